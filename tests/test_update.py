"""Updates: optimizers, models of all kinds, updates of one's own."""

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


TARGET = jnp.array([1.0, -2.0, 0.5])


class Model(eqx.Module):
    """Parameters, an integer table, a key, a function and a number."""

    w: jax.Array
    table: jax.Array
    key: jax.Array
    act: Any
    scale: int

    def __init__(self):
        self.w = jnp.zeros(3)
        self.table = jnp.array([2, 0, 1])
        self.key = jr.key(3)
        self.act = jnp.sinh
        self.scale = 2


def distance(model, batch):
    offset = 0.0 if batch is None else jnp.mean(batch)
    return jnp.sum((model.act(model.w) - TARGET[model.table] - offset) ** 2)


def size(model, batch):
    return jnp.sum(model.w**2)


def run(loss, optimizer, data=None, num_steps=20, model=None):
    trainer = tr.Trainer(loss, optimizer)
    model = Model() if model is None else model
    return trainer.fit(model, data, num_steps=num_steps, progress=False)


OPTIMIZERS = {
    "sgd": optax.sgd(0.05, momentum=0.5),
    "adamw": optax.adamw(0.1),
    "lamb": optax.lamb(0.1),
    "lbfgs": optax.lbfgs(),
    "polyak": optax.polyak_sgd(0.1),
    "plateau": optax.chain(
        optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=2, cooldown=1)
    ),
    "clip and schedule": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(0.2, 20))
    ),
    "every other step": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("data", [None, [jnp.zeros(4)]], ids=["no data", "a batch"])
def test_an_optimizer_runs_and_compiles_once(name, data):
    model = Model()
    result = run(distance, OPTIMIZERS[name], data, model=model)
    assert result.compiles == 1
    history = result.history["loss"]
    assert history[0] == distance(model, None)
    assert history[-1] < 0.8 * history[0]
    assert np.isfinite(result.model.w).all()
    np.testing.assert_array_equal(result.model.table, model.table)
    assert result.model.key == model.key
    assert (result.model.act, result.model.scale) == (model.act, model.scale)
    np.testing.assert_array_equal(model.w, np.zeros(3))


@pytest.mark.parametrize("name", ["lbfgs", "plateau"])
def test_an_optimizer_that_evaluates_the_loss_follows_a_schedule(name):
    ramp = tr.WeightedSum(a=distance, b=(optax.linear_schedule(1.0, 0.0, 5), size))
    result = run(tr.switch_every(3, ramp, distance), OPTIMIZERS[name])
    assert result.compiles == 1
    assert result.history["loss"][-1] < 0.8 * result.history["loss"][0]


def test_the_loss_reported_is_that_of_the_parameters_before():
    loss = lambda model, batch: model**2
    history = run(loss, optax.sgd(0.25), model=jnp.float32(8), num_steps=3).history
    assert history["loss"].tolist() == [64.0, 16.0, 4.0]


def test_an_update_is_what_optax_does_by_hand():
    optimizer, model = optax.adamw(0.1), Model()
    params: Any
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    state = optimizer.init(params)
    for _ in range(5):
        grad = jax.grad(lambda p: distance(eqx.combine(p, rest), None))(params)
        updates, state = optimizer.update(grad, state, params)
        params = optax.apply_updates(params, updates)
    found = run(distance, optimizer, num_steps=5).model
    np.testing.assert_allclose(found.w, params.w, rtol=1e-5)


def test_an_optimizer_is_given_the_loss_and_its_gradient():
    def update(updates, state, params=None, **extra_args):
        assert set(extra_args) == {"value", "grad", "value_fn", "obj_fn", "grad_fn"}
        value, grad, value_fn = (extra_args[n] for n in ("value", "grad", "value_fn"))
        again = value_fn(params - updates / 4)
        return jax.tree.map(jnp.zeros_like, grad), jnp.stack([value, again])

    init = lambda params: jnp.zeros(2)
    optimizer = optax.GradientTransformationExtraArgs(init, update)
    loss = lambda model, batch: model**2
    result = run(loss, optimizer, model=jnp.float32(3), num_steps=1)
    assert result.state.opt_state.tolist() == [9.0, 2.25]  # at 3, and at 3 - 6 / 4


