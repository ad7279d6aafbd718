"""Transforms against one-line loops in Python, and what they leave alone."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import equal, mlp
from hypothesis import given, settings, strategies as st

from trainer._averages import EMA, SWA
from trainer._transforms import Project, Target
from trainer.mistakes._trace_errors import TraceError


few = settings(max_examples=20)
twelve = lambda numbers: st.lists(numbers, min_size=12, max_size=12)
weights = twelve(st.floats(-4, 4, width=16))
decays = twelve(st.floats(0, 1, width=16))
periods = st.integers(1, 4)


class Table(eqx.Module):
    values: jax.Array

    def __call__(self, step):
        return self.values[step - 1]


@eqx.filter_jit
def _scan(transform, carry, inputs):
    def body(carry, xs):
        model, kept = {**carry[0], "w": xs[0]}, carry[1]
        model, kept = transform(model, kept, step=xs[1])
        return (model, kept), transform.evaluated(model, kept)

    return jax.lax.scan(body, carry, inputs)[1]


def evaluated(transform, ws, w=1.0, **others):
    """What is evaluated after each update, when the updates make `w` these numbers."""
    model = {"w": jnp.float32(w), **others}
    steps = jnp.arange(1, len(ws) + 1, dtype=jnp.int32)
    inputs = (jnp.asarray(ws, jnp.float32), steps)
    return _scan(transform, (model, transform.init(model)), inputs)


class Mixed(eqx.Module):
    w: jax.Array
    half: jax.Array
    table: jax.Array
    key: jax.Array
    act: object
    rate: float


def mixed(seed, act=jax.nn.relu, rate=0.5):
    a, b, c = jr.split(jr.key(seed), 3)
    w, half = jr.normal(a, (3,)), jr.normal(b, (2,), jnp.bfloat16)
    return Mixed(w, half, jnp.arange(seed, seed + 4), c, act, rate)


pair = lambda: {"q": mixed(1), "target": mixed(2)}
ONLINE, TARGET = (lambda m: m["q"]), (lambda m: m["target"])
clip = lambda w: jnp.clip(w, -0.01, 0.01)
ALL = [
    EMA(0.9),
    EMA(lambda step: 1 - 1 / step, debias=False, every=3),
    SWA(2, every=3, where=ONLINE),
    Target(ONLINE, TARGET, every=3),
    Target(ONLINE, TARGET, tau=0.1),
    Target(ONLINE, TARGET, tau=0.1, every=2),
    Project(clip, where=lambda m: (m["q"].w, m["q"].half)),
]
each = pytest.mark.parametrize("transform", ALL, ids=lambda t: type(t).__name__)


@pytest.mark.parametrize(
    ("debias", "expected"),
    [(False, [1.1, 1.29, 1.561, 1.9049]), (True, [2.0, 2.5263, 3.0701, 3.6313])],
)
def test_ema_of_parameters(debias, expected):
    found = evaluated(EMA(0.9, debias=debias), [2, 3, 4, 5])["w"]
    np.testing.assert_allclose(found, expected, atol=1e-4)


@few
@given(ws=weights, ds=decays, debias=st.booleans(), every=periods)
def test_ema_is_a_loop(ws, ds, debias, every):
    ema = EMA(Table(jnp.asarray(ds, jnp.float32)), debias=debias, every=every)
    z, m = (0.0, 0.0) if debias else (1.0, 1.0)
    expected = []
    for step, (w, d) in enumerate(zip(ws, ds, strict=True), 1):
        if step % every == 0:
            z, m = d * z + (1 - d) * w, d * m + (1 - d)
        expected.append(z / m if m else w)
    found = evaluated(ema, ws)["w"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@few
@given(ws=weights, start=st.sampled_from([1, 2, 5, 20]), every=periods)
def test_swa_is_a_mean(ws, start, every):
    expected = []
    for step, w in enumerate(ws, 1):
        taken = ws[start - 1 : step : every]
        expected.append(np.mean(taken) if taken else w)
    found = evaluated(SWA(start, every=every), ws)["w"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@few
@given(ws=weights, tau=st.sampled_from([None, 0.005, 0.7, 1.0]), every=periods)
def test_target_is_a_loop(ws, tau, every):
    follow = Target(lambda m: m["w"], lambda m: m["t"], tau=tau, every=every)
    t, expected = -2.0, []
    for step, w in enumerate(ws, 1):
        if step % every == 0:
            t = w if tau is None else tau * w + (1 - tau) * t
        expected.append(t)
    found = evaluated(follow, ws, t=jnp.float32(-2.0))["t"]
    np.testing.assert_allclose(found, expected, atol=0 if tau in (None, 1) else 1e-5)


def test_target_has_a_period_of_its_own():
    follow = Target(lambda m: m["w"], lambda m: m["t"], every=10)
    ws = [step // 4 for step in range(1, 41)]
    found = evaluated(follow, ws, t=jnp.float32(0.0))["t"].tolist()
    assert found[9::10] == [2, 5, 7, 10]
    assert sorted(set(found)) == [0, 2, 5, 7, 10]


def kinds(tree):
    return [(x.shape, x.dtype, x.aval.weak_type) for x in jax.tree.leaves(tree)]


@each
def test_a_loop_keeps_structure_and_leaves_the_rest_alone(transform):
    model = pair()
    arrays, static = eqx.partition((model, transform.init(model)), eqx.is_array)
    before = jax.tree.map(jnp.copy, arrays)

    def body(k, arrays):
        model, kept = transform(*eqx.combine(arrays, static), step=k + 1)
        mean, rest = eqx.partition(transform.evaluated(model, kept), eqx.is_array)
        assert kinds(mean) == kinds(arrays[0])
        assert eqx.tree_equal(rest, static[0])
        out, rest = eqx.partition((model, kept), eqx.is_array)
        assert kinds(out) == kinds(arrays)
        assert eqx.tree_equal(rest, static)
        return out

    loop = lambda arrays: jax.lax.fori_loop(0, 7, body, arrays)
    after = jax.jit(loop, donate_argnums=0)(arrays)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert not any(weak for *_, weak in kinds(after))
    if isinstance(transform, EMA | SWA):
        assert equal(after[0], before[0])
    was, now = before[0], after[0]
    copies = isinstance(transform, Target) and transform.tau is None
    was = {**was, "target": was["q"]} if copies else was
    for name in was:
        assert (was[name].table == now[name].table).all()
        assert (was[name].key == now[name].key).all()


@each
def test_what_is_kept_has_arrays_of_its_own(transform):
    model = pair()
    leaves = jax.tree.leaves(transform.init(model))
    assert all(isinstance(x, jax.Array) and not x.weak_type for x in leaves)
    leaves += jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


@pytest.mark.parametrize("average", [EMA(0.999), SWA(1)])
def test_an_average_is_not_kept_in_half_precision(average):
    model = {"w": jnp.ones((), jnp.bfloat16)}
    kept = average.init(model)
    assert kept.parameters["w"].dtype == jnp.float32
    for step in range(1, 9):
        value = jnp.asarray(1 + (step % 2) / 128, jnp.bfloat16)
        _, kept = average({"w": value}, kept, step=jnp.int32(step))
    assert abs(float(kept.parameters["w"]) - (1 + 1 / 256)) < 1e-4
    assert average.evaluated(model, kept)["w"].dtype == jnp.bfloat16


def test_averages_do_not_drift():
    model = {"w": jnp.float32(0.1), "mask": jnp.float32(-jnp.inf)}
    for ema in (EMA(0.9999), EMA(0.9999, debias=False), EMA(0.0)):
        body = lambda k, kept, ema=ema: ema(model, kept, step=k + 1)[1]
        kept = jax.lax.fori_loop(0, 1000, body, ema.init(model))
        assert equal(ema.evaluated(model, kept), model)


def test_there_is_an_average_only_once_a_model_is_in_it():
    start, now = {"w": jnp.float32(1.0)}, {"w": jnp.float32(7.0)}
    for average in (EMA(0.9), SWA(5)):
        assert average.evaluated(now, average.init(start))["w"] == 7
    ema = EMA(0.9, debias=False)
    assert ema.evaluated(now, ema.init(start))["w"] == 1
    assert Target(ONLINE, TARGET, tau=0.1).evaluated(start, None) is start


def test_where_picks_what_is_averaged():
    model = mlp()
    layer = lambda m: m.layers[1]
    twice = jax.tree.map(lambda x: 2 * x if eqx.is_array(x) else x, model)
    for average in (EMA(0.5, where=layer, debias=False), SWA(1, where=layer)):
        kept = average.init(model)
        assert len(jax.tree.leaves(kept)) == 3
        _, kept = average(model, kept, step=jnp.int32(1))
        found = average.evaluated(twice, kept)
        assert equal(layer(found), layer(model))
        assert equal(found.layers[0], twice.layers[0])


def test_a_copy_takes_all_arrays_and_mixing_the_inexact_ones():
    model = {**pair(), "target": mixed(2, act=jax.nn.tanh, rate=0.1)}
    copying, mixing = Target(ONLINE, TARGET, every=1), Target(ONLINE, TARGET, tau=1)
    target = copying(model, copying.init(model), step=jnp.int32(1))[0]["target"]
    assert equal(target, model["q"])
    assert (target.act, target.rate) == (jax.nn.tanh, 0.1)
    target = mixing(model, mixing.init(model), step=jnp.int32(1))[0]["target"]
    assert equal((target.w, target.half), (model["q"].w, model["q"].half))
    assert equal((target.table, target.key), (model["target"].table, mixed(2).key))


def test_a_target_may_be_several_parts_and_start_as_the_online_object():
    net = mixed(1)
    model = {"a": net, "b": net, "c": net, "d": net}
    parts = [lambda m: (m["a"], m["b"].w), lambda m: (m["c"], m["d"].w)]
    follow = Target(*parts, every=1)
    assert follow.init(model) is None
    found, _ = follow({**model, "a": mixed(3)}, None, step=jnp.int32(1))
    assert equal(found["c"], mixed(3))
    assert equal(found["d"], net)


def test_project_clips_the_critic_alone():
    model = {"critic": mlp(), "generator": mlp(1)}
    project = Project(clip, where=lambda m: m["critic"])
    assert project.init(model) is None
    found, _ = project(model, None, step=jnp.int32(1))
    weight = model["critic"].layers[0].weight
    np.testing.assert_array_equal(found["critic"].layers[0].weight, clip(weight))
    assert equal(found["generator"], model["generator"])
    found, _ = Project(lambda w: 0.5)(jnp.float32(1.0), None, step=jnp.int32(1))
    assert kinds(found) == kinds(jnp.float32(0.5))


WRONG = [
    (lambda: EMA("0.9"), TypeError, "`decay` of `EMA` is `'0.9'`"),
    (lambda: EMA(1.0), ValueError, "from 0 to below 1"),
    (lambda: EMA(1 - 1e-9), ValueError, "float32"),
    (lambda: EMA(float("nan")), ValueError, "`nan`"),
    (lambda: EMA(lambda s: jnp.ones(2)), TypeError, r"`float32\[2\]`, not a scalar"),
    (lambda: EMA(lambda s: (1 + s) / s), ValueError, "gives `2.0` after the first"),
    (lambda: EMA(lambda s: 0.9 if s > 3 else 0.5), TraceError, "Python `if`"),
    (lambda: EMA(0.9, debias=0), TypeError, "`debias` of `EMA` is `0`"),
    (lambda: EMA(0.9, every=0), ValueError, "`every` of `EMA` is `0`"),
    (lambda: SWA(0), ValueError, "`start` of `SWA` is `0`"),
    (lambda: SWA(1, every=1.5), TypeError, "`every` of `SWA` is `1.5`"),
    (lambda: Target(ONLINE, ONLINE), TypeError, "neither `every` nor `tau`"),
    (lambda: Target(ONLINE, ONLINE, every=0), ValueError, "`every` of `Target` is `0`"),
    (lambda: Target(ONLINE, ONLINE, tau=0), ValueError, "above 0 and at most 1"),
    (lambda: Target(ONLINE, ONLINE, tau="1"), TypeError, "such as `0.005`"),
    (lambda: Target(mlp(), TARGET, every=1), TypeError, "`online` of `Target` is `MLP"),
    (lambda: Project(0.01), TypeError, "`fn` of `Project` is `0.01`"),
    (lambda: Project(clip, where=mlp()), TypeError, "`where` of `Project`"),
]


@pytest.mark.parametrize(("make", "error", "message"), WRONG)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


TABLE = lambda m: m["q"].table
OTHER = {"q": mixed(1), "target": eqx.tree_at(lambda m: m.w, mixed(2), jnp.ones(4))}
CANNOT = [
    (EMA(0.9, where=TABLE), pair(), "`where` picks has no floating array, so `EMA`"),
    (SWA(1), jnp.arange(3), "The model has no floating array, so `SWA`"),
    (Project(clip, where=TABLE), pair(), "so `Project` has nothing"),
    (Project(jnp.sum), pair(), r"`model\['q'\].w` was float32\[3\]"),
    (Project(lambda w: w + jnp.float32(1)), pair(), r"\.half` was bfloat16"),
    (Target(ONLINE, ONLINE, every=1), pair(), "pick the same leaves"),
    (Target(ONLINE, TARGET, every=1), OTHER, r"`target.w` was float32\[3\] and is now"),
    (Target(ONLINE, TARGET, tau=1), {"q": jnp.int32(1), "target": jnp.int32(2)}, "mix"),
    (Target(ONLINE, TARGET, every=1), {"q": 1, "target": 2}, "no array to copy"),
]


@pytest.mark.parametrize(("transform", "model", "message"), CANNOT)
def test_models_that_a_transform_cannot_work_on(transform, model, message):
    with pytest.raises(ValueError, match=message):
        transform.init(model)
