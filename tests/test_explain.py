"""What JAX says of a mistake in a loss, said again with the user's own line."""

import functools
import inspect
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trainer as tr
from trainer._explain import explain_trace


MODEL = jnp.arange(1.0, 4.0)


def python_if(model, batch, *, step):
    if step > 10:  # here
        return jnp.sum(model)
    return jnp.sum(model**2)


def python_while(model, batch):
    total = jnp.sum(model)
    while total > 1:  # here
        total = total / 2
    return total


def python_and(model, batch, *, step):
    late = step > 1 and step < 3  # here
    return jnp.sum(model) * late


def python_assert(model, batch):
    assert jnp.all(jnp.isfinite(model))  # here
    return jnp.sum(model)


def numpy_sin(model, batch):
    return jnp.sum(np.sin(model))  # here


def numpy_asarray(model, batch):
    return jnp.sum(np.asarray(model))  # here


def numpy_norm(model, batch):
    return jnp.asarray(np.linalg.norm(model))  # here


def numpy_stack(model, batch):
    return jnp.sum(np.stack([model, model]))  # here


def python_float(model, batch):
    value = jnp.sum(model)
    return value, {"value": float(value)}  # here


def python_item(model, batch):
    value = jnp.sum(model)
    return value, {"value": value.item()}  # here


def length_from_value(model, batch, *, step):
    return jnp.sum(model) + jnp.arange(step).sum()  # here


def python_range(model, batch, *, step):
    return sum(jnp.sum(model) for _ in range(step))  # here


def list_index(model, batch, *, step):
    return jnp.sum(model) * [1.0, 2.0][step]  # here


def mask_index(model, batch):
    return jnp.sum(model[model > 0])  # here


BOOLEAN = ("A Python `if`, `while`, `and`", "Choose between losses with `tr.switch_e")
ARRAY = ("A NumPy function is given a traced value", "same name in `jax.numpy`")
NUMBER = ("is turned into a Python number, or into a shape", "report it as a metric")
INDEX = ("used as a Python index or in `range`", "or use `jax.lax.fori_loop`")
MASK = ("An array is indexed by a traced mask", "use `jnp.where(mask, x, 0)`")
MISTAKES = {
    python_if: (jax.errors.TracerBoolConversionError, BOOLEAN),
    python_while: (jax.errors.TracerBoolConversionError, BOOLEAN),
    python_and: (jax.errors.TracerBoolConversionError, BOOLEAN),
    python_assert: (jax.errors.TracerBoolConversionError, BOOLEAN),
    numpy_sin: (jax.errors.TracerArrayConversionError, ARRAY),
    numpy_asarray: (jax.errors.TracerArrayConversionError, ARRAY),
    numpy_norm: (jax.errors.TracerArrayConversionError, ARRAY),
    numpy_stack: (jax.errors.TracerArrayConversionError, ARRAY),
    python_float: (jax.errors.ConcretizationTypeError, NUMBER),
    python_item: (jax.errors.ConcretizationTypeError, NUMBER),
    length_from_value: (jax.errors.ConcretizationTypeError, NUMBER),
    python_range: (jax.errors.TracerIntegerConversionError, INDEX),
    list_index: (jax.errors.TracerIntegerConversionError, INDEX),
    mask_index: (jax.errors.NonConcreteBooleanIndexError, MASK),
}


def marked_line(function):
    """The line of a function that is marked, and its place as a message names it."""
    lines, first = inspect.getsourcelines(function)
    (place,) = [number for number, line in enumerate(lines) if "# here" in line]
    return f" at test_explain.py:{first + place}, `{lines[place].strip()}`"


def fails(loss, model=MODEL):
    trainer = tr.Trainer(loss, optax.sgd(0.1))
    with pytest.raises(tr.TraceError) as caught:
        trainer.fit(model, None, num_steps=2, progress=False)
    return caught.value


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_is_explained_where_it_was_made(mistake):
    kind, (did, instead) = MISTAKES[mistake]
    error = fails(mistake)
    assert isinstance(error.__cause__, kind)
    assert did in str(error)
    assert instead in str(error)
    assert marked_line(mistake) in str(error)
    assert "have no values while the step is compiled" in str(error)
    assert isinstance(error, TypeError)


