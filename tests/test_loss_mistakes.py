"""What a loss or an update must not do: each is an error at the first trace.

The error says what was done, names the line that is marked `# here`, says what to write
instead, and has the error of JAX's or Python's as its cause.
"""

import inspect
from typing import Any

import equinox as eqx
import form_mistakes
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import value_mistakes
from mistakes import Layer, marked_line, MODEL, ROWS

import trainer as tr


TABLES = (value_mistakes, form_mistakes)


def trained(loss, model=MODEL):
    return tr.Trainer(loss, optax.sgd(0.1)).fit(
        model, None, num_steps=2, progress=False
    )


@pytest.mark.parametrize("name", ROWS)
def test_a_mistake_is_explained_at_its_line(name):
    mistake = ROWS[name]
    with pytest.raises(tr.TraceError) as caught:
        trained(mistake.function, mistake.model)
    text = str(caught.value)
    assert isinstance(caught.value.__cause__, mistake.cause)
    assert mistake.did in text
    assert mistake.instead in text
    assert marked_line(mistake.function) in text
    words = text.replace(marked_line(mistake.function), "")
    assert words.count(". ") <= 2
    assert words.endswith((".", "?"))
    assert not getattr(caught.value.__cause__, "__notes__", [""])[-1].startswith("In")


@pytest.mark.parametrize("name", [n for n, r in ROWS.items() if r.when_evaluated])
def test_a_mistake_is_explained_while_evaluating(name):
    mistake = ROWS[name]
    trainer = tr.Trainer(mistake.function, optax.sgd(0.1))
    with pytest.raises(tr.TraceError) as caught:
        trainer.evaluate(mistake.model, [jnp.zeros(2)])
    assert isinstance(caught.value.__cause__, mistake.cause)
    assert mistake.did in str(caught.value)


def test_a_kept_value_that_jax_is_told_to_look_for():
    kept = []

    def keeps(model, batch):
        kept.append(jnp.sum(model))
        return kept[-1]

    with jax.checking_leaks(), pytest.raises(tr.TraceError, match="kept in") as caught:
        trained(keeps)
    assert str(caught.value.__cause__).startswith("Leaked ")


# An update of one's own.


class Unfiltered(tr.AbstractUpdate):
    """Makes the optimizer's state for what `pick` leaves of the model."""

    pick: Any
    optimizer: Any = optax.adam(0.1)

    def init(self, model):
        return self.optimizer.init(self.pick(model))  # here

    def __call__(self, model, opt_state, batch):
        grad = eqx.filter_grad(lambda m: jnp.sum(m.w**2))(model)
        new, opt_state = self.optimizer.update(grad, opt_state)
        return eqx.apply_updates(model, new), opt_state, {}


def updated(update, model):
    return tr.Trainer(update=update).fit(model, None, num_steps=2, progress=False)


def test_an_optimizer_that_is_given_functions():
    with pytest.raises(tr.TraceError, match=r"`opt\.init\(eqx\.filter\(") as caught:
        updated(Unfiltered(lambda model: model), Layer())
    assert "a model with a function among its leaves" in str(caught.value)
    assert marked_line(Unfiltered.init) in str(caught.value)
    assert type(caught.value.__cause__) is TypeError


def test_an_optimizer_that_is_given_integers():
    update = Unfiltered(lambda model: eqx.filter(model, eqx.is_array))
    with pytest.raises(tr.TraceError, match=r"`opt\.init\(eqx\.filter\(") as caught:
        updated(update, Layer())
    assert "has something for `table`, for which there is no" in str(caught.value)
    line = inspect.getsourcelines(Unfiltered.__call__)[1] + 2
    assert f"test_loss_mistakes.py:{line}, `new, opt_state = " in str(caught.value)
    assert type(caught.value.__cause__) is ValueError


def test_an_optimizer_that_forgets_what_it_kept_for_integers():
    pick = lambda model: eqx.filter(model, eqx.is_array)
    with pytest.raises(
        TypeError, match=r"was int32.* and is now gone.*eqx\.is_inexact"
    ):
        updated(Unfiltered(pick, optax.rmsprop(0.1)), Layer())


