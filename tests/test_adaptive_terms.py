"""AdaptiveSum of terms that are composed, keep a state or draw; what is refused."""

import math
import re
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import batches, Counting, doubles, flat, net, net_mae, net_mse

import trainer as tr


def one(model, batch):
    return model**2


def ten(model, batch):
    return 10 * model**2


def noisy(model, batch, *, key, step):
    scale = 1 + jr.uniform(key)
    return scale * model**2, {"scale": scale, "local": step}


def run(loss, num_steps=8, model=None, data=None, optimizer=None):
    trainer = tr.Trainer(loss, optax.sgd(0.0) if optimizer is None else optimizer)
    model = jnp.float32(2.0) if model is None else model
    result = trainer.fit(model, data, num_steps=num_steps, progress=False)
    return trainer, result


AT_ONCE: Any = tr.GradientBalance(alpha=0.0, every=1)


def test_the_rule_and_the_sum_draw_the_same():
    history = run(tr.AdaptiveSum(AT_ONCE, a=noisy, b=one))[1].history
    scale = np.asarray(history["a/scale"])
    assert len(set(scale)) == 8
    np.testing.assert_allclose(history["weight/a"], (scale + 1) / scale, rtol=1e-6)
    np.testing.assert_allclose(history["loss"], 2 * 4 * (scale + 1), rtol=1e-6)


def test_in_a_branch_it_counts_the_steps_of_the_branch():
    rule = tr.GradientBalance(alpha=0.5, every=2)
    inner = tr.AdaptiveSum(rule, a=noisy, b=one)
    for whole, label in [
        (tr.Switch(tr.Cycle((3, 1)), {"x": inner, "y": one}), ""),
        (tr.WeightedSum(x=(lambda step: step % 4 < 3, inner), y=one), "x/"),
    ]:
        history = run(whole, 12)[1].history
        local = history[f"{label}a/local"]
        assert (
            history[f"{label}weight/b"].mask.tolist()
            == [False] * 3 + [True] + ([False] * 3 + [True]) * 2
        )
        weight = 1.0
        for place in np.flatnonzero(~local.mask):
            if local[place] % 2 == 0:
                scale = history[f"{label}a/scale"][place]
                weight = 0.5 * weight + 0.5 * (1 + scale)
            assert history[f"{label}weight/b"][place] == pytest.approx(weight)


def test_a_sum_in_a_sum_renews_once_a_step():
    inner = tr.AdaptiveSum(tr.Uncertainty(optax.sgd(0.1)), p=one, q=ten)
    alone = run(inner)[1].history
    history = run(tr.AdaptiveSum(AT_ONCE, a=inner, b=one))[1].history
    np.testing.assert_allclose(history["a/weight/q"], alone["weight/q"], rtol=1e-6)
    np.testing.assert_allclose(history["a"], alone["loss"], rtol=1e-6)
    weights = history["weight/a"], history["weight/b"]
    total = weights[0] * history["a"] + weights[1] * history["b"]
    np.testing.assert_allclose(history["loss"], total, rtol=1e-6)
    slope = history["a/weight/p"] + 10 * history["a/weight/q"]
    np.testing.assert_allclose(weights[1], 1 + slope, rtol=1e-6)


def adds(model, batch, *, state):
    seen = state.get(model.index)
    return model.w * seen, {"seen": seen}, state.set(model.index, seen + 1)


@pytest.mark.parametrize("rule", [tr.GradNorm(every=1), tr.SoftAdapt(every=2)])
def test_the_state_goes_through_the_terms_and_not_through_the_rule(rule):
    for first in (doubles, tr.alternate(doubles, doubles)):
        model = eqx.nn.make_with_state(Counting)()
        _, result = run(tr.AdaptiveSum(rule, a=first, b=adds), 3, model)
        assert result.history["a/seen"].tolist() == [1, 3, 7]
        assert result.history["b/seen"].tolist() == [2, 6, 14]


