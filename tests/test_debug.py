"""`debug=True`: a look inside of a run with Python's own means."""

import sys
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trainer as tr
from tests.debugged import (
    ADAM,
    BOUNDS,
    FEED,
    fit,
    MODEL,
    mse,
    same,
    same_history,
    same_state,
    SGD,
    Values,
    X,
    Y,
)


PLACES = ["loss", "term", "model", "selector", "transform", "sampler", "clip"]


class Model(eqx.Module):
    a: jax.Array
    look: Values

    @eqx.filter_jit
    def __call__(self, x):
        return jax.lax.cond(x[0] > -9, self.look, abs, jnp.sum(x * self.a))


class Which(tr.AbstractSelector):
    look: Values

    def __call__(self, step, num):
        return (1, step) if self.look(step) % 2 else (0, step)


class Same(tr.AbstractTransform):
    look: Values

    def init(self, model):
        return None

    def __call__(self, model, kept, *, step):
        self.look(model.a[0])
        return model, kept


class Sampler(tr.AbstractSampler):
    look: Values

    def init(self, key):
        return None

    def sample(self, carry, model, *, step, key):
        return model.a * self.look(step + 1), carry


class Looks:
    """A program that looks at a value in each place where there is code of a user's."""

    def __init__(self):
        self.at = look = {name: Values() for name in PLACES}

        def loss(model, batch):
            assert batch.shape == (3,)
            return look["loss"](model(batch)) ** 2

        term = lambda model, batch: look["term"](jnp.sum(model.a**2))
        clip = lambda w: w if look["clip"](w[0]) < 9 else 0 * w
        total = tr.WeightedSum(b=loss, t=(lambda step: step // 2, tr.alternate(term)))
        switch = tr.Switch(Which(look["selector"]), [total, loss])
        self.update = tr.Minimize(switch, SGD)
        self.transforms = {"same": Same(look["transform"]), "clip": tr.Project(clip)}
        self.model = Model(MODEL.a, look["model"])
        self.sampler = Sampler(look["sampler"])

    def fit(self, **options):
        trainer = tr.Trainer(update=self.update, transforms=self.transforms, **options)
        return fit(trainer, self.model, self.sampler, 6)


def test_values_are_seen_everywhere():
    looks = Looks()
    result, _ = looks.fit(debug=True)
    often = {name: len(look.seen) for name, look in looks.at.items()}
    # The term has a weight of 0 at step 0, and each second step has another branch.
    counts = {"term": 2, "clip": 7}
    assert often == {name: counts.get(name, 6) for name in PLACES}
    assert looks.at["selector"].seen == [0, 1, 2, 3, 4, 5]
    assert looks.at["sampler"].seen == [1, 2, 3, 4, 5, 6]
    assert looks.at["loss"].seen == looks.at["model"].seen
    losses = np.square(looks.at["loss"].seen)[1::2]
    np.testing.assert_allclose(result.history["loss"][1::2], losses, rtol=1e-6)
    assert str(result.compile_report).endswith("(debug: nothing is compiled)")
    assert (result.compile_report.traces, result.compile_report.seconds) == (0, {})


def test_a_fit_without_jit_is_the_same():
    looks = Looks()
    with jax.disable_jit():
        result, _ = looks.fit()
    assert len(looks.at["loss"].seen) == 6
    assert result.compiles == 0
    trainer = tr.Trainer(mse, SGD)
    compiled = fit(trainer)
    with jax.disable_jit():
        assert same(fit(trainer), compiled)
        found = trainer.evaluate(MODEL, FEED)
    # What was compiled before is in use again.
    assert fit(trainer)[0].compiles == 1
    assert np.isclose(found["loss"], trainer.evaluate(MODEL, FEED)["loss"])


def test_a_preview_needs_no_values():
    loss = tr.alternate(mse, tr.alternate(mse, mse))
    with jax.disable_jit():
        found = tr.preview(loss, 4)
    assert str(found) == str(tr.preview(loss, 4))


def test_values_are_seen_in_an_update_in_parts_of_a_batch_and_in_evaluations():
    look, rows = Values(), []

    def loss(model, batch):
        rows.append(len(batch[0]))
        return look(mse(model, batch))

    class Twice(tr.Trainer):
        def update(self, model, opt_state, batch):
            look(model.b)
            value, grad = eqx.filter_value_and_grad(loss)(model, batch)
            move = 0.1 if look(value) > 0.01 else 0.0
            model = jax.tree.map(lambda p, g: p - move * g, model, grad)
            return model, opt_state, {"loss": value}

    fit(Twice(debug=True), num_steps=2)
    assert (len(look.seen), rows) == (6, [4, 4])
    parts = tr.Trainer(update=tr.Minimize(loss, SGD, micro_batches=3), debug=True)
    fit(parts, num_steps=2)
    assert (len(look.seen), rows[2:]) == (10, [2, 2, 2, 2])
    found = parts.evaluate(MODEL, FEED)
    assert (len(look.seen), rows[6:]) == (13, [4, 4, 4])
    assert np.isclose(found["loss"], np.mean(look.seen[10:]))


def test_each_member_of_an_ensemble_has_its_values():
    look = Values()

    def loss(model, batch):
        return look(mse(model, batch))

    make = lambda rate: tr.Trainer(loss, optax.sgd(rate), debug=True)
    models = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), MODEL)
    result = fit(tr.ensemble(make, rate=[0.2, 0.01]), models, num_steps=3)[0]
    seen = np.array(look.seen).reshape(3, 2)
    for place in (0, 1):
        np.testing.assert_allclose(result.history[f"{place}/loss"], seen[:, place])


