"""Cases of what happens in a step: bad batches, half precision, targets, buffers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from test_cases import by_hand, close, fit, linear, mse, rows, same

import trainer as tr


def batches(bad=2):
    """Five batches, of which one is not a number."""
    x, y = rows(20)
    found = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 20, 4)]
    if bad is not None:
        found[bad] = (found[bad][0] * np.nan, found[bad][1])
    return found


def trained_on(steps):
    calls = [{"batch": batches()[step]} for step in steps]
    return by_hand(mse, optax.adam(0.1), linear(), calls)[0]


def nan_steps(history):
    return np.flatnonzero(np.isnan(history["loss"])).tolist()


GOOD = [0.475253, 0.587311, 0.104536]


def test_case_50_an_optimizer_that_skips_what_is_not_finite_counts_four_of_five():
    optimizer = optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=3)
    with pytest.warns(UserWarning, match="Step 2 made"):
        result = fit(mse, optimizer, linear(), batches(), num_steps=5)
    close(result.model, trained_on([0, 1, 3, 4]))
    close(result.model, GOOD)
    assert nan_steps(result.history) == [2]
    state = result.state.opt_state
    assert (result.state.step, state.inner_state[0].count) == (5, 4)
    assert state.total_notfinite == 1


def guarded(nonfinite, steps_per_call):
    options = {"nonfinite": nonfinite, "steps_per_call": steps_per_call}
    return tr.Trainer(mse, optax.adam(0.1), **options)


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_case_50_a_bad_step_is_left_out(steps_per_call, step_compiles):
    trainer = guarded("skip", steps_per_call)
    with pytest.warns(UserWarning, match=r"Step 2 made .* Steps left out: 1"):
        result = trainer.fit(linear(), batches(), num_steps=5, progress=False)
    close(result.model, trained_on([0, 1, 3, 4]))
    close(result.model, GOOD)
    assert nan_steps(result.history) == [2]
    assert (result.state.step, result.state.opt_state[0].count) == (5, 4)
    assert "count=1, step=2" in repr(result.nonfinite)
    assert step_compiles() == 1


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_case_50_a_bad_step_stops_the_run_at_the_last_good_model(steps_per_call):
    trainer = guarded("raise", steps_per_call)
    run = lambda model, data: trainer.fit(model, data, num_steps=5, progress=False)
    with pytest.raises(tr.NonfiniteError, match=r"Step 2 made .*trainer\.last_state"):
        run(linear(), batches())
    assert trainer.last_state is not None
    assert trainer.last_state.step == 2
    close(trainer.last_state.model, trained_on([0, 1]))
    assert trainer.last_history is not None
    assert nan_steps(trainer.last_history) == [2]
    more = run(trainer.last_state, batches(bad=None))
    assert np.isfinite(more.history["loss"]).all()
    assert more.compiles == 1


def half():
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), linear())


def narrow(model, batch):
    return mse(model, batch).astype(jnp.bfloat16)


def wide(model, batch):
    return 2 * mse(model, batch).astype(jnp.float32)


def dtypes(tree):
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    return {str(leaf.dtype) for leaf in leaves}


@pytest.mark.parametrize("rate", [0.1, lambda count: jnp.float32(0.1)])
def test_case_51_half_precision_stays_half(rate, step_compiles):
    trainer = tr.Trainer(tr.piecewise([narrow, wide], [2]), optax.adam(rate))
    result = trainer.fit(half(), [rows(8)], num_steps=4, progress=False)
    assert dtypes((result.model, result.state.opt_state)) == {"bfloat16"}
    losses = result.history["loss"]
    assert losses.dtype == np.float32
    assert result.history["branch"].tolist() == [0, 0, 1, 1]
    assert step_compiles() == 1

    def by_step(model, batch, step):
        value = mse(model, batch).astype(jnp.float32)
        return jnp.where(step < 2, value, 2 * value)

    calls = [{"batch": rows(8), "step": jnp.int32(i)} for i in range(4)]
    hand, expected, _ = by_hand(by_step, optax.adam(0.1), half(), calls)
    np.testing.assert_allclose(losses, expected, rtol=0.01)
    for a, b in zip(*map(jax.tree.leaves, (result.model, hand)), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0.04)


class Manual(tr.Trainer):
    """A step whose rate is a float32 array."""

    def update(self, model, opt_state, batch):
        grad = eqx.filter_grad(mse)(model, batch)
        step = lambda p, g: p - jnp.float32(0.1) * g
        return jax.tree.map(step, model, grad), opt_state, {}


def test_case_51_an_update_that_widens_a_parameter_is_refused(step_compiles):
    widened = r"`model\.w` was bfloat16\[2\] and is now float32\[2\]"
    with pytest.raises(TypeError, match=widened):
        Manual().fit(half(), [rows(8)], num_steps=3, progress=False)
    assert step_compiles() == 0


class Annealed(tr.AbstractSampler):
    """Carries the share of random actions it acted with last."""

    epsilon: tr.Anneal = tr.Anneal(1.0, 0.1, over=20)

    def init(self, key):
        return jnp.float32(1.0)

    def sample(self, carry, model, *, step, key):
        return None, self.epsilon(step)


class Each(tr.AbstractCallback):
    """Keeps what a function says after each step."""

    def __init__(self, function):
        super().__init__(1)
        self.function, self.seen = function, []

    def __call__(self, info):
        self.seen.append(self.function(info))


ONLINE, TARGET = lambda m: m["online"], lambda m: m["target"]


@pytest.mark.parametrize("steps_per_call", [1, 7])
def test_case_53_copies_to_the_target_have_a_period_of_their_own(steps_per_call):
    up = tr.Minimize(lambda m, batch: -m["online"], optax.sgd(1.0), where=ONLINE)
    every_fourth = tr.SwitchUpdate(tr.Cycle((3, 1)), {"act": None, "train": up})
    options = {"transforms": {"target": tr.Target(ONLINE, TARGET, every=10)}}
    options["steps_per_call"] = steps_per_call
    trainer, model = tr.Trainer(update=every_fourth, **options), jnp.zeros(())
    each = Each(lambda info: (info.model["target"], info.state.source))
    model = {"online": model, "target": model}
    fitting = {"num_steps": 41, "callbacks": [each], "progress": False}
    result = trainer.fit(model, Annealed(), **fitting)
    targets, epsilons = np.array(each.seen).T
    assert targets.tolist() == [0] * 9 + [2] * 10 + [5] * 10 + [7] * 10 + [10] * 2
    close(epsilons[[0, 10, 20, 30, 40]], np.array([1.0, 0.55, 0.1, 0.1, 0.1]))
    trained = ~np.ma.getmaskarray(result.history["train/loss"])
    assert np.flatnonzero(trained).tolist() == list(range(3, 41, 4))
    assert result.compiles == 1


CAPACITY = 5
DRAWN = [[0, 0], [0, 0], [0, 1], [3, 0], [4, 0], [3, 5], [3, 5]]


def empty(capacity=CAPACITY):
    return jnp.full(capacity, -1.0), jnp.int32(0), jnp.int32(0)


def add_and_draw(buffer, step, key):
    """Put a number into a ring buffer, then draw two of those that are in it."""
    storage, position, size = buffer
    storage = storage.at[position].set(step.astype(jnp.float32))
    position, size = (position + 1) % CAPACITY, jnp.minimum(size + 1, CAPACITY)
    drawn = storage[jr.randint(key, (2,), 0, size)]
    return drawn, (storage, position, size)


class Replay(tr.AbstractSampler):
    capacity: int = CAPACITY

    def init(self, key):
        return empty(self.capacity)

    def sample(self, carry, model, *, step, key):
        return add_and_draw(carry, step, key)


def report(model, batch):
    return model**2, {"first": batch[0], "second": batch[1]}


def by_loop():
    buffer = empty()
    for i in range(7):
        pair, buffer = add_and_draw(buffer, jnp.int32(i), jr.fold_in(jr.key(0), i))
        yield pair.tolist()


def drawn(history):
    return np.stack([history["first"], history["second"]], axis=1).tolist()


def check_filled(buffer):
    storage, position, size = buffer
    assert storage.tolist() == [5, 6, 2, 3, 4]
    assert (position, size) == (2, 5)


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_case_55_a_replay_buffer_is_carried_in_the_step(steps_per_call):
    trainer = tr.Trainer(report, optax.sgd(0.1), steps_per_call=steps_per_call)
    run = lambda model, end: trainer.fit(model, Replay(), num_steps=end, progress=False)
    whole, begun = run(jnp.ones(()), 7), run(jnp.ones(()), 3)
    resumed = run(begun.state, 7)
    assert drawn(whole.history) == DRAWN == list(by_loop())
    assert drawn(resumed.history) == DRAWN[3:]
    check_filled(whole.state.source)
    check_filled(resumed.state.source)
    assert begun.state.source[0].tolist() == [0, 1, 2, -1, -1]
    assert resumed.compiles == 1


def test_case_55_the_buffer_is_donated_and_not_copied():
    each = Each(lambda info: [a for a in jax.live_arrays() if a.size >= 2**20])
    trainer = tr.Trainer(report, optax.sgd(0.1), steps_per_call=1)
    fitting = {"num_steps": 4, "callbacks": [each], "progress": False}
    result = trainer.fit(jnp.ones(()), Replay(2**20), **fitting)
    buffers = [buffer for (buffer,) in each.seen]
    assert [buffer.is_deleted() for buffer in buffers] == [True] * 3 + [False]
    assert result.state.source[0] is buffers[-1]


class Remembering(eqx.Module):
    w: jax.Array
    buffer: eqx.nn.StateIndex

    def __init__(self):
        self.w, self.buffer = jnp.ones(()), eqx.nn.StateIndex(empty())


def remembered(model, batch, *, step, state, key):
    batch, buffer = add_and_draw(state.get(model.buffer), step, key)
    return *report(model.w, batch), state.set(model.buffer, buffer)


def test_case_55_a_buffer_may_be_in_the_state_of_the_model():
    model, state = eqx.nn.make_with_state(Remembering)()
    result = fit(remembered, optax.sgd(0.1), (model, state), None, num_steps=7)
    assert drawn(result.history) == DRAWN
    check_filled(result.model_state.get(result.model.buffer))
    assert state.get(model.buffer)[0].tolist() == [-1.0] * CAPACITY


def falling(model, batch):
    return -model


AVERAGES = {"from_start": tr.EMA(0.9, debias=False), "corrected": tr.EMA(0.9)}


@pytest.mark.parametrize("steps_per_call", [1, 7])
def test_case_62_an_average_of_the_parameters(steps_per_call):
    options = {"transforms": AVERAGES, "steps_per_call": steps_per_call}
    trainer = tr.Trainer(falling, optax.sgd(1.0), **options)
    averages = lambda state: [trainer.evaluated_model(state, n) for n in AVERAGES]
    each = Each(lambda info: averages(info.state))
    fitting = {"num_steps": 4, "callbacks": [each], "progress": False}
    result = trainer.fit(jnp.ones(()), None, **fitting)
    from_start, corrected = np.array(each.seen).T
    close(from_start, np.array([1.1, 1.29, 1.561, 1.9049]), atol=1e-5)
    close(corrected, np.array([2.0, 2.5263, 3.0701, 3.6313]), atol=1e-4)
    assert result.model == 5
    found = trainer.evaluate(result.state, [np.zeros(1)], using="from_start")
    assert found["loss"] == pytest.approx(-1.9049, abs=1e-4)
    assert result.compiles == 1
    # It goes on with the state.
    run = lambda model, end: trainer.fit(model, None, num_steps=end, progress=False)
    same(averages(run(run(jnp.ones(()), 1).state, 4).state), averages(result.state))