def test_batch_norm_is_as_in_a_weighted_sum():
    equal = tr.AdaptiveSum(tr.SoftAdapt(beta=0.0), a=net_mse, b=net_mae)
    fixed = tr.WeightedSum(a=(0.5, net_mse), b=(0.5, net_mae))
    states = []
    for loss in (equal, fixed):
        _, result = run(loss, 6, net(), batches(), optax.sgd(0.05))
        states.append(flat((result.model, result.model_state)))
    np.testing.assert_allclose(*states, rtol=1e-5, atol=1e-6)


class Fixed(tr.AbstractRule):
    """A rule of a user's own."""

    every: int = 1

    def init(self, num):
        return {"weights": jnp.ones(num), "renewed": jnp.int32(0)}

    def renew(self, memory, seen, *, key):
        weights = jnp.arange(1.0, 1.0 + seen.values.size) * seen.values
        return {"weights": weights, "renewed": memory["renewed"] + 1}


def test_a_rule_of_ones_own():
    _, result = run(tr.AdaptiveSum(Fixed(every=3), a=one, b=ten), 7)
    assert result.history["weight/a"].tolist() == [4.0] * 7
    assert result.history["weight/b"].tolist() == [80.0] * 7
    assert int(result.state.memory.program.parts["loss"].own["rule"]["renewed"]) == 3
    assert result.compiles == 1


def test_a_loss_that_is_not_finite_leaves_the_weights_finite():
    broken = lambda model, batch: model * jnp.sum(batch)
    data = [np.float32([v]) for v in (1.0, math.nan, 2.0, 1.0)]
    rules = [tr.GradNorm(), tr.SoftAdapt(), tr.ReLoBRaLo(), AT_ONCE, tr.Uncertainty()]
    for rule in [*rules, tr.LearningRateAnnealing(every=1)]:
        trainer = tr.Trainer(
            tr.AdaptiveSum(rule, a=one, b=broken), optax.sgd(0.0), nonfinite="skip"
        )
        with pytest.warns(UserWarning, match="not finite"):
            history = trainer.fit(
                jnp.float32(2.0), data, num_steps=4, progress=False
            ).history
        assert np.isfinite([history["weight/a"], history["weight/b"]]).all()


def rows(model, batch):
    return model * batch


def test_a_mean_square_leaves_padding_out():
    x = np.arange(14, dtype=np.float32).reshape(7, 2, 1)
    for residuals in (
        rows,
        lambda m, b, *, mask: jnp.where(mask[:, None, None], m * b, 0),
    ):
        loss, model = tr.MeanSquare(residuals), jnp.float32(2.0)
        mask = jnp.arange(7) < 5
        expected = float(np.mean(4 * x[:5] ** 2))
        assert float(loss(model, x, mask=mask)) == pytest.approx(expected)
        trainer = tr.Trainer(loss, optax.sgd(0.0))
        data = tr.Loader([x, x[:5]], ragged="pad")
        history = trainer.fit(model, data, num_steps=2, progress=False).history
        np.testing.assert_allclose(history["loss"][1], expected, rtol=1e-6)
    assert float(tr.MeanSquare(rows)(jnp.float32(1.0), x)) == pytest.approx(
        (x**2).mean()
    )
    asks = tr.MeanSquare(lambda m, b, *, step, key: m * step + 0 * jr.uniform(key))
    _, result = run(asks, 3, jnp.ones(1))
    assert result.history["loss"].tolist() == [0, 1, 4]


def doubled(model, batch):
    return jnp.concatenate([model * batch, batch])


def counts(model, batch):
    return jnp.arange(3)


def stateful(model, batch, *, state):
    return model, state