def test_a_breakpoint_stops_in_the_loss(monkeypatch):
    stops = []

    def loss(model, batch):
        value = mse(model, batch)
        breakpoint()
        return value

    at = lambda: stops.append(sys._getframe(1).f_locals["value"].item())
    monkeypatch.setattr(sys, "breakpointhook", at)
    result, _ = fit(tr.Trainer(loss, SGD, debug=True), num_steps=3)
    np.testing.assert_allclose(stops, result.history["loss"])


def test_an_error_is_the_users_own_and_leaves_all_that_was():
    def loss(model, batch, *, step):
        assert step < 4, "too far"
        return mse(model, batch)

    trainer = tr.Trainer(loss, ADAM, debug=True)
    with pytest.raises(AssertionError, match="too far") as caught:
        fit(trainer)
    assert traceback.extract_tb(caught.tb)[-1].line.startswith("assert step < 4")
    like, _ = fit(tr.Trainer(mse, ADAM), num_steps=4)
    assert same_state(trainer.last_state, like.state, BOUNDS)
    assert same_history(trainer.last_history, like.history, BOUNDS)


@pytest.mark.parametrize("end", [StopIteration, KeyboardInterrupt])
def test_no_error_in_a_loss_is_taken_for_the_end_of_the_data(end):
    def loss(model, batch, *, step):
        if step == 2:
            raise end
        return mse(model, batch)

    trainer = tr.Trainer(loss, ADAM, debug=True)
    with pytest.raises(end):
        fit(trainer)
    assert int(trainer.last_state.step) == 2


def test_what_has_no_value_is_told_how_to_be_read():
    under_gradient = lambda model, batch: jnp.sum(np.sin(model.a))
    mapped = lambda model, batch: jnp.sum(
        jax.vmap(lambda x: x if x > 0 else -x)(model.a)
    )
    for loss in (under_gradient, mapped):
        with pytest.raises(TypeError) as caught:
            fit(tr.Trainer(loss, SGD, debug=True), source=None)
        assert not isinstance(caught.value, tr.TraceError)
        assert "`x.item()` is the value of a scalar" in caught.value.__notes__[-1]


def test_attributes_may_be_set_at_any_time():
    class Scaled(tr.Trainer):
        scale = 1.0

        def loss(self, model, batch):
            return self.scale * jnp.sum(model.a)

    def change(info):
        trainer.scale = info.step / 2

    trainer = Scaled(optimizer=SGD, debug=True)
    look = Each(change)
    result, _ = fit(trainer, source=None, num_steps=3, callbacks=[look])
    assert trainer.scale == 1.5
    sums = result.history["loss"] / [1, 0.5, 1]
    np.testing.assert_allclose(np.diff(sums), [-0.15, -0.075], atol=1e-6)
    trainer.debug = False
    assert fit(trainer, source=None, num_steps=3)[0].compiles == 1
    with pytest.raises(
        tr.RecompileError, match=r"`scale` of `Scaled` is set to `1\.0`"
    ):
        trainer.scale = 1.0


class Each(tr.AbstractCallback):
    """Calls a function after every step."""

    every = 1

    def __init__(self, call):
        self.call = call

    def __call__(self, info):
        self.call(info)


def test_batches_of_other_forms_as_the_compiled_run_has_them():
    feed = [FEED[0], FEED[1], (X[:3], Y[:3]), (X[:6], Y[:6])]
    runs = []
    for debug in (True, False):
        how = {"on_recompile": "allow", "debug": debug}
        runs.append(fit(tr.Trainer(mse, SGD, **how), source=feed, num_steps=9)[0])
    debug, compiled = runs
    assert (debug.compiles, compiled.compiles) == (0, 3)
    assert same_history(debug.history, compiled.history, BOUNDS)
    assert same_state(debug.state, compiled.state, BOUNDS)
    with pytest.raises(tr.RecompileError, match=r"`batch\[0\]` .*float32\[6,3\]"):
        fit(tr.Trainer(mse, SGD, debug=True), source=feed[1::2])


def test_an_update_that_changes_the_state_is_refused():
    class Narrow(tr.Trainer):
        def update(self, model, opt_state, batch):
            return jax.tree.map(jnp.bfloat16, model), opt_state, {}

    with pytest.raises(TypeError, match=r"The update changes the state: `model\.a`"):
        fit(Narrow(debug=True), source=None)