def test_a_gradient_in_an_update():
    class Own(tr.Trainer):
        def update(self, model, opt_state, batch):
            grad = jax.grad(lambda m: m**2)(model)  # here
            return model - grad, opt_state, {}

    with pytest.raises(tr.TraceError, match="of an array of shape") as caught:
        Own().fit(MODEL, None, num_steps=2, progress=False)
    assert marked_line(Own.update) in str(caught.value)


# What a loss returns.

SCALAR = jnp.float32(1)
RETURNED = {
    "a vector": (MODEL, "returned float32[3]; a loss is one number. Reduce it"),
    "one in a vector": (MODEL[:1], "returned float32[1]; a loss is one number"),
    "two losses": (
        (SCALAR, SCALAR),
        "returned `(float32[], float32[])`, and the second is no dict of metrics. Retu",
    ),
    "three": ((SCALAR, {}, 1), "returned 3 values. A loss returns a scalar, or"),
    "a list": ([SCALAR], "returned `[float32[]]` of type `list`, which has no grad"),
    "None": (None, "returned `None`. End it with `return` and the loss"),
    "a dict": (
        {"loss": SCALAR},
        "returned `{'loss': float32[]}`, a dict without a los",
    ),
    "a Python number": (1.0, "returned `1.0`, which is Python's and has no gradient"),
    "a number of NumPy's": (np.float32(1), "which is NumPy's and has no gradient. Com"),
    "an int": (jnp.int32(1), "returned int32[]; a loss is a real floating number, whi"),
    "a bool": (jnp.array(True), "returned bool[]; a loss is a real floating number"),
    "complex": (jnp.complex64(1), "Take the real part: `jnp.real(value)`."),
    "metrics of None": ((SCALAR, None), "returned metrics of type `NoneType`. Metri"),
    "a vector as metric": (
        (SCALAR, {"a": MODEL}),
        "is float32[3]. A metric is one rea",
    ),
    "a state": ((SCALAR, eqx.nn.State(Layer())), "returned a State, for which it did"),
}


@pytest.mark.parametrize("name", RETURNED)
@pytest.mark.parametrize("how", ["fit", "evaluate", "in a branch"])
def test_what_a_loss_returns_is_checked(name, how):
    value, message = RETURNED[name]

    def loss(model, batch):
        return value

    def fine(model, batch):
        return jnp.sum(model)

    both = {"fine": fine, "loss": loss}
    used = tr.Switch(tr.Every(2), both) if how == "in a branch" else loss
    trainer = tr.Trainer(used, optax.sgd(0.1))
    options = {} if how == "evaluate" else {"num_steps": 2, "progress": False}
    use = trainer.evaluate if how == "evaluate" else trainer.fit
    with pytest.raises(TypeError) as caught:
        use(MODEL, [jnp.zeros(2)], **options)
    line = inspect.getsourcelines(loss)[1]
    assert f"`loss` at test_loss_mistakes.py:{line}" in str(caught.value)
    assert message in str(caught.value)
    assert not isinstance(caught.value, tr.TraceError)


def test_what_an_update_returns_is_checked():
    class Own(tr.AbstractUpdate):
        returned: Any

        def init(self, model):
            return None

        def __call__(self, model, opt_state, batch):
            return self.returned(model)

    line = inspect.getsourcelines(Own.__call__)[1]
    place = rf"`Own` at test_loss_mistakes\.py:{line}"
    with pytest.raises(TypeError, match=rf"{place} must return `\(model, opt_state"):
        updated(Own(lambda model: model), MODEL)
    with pytest.raises(TypeError, match=f"{place} returned metrics of type `float`"):
        updated(Own(lambda model: (model, None, 1.0)), MODEL)


def test_a_python_number_from_a_branch_of_a_cond_is_made_strong():
    """JAX makes such a loss weakly typed, which costs others a second compile."""

    def loss(model, batch, *, step):
        value = jax.lax.cond(step % 2 == 0, lambda: jnp.sum(model), lambda: 0.0)
        assert value.weak_type
        return value, {"half": value / 2}

    trainer = tr.Trainer(loss, optax.sgd(1.0))
    result = trainer.fit(MODEL, None, num_steps=3, progress=False)
    again = trainer.fit(result.state, None, num_steps=4, progress=False)
    assert again.compiles == 1
    np.testing.assert_array_equal(result.history["loss"], [6.0, 0.0, 3.0])
    np.testing.assert_array_equal(again.model, MODEL - 2)
