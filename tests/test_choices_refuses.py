"""Selectors by chance and by a metric: what is refused, and in which words."""

import math
import re
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import trainer as tr


zero = lambda model, batch: jnp.sum(0 * model)


class Answers(tr.AbstractSelector):
    """Answers with what it is given."""

    answer: Any

    def __call__(self, step, num):
        return self.answer


class Forgets(tr.AbstractSelector):
    def init(self, num):
        return jnp.int32(0)

    def __call__(self, step, num):
        return step, step

    def after(self, memory, outcome):
        return None


pair = lambda which, by="step": tr.Switch(which, [zero, zero], by=by)
run = lambda which: tr.Trainer(pair(which), optax.sgd(0.1)).fit(
    jnp.ones(1), None, num_steps=1, progress=False
)
called = lambda which: pair(which)(jnp.ones(1), None, step=0)
wide = lambda step: jnp.ones(2)
TYPE_ERRORS: list[Any] = [
    (lambda: tr.Random(3), "probabilities of `Random` are `3`. Give a list"),
    (lambda: tr.Random("ab"), "probabilities of `Random` are `'ab'`. Give a list"),
    (lambda: tr.Random(("1", 2)), "a probability of `Random` is `'1'`, which is not"),
    (lambda: pair(tr.Random((1, wide))), "returns shape (2,), not a scalar"),
    (lambda: tr.Plateau(3, patience=1), "metric of `Plateau` is `3`. Give its name"),
    (lambda: tr.Plateau(patience=2.0), "is `2.0`, which is not a whole number"),
    (lambda: tr.Threshold(0.5, below=1), "The metric of `Threshold` is `0.5`. Give"),
    (lambda: tr.Threshold(), "`below=None` and `above=None`. Give one of them"),
    (lambda: tr.Threshold(below=1, above=0), "the number that the metric has to cross"),
    (lambda: tr.Threshold(below=(1, "a")), "a threshold is `'a'`, which is not a num"),
    (lambda: pair(max), "is not a selector. Use `tr.Every`, `tr.Cycle`"),
    (lambda: run(Answers(jnp.int32(1))), "`Answers` returned `int32[]`. A selector r"),
    (lambda: run(Forgets()), "was int32[] and is now gone"),
    (lambda: called(tr.Random((1, 1))), "remembers what was before, and is called by"),
]
VALUE_ERRORS: list[Any] = [
    (lambda: tr.Random((1, -1)), "`(1.0, -1.0)`; none may be negative"),
    (lambda: tr.Random((0, 0)), "none is ever above 0, so that no branch"),
    (lambda: tr.Random((1, math.inf)), "is `inf`. It is a finite number"),
    (lambda: pair(tr.Random((1,))), "has 1 probabilities, but drives 2 branches"),
    (lambda: pair(tr.Random((1, 1)), "epoch"), "has had, and cannot count epochs"),
    (lambda: tr.Plateau(patience=0), "`patience` of `Plateau` is `0`; it must be"),
    (lambda: tr.Plateau(patience=1, min_delta=-1), "neither may be negative"),
    (lambda: tr.Plateau(patience=1, smoothing=1), "finite number below 1"),
    (lambda: tr.Plateau(patience=1, smoothing=-0.5), "`0.0` and `-0.5`; neither"),
    (lambda: tr.Plateau(patience=1, mode="low"), "`'low'`; it is `'min'` or `'max'`"),
    (lambda: tr.Threshold(below=()), "`Threshold` was given no threshold. Give one"),
    (lambda: pair(tr.Threshold(below=(2, 1))), "drives 2 branches. Give one fewer"),
]


@pytest.mark.parametrize(("make", "text"), TYPE_ERRORS)
def test_what_is_of_the_wrong_kind(make, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        make()


@pytest.mark.parametrize(("make", "text"), VALUE_ERRORS)
def test_what_has_a_wrong_value(make, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


def test_updates_may_be_chosen_as_losses_are():
    loss = lambda n: lambda model, batch: model[n] ** 2
    part = lambda n: tr.Minimize(loss(n), optax.sgd(0.25), where=lambda model: model[n])
    parts = {"p": part(0), "q": part(1), "idle": None}
    start, low = (jnp.float32(1.0),) * 2, tr.Threshold("p/loss", below=(0.05, 0.0))
    for which, expected in [(low, [0] * 4 + [1] * 4), (tr.Random((1, 1, 1)), None)]:
        trainer = tr.Trainer(update=tr.SwitchUpdate(which, parts))
        result = trainer.fit(start, None, num_steps=8, progress=False)
        branch = result.history["branch"].tolist()
        assert expected in (branch, None)
        found = [float(x) for x in result.model]
        assert found == [0.5 ** branch.count(n) for n in (0, 1)]


@pytest.mark.parametrize("name", ["salt", "index", "selector", "rule"])
def test_a_memory_may_have_any_names(name):
    class Mine(tr.AbstractSelector):
        def init(self, num):
            return {name: jnp.float32(0.5)}

        def __call__(self, step, num, *, memory):
            return (memory[name] > 1).astype(jnp.int32), step

    trainer = tr.Trainer(tr.Switch(Mine(), [zero, zero]), optax.sgd(0.1))
    history = trainer.fit(jnp.ones(1), None, num_steps=3, progress=False).history
    assert history["branch"].tolist() == [0, 0, 0]
