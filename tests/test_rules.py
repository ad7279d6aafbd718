"""Rules for adaptive weights, against their papers' formulas in NumPy."""

from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

from trainer._gradient_rules import (
    GradientBalance,
    GradNorm,
    LearningRateAnnealing,
    Uncertainty,
)
from trainer._rules import NTKTrace, ReLoBRaLo, Seen, SoftAdapt


NUM = 3
renew = eqx.filter_jit(lambda rule, *args, key: rule.renew(*args, key=key))


def seen_of(values, scales, traces, dtype=jnp.float32):
    """What a rule sees: gradients are the same up to a scale, and a None among them."""
    base = np.random.default_rng(7).normal(size=(NUM, 7))
    arrays = [jnp.asarray(b * s, dtype) for b, s in zip(base, scales, strict=True)]
    trees = tuple({"last": a[:4].reshape(2, 2), "rest": (None, a[4:])} for a in arrays)
    return Seen(jnp.asarray(values, dtype), trees, jnp.asarray(traces, dtype))


def sequence(seed, length=6, dtype=jnp.float32):
    draw = lambda rng: np.float32(rng.uniform(0.5, 2.0, NUM) * [1.0, 0.3, 4.0])
    rng = np.random.default_rng(seed)
    return [seen_of(draw(rng), draw(rng), draw(rng), dtype) for _ in range(length)]


def weights_of(rule, seens, key):
    """The weights after every renewal."""
    memory, rows = rule.init(NUM), []
    for i, seen in enumerate(seens):
        memory = renew(rule, memory, seen, key=jr.fold_in(key, i))
        rows.append(np.asarray(rule.weights(memory)))
    return rows


def run_to(rule, values, scales=(1, 1, 1), traces=(1, 1, 1)):
    memory = rule.init(NUM)
    for value in values:
        memory = renew(rule, memory, seen_of(value, scales, traces), key=jr.key(0))
    return memory


def values_of(seens):
    return [np.asarray(seen.values, np.float64) for seen in seens]


def gradients_of(seens, where=lambda gradient: gradient):
    leaves = lambda g: [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(g)]
    return [[np.concatenate(leaves(where(g))) for g in s.gradients] for s in seens]


class Adam:
    """Kingma and Ba, 2015, Algorithm 1."""

    def __init__(self, rate):
        self.rate, self.m, self.v, self.t = rate, 0.0, 0.0, 0

    def step(self, gradient):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return -self.rate * m / (np.sqrt(v) + 1e-8)


def grad_norm(seens, alpha=1.5, rate=0.025, where=lambda gradient: gradient):
    values, adam, w = values_of(seens), Adam(rate), np.ones(NUM)
    for value, gradients in zip(values, gradients_of(seens, where), strict=True):
        norms = np.array([np.sqrt((g**2).sum()) for g in gradients])
        ratio = value / values[0]
        target = (w * norms).mean() * (ratio / ratio.mean()) ** alpha
        w = np.maximum(w + adam.step(np.sign(w * norms - target) * norms), 1e-6)
        w = w * NUM / w.sum()
        yield w


def soft_adapt(seens, beta=0.1, normalized=False, loss_weighted=False):
    values = values_of(seens)
    yield np.full(NUM, 1 / NUM)
    for before, now in pairwise(values):
        s = now - before
        s = s / np.abs(s).sum() if normalized else s
        e = np.exp(beta * s) * ((before + now) / 2 if loss_weighted else 1)
        yield e / e.sum()


def annealing(seens, alpha=0.1, reference=0):
    w = np.ones(NUM)
    for gradients in gradients_of(seens):
        top = np.abs(gradients[reference]).max()
        new = np.array([top / np.abs(g).mean() for g in gradients])
        w = (1 - alpha) * w + alpha * new
        w[reference] = 1
        yield w


def balance(seens, alpha=0.9):
    w = np.ones(NUM)
    for gradients in gradients_of(seens):
        norms = np.array([np.linalg.norm(g) for g in gradients])
        w = alpha * w + (1 - alpha) * norms.sum() / norms
        yield w


def uncertainty(seens, optimizer):
    s, step = np.zeros(NUM), optimizer()
    for value in values_of(seens):
        s = s + step(0.5 - 0.5 * np.exp(-s) * value)
        yield 0.5 * np.exp(-s)


def ntk(seens):
    traces = [np.asarray(seen.traces, np.float64) for seen in seens]
    return [trace.sum() / trace for trace in traces]


