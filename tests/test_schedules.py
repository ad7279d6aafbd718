"""Schedules and fractions of the run, against plain Python."""

import contextlib
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batches, flat, mae, mlp, mse
from hypothesis import given, settings, strategies as st

import trainer as tr
from trainer._counts import number_in, steps_of
from trainer._schedules import check_schedule


INT32_MAX = 2**31 - 1
SIZE = 32  # one shape for every vectorised call
some = st.floats(-4, 4, width=16)
runs = st.integers(1, INT32_MAX)


def plain(model, batch):
    return jnp.sum(model**2)


def other(model, batch, *, step):
    return jnp.sum(model**2) + 1.0, {"local": step}


def train(loss, num_steps=8, **options):
    trainer = tr.Trainer(loss, optax.sgd(0.0), **options)
    return trainer.fit(jnp.ones(1), None, num_steps=num_steps, progress=False)


def share_of(step, over, cycles, ramp):
    """Fu et al., 2019, equations 6 and 7; their first step is 1."""
    if step >= over:
        return 1.0
    place = (step % math.ceil(Fraction(over, cycles))) / (over / cycles)
    return min(place / ramp, 1.0)


def values_of(schedule, steps):
    padded = jnp.asarray([*steps, *[0] * (SIZE - len(steps))], jnp.int32)
    found = jax.vmap(schedule)(padded)
    assert found.dtype == jnp.float32
    return np.asarray(found, np.float64)[: len(steps)]


def around(over, cycles, steps=()):
    ends = [over * k // cycles for k in range(min(cycles, 4))]
    near = [e + d for e in [*ends, over] for d in (-1, 0, 1)]
    return [s for s in [*near, *steps] if 0 <= s <= INT32_MAX][:SIZE]


@given(
    start=some,
    stop=some,
    over=st.one_of(st.integers(1, 50), runs, st.just(INT32_MAX)),
    cycles=st.one_of(st.integers(1, 9), runs),
    ramp=st.floats(0.05, 1.0),
    steps=st.lists(st.integers(0, INT32_MAX), max_size=8),
)
def test_a_linear_anneal_is_that_of_the_paper(start, stop, over, cycles, ramp, steps):
    cycles = min(cycles, over)
    schedule = tr.Anneal(start, stop, over, cycles=cycles, ramp=ramp)
    steps = around(over, cycles, steps)
    shares = np.array([share_of(s, over, cycles, ramp) for s in steps])
    expected = start + (stop - start) * shares
    close = {"rtol": 0, "atol": 2e-6 * (abs(start) + abs(stop)) / ramp}
    np.testing.assert_allclose(values_of(schedule, steps), expected, **close)


@given(ends=st.tuples(some, some), over=runs, cycles=st.integers(1, 9))
def test_the_other_shapes_bend_it(ends, over, cycles):
    cycles = min(cycles, over)
    steps = around(over, cycles, range(12))
    shares = np.array([share_of(s, over, cycles, 0.5) for s in steps])
    start, stop = ends
    bent = tr.Anneal(*ends, over, cycles=cycles, ramp=0.5, shape="cosine")
    expected = start + (stop - start) * (1 - np.cos(np.pi * shares)) / 2
    np.testing.assert_allclose(values_of(bent, steps), expected, rtol=0, atol=1e-4)
    start, stop = abs(start), abs(stop)
    bent = tr.Anneal(start, stop, over, cycles=cycles, ramp=0.5, shape="sqrt")
    squares = start**2 + (stop**2 - start**2) * shares
    found = values_of(bent, steps) ** 2
    np.testing.assert_allclose(found, squares, rtol=0, atol=1e-4)


@given(start=some, stop=some, over=st.integers(1, 10**6))
def test_one_cycle_is_the_linear_schedule_of_optax(start, stop, over):
    steps = around(over, 1, [over // 2, over // 3])
    theirs = values_of(optax.linear_schedule(start, stop, over), steps)
    ours = values_of(tr.Anneal(start, stop, over), steps)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=4e-6)


def test_cycles_whose_length_does_not_divide():
    half = tr.Anneal(0.0, 1.0, 10, cycles=3, ramp=0.5)  # cycles of 4, 4 and 2 steps
    expected = [0, 0.6, 1, 1, 0, 0.6, 1, 1, 0, 0.6, 1, 1]
    np.testing.assert_allclose(values_of(half, range(12)), expected, rtol=1e-6)
    each = tr.Anneal(2.0, 1.0, 3, cycles=3)
    assert values_of(each, range(5)).tolist() == [2, 2, 2, 1, 1]


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize("ends", [(1.0, 1e-3), (1e-3, 1.0), (0.1, 0.3), (1.0, 1e-9)])
def test_it_starts_and_ends_at_the_values_given(shape, ends):
    found = values_of(tr.Anneal(*ends, 10, shape=shape), [0, 10, 11])
    np.testing.assert_allclose(found, [ends[0], ends[1], ends[1]], rtol=1e-5)


@settings(max_examples=60)
@given(top=st.integers(1, 9_999), bottom=st.integers(2, 10_000), total=runs)
def test_a_fraction_is_exact_and_rounded_down(top, bottom, total):
    top = top % bottom or 1
    totals = [total, INT32_MAX, bottom, bottom - 1, 1]
    found = jax.vmap(lambda n: steps_of(top / bottom, n))(jnp.asarray(totals))
    assert found.dtype == jnp.int32
    assert found.tolist() == [math.floor(Fraction(top, bottom) * n) for n in totals]


def test_a_fine_fraction_is_not_taken_for_all_or_nothing():
    total = 10_000_000
    for value in (1e-5, 0.99999):
        with contextlib.suppress(ValueError):  # it may be refused
            assert 0 < int(steps_of(tr.At((value,)).boundaries[0], total)) < total


def test_a_fraction_may_be_of_numpy():
    which = tr.At((np.float64(0.5),))
    assert int(which(jnp.int32(2), 2, num_steps=jnp.int32(4))[0]) == 1
    assert float(tr.Anneal(0, 1, np.float64(0.5))(1, num_steps=jnp.int32(4))) == 0.5


@given(
    given=st.sets(st.integers(1, 99), max_size=4),
    as_fraction=st.lists(st.booleans(), min_size=4),
    total=st.one_of(st.integers(1, 200), runs),
)
def test_at_takes_steps_and_fractions_together(given, as_fraction, total):
    marks, which, starts = sorted(given), [], [0]
    for mark, kind in zip(marks, as_fraction, strict=False):
        which.append(mark / 100 if kind else mark)
        start = math.floor(Fraction(mark, 100) * total) if kind else mark
        starts.append(max(start, starts[-1]))  # the later one may come out first
    selector, num = tr.At(which), len(which) + 1
    near = [s + d for s in starts for d in (-1, 0, 1) if 0 <= s + d <= INT32_MAX]
    for step in near[:6]:
        found = selector(jnp.int32(step), num, num_steps=jnp.int32(total))
        index = sum(step >= start for start in starts[1:])
        assert tuple(map(int, found)) == (index, step - starts[index])


def both():
    ramp = tr.Anneal(0.0, 1.0, over=0.75, cycles=2, ramp=0.5)
    late = tr.piecewise([plain, other, other], [0.26, 0.5])
    return tr.WeightedSum(a=(ramp, plain), b=(tr.Anneal(1.0, 0.5, 0.5), late))


@pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])
def test_a_run_resolves_its_fractions(steps_per_call):
    result = train(both(), 16, steps_per_call=steps_per_call)
    history = result.history
    ramp = [0, 1 / 3, 2 / 3, 1, 1, 1] * 2 + [1] * 4
    np.testing.assert_allclose(history["weight/a"], ramp, rtol=1e-6)
    falling = [1 - min(s / 16, 0.5) for s in range(16)]
    np.testing.assert_allclose(history["weight/b"], falling, rtol=1e-6)
    assert history["b/branch"].tolist() == [0] * 4 + [1] * 4 + [2] * 8
    assert history["b/local"].tolist() == [None] * 4 + [*range(4)] + [*range(8)]
    assert result.compiles == 1
    assert int(result.state.memory.num_steps) == 16