MASK = jnp.ones(3, bool)
called = lambda residuals: tr.MeanSquare(residuals)(jnp.ones(3), jnp.ones(3), mask=MASK)
own = lambda **terms: tr.AdaptiveSum(tr.GradNorm(), **terms)
picks = lambda where: tr.AdaptiveSum(tr.GradNorm(where=where), a=one)
TYPE_ERRORS: list[Any] = [
    (
        lambda: tr.AdaptiveSum(max, a=one),
        "is not a rule. Use one such as `tr.GradNorm(",
    ),
    (lambda: tr.AdaptiveSum(tr.GradNorm, a=one), "or a subclass of `tr.AbstractRule`"),
    (lambda: own(a=(2.0, one)), "`a` of `AdaptiveSum` is a tuple. The rule finds the"),
    (lambda: own(a=3.0), "`3.0` is not a loss"),
    (
        lambda: tr.AdaptiveSum(tr.NTKTrace(), a=one),
        "which `a` does not show. Write `tr.",
    ),
    (
        lambda: own(a=one)(jnp.ones(1), None, step=0),
        "remembers what was before, and is",
    ),
    (lambda: tr.MeanSquare(3), "is not a loss"),
    (lambda: tr.MeanSquare(lambda model: model), "A loss takes `(model, batch)`, then"),
    (
        lambda: tr.MeanSquare(stateful),
        "which the residuals of `MeanSquare` do not take",
    ),
    (
        lambda: called(counts),
        "The residuals of `MeanSquare` are an array of real float",
    ),
    (
        lambda: called(lambda m, b: 1.0),
        "returned 1.0. The residuals of `MeanSquare` are",
    ),
    (lambda: tr.GradNorm(where=3), "is `3`, which picks nothing. Give a function of"),
    (lambda: tr.GradNorm(alpha="1"), "`alpha` of `GradNorm` is `'1'`, not a number"),
    (lambda: tr.SoftAdapt(beta=True), "`beta` of `SoftAdapt` is `True`, not a number"),
    (
        lambda: tr.SoftAdapt(normalized=1),
        "choices of `SoftAdapt` are `(1, False)`. Give",
    ),
    (lambda: tr.LearningRateAnnealing(reference=0.5), "is `0.5`, not a whole number."),
    (lambda: tr.Uncertainty(0.1), "is `0.1`, not an optimizer. Use one of Optax's"),
    (lambda: tr.NTKTrace(every=2.0), "`every` of `NTKTrace` is `2.0`, which is not a"),
]
VALUE_ERRORS: list[Any] = [
    (lambda: own(), "`AdaptiveSum` was given no losses"),
    (lambda: own(loss=one), "is named `loss`, which the history uses for something"),
    (lambda: own(weight=one), "is named `weight`, which the history uses for somethi"),
    (lambda: own(**{"a/b": one}), "named `a/b`. The history puts a slash between na"),
    (
        lambda: called(doubled),
        "for a batch of 3 examples, some of which may be padding",
    ),
    (lambda: run(picks(lambda m: ())), "finds no parameter in the model, or in what"),
    (lambda: tr.GradNorm(alpha=-1), "is `-1`, which is out of range. Give a number at"),
    (lambda: tr.GradNorm(learning_rate=0), "out of range. Give a number above 0"),
    (
        lambda: tr.SoftAdapt(beta=math.inf),
        "is `inf`, which is out of range. Give a num",
    ),
    (lambda: tr.ReLoBRaLo(temperature=0), "out of range. Give a number above 0"),
    (lambda: tr.ReLoBRaLo(alpha=1.5), "out of range. Give a number from 0 to 1"),
    (lambda: tr.ReLoBRaLo(lookback=-1), "`lookback` of `ReLoBRaLo` is `-1`, which is"),
    (lambda: tr.LearningRateAnnealing(alpha=0), "Give a number above 0 and up to 1"),
    (lambda: tr.LearningRateAnnealing(reference=-1), "Terms are counted from 0: give"),
    (
        lambda: tr.AdaptiveSum(tr.LearningRateAnnealing(reference=2), a=one, b=one),
        "is `2`, but there are 2 terms, counted from 0. Give a smaller index",
    ),
    (lambda: tr.GradientBalance(alpha=1), "Give a number at least 0 and below 1"),
    (lambda: tr.GradNorm(every=0), "`every` of `GradNorm` is `0`; it must be from 1"),
    (lambda: tr.GradNorm().check(0), "`GradNorm` weighs 0 terms. Give one."),
]


@pytest.mark.parametrize(("make", "text"), TYPE_ERRORS)
def test_what_is_of_the_wrong_kind(make, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        make()


@pytest.mark.parametrize(("make", "text"), VALUE_ERRORS)
def test_what_has_a_wrong_value(make, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        make()
