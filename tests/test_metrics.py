"""Metrics on the device: what they are kept as, when they are absent, their buffer."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

import trainer as tr
from trainer._metric_rows import MetricBuffer
from trainer._metrics import as_metrics, Metric, switch


ROWS = 5


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, "int32"),
        (3, "int32"),
        (0.1, "float32"),
        (np.float64(0.1), "float32"),
        (np.int8(3), "int32"),
        (jnp.uint8(200), "int32"),
        (jnp.array(False), "int32"),
        (jnp.bfloat16(0.5), "float32"),
        (jnp.float16(0.5), "float32"),
        (jnp.float32(0.1), "float32"),
    ],
)
def test_what_a_metric_is_kept_as(value, dtype):
    (metric,) = as_metrics({"a": value}, "loss").values()
    assert metric.value.dtype == dtype
    assert metric.value.shape == ()
    assert not metric.value.weak_type
    assert float(metric.value) == np.float32(value)
    assert metric.present is True


def test_double_precision_is_kept_where_jax_has_it():
    with jax.enable_x64(True):
        metrics = as_metrics({"a": jnp.float64(0.1), "b": 2**40, "c": 1.5}, "loss")
        assert [str(m.value.dtype) for m in metrics.values()] == [
            "float64",
            "int64",
            "float64",
        ]
        assert int(metrics["b"].value) == 2**40
        buffer = MetricBuffer(metrics, 1)
        written = buffer.write(jax.device_put(buffer.empty()), jnp.int32(0), metrics)
        assert buffer.read(jax.device_get(written), 1)["a"][0] == 0.1


def test_a_metric_that_may_be_absent_stays_so():
    maybe = Metric(jnp.bfloat16(2), jnp.array(False))
    (metric,) = as_metrics({"a": maybe}, "loss").values()
    assert metric.value.dtype == jnp.float32
    assert not metric.present


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ([1.0], "`f` returned metrics of type `list`. Metrics are a dict from names"),
        ({1: 1.0}, "`f` returned a metric named `1`, not a str"),
        ({"a": jnp.ones(2)}, r"Metric `a` of `f` is float32\[2\]. A metric is one"),
        ({"a": [1.0, 2.0]}, r"is float32\[2\]. A metric is one real number"),
        ({"a": 1j}, r"is complex64\[\]. A metric is one real number"),
        ({"a": "good"}, "Metric `a` of `f` is 'good'"),
        ({"a": None}, "Metric `a` of `f` is None"),
        ({"a": [1.0, [2.0]]}, r"Metric `a` of `f` is \[1.0, \[2.0\]\]"),
        ({"a": jr.key(0)}, r"is key<fry>\[\]. A metric is one real number"),
    ],
)
def test_what_a_metric_may_not_be(metrics, text):
    with pytest.raises(TypeError, match=text):
        as_metrics(metrics, "f")


kinds = st.tuples(st.sampled_from(["float32", "int32"]), st.booleans())
whole = st.integers(-(2**24), 2**24)


@settings(max_examples=15)
@given(
    columns=st.dictionaries(st.text("abc/", min_size=1), kinds, min_size=1, max_size=5),
    count=st.integers(1, ROWS),
    data=st.data(),
)
def test_what_is_written_is_read(columns, count, data):
    values = {n: data.draw(st.tuples(*[whole] * count)) for n in columns}
    flags = {n: data.draw(st.tuples(*[st.booleans()] * count)) for n in columns}

    def at(row):
        return {
            name: Metric(
                jnp.asarray(values[name][row], dtype),
                jnp.asarray(flags[name][row]) if optional else True,
            )
            for name, (dtype, optional) in columns.items()
        }

    buffer = MetricBuffer(at(0), ROWS)
    buffers = jax.device_put(buffer.empty())
    for row in range(count):
        buffers = buffer.write(buffers, jnp.int32(row), at(row))
    found = buffer.read(jax.device_get(buffers), count)
    assert found.keys() == columns.keys()
    for name, (dtype, optional) in columns.items():
        assert found[name].dtype == dtype
        assert len(found[name]) == count
        assert np.ma.isMaskedArray(found[name]) == optional
        expected = [
            value if flag or not optional else None
            for value, flag in zip(values[name], flags[name], strict=True)
        ]
        assert found[name].tolist() == expected


def test_metrics_of_one_dtype_share_a_buffer():
    names = [f"m{n}" for n in range(20)]
    metrics = {name: Metric(jnp.float32(0)) for name in names}
    metrics["n"] = Metric(jnp.int32(0), jnp.array(True))
    shapes = {k: v.shape for k, v in MetricBuffer(metrics, 7).empty().items()}
    assert shapes == {"float32": (7, 20), "int32": (7, 1), "present": (7, 1)}


def test_what_was_read_is_not_changed_by_the_next_row():
    metrics = {"a": Metric(jnp.float32(1), jnp.array(True))}
    buffer = MetricBuffer(metrics, 2)
    buffers = jax.tree.map(np.copy, buffer.empty())
    found = buffer.read(buffers, 2)
    buffers["float32"][:] = 9
    buffers["present"][:] = True
    assert found["a"].tolist() == [None, None]


def test_absent_is_masked_and_never_0_or_nan():
    late = lambda model, batch: (jnp.sum(model), {"rare": 5, "share": 0.5})
    often = lambda model, batch: jnp.sum(model)
    trainer = tr.Trainer(tr.piecewise([often, late], [2]), optax.sgd(0.0))
    history = trainer.fit(jnp.ones(2), None, num_steps=4, progress=False).history
    assert history["rare"].mask.tolist() == [True, True, False, False]
    assert history["rare"].mean() == 5
    assert history["rare"].dtype == np.int32
    assert history["share"].tolist() == [None, None, 0.5, 0.5]
    assert not np.ma.isMaskedArray(history["loss"])


def test_the_dtype_of_a_metric_holds_the_values_of_all_branches():
    whole = lambda model, batch: (jnp.sum(model), {"a": 7})
    part = lambda model, batch: (jnp.sum(model), {"a": jnp.float16(0.5)})
    trainer = tr.Trainer(tr.alternate(whole, part), optax.sgd(0.0))
    history = trainer.fit(jnp.ones(2), None, num_steps=2, progress=False).history
    assert history["a"].dtype == np.float32
    assert history["a"].tolist() == [7.0, 0.5]


@pytest.mark.parametrize("batched", [False, True])
def test_switch_joins_dtypes_and_lets_keys_through(batched):
    runs = []

    def first(x, key):
        runs.append("first")
        return (x.astype(jnp.bfloat16), key, jnp.int32(1)), {"a": Metric(jnp.int32(3))}

    def second(x, key):
        runs.append("second")
        return (2 * x, jr.fold_in(key, 1), jnp.int32(2)), {
            "b": Metric(jnp.float32(4), x[0] > 5)
        }

    run = lambda i: switch(i, [first, second], jnp.arange(1.0, 3.0), jr.key(0))
    index = jnp.asarray([0, 1], jnp.int32)
    over = jax.vmap(run) if batched else lambda i: jax.lax.map(run, i)
    (x, key, number), metrics = jax.jit(over)(index)
    assert x.dtype == jnp.float32
    assert x.tolist() == [[1, 2], [2, 4]]
    assert (key == jnp.stack([jr.key(0), jr.fold_in(jr.key(0), 1)])).all()
    assert number.tolist() == [1, 2]
    assert metrics["a"].present.tolist() == [True, False]
    assert metrics["a"].value[0] == 3
    assert metrics["b"].present.tolist() == [False, False]
    assert sorted(runs) == ["first", "second"]