SGD = optax.sgd(1.0)
RATE: Any = 1e-3
SIZE: Any = size


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: tr.Minimize(size, RATE), "`0.001` is not an optimizer. Use one of Op"),
        (lambda: tr.Minimize(3, SGD), "`3` is not a loss"),
        (lambda: tr.Trainer(size), "`Trainer` has a loss but no optimizer. Pass one"),
        (lambda: tr.Trainer(update=SIZE), "is not an update. Use `tr.Minimize(loss, o"),
        (
            lambda: tr.Trainer(None, SGD, update=tr.Minimize(size, SGD)),
            "The optimizer belongs into the update",
        ),
    ],
)
def test_what_is_refused(make, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        make()


class Decay(tr.AbstractUpdate):
    """Scales the model; its rate is an array that the step takes as an argument."""

    rate: jax.Array

    def init(self, model):
        return {"norm": jnp.float32(0)}

    def __call__(self, model, opt_state, batch, *, step, epoch, key):
        metrics = {"loss": jnp.sum(model), "step": step, "epoch": epoch}
        metrics["noise"] = jr.uniform(key)
        norm = opt_state["norm"] + jnp.sum(model)
        return model * self.rate, {"norm": norm}, metrics


def test_an_update_of_ones_own():
    trainer = tr.Trainer(update=Decay(jnp.float32(0.5)))
    data = [jnp.zeros(2)] * 2
    result = trainer.fit(jnp.ones(2), data, num_epochs=2, key=jr.key(5), progress=False)
    assert result.compiles == 1
    assert result.history["loss"].tolist() == [2.0, 1.0, 0.5, 0.25]
    assert result.history["step"].tolist() == [0, 1, 2, 3]
    assert result.history["epoch"].tolist() == [0, 0, 1, 1]
    assert result.state.opt_state["norm"] == 3.75
    noise = [jr.uniform(jr.fold_in(jr.key(5), step)) for step in range(4)]
    np.testing.assert_array_equal(result.history["noise"], noise)


def test_a_field_of_an_update_may_have_any_name():
    class Named(tr.AbstractUpdate):
        method: str
        loss: str = "mse"
        optimizer: str = "none"

        def init(self, model):
            return None

        def __call__(self, model, opt_state, batch, *, step):
            return model * 0.5, opt_state, {"step": step}

    trainer = tr.Trainer(update=Named("newton"))
    result = trainer.fit(jnp.ones(2), None, num_steps=2, progress=False)
    assert result.model.tolist() == [0.25, 0.25]


def own(update, optimizer=None):
    return type("Own", (tr.Trainer,), {"update": update})(None, optimizer)


def test_an_update_that_is_overridden():
    optimizer = optax.sgd(0.25)

    def update(self, model, opt_state, batch, *, step, mask):
        grad = jax.grad(lambda m: jnp.sum(m**2, where=mask))(model)
        updates, opt_state = optimizer.update(grad, opt_state)
        return optax.apply_updates(model, updates), opt_state, {"step": step}

    model, batch = jnp.ones(2), jnp.zeros(2)
    result = own(update, optimizer).fit(model, [batch], num_steps=2, progress=False)
    assert result.model.tolist() == [0.25, 0.25]
    assert result.history["step"].tolist() == [0, 1]


def test_without_an_optimizer_the_state_starts_as_none():
    def update(self, model, opt_state, batch):
        assert opt_state is None
        return model + 1, opt_state, {}

    assert own(update).init(jnp.zeros(2)).opt_state is None
    result = own(update).fit(jnp.zeros(2), None, num_steps=3, progress=False)
    assert result.model.tolist() == [3.0, 3.0]
    assert list(result.history) == []


class Counting(eqx.Module):
    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.float32(1.0))


def test_an_update_with_state_returns_it_last():
    def update(self, model, opt_state, batch, state):
        seen = state.get(model.index)
        return model, opt_state, {"seen": seen}, state.set(model.index, 2 * seen)

    stateful = eqx.nn.make_with_state(Counting)()
    result = own(update).fit(stateful, None, num_steps=3, progress=False)
    assert result.history["seen"].tolist() == [1, 2, 4]
    assert result.model_state.get(result.model.index) == 8
    with pytest.raises(TypeError, match="an update asks for `state`, but the model"):
        own(update).fit(jnp.zeros(2), None, num_steps=1, progress=False)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ((1, 2), "must return `(model, opt_state, metrics)`, and the new state last"),
        ((1, 2, {}, 4), "must return `(model, opt_state, metrics)`"),
        (None, "must return `(model, opt_state, metrics)`"),
        ((1, 2, 3), "returned metrics of type `int`. Metrics are a dict"),
        ((1, 2, {"a": jnp.ones(2)}), "is float32[2]. A metric is one real"),
    ],
)
def test_what_an_update_may_not_return(returned, text):
    update = lambda self, model, opt_state, batch: returned
    update.__name__ = "update"
    with pytest.raises(TypeError, match=re.escape(text)) as caught:
        own(update).fit(jnp.zeros(2), None, num_steps=1, progress=False)
    assert "`update` at test_update.py:" in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda self, model, batch: None,
        lambda self, model, opt_state, batch, rng: None,
        lambda self, model, opt_state, step: None,
    ],
)
def test_the_arguments_of_an_update_are_checked(wrong):
    text = "An update takes `(model, opt_state, batch)`, then any of `step`, `epoch`"
    with pytest.raises(TypeError, match=re.escape(text)):
        own(wrong)


def test_no_update_is_called_a_update():
    without_signature = {"__call__": property(lambda self: max), "init": lambda s, m: 0}
    update: Any = type("Odd", (tr.AbstractUpdate,), without_signature)()
    with pytest.raises(TypeError, match="is not an update: "):
        tr.Trainer(update=update)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m, s: (m[:1], s), "`model` was float32[2] and is now float32[1]"),
        (lambda m, s: (m.astype(int), s), "`model` was float32[2] and is now int32[2]"),
        (lambda m, s: ((m, m), s), "`model` was float32[2] and is now gone"),
        (lambda m, s: (m, m), "`opt_state` is new: float32[2]"),
        (
            lambda m, s: (m, ()),
            "`opt_state` was of class `NoneType` and is now of class `tuple`",
        ),
    ],
)
def test_an_update_keeps_the_structure(change, text):
    update = lambda self, model, opt_state, batch: (*change(model, opt_state), {})
    with pytest.raises(TypeError) as caught:
        own(update).fit(jnp.zeros(2), None, num_steps=1, progress=False)
    assert f"{text}, so that the second step would compile again" in str(caught.value)
    assert "``" not in str(caught.value)
