"""Shapes and numbers of a model that are not what they look like are told."""

import inspect
import warnings
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import trainer as tr
from trainer._weighted_sum import scaled
from trainer.mistakes._wide_broadcasts import wide_broadcasts


FILE = "test_silent_shapes.py"
x = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(6, 2)
y = x.sum(1)


def net(out="scalar"):
    return eqx.nn.Linear(2, out, key=jr.key(0))


def fit(loss, model, data=None, **kwargs):
    if not isinstance(loss, tr.Trainer):
        loss = tr.Trainer(loss, optax.sgd(0.1), **kwargs)
    return loss.fit(model, data, num_steps=1, progress=False)


def told(*given, **kwargs):
    with pytest.raises(tr.LossWarning) as caught:
        fit(*given, **kwargs)
    return str(caught.value)


def clean(*given, **kwargs):
    with warnings.catch_warnings(action="error"):
        return fit(*given, **kwargs)


def predict(model, batch):
    return jax.vmap(model)(batch["x"])


def mse(model, batch):
    return jnp.mean((predict(model, batch) - batch["y"]) ** 2)  # here


def absolute(model, batch):
    error = batch["y"] - predict(model, batch)  # here
    return jnp.sum(jnp.abs(error))


def entropy(model, batch):
    p = jax.nn.sigmoid(predict(model, batch))
    return -jnp.mean(batch["y"] * jnp.log(p))  # here


def each(model, batch):
    def row(x, y):
        return (model(x) * jnp.ones(4) - y) ** 2  # here

    return jnp.mean(jax.vmap(row)(batch["x"], jnp.ones((6, 4, 1)) * batch["y"][0]))


def line(function):
    lines, first = inspect.getsourcelines(function)
    (number,) = (n for n, text in enumerate(lines) if "# here" in text)
    return f" at {FILE}:{first + number}, `{lines[number].strip()}`"


column = {"x": x, "y": y[:, None]}
flat = {"x": x, "y": y, "as_column": y[:, None]}


@pytest.mark.parametrize("of", [lambda x: x, lambda x: tr.alternate(x, x)])
@pytest.mark.parametrize(
    ("loss", "out", "batch", "size"),
    [
        (mse, "scalar", column, 6),
        (mse, 1, flat, 6),
        (absolute, "scalar", column, 6),
        (entropy, 1, flat, 6),
        (each, "scalar", flat, 4),
    ],
)
def test_each_prediction_meets_each_target(loss, out, batch, size, of):
    text = told(of(loss), net(out), [batch])
    assert text.startswith(
        f"Shapes ({size},) and ({size}, 1) are combined{line(loss)}: they broadcast to "
        f"({size}, {size}), so that each prediction meets each target."
    )
    assert "`jnp.squeeze(target, -1)`" in text


def test_it_is_told_of_an_ensemble_and_of_arrays_on_the_device():
    rates = tr.ensemble(lambda rate: tr.Trainer(mse, optax.sgd(rate)), rate=[0.1, 0.2])
    models = eqx.filter_vmap(lambda key: eqx.nn.Linear(2, 1, key=key))(
        jr.split(jr.key(0))
    )
    assert line(mse) in told(rates, models, tr.Arrays(flat, batch_size=6))


CONSTANT = jnp.linspace(0, 1, 6)[:, None]


def pairs(model, batch):
    points, places = predict(model, batch), jnp.arange(6.0)
    rows = points[:, None]
    mask = places[:, None] >= places
    kernel = jnp.exp(-((2 * rows - points) ** 2))
    kernel += jnp.exp(-((rows - batch["y"]) ** 2)) * np.ones((6, 1), np.float32)
    kernel += batch["y"] * jnp.sum(kernel, axis=1, keepdims=True)
    kernel += batch["y"] * points.reshape(6, 1)
    kernel += (points[None] - batch["as_column"]) ** 2
    kernel += batch["y"] - CONSTANT
    row = jnp.expand_dims(points, 0)
    kernel += (row - batch["as_column"]) ** 2
    return jnp.mean(kernel, where=mask) + jnp.mean(points[:, None] - batch["y"][None])


