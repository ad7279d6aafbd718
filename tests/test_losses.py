"""What may be a loss, what it is given, and what it may return."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import trainer as tr
from trainer._composed import check_loss, evaluate_loss, leaves_of
from trainer._grad import value_and_grad
from trainer._losses import call_leaf, Given


MODEL = jnp.arange(1.0, 4.0)
GIVEN = Given(jnp.int32(3), jnp.int32(2), jr.key(1), jnp.array([True, False]))


def square(model, batch):
    return jnp.sum(model**2)


def scaled(model, batch, scale=1.0):
    return scale * jnp.sum(model**2)


def keyword(model, batch, *, step, epoch, key, mask):
    noise = jr.uniform(key)
    return jnp.sum(model**2), {"n": step + epoch + mask.sum(), "noise": noise}


def positional(model, batch, key, step):
    return jnp.sum(model**2) * (step == 3) + 0 * jr.uniform(key)


def by_other_names(m, data, /, epoch):
    return jnp.sum(m**2) + 0 * epoch


def ignores_the_rest(model, batch, *rest, option=None, **others):
    assert (rest, option, others) == ((), None, {})
    return jnp.sum(model**2)


def positional_only(model, batch, step=0, /):
    return jnp.sum(model**2) + step


def named_rest(model, batch, *mask, **state):
    assert (mask, state) == ((), {})
    return jnp.sum(model**2)


def outer(extra, model, batch, *, step):
    return jnp.sum(model**2) + extra * (step - 3)


class Holder:
    factor = 1.0

    def method(self, model, batch, *, step):
        return self.factor * jnp.sum(model**2) + 0 * step

    @staticmethod
    def static(model, batch):
        return jnp.sum(model**2)

    @classmethod
    def of_class(cls, model, batch, mask):
        return cls.factor * jnp.sum(model**2) * mask[0]

    def __call__(self, model, batch, *, epoch):
        return jnp.sum(model**2) * (epoch == 2)


class Distance(tr.AbstractLoss):
    """Carries an array along, which is not trained."""

    target: jax.Array
    power: int = 2

    def __call__(self, model, batch, *, step):
        return jnp.sum((model - self.target) ** self.power) + 0 * step


ACCEPTED = {
    "function": square,
    "lambda": lambda model, batch: jnp.sum(model**2),
    "default": scaled,
    "keyword": keyword,
    "positional": positional,
    "other names": by_other_names,
    "positional-only default": positional_only,
    "star of a name": named_rest,
    "star": ignores_the_rest,
    "partial": functools.partial(scaled, scale=1.0),
    "partial of the first": functools.partial(outer, 5.0),
    "bound method": Holder().method,
    "static method": Holder.static,
    "class method": Holder.of_class,
    "callable object": Holder(),
    "AbstractLoss": Distance(jnp.zeros(3)),
    "jax.jit": jax.jit(square),
    "filter_jit": eqx.filter_jit(square),
    "checkpoint": jax.checkpoint(square),
}
# The losses that ask for `step`.
STEP = {"keyword", "positional", "partial of the first", "bound method", "AbstractLoss"}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_loss_may_be(name):
    loss = ACCEPTED[name]
    check_loss(loss)
    value, grad = value_and_grad(loss, MODEL, None, GIVEN).value
    assert value == 14.0
    np.testing.assert_array_equal(grad, 2 * MODEL)
    trainer = tr.Trainer(loss, optax.sgd(0.1))
    assert trainer.program.update.takes("step") == [name in STEP]


def test_a_loss_is_given_what_it_asks_for():
    output = call_leaf(keyword, MODEL, None, GIVEN)
    assert output.metrics["n"].value == 3 + 2 + 1
    assert output.metrics["noise"].value == jr.uniform(jr.key(1))


def test_every_loss_of_a_step_sees_the_same_key():
    noise = lambda model, batch, key: jr.normal(key) + 0 * jnp.sum(model)
    loss = tr.WeightedSum(a=noise, b=(-1.0, noise), c=(lambda s: 1.0, noise))
    output = evaluate_loss(loss, MODEL, None, GIVEN)
    assert output.metrics["a"].value == output.metrics["c"].value
    trainer = tr.Trainer(noise, optax.sgd(0.0))
    history = trainer.fit(MODEL, None, num_steps=4, progress=False).history
    assert len(set(history["loss"].tolist())) == 4


def test_the_fields_of_a_loss_are_not_trained():
    loss = Distance(jnp.full(3, 5.0))
    trainer = tr.Trainer(tr.switch_every(1, loss, square), optax.sgd(0.25))
    result = trainer.fit(MODEL, None, num_steps=1, progress=False)
    np.testing.assert_array_equal(result.model, [3.0, 3.5, 4.0])
    np.testing.assert_array_equal(loss.target, [5.0, 5.0, 5.0])
    assert result.compiles == 1


def test_leaves_are_in_order():
    nested = tr.WeightedSum(a=tr.alternate(square, scaled), b=(2.0, keyword))
    assert leaves_of(nested) == [square, scaled, keyword]
    assert leaves_of(square) == [square]


TAKES = "A loss takes `(model, batch)`, then any of `step`, `epoch`, `key`, `mask`, "
REFUSED = {
    "a number": (3.0, "`3.0` is not a loss. A loss is a function of"),
    "None": (None, "`None` is not a loss"),
    "no signature": (max, "is not a loss: no signature found"),
    "one argument": (lambda model: model, "`<lambda>` takes `(model)`"),
    "two inputs": (lambda model, x, y: model, "A batch of several arrays is one arg"),
    "unknown keyword": (lambda m, b, *, rng: m, "`<lambda>` takes `(m, b, *, rng)`"),
    "no batch": (lambda model, step: model, TAKES),
    "step first": (lambda step, model, batch: model, TAKES),
    "keyword model": (lambda *, model, batch: model, TAKES),
    "only star": (lambda *args: args[0], TAKES),
    "positional-only step": (lambda model, batch, step, /: model, TAKES),
    "a layer": (
        eqx.nn.Linear(1, 1, key=jr.key(0)),
        "`Linear` takes `(x, *, key=None)`",
    ),
    "a class": (Holder, "`Holder` is a class, and a loss is an instance of one"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("inside", [False, True])
def test_a_loss_may_not_be(name, inside):
    loss, text = REFUSED[name]
    use = tr.alternate if inside else lambda loss: tr.Trainer(loss, optax.sgd(0.1))
    if (loss, inside) == (None, False):
        use = lambda loss: tr.Minimize(loss, optax.sgd(0.1))
    with pytest.raises(TypeError, match=re.escape(text)):
        use(loss)


def test_an_abstract_loss_needs_a_call():
    empty: Any = type("Empty", (tr.AbstractLoss,), {})
    with pytest.raises(TypeError, match="abstract"):
        empty()


SCALAR = jnp.float32(1.5)
RETURNED = {
    "a scalar": (SCALAR, {}),
    "a 1-tuple": ((SCALAR,), {}),
    "weak": (jnp.asarray(1.5), {}),
    "half": (SCALAR.astype(jnp.bfloat16), {}),
    "no metrics": ((SCALAR, {}), {}),
    "metrics": ((SCALAR, {"a": 1, "b/c": jnp.float32(2)}), {"a": 1, "b/c": 2}),
    "near a reserved name": ((SCALAR, {"losses": 1, "weights/a": 2}), None),
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_loss_may_return(name):
    returned, expected = RETURNED[name]
    output = call_leaf(lambda m, b: returned, MODEL, None, GIVEN)
    assert output.value == 1.5
    assert not output.value.weak_type
    if expected is not None:
        assert {k: m.value for k, m in output.metrics.items()} == expected


WRONG = {
    "a vector": (jnp.ones(3), "returned float32[3]; a loss is one number"),
    "one in a vector": (jnp.ones(1), "float32[1]; a loss is one number. Reduce it"),
    "an int": (jnp.int32(1), "returned int32[]; a loss is a real floating number"),
    "a bool": (jnp.array(True), "returned bool[]; a loss is a real floating"),
    "complex": (
        jnp.complex64(1),
        "complex64[]; a loss is a real floating number, which has a gradient. Take",
    ),
    "None": (None, "returned `None`. End it with `return` and the loss"),
    "a float": (1.0, "returned `1.0`, which is Python's and has no gradient"),
    "NumPy": (np.float32(1), "`float32[]`, which is NumPy's and has no gradi"),
    "a list": ([SCALAR, {}], "of type `list`, which has no gradient"),
    "a dict": ({"loss": SCALAR}, "`{'loss': float32[]}`, a dict without a loss"),
    "three": ((SCALAR, {}, 1), "returned 3 values. A loss returns a scalar, or"),
    "an empty tuple": ((), "returned 0 values"),
    "metrics first": (({"a": 1}, SCALAR), "float32[])`, and the second is no dict"),
    "metrics of None": ((SCALAR, None), "returned metrics of type `NoneType`. Metr"),
    "a vector metric": ((SCALAR, {"a": MODEL}), "is float32[3]. A metric is one"),
    "a text metric": ((SCALAR, {"a": "hi"}), "is 'hi'. A metric is one real"),
    "a complex metric": ((SCALAR, {"a": 1j}), "is complex64[]. A metric is one"),
    "a number's name": ((SCALAR, {3: 1.0}), "returned a metric named `3`, not a str"),
    "metric loss": ((SCALAR, {"loss": 1.0}), "named `loss`, a name the Trainer"),
    "metric weight": ((SCALAR, {"weight/a": 1.0}), "a metric named `weight/a`, a name"),
    "state unasked": ((SCALAR, eqx.nn.State(MODEL)), "a State, for which it did not"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_may_not_return(name):
    returned, text = WRONG[name]

    def wrong(model, batch):
        return returned

    error = ValueError if name in ("metric loss", "metric weight") else TypeError
    with pytest.raises(error, match=re.escape(text)) as caught:
        value_and_grad(tr.alternate(square, wrong), MODEL, None, GIVEN)
    assert "`wrong`" in str(caught.value)


class Counting(eqx.Module):
    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.float32(1.0))


@pytest.mark.parametrize("metrics", [None, {"seen": 7}])
def test_a_loss_with_state_returns_it_last(metrics):
    model, state = eqx.nn.make_with_state(Counting)()

    def loss(model, batch, state):
        new = state.set(model.index, state.get(model.index) + 1)
        return (SCALAR, new) if metrics is None else (SCALAR, metrics, new)

    output = call_leaf(loss, model, None, GIVEN._replace(state=state))
    assert output.state.get(model.index) == 2
    assert {k: m.value for k, m in output.metrics.items()} == (metrics or {})
    assert state.get(model.index) == 1
    with pytest.raises(
        TypeError, match="asks for `state`, but the model was given wit"
    ):
        call_leaf(loss, model, None, GIVEN)


@pytest.mark.parametrize(
    "forget",
    [
        lambda state: SCALAR,
        lambda state: (SCALAR, {"a": 1}),
        lambda state: (state, SCALAR),
        lambda state: state,
    ],
)
def test_a_loss_with_state_may_not_forget_it(forget):
    model, state = eqx.nn.make_with_state(Counting)()
    loss = lambda model, batch, state: forget(state)
    with pytest.raises(
        TypeError, match="must return the new state last: `return value"
    ):
        call_leaf(loss, model, None, GIVEN._replace(state=state))