last = lambda gradient: gradient["last"]
REFERENCES = [
    (GradNorm(), grad_norm, ()),
    (GradNorm(0.5, 2.0, last), grad_norm, (0.5, 2.0, last)),
    (SoftAdapt(), soft_adapt, ()),
    (SoftAdapt(-1.0, normalized=True), soft_adapt, (-1.0, True)),
    (SoftAdapt(loss_weighted=True), soft_adapt, (0.1, False, True)),
    (SoftAdapt(2.0, True, True), soft_adapt, (2.0, True, True)),
    (LearningRateAnnealing(), annealing, ()),
    (LearningRateAnnealing(0.7, reference=2), annealing, (0.7, 2)),
    (GradientBalance(0.8), balance, (0.8,)),
    (Uncertainty(), uncertainty, (lambda: Adam(0.025).step,)),
    (Uncertainty(optax.sgd(0.2)), uncertainty, (lambda: lambda g: -0.2 * g,)),
    (NTKTrace(), ntk, ()),
]
RULES = [*(rule for rule, _, _ in REFERENCES), ReLoBRaLo(1.0, 0.9, 0.5)]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("case", REFERENCES, ids=lambda c: type(c[0]).__name__)
def test_rule_is_its_papers_formula(case, x64, key):
    rule, reference, arguments = case
    with jax.enable_x64(x64):
        seens = sequence(int(x64), dtype=float)
        found = weights_of(rule, seens, key)
    # Optax's Adam takes `1 - 0.999` in the parameters' dtype.
    off = 3e-5 if isinstance(rule, GradNorm | Uncertainty) and not x64 else 0
    expected = list(reference(seens, *arguments))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=off)


@pytest.mark.parametrize("lookback", [0.0, 0.7, 1.0])
def test_relobralo_is_equation_11(lookback, key):
    alpha, temperature, seens = 0.8, 1.5, sequence(3, 200)
    rule = ReLoBRaLo(temperature, alpha, lookback)
    found = weights_of(rule, seens, key)
    values, looked_back = values_of(seens), []

    def bal(now, then):
        e = np.exp(values[now] / (temperature * values[then]))
        return NUM * e / e.sum()

    np.testing.assert_array_equal(found[0], np.ones(NUM))
    weights = np.ones(NUM)
    for t in range(1, len(seens)):
        recent = (1 - alpha) * bal(t, t - 1)
        both = [alpha * past + recent for past in (weights, bal(t, 0))]
        looked_back.append(np.argmin([np.abs(found[t] - w).max() for w in both]))
        weights = both[looked_back[-1]]
        np.testing.assert_allclose(found[t], weights, rtol=1e-6)
    assert abs(np.mean(looked_back) - (1 - lookback)) <= (0.1 if lookback == 0.7 else 0)


def describe(tree):
    leaves, structure = jax.tree.flatten(tree)
    assert not any(leaf.weak_type for leaf in leaves)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


usual = st.lists(st.floats(0.25, 8, width=32), min_size=NUM, max_size=NUM)
odd = [0.0, -1.0, 1e-38, 1e-20, 1.0, 1e20, 1e38, np.inf, np.nan]
wild = st.lists(st.sampled_from(odd), min_size=NUM, max_size=NUM)
SUMS = {GradNorm: NUM, ReLoBRaLo: NUM, SoftAdapt: 1}


