"""Selectors by chance, by a metric, and of one's own, against plain-Python loops."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import equal
from hypothesis import given, settings, strategies as st

import trainer as tr


def seen(model, batch, *, step):
    return jnp.sum(model[0] ** 2), {"seen": jnp.sum(batch), "local": step}


def unseen(model, batch, *, step):
    return jnp.sum(model[0] ** 2), {"local": step}


given_loss = lambda model, batch: jnp.sum(batch) + 0 * model[0]
shrink = lambda model, batch: model[0] ** 2
zero = lambda model, batch: 0 * model[0]
START = (jnp.float32(1.0),)
DATA = [np.zeros(1, np.float32)]


def make(loss, **options):
    return tr.Trainer(loss, optax.sgd(0.25), **options)


def fit(trainer, steps, state=START, **options):
    """For a number of steps, or one for each value, which the losses are given."""
    data = None if isinstance(steps, int) else [np.float32([v]) for v in steps]
    num_steps = options.pop("num_steps", steps if data is None else len(data))
    return trainer.fit(state, data, num_steps=num_steps, progress=False, **options)


def branches(loss, steps, **options):
    return fit(make(loss), steps, **options).history["branch"].tolist()


def had(branch):
    return [branch[:place].count(b) for place, b in enumerate(branch)]


def test_draws_have_the_probabilities_given():
    which, num = tr.Random((3, 0, 1, 6)), 20_000
    memory, keys = which.init(4), jr.split(jr.key(3), num)
    draw = lambda key: which(jnp.int32(0), 4, memory=memory, key=key)[0]
    counts = np.bincount(jax.vmap(draw)(keys), minlength=4)
    share = np.array([0.3, 0.0, 0.1, 0.6])
    spread = np.sqrt(share * (1 - share) / num)
    assert (np.abs(counts / num - share) <= 4 * spread).all()


two = lambda: tr.Switch(tr.Random((2, 1)), [seen, unseen])


def test_the_same_key_draws_the_same():
    first = fit(make(two()), [0.0] * 40, key=jr.key(5))
    branch = first.history["branch"].tolist()
    assert 0 < sum(branch) < 40
    assert first.history["local"].tolist() == had(branch)
    for steps_per_call in (1, 7):
        trainer = make(two(), steps_per_call=steps_per_call)
        again = fit(trainer, [0.0] * 40, key=jr.key(5))
        assert equal(first.state, again.state)
        assert again.history["branch"].tolist() == branch
    other = fit(trainer, [0.0] * 40, key=jr.key(6)).history["branch"]
    assert other.tolist() != branch


def test_probabilities_may_be_scheduled():
    first = tr.Random((lambda step: step < 5, lambda step: step >= 5))
    assert branches(tr.Switch(first, [zero, zero]), 10) == [0] * 5 + [1] * 5
    late = tr.Random((tr.Anneal(1.0, 0.0, over=0.5, ramp=1e-6), lambda step: step > 0))
    assert branches(tr.Switch(late, [zero, zero]), 8) == [0] + [1] * 7


def test_a_probability_that_falls_below_0_is_one_of_0():
    falling = tr.Random((lambda step: 1.0 - step, lambda step: 1.0 * (step > 0)))
    assert branches(tr.Switch(falling, [zero, zero]), 6) == [0] + [1] * 5


class Coin(tr.AbstractSelector):
    def __call__(self, step, num, *, key):
        return jr.randint(key, (), 0, num), step


@pytest.mark.parametrize("which", [tr.Random((1, 1)), Coin()])
@pytest.mark.parametrize("names", ["xy", "ab"])
def test_two_at_one_step_draw_apart(which, names):
    switch = lambda names: tr.Switch(which, dict.fromkeys(names, zero))
    history = fit(make(tr.WeightedSum(p=switch("ab"), q=switch(names))), 64).history
    both = 2 * history["p/branch"] + history["q/branch"]
    assert (np.bincount(both, minlength=4) > 5).all()
    nested = tr.Switch(which, {"a": switch(names), "b": zero})
    inner = fit(make(nested), 64).history["a/branch"].compressed()
    assert (np.bincount(inner, minlength=2) > 5).all()


def plateau(values, patience, min_delta=0.0, mode="min", smoothing=0.0):
    """The branch of every step, of three."""
    branch, best, average, bad = 0, math.inf, math.nan, 0
    for value in values:
        yield branch
        value = value if mode == "min" else -value
        old = value if math.isnan(average) else average
        average = smoothing * old + (1 - smoothing) * value if smoothing else value
        better = average < best - min_delta
        best, bad = (average, 0) if better else (best, bad + 1)
        if bad >= patience and branch < 2:
            branch, best, average, bad = branch + 1, math.inf, math.nan, 0


def threshold(values, below=(), above=()):
    branch = 0
    for value in values:
        yield branch
        under = branch < 2 and below and value < below[branch]
        over = branch < 2 and above and value > above[branch]
        branch += bool(under or over)


CHANGES: list[Any] = [
    {"patience": 1},
    {"patience": 2, "min_delta": 0.5},
    {"patience": 2, "mode": "max"},
    {"patience": 3, "smoothing": 0.5},
    {"patience": 1, "smoothing": 0.5, "min_delta": 0.25, "mode": "max"},
    {"below": (1.5, -2.0)},
    {"above": (1.5, -2.0)},
]
by_values = lambda c: (tr.Plateau if "patience" in c else tr.Threshold)("seen", **c)
CHOOSING = [make(tr.Switch(by_values(change), [seen] * 3)) for change in CHANGES]
# Eighths, so that float32 is exact.
numbers = st.one_of(st.integers(-40, 40).map(lambda n: n / 8), st.just(math.nan))


@pytest.mark.parametrize("number", range(len(CHANGES)))
@settings(max_examples=25)
@given(values=st.lists(numbers, min_size=14, max_size=14))
def test_what_a_metric_chooses_is_a_loop_over_its_values(number, values):
    result, change = fit(CHOOSING[number], values), CHANGES[number]
    loop = plateau if "patience" in change else threshold
    expected = list(loop(values, **change))
    assert result.history["branch"].tolist() == expected
    assert result.history["local"].tolist() == had(expected)
    assert result.compiles == 1


def test_after_a_value_of_inf_a_finite_one_is_better():
    result = fit(CHOOSING[1], [5.0, math.inf, 4.0, 3.0, 2.0, 2.0, 2.0, 1.0])
    assert result.history["branch"].tolist() == [0] * 7 + [1]


def test_the_loss_is_what_is_looked_at_by_default():
    loss = tr.Switch(tr.Plateau(patience=1), [given_loss] * 3)
    assert branches(loss, [3, 2, 2, 1, 1, 0]) == [0, 0, 0, 1, 1, 2]
    loss = tr.Switch(tr.Threshold(below=0.5), [given_loss] * 2)
    assert branches(loss, [1.0, 0.5, 0.25, 9.0]) == [0, 0, 0, 1]


def test_a_step_that_does_not_report_the_metric_does_not_count():
    inner = tr.Switch(tr.Cycle((1, 2)), [seen, unseen])
    loss = tr.Switch(tr.Plateau("seen", patience=2), {"a": inner, "b": zero})
    assert branches(loss, [1.0] * 10) == [0] * 7 + [1] * 3  # 0, 3 and 6 report it


def test_in_a_branch_only_its_own_steps_count():
    inner = tr.Switch(tr.Plateau("seen", patience=1), [seen, seen, unseen])
    loss = tr.Switch(tr.Cycle((2, 1)), {"a": inner, "b": zero})
    values = [5.0, 4.0, 9.0, 4.0, 3.0, 9.0, 2.0, 2.0, 9.0, 1.0]
    history = fit(make(loss), values).history
    own = [v for place, v in enumerate(values) if place % 3 < 2]
    assert history["a/branch"].compressed().tolist() == list(plateau(own, 1))
    assert history["branch"].tolist() == [0, 0, 1] * 3 + [0]
    assert history["local"].tolist() == [0, 1, None, 2, 0, None, 1, 2, None, 0]


class Reports(tr.AbstractCallback):
    """Reports given values, one every three steps."""

    every = 3

    def __init__(self, values):
        self.values = values

    def __call__(self, info):
        return {"validation/x": self.values[info.step // 3 - 1]}


def test_a_run_in_pieces_is_the_run_in_one():
    told = tr.Threshold("validation/x", below=0.5, reported=True)
    noisy = tr.Switch(tr.Plateau("seen", patience=2, smoothing=0.5), [seen, seen])
    loss = tr.WeightedSum(
        drawn=two(),
        told=tr.Switch(told, [zero, unseen]),
        summed=tr.AdaptiveSum(tr.GradNorm(every=2), p=noisy, q=unseen),
    )
    values = [4.0, 3.0, 3.5, 3.0, 2.75, 9.0, 8.0, 9.0, 9.0, 9.0]
    trainer, options = make(loss, steps_per_call=4), {"callbacks": [Reports([1, 0, 0])]}

    def run(*pieces):
        state, histories, result = START, [], None
        for stop in pieces:
            result = fit(trainer, values, state, num_steps=stop, **options)
            state, histories = result.state, [*histories, result.history]
        return result, sum(histories[1:], histories[0])

    whole, history = run(10)
    assert history["told/branch"].any()
    assert history["summed/p/branch"].any()
    for pieces in ([3, 10], [1, 6, 7, 10]):
        result, joined = run(*pieces)
        assert equal(result.state, whole.state)
        assert all(joined[n].tolist() == history[n].tolist() for n in history)
    assert result.compiles == 1


@pytest.mark.parametrize("steps_per_call", [1, 4, 7])
def test_a_reported_metric_is_looked_at_once_each_time(steps_per_call):
    values = [5.0, 4.0, 4.0, math.nan, 3.0, 9.0, 9.0, 9.0]
    which = tr.Plateau("validation/x", patience=2, reported=True)
    trainer = make(tr.Switch(which, [unseen] * 3), steps_per_call=steps_per_call)
    result = fit(trainer, 26, callbacks=[Reports(values)])
    branch = list(plateau([*values, 0.0], 2))
    # A report after 3 steps is seen before the step of index 3.
    expected = [branch[step // 3] for step in range(26)]
    assert result.history["branch"].tolist() == expected
    assert result.history["local"].tolist() == had(expected)
    assert result.compiles == 1


def test_a_validation_loss_may_decide():
    which = tr.Threshold("validation/loss", below=(0.1, 0.01), reported=True)
    trainer = make(tr.Switch(which, [shrink] * 3))
    result = fit(trainer, 12, callbacks=[tr.Evaluate(DATA, every=2)])
    # Before steps 0, 2, 4 and 6: 1, 1/16, 1/256, ...
    assert result.history["branch"].tolist() == [0] * 2 + [1] * 2 + [2] * 8
    assert result.compiles == 1


def test_a_metric_that_no_one_reports_is_an_error():
    which = tr.Plateau("validation/los", patience=1, reported=True)
    trainer = make(tr.Switch(which, [shrink] * 2))
    for callbacks in ([], [tr.Evaluate(DATA)]):
        with pytest.raises(ValueError, match="waits for `validation/los` from a callb"):
            fit(trainer, 4, callbacks=callbacks)
    for which in (tr.Plateau("sen", patience=1), tr.Threshold("sen", below=1)):
        with pytest.raises(KeyError, match=r"No metric `sen` here. Did you mean .seen"):
            branches(tr.Switch(which, [seen] * 2), [1.0])
    with pytest.warns(UserWarning, match="for `validation/los`, and no callback has"):
        fit(trainer, 4, callbacks=[tr.Evaluate(DATA, every=2)])


def test_evaluation_is_of_the_branch_of_the_last_step():
    minus = lambda model, batch: model[0] - 10.0
    trainer = make(tr.Switch(tr.Plateau("loss", patience=2), [zero, minus]))
    found = [trainer.evaluate(fit(trainer, n).state, DATA)["loss"] for n in (3, 4)]
    assert found == [0.0, 1.0 - 0.25 - 10.0]
    assert trainer.evaluate(START, DATA)["loss"] == 0


class Late(tr.AbstractSelector):
    def init(self, num):
        return {"had": jnp.zeros(num, jnp.int32), "low": jnp.float32(9.0)}

    def __call__(self, step, num, *, memory, key, num_steps):
        late = (memory["low"] < 0.05) | (step == num_steps - 1)
        index = jnp.where(late, num - 1, jr.randint(key, (), 0, num))
        return index, memory["had"][index]

    def after(self, memory, outcome):
        low = jnp.minimum(memory["low"], outcome.metrics["loss"].value)
        return {"had": memory["had"].at[outcome.branch].add(1), "low": low}


def test_a_selector_of_ones_own_remembers_draws_and_knows_the_total():
    result = fit(make(tr.Switch(Late(), {"a": seen, "b": unseen})), [0.0] * 12)
    branch = result.history["branch"].tolist()
    assert 0 in branch[:4]
    assert branch[4:] == [1] * 8  # after a low loss
    assert result.history["local"].tolist() == had(branch)
    memory = result.state.memory.program.parts["loss"].own["selector"]
    assert memory["had"].tolist() == [branch.count(0), branch.count(1)]