def test_epochs_of_known_length_are_counted_in_steps():
    trainer = tr.Trainer(tr.piecewise([mse, mae], [0.5]), optax.sgd(0.0))
    for data, num in [(batches(), 4), (tr.Loader(batches()), 4), (batches()[:3], 3)]:
        result = trainer.fit(mlp(), data, num_epochs=2, progress=False)
        assert result.history["branch"].tolist() == [0] * num + [1] * num
    assert result.compiles == 1
    x, y = (np.concatenate(column) for column in zip(*batches(), strict=True))
    trainer = tr.Trainer(tr.piecewise([mse, mae], [0.5]), optax.sgd(0.0))
    arrays = tr.Arrays((x, y), batch_size=16)
    result = trainer.fit(mlp(), arrays, num_epochs=3, progress=False)
    assert result.history["branch"].tolist() == [0] * 6 + [1] * 6


def test_epochs_of_unknown_length_are_refused():
    trainer = tr.Trainer(tr.piecewise([mse, mae], [0.5]), optax.sgd(0.0))
    for data in (lambda: iter(batches()), iter(batches())):
        with pytest.raises(ValueError, match=r"not known. Give `num_steps`, or a loa"):
            trainer.fit(mlp(), data, num_epochs=1, progress=False)
        whole = trainer.fit(mlp(), data, num_steps=4, progress=False)
        assert whole.history["branch"].tolist() == [0, 0, 1, 1]


def test_a_longer_total_is_the_new_one():
    trainer = tr.Trainer(both(), optax.sgd(0.1))
    start = jnp.ones(2)
    fit = lambda model, n: trainer.fit(model, None, num_steps=n, progress=False)
    first = fit(start, 8)
    second, again = fit(first.state, 32), fit(first.state, 32)
    assert second.history["b/branch"].tolist() == [1] * 8 + [2] * 16
    assert int(second.state.memory.num_steps) == 32
    assert second.compiles == 1
    np.testing.assert_array_equal(flat(second.state), flat(again.state))


