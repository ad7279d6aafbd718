"""`debug=True`: the same numbers as those of the compiled run."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import trainer as tr
from tests.debugged import (
    ADAM,
    BOUNDS,
    FEED,
    fit,
    masked,
    MODEL,
    mse,
    noisy,
    same,
    same_history,
    same_state,
    SGD,
    small,
    STEPS,
    told,
    X,
    Y,
)


# Each operation is compiled by itself, which takes a while.
pytestmark = pytest.mark.slow


NESTED = tr.piecewise(
    {
        "first": tr.alternate(noisy, told),
        "last": tr.WeightedSum(fit=(2.0, mse), turns=tr.switch_every(2, told, small)),
    },
    boundaries=[0.3],
)
RAMP = tr.WeightedSum(
    fit=mse,
    turns=(optax.linear_schedule(0, 1, 6, 5), tr.alternate(small, told)),
    off=(lambda step: 0.0 * step, tr.alternate(small, told)),
)
# At step 0 there is nothing to add up.
ALL_SCHEDULED = tr.WeightedSum(a=(lambda s: s // 2 % 2, mse), b=(lambda s: s % 2, told))
PLATEAU = tr.Switch(
    tr.Plateau("double", patience=2, min_delta=10.0),
    [told, mse, tr.alternate(mse, told)],
)
UNKNOWN = tr.Switch(tr.Threshold("double", below=1e-9), [mse, told])
RANDOM = tr.Switch(tr.Random((1, 2)), [mse, told])
PARTS = tr.Parts(
    a=tr.Part(optax.inject_hyperparams(optax.adam)(1e-2), lambda m: m.a),
    b=tr.Part(SGD, lambda m: m.b, start=3, stop=0.8),
)
TRANSFORMS = {
    "ema": tr.EMA(0.9),
    "swa": tr.SWA(start=4, every=3),
    "clip": tr.Project(lambda w: jnp.clip(w, -0.3, 0.3), where=lambda m: m.a),
}
A = tr.Minimize(mse, optax.adam(0.1), where=lambda m: m.a)
B = tr.Minimize(tr.alternate(mse, told), SGD, where=lambda m: m.b)
TURNS = tr.SwitchUpdate(tr.Cycle((2, 1, 1)), {"a": A, "b": B, "rest": None})
ADAPTIVE = tr.AdaptiveSum(
    tr.NTKTrace(every=3),
    near=tr.MeanSquare(lambda m, b: b[0] @ m.a + m.b - b[1]),
    far=tr.MeanSquare(lambda m, b: m.a, per_example=False),
)


class Walk(tr.AbstractSampler):
    """A batch that moves with the model, and counts."""

    scale: jax.Array

    def init(self, key):
        return {"x": jr.uniform(key, (4, 3)), "count": jnp.int32(0)}

    def sample(self, carry, model, *, step, key):
        x = 0.5 * carry["x"] + self.scale * jr.uniform(key, (4, 3)) + 0.1 * model.a
        carry = {"x": x, "count": carry["count"] + step}
        return (x, jnp.sin(carry["count"]) * jnp.ones(4)), carry


def minimize(*args, **options):
    return {"update": tr.Minimize(*args, **options)}


MICRO = minimize(tr.alternate(noisy, masked), ADAM, micro_batches=3)
PROGRAMS = {
    "plain": {"loss": noisy, "optimizer": ADAM},
    "nested": {"loss": NESTED, "optimizer": ADAM},
    "ramp": {"loss": RAMP, "optimizer": ADAM},
    "scheduled": {"loss": ALL_SCHEDULED, "optimizer": ADAM},
    "plateau": {"loss": PLATEAU, "optimizer": ADAM},
    "unknown": {"loss": UNKNOWN, "optimizer": ADAM},
    "random": {"loss": RANDOM, "optimizer": ADAM},
    "adaptive": {"loss": ADAPTIVE, "optimizer": ADAM},
    "turns": {"update": TURNS},
    "jointly": {"update": tr.JointUpdate({"a": A, "b": B})},
    "parts": {"loss": mse, "optimizer": PARTS},
    "transforms": {"loss": mse, "optimizer": ADAM, "transforms": TRANSFORMS},
    "micro-batches": MICRO,
    "bfloat16": minimize(mse, SGD, compute="bfloat16"),
    "accumulated": {"loss": mse, "optimizer": optax.MultiSteps(ADAM, 3)},
}
LOOSER = {"bfloat16": 2e-2}


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_the_compiled_run(name):
    how = PROGRAMS[name]
    runs = [fit(tr.Trainer(**how, debug=debug)) for debug in (True, False)]
    assert same(*runs, within=LOOSER.get(name, 1e-5))


def test_a_line_search_is_gone_through_as_well():
    far = lambda model, batch: jnp.sum((model**2 - 2) ** 2)
    trainers = [tr.Trainer(far, optax.lbfgs(), debug=debug) for debug in (True, False)]
    assert same(*(fit(trainer, MODEL.a, None, 4) for trainer in trainers))


class Normed(eqx.Module):
    a: jax.Array
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout

    def __init__(self):
        self.a, self.drop = MODEL.a, eqx.nn.Dropout(0.5)
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")

    def __call__(self, x, state, key):
        x, state = self.norm(x, state)
        return self.drop(x, key=key) @ self.a, state


def normed(model, batch, *, state, key):
    (x, y), keys = batch, jr.split(key, len(batch[0]))
    run = jax.vmap(model, (0, None, 0), (0, None), axis_name="batch")
    prediction, state = run(x, state, keys)
    return jnp.mean((prediction - y) ** 2), {"top": prediction.max()}, state


def test_a_model_with_a_state_and_dropout():
    model, runs = eqx.nn.make_with_state(Normed)(), []
    for debug in (True, False):
        trainer = tr.Trainer(normed, SGD, debug=debug)
        runs.append(fit(trainer, model))
        found = trainer.evaluate(runs[-1][0].state, FEED)
        runs[-1][0].history.record(5, {f"mean {n}": v for n, v in found.items()})
    assert same(*runs)


SOURCES = {
    "arrays": (tr.Arrays((X, Y), batch_size=4, shuffle=True), noisy),
    "iterator": (lambda: iter(FEED), mse),
    "ragged": (tr.Loader([*FEED, (X[:3], Y[:3])], ragged="pad"), masked),
    "none": (None, small),
    "sampler": (Walk(jnp.float32(0.5)), mse),
}


@pytest.mark.parametrize("name", SOURCES)
def test_batches_are_those_of_the_compiled_run(name):
    source, loss = SOURCES[name]
    trainers = [tr.Trainer(loss, SGD, debug=debug) for debug in (True, False)]
    assert same(*(fit(trainer, source=source) for trainer in trainers))


def test_a_run_goes_on_from_one_to_the_other():
    debug, compiled = (tr.Trainer(RANDOM, ADAM, debug=d) for d in (True, False))
    whole = fit(debug)[0]
    for first, then in ((debug, compiled), (compiled, debug)):
        begun = fit(first, num_steps=6)[0]
        ended = fit(then, begun.state)[0]
        assert same_state(ended.state, whole.state, BOUNDS)
        assert same_history(begun.history + ended.history, whole.history, BOUNDS)


def test_callbacks_and_evaluations_see_the_same():
    which = tr.Plateau("validation/loss", patience=1, min_delta=1.0, reported=True)
    loss = tr.Switch(which, [mse, told])
    seen, runs = [], []

    class Look(tr.AbstractCallback):
        every = 4

        def __call__(self, info):
            seen.append((info.step, info.metrics["loss"], int(info.state.step)))
            return tr.Stop("enough") if info.step == 12 else {"twice": 2 * info.step}

    for debug in (True, False):
        trainer = tr.Trainer(loss, SGD, debug=debug)
        runs.append(fit(trainer, callbacks=[tr.Evaluate(FEED, every=2), Look()]))
    assert same(*runs)
    assert runs[0][0].stop_reason == "enough"
    np.testing.assert_allclose(seen[:3], seen[3:], rtol=1e-5)


def spoiled(model, batch, *, step):
    return mse(model, batch) * jnp.where(step % 7 == 5, jnp.nan, 1.0)


def test_steps_that_are_not_finite_are_left_out():
    how = {"optimizer": ADAM, "nonfinite": "skip", "transforms": {"ema": tr.EMA(0.9)}}
    runs = [fit(tr.Trainer(spoiled, **how, debug=debug)) for debug in (True, False)]
    assert same(*runs)
    assert "Steps left out: 3" in runs[0][1][0]


def test_a_step_that_is_not_finite_ends_the_run():
    trainers = [
        tr.Trainer(spoiled, ADAM, nonfinite="raise", debug=debug)
        for debug in (True, False)
    ]
    said = []
    for trainer in trainers:
        with pytest.raises(tr.NonfiniteError) as caught:
            fit(trainer)
        said.append(str(caught.value))
    assert said[0] == said[1]
    debug, compiled = trainers
    assert int(debug.last_state.step) == 5
    assert same_state(debug.last_state, compiled.last_state, BOUNDS)
    assert same_history(debug.last_history, compiled.last_history, BOUNDS)


def test_the_members_of_an_ensemble():
    def make(rate, debug):
        loss = tr.Switch(tr.Threshold("loss", below=0.3), [noisy, told])
        return tr.Trainer(loss, optax.sgd(rate), nonfinite="skip", debug=debug)

    models = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), MODEL)
    runs = []
    for debug in (True, False):
        both = tr.ensemble(
            lambda rate, debug=debug: make(rate, debug), rate=[0.2, 0.01], seeds=(3, 5)
        )
        runs.append(fit(both, models))
        found = both.evaluate(runs[-1][0].state, FEED, loss=told)
        runs[-1][0].history.record(STEPS, {f"mean {n}": v for n, v in found.items()})
    assert same(*runs)
    # There are steps at which they are at different branches.
    assert np.ma.getmaskarray(runs[0][0].history["branch"]).any()