def biased(model, batch):
    hidden = batch["x"] @ model.weight.T + model.bias
    return jnp.mean((hidden - jnp.ones(1)) ** 2) + jnp.mean(hidden[0] - batch["y"][:1])


@pytest.mark.parametrize(
    ("loss", "out", "batch"),
    [
        (mse, "scalar", flat),
        (mse, 1, column),
        (pairs, "scalar", flat),
        (biased, 1, flat),
    ],
)
def test_pairs_that_are_meant_are_not_told(loss, out, batch):
    clean(loss, net(out), [batch])


def test_one_example_is_no_mistake():
    one = {"x": x[:1], "y": y[:1, None]}
    clean(mse, net(), [one])


def outer(model, batch):
    return jnp.sum(model["u"] * jnp.arange(3.0)) + jnp.sum(model["u"] * model["v"])


def test_a_parameter_that_is_a_column_is_not_told():
    clean(tr.alternate(outer, outer), {"u": jnp.ones((3, 1)), "v": jnp.ones(3)})


def test_without_lines_nothing_is_told():
    jaxpr = jax.make_jaxpr(lambda row, column: column * row)(
        jnp.ones(3), jnp.ones((3, 1))
    )
    assert len(wide_broadcasts(jaxpr.jaxpr, ())) == 1
    bare = jax.make_jaxpr(scaled)(jnp.ones(3), jnp.ones((3, 1)))
    assert bare.jaxpr.eqns[-1].primitive == jaxpr.jaxpr.eqns[-1].primitive
    assert not wide_broadcasts(bare.jaxpr, ())


class Scaled(eqx.Module):
    net: eqx.nn.Linear
    rate: float
    eps: float = 1e-5
    power: int = 2
    is_on: bool = True
    drop: eqx.nn.Dropout = eqx.field(default_factory=lambda: eqx.nn.Dropout(0.0))
    betas: tuple = (0.9, 0.99)
    setting: float = eqx.field(default=1.0, static=True)

    def __call__(self, x):
        return self.rate * self.net(x)


class Pair(NamedTuple):
    weight: jax.Array
    bias: float


@pytest.mark.parametrize(
    ("model", "begins", "ends"),
    [
        (
            Scaled(net(), 1.5),
            "`model.rate` is the Python float 1.5: a constant of the program",
            "or `eqx.field(static=True)` if it is a setting.",
        ),
        (
            {"w": jnp.ones(2), "b": [0.0, 1.0, jnp.ones(2)]},
            "`model['b'][0]` is the Python float 0.0 (so is `model['b'][1]`)",
            "or keep it out of the model if it is a setting.",
        ),
        (Pair(jnp.ones(2), 0.5), "`model.bias` is the Python float 0.5", ""),
    ],
    ids=["module", "dict", "tuple"],
)
def test_a_python_float_that_looks_like_a_parameter_is_told(model, begins, ends):
    text = told(total, model)
    assert text.startswith(begins)
    assert text.endswith(ends)
    assert "Write `jnp.asarray(" in text


def total(model, batch):
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    return sum(jnp.sum(array**2) for array in arrays)


def test_it_is_told_once_for_a_trainer():
    trainer = tr.Trainer(total, optax.sgd(0.1))
    with pytest.warns(tr.LossWarning, match="`model.rate`") as caught:
        result = fit(trainer, Scaled(net(), 1.5))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        trainer.fit(result.state, None, num_steps=2, progress=False)
        fit(trainer, Scaled(net(), 1.5))


def test_arrays_and_settings_are_not_told():
    model = Scaled(net(), jnp.asarray(1.5))
    schedule = tr.Anneal(0.0, 1.0, over=5)
    clean(total, {"scaled": model, "library": [schedule, eqx.nn.Dropout(0.5)]})


def test_a_second_form_of_the_step_tells_nothing_new():
    trainer = tr.Trainer(mse, optax.sgd(0.1), on_recompile="allow")
    with pytest.warns(tr.LossWarning) as caught:
        state = fit(trainer, net(), [column]).state
    assert len(caught) == 1
    assert caught[0].filename == __file__
    small = {"x": x[:4], "y": y[:4, None]}
    result = trainer.fit(state, [small], num_steps=2, progress=False)
    assert result.compiles == 2