@each_rule
@pytest.mark.parametrize("kind", [usual, wild], ids=["usual", "wild"])
@given(data=st.data(), dtype=st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_weights_are_finite_and_the_memory_keeps_its_form(rule, kind, data, dtype):
    memory = rule.init(NUM)
    form = describe(memory)
    for i in range(4):
        seen = seen_of(*[data.draw(kind) for _ in range(3)], dtype)
        memory = renew(rule, memory, seen, key=jr.key(i))
        weights = np.asarray(rule.weights(memory))
        assert np.all(np.isfinite(weights) & (weights >= 0))
        assert np.all(weights > 0) or kind is wild
        assert weights.sum() == pytest.approx(SUMS.get(type(rule), weights.sum()))
        assert describe(memory) == form
        assert np.isfinite(rule.offset(memory))


@each_rule
def test_a_loss_gradient_and_trace_that_are_not_numbers_change_nothing(rule):
    memory = run_to(rule, [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    after = renew(rule, memory, seen_of(*[[np.nan] * NUM] * 3), key=jr.key(0))
    assert eqx.tree_equal(memory, after)


@pytest.mark.parametrize("rule", [LearningRateAnnealing(1.0), GradientBalance(0.0)])
def test_a_term_without_a_gradient_keeps_its_weight(rule):
    memory = run_to(rule, [[1.0] * 3], scales=[1.0, 2.0, 4.0])
    before, fixed = rule.weights(memory), isinstance(rule, LearningRateAnnealing)
    for scales in ([3.0, 0.0, 1.0], [0.0, 0.0, 0.0]):
        memory = renew(rule, memory, seen_of([1.0] * 3, scales, scales), key=jr.key(0))
        assert (rule.weights(memory) == before).tolist() == [fixed, True, False]


def test_degenerate_losses_have_the_weights_that_the_docs_say():
    weights = lambda rule, *args, **kw: rule.weights(run_to(rule, *args, **kw)).tolist()
    zeros, ones = [0.0] * 3, [1.0] * 3
    mixed, below = [-1.0, 1.0, 1.0], [-1.0, -2.0, -3.0]
    assert weights(NTKTrace(), [ones], traces=[0.0, 2.0, 2.0]) == [1.0, 2.0, 2.0]
    assert weights(NTKTrace(), [ones], traces=zeros) == ones
    most = weights(Uncertainty(optax.sgd(1.0)), [zeros] * 70)
    assert most == pytest.approx([0.5 * np.exp(30)] * 3)
    soft, plain = SoftAdapt(loss_weighted=True), SoftAdapt()
    flat = weights(SoftAdapt(0.1, True), [zeros, below, below])
    assert flat == pytest.approx([1 / 3] * 3)
    assert weights(soft, [mixed] * 2) == pytest.approx([0.0, 0.5, 0.5])
    assert weights(soft, [below, zeros]) == weights(plain, [below, zeros])
    progress = lambda *values: weights(ReLoBRaLo(1.0, 0.0), values)
    assert progress([0, 1, 1], [9, 1, 2]) == progress(ones, [1, 1, 2])
    assert weights(GradNorm(), [zeros, ones], scales=zeros) == ones
    norm = lambda *values: weights(GradNorm(), values, scales=[1.0, 2.0, 3.0])
    for pair in ([zeros, ones], [ones, zeros], [ones, mixed], [mixed, ones]):
        assert norm(*pair) == norm(ones, ones) != norm(ones, [9.0, 1.0, 1.0])


def test_uncertainty_is_joint_gradient_descent():
    rule, seen = Uncertainty(optax.sgd(0.1)), Seen(jnp.array([1.0, 2.0, 5.0]))
    total = lambda m: jnp.sum(rule.weights(m) * seen.values) + rule.offset(m)
    before = {**rule.init(NUM), "logs": jnp.array([0.3, -0.2, 1.0])}
    after = renew(rule, before, seen, key=jr.key(0))
    expected = before["logs"] - 0.1 * jax.grad(total)(before)["logs"]
    np.testing.assert_allclose(after["logs"], expected, rtol=1e-6)


def test_what_a_rule_needs_and_when_its_weights_act():
    by_value = {SoftAdapt, ReLoBRaLo, Uncertainty}
    assert {type(r) for r in RULES if r.needs == "values"} == by_value
    assert {type(r) for r in RULES if r.needs == "traces"} == {NTKTrace}
    assert {type(r) for r in RULES if r.delayed} == {GradNorm, Uncertainty}


@each_rule
def test_every_is_a_period(rule):
    with pytest.raises(ValueError, match=f"`every` of `{type(rule).__name__}` is `0`"):
        type(rule)(every=0)
    with pytest.raises(ValueError, match=" 0 terms"):
        rule.check(0)
    rule.check(NUM)


WRONG = [
    (TypeError, "`alpha` of `GradNorm` is `'a'`, not a num", lambda: GradNorm("a")),
    (ValueError, "`-1`, .* Give a number at least 0", lambda: GradNorm(-1)),
    (ValueError, "`learning_rate` .* above 0", lambda: GradNorm(learning_rate=0)),
    (TypeError, "`where` .* picks nothing", lambda: GradNorm(where="w")),
    (ValueError, "a number that is finite", lambda: SoftAdapt(np.nan)),
    (TypeError, "choices .* `\\(1, False\\)`", lambda: SoftAdapt(normalized=1)),
    (ValueError, "`temperature` .* `0`", lambda: ReLoBRaLo(0)),
    (ValueError, "`alpha` .* from 0 to 1", lambda: ReLoBRaLo(alpha=1.1)),
    (TypeError, "`lookback` .* `True`", lambda: ReLoBRaLo(lookback=True)),
    (ValueError, "above 0 and up to 1", lambda: LearningRateAnnealing(0)),
    (TypeError, "index of a term", lambda: LearningRateAnnealing(reference=1.0)),
    (ValueError, "from 0", lambda: LearningRateAnnealing(reference=-1)),
    (ValueError, "3 terms", lambda: LearningRateAnnealing(reference=3).check(3)),
    (ValueError, "at least 0 and below 1", lambda: GradientBalance(1)),
    (TypeError, "not an optimizer", lambda: Uncertainty(0.1)),
    (ValueError, "no parameter", lambda: run_to(GradNorm(where=lambda g: None), [[1]])),
]


@pytest.mark.parametrize(("error", "message", "make"), WRONG)
def test_a_wrong_argument_is_an_error_that_says_what_to_give(error, message, make):
    with pytest.raises(error, match=message):
        make()