def test_evaluation_is_at_the_step_of_the_state():
    loss = tr.WeightedSum(
        a=tr.piecewise([plain, lambda m, b: jnp.sum(m) + 9.0], [0.5]),
        b=(tr.Anneal(1.0, 0.0, 0.5), plain),
    )
    trainer, data = tr.Trainer(loss, optax.sgd(0.0)), [jnp.zeros(2)]
    fit = lambda n, *callbacks: trainer.fit(
        jnp.ones(1), None, num_steps=n, callbacks=callbacks, progress=False
    )
    assert trainer.evaluate(fit(8).state, data)["loss"] == 10.0
    assert trainer.evaluate(trainer.init(jnp.ones(1)), data)["loss"] == 2.0
    found = fit(8, tr.Evaluate(data, every=2)).history["validation/loss"]
    assert found.tolist() == [1.5, 10.0, 10.0, 10.0]


def test_a_model_is_evaluated_at_the_start_of_a_run():
    data = [jnp.zeros(2)]
    late = tr.piecewise([plain, other], [0.5])
    for loss in (late, tr.WeightedSum(a=(tr.Anneal(1.0, 0.0, 0.5), plain))):
        trainer = tr.Trainer(loss, optax.sgd(0.0))
        assert trainer.evaluate(jnp.ones(1), data)["loss"] == 1.0


def test_a_schedule_of_ones_own_may_ask_for_the_total():
    asks = lambda step, *, num_steps: 3 * step / num_steps
    does_not_ask = lambda step, num_steps=4: step / num_steps
    for schedule, scale in [(asks, 3 / 8), (does_not_ask, 1 / 4)]:
        result = train(tr.WeightedSum(a=(schedule, plain)))
        found, expected = result.history["weight/a"], scale * np.arange(8)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert (result.state.memory.num_steps is not None) == (schedule is asks)


def test_it_may_be_a_learning_rate_if_counted_in_steps():
    rate = tr.Anneal(0.5, 0.0, 4)
    trainer = tr.Trainer(lambda m, b: jnp.sum(m), optax.sgd(rate))
    result = trainer.fit(jnp.zeros(1), None, num_steps=6, progress=False)
    assert result.model.tolist() == [-(0.5 + 0.375 + 0.25 + 0.125)]
    trainer = tr.Trainer(plain, optax.sgd(tr.Anneal(0.5, 0.0, 0.5)))
    with pytest.raises(ValueError, match=r"`0\.5` is a fraction of a run whose"):
        trainer.fit(jnp.zeros(1), None, num_steps=6, progress=False)


def test_fractions_are_of_steps_and_not_of_epochs():
    with pytest.raises(ValueError, match="`At` counts epochs, and was given a frac"):
        tr.piecewise([plain, other], [0.5], by="epoch")
    with pytest.raises(ValueError, match="`weight of a` counts epochs, and was"):
        tr.WeightedSum(by="epoch", a=(tr.Anneal(0.0, 1.0, 0.5), plain))
    with pytest.raises(ValueError, match="Use `by='step'`, or whole numbers of epochs"):
        tr.Part(optax.sgd(0.1), start=0.5, by="epoch")
    tr.WeightedSum(by="epoch", a=(tr.Anneal(0.0, 1.0, 5), plain))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"stop": math.nan}, ValueError, "is `nan`. It is a finite number"),
        ({"over": 0}, ValueError, r"`over` of `Anneal` is `0`; it must be from 1"),
        ({"over": 2.0}, ValueError, "Write `0.5` for half of the run or `2` for steps"),
        ({"cycles": 9}, ValueError, "has 9 cycles in 8 steps. A cycle needs a step"),
        ({"ramp": 1.5}, ValueError, "is `1.5`; it is a share of a cycle, at most 1"),
        ({"shape": "step"}, ValueError, "is `'step'`; it is one of .'cosine', 'linear"),
        ({"stop": -1, "shape": "sqrt"}, ValueError, "values that are not negative"),
    ],
)
def test_what_anneal_refuses(change, error, text):
    with pytest.raises(error, match=text):
        tr.Anneal(**{"start": 0.0, "stop": 1.0, "over": 8, **change})


def test_what_else_is_refused():
    step, text = jnp.int32(0), "Call it with `num_steps=`, or give a whole number"
    for call in (
        lambda: tr.At((0.5,))(step, 2),
        lambda: tr.Anneal(0.0, 1.0, 0.5)(step),
        lambda: tr.piecewise([plain, other], [0.5])(jnp.ones(1), None, step=0),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(ValueError, match="is a schedule that is inf at step"):
        check_schedule(lambda step: 1.0 / step, "It")
    with pytest.raises(TypeError, match=r"returns shape \(2,\), not a scalar"):
        check_schedule(lambda step, num_steps: jnp.ones(2), "It")
    with pytest.raises(ValueError, match="above 0 and below 2"):
        number_in(3, "It", above=0, below=2)