class Wrong(tr.AbstractLoss):
    weight: float

    def __call__(self, model, batch, *, step):
        return self.weight * jnp.sum(model) if step else jnp.sum(model)  # here


class Layer(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return x if self.w > 0 else -x  # here


class OddSelector(tr.AbstractSelector):
    def __call__(self, step, num):
        return (step, step) if step > 3 else (0 * step, step)  # here


def shouting(step):
    return 1.0 if step > 5 else 0.5  # here


def fine(model, batch):
    return jnp.sum(model**2)


WHERE = {
    "in a class": (Wrong(2.0), MODEL, Wrong.__call__),
    "in a switch": (tr.alternate(fine, python_if), MODEL, python_if),
    "in a sum": (
        tr.WeightedSum(a=fine, b=(lambda step: step, python_if)),
        MODEL,
        python_if,
    ),
    "in a partial": (functools.partial(python_if), MODEL, python_if),
    "under vmap": (
        lambda m, b: jnp.sum(jax.vmap(lambda v: mask_index(v[None], b))(m)),
        MODEL,
        mask_index,
    ),
    "in a layer": (lambda m, b: m(jnp.float32(1)), Layer(MODEL[0]), Layer.__call__),
    "in a selector": (
        tr.Switch(OddSelector(), [fine, fine]),
        MODEL,
        OddSelector.__call__,
    ),
}


@pytest.mark.parametrize("name", WHERE)
def test_the_innermost_line_of_the_user_is_named(name):
    loss, model, function = WHERE[name]
    assert marked_line(function) in str(fails(loss, model))


def test_a_mistake_in_a_schedule_is_explained():
    with pytest.raises(tr.TraceError) as caught:
        tr.WeightedSum(a=(shouting, fine))
    assert marked_line(shouting) in str(caught.value)


def test_a_mistake_in_an_update_is_explained():
    class Own(tr.Trainer):
        def update(self, model, opt_state, batch, *, step):
            scale = 0.5 if step > 3 else 0.1  # here
            return model * scale, opt_state, {}

    with pytest.raises(tr.TraceError) as caught:
        Own().fit(MODEL, None, num_steps=2, progress=False)
    assert marked_line(Own.update) in str(caught.value)


def test_a_mistake_while_evaluating_is_explained():
    trainer = tr.Trainer(fine, optax.sgd(0.1))
    with pytest.raises(tr.TraceError) as caught:
        trainer.evaluate(MODEL, [jnp.zeros(2)], loss=numpy_sin)
    assert marked_line(numpy_sin) in str(caught.value)


def test_a_trainer_whose_trace_failed_fails_the_same_way_again():
    trainer = tr.Trainer(python_if, optax.sgd(0.1))
    for _ in range(2):
        with pytest.raises(tr.TraceError, match="if step > 10"):
            trainer.fit(MODEL, None, num_steps=2, progress=False)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyError("k"), TypeError("t")])
def test_other_errors_are_left_as_they_are(error):
    def loss(model, batch):
        raise error

    trainer = tr.Trainer(loss, optax.sgd(0.1))
    with pytest.raises(type(error)) as caught:
        trainer.fit(MODEL, None, num_steps=1, progress=False)
    assert caught.value is error


def test_an_error_outside_of_any_file_still_has_a_message():
    scope = {}
    exec("def loss(flag):\n    return 1 if flag else 2", scope)
    run = jax.jit(scope["loss"])
    with pytest.raises(tr.TraceError, match="A Python `if`") as caught, explain_trace():
        run(jnp.array(True))
    cause = caught.value.__cause__
    assert cause is not None
    frames = traceback.extract_tb(cause.__traceback__)
    assert any(frame.filename == "<string>" for frame in frames)
