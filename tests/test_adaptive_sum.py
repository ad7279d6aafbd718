"""AdaptiveSum in a run: the weights of every step against a replay in NumPy."""

from itertools import pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import batches, Counting, doubles, flat, net, net_mae, net_mse

import trainer as tr


RATE, STEPS, NAMES = 0.05, 12, ("fit", "size", "power")
A = np.random.default_rng(1).normal(size=(8, 4)) / 2
Y = np.random.default_rng(2).normal(size=8)
BATCH = (jnp.asarray(A, jnp.float32), jnp.asarray(Y, jnp.float32))
START = np.array([1.5, -1.0, 0.5, 2.0])


def rows_of_fit(model, batch):
    return batch[0] @ model - batch[1]


def rows_of_size(model, batch):
    return 0.5 * model * jnp.ones_like(batch[0])


def rows_of_power(model, batch):
    return (model - 1) ** 2 / 2 * jnp.ones_like(batch[0])


TERMS: Any = dict(
    zip(
        NAMES,
        map(tr.MeanSquare, (rows_of_fit, rows_of_size, rows_of_power)),
        strict=True,
    )
)


def rows_and_jacobians(w):
    """The residuals of each term, and their derivatives, by hand in float64."""
    ones = np.ones((8, 1, 1))
    yield A @ w - Y, A
    yield np.tile(w / 2, 8), (ones * np.eye(4) / 2).reshape(32, 4)
    yield np.tile((w - 1) ** 2 / 2, 8), (ones * np.diag(w - 1)).reshape(32, 4)


def looked_at(w):
    """Values, gradients and traces of the terms."""
    found = list(rows_and_jacobians(w))
    values = np.array([np.mean(r**2) for r, _ in found])
    gradients = np.array([2 * r @ j / len(r) for r, j in found])
    return values, gradients, np.array([np.sum(j**2) for _, j in found])


def grad_norm(seen):
    """Chen et al., 2018, equations 1 and 2, and Adam of Kingma and Ba."""
    w, m, v = np.ones(3), 0.0, 0.0
    for t, (values, gradients, _) in enumerate(seen, 1):
        norms = np.linalg.norm(gradients, axis=1)
        first = values if t == 1 else first
        ratio = values / first
        target = (w * norms).mean() * (ratio / ratio.mean()) ** 1.5
        slope = norms * np.sign(w * norms - target)
        m, v = 0.9 * m + 0.1 * slope, 0.999 * v + 0.001 * slope**2
        w = w - 0.025 * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        w = np.maximum(w, 1e-6)
        yield (w := w * 3 / w.sum())


def soft_adapt(seen):
    yield np.full(3, 1 / 3)
    for (before, *_), (now, *_) in pairwise(seen):
        e = np.exp(5.0 * (now - before))
        yield e / e.sum()


def balance(now, earlier, temperature):
    e = np.exp(now / earlier / temperature)
    return 3 * e / e.sum()


def relobralo(lookback):
    """Bischof and Kraus, 2021, equation 11, with a certain rho."""

    def weights(seen):
        yield (w := np.ones(3))
        for (before, *_), (now, *_) in pairwise(seen):
            past = w if lookback == 1 else balance(now, seen[0][0], 0.5)
            yield (w := 0.9 * past + 0.1 * balance(now, before, 0.5))

    return weights


def annealing(seen):
    w = np.ones(3)
    for _, gradients, _ in seen:
        new = np.abs(gradients[1]).max() / np.abs(gradients).mean(1)
        w = 0.8 * w + 0.2 * new
        w[1] = 1
        yield w.copy()


def equal_norms(seen):
    w = np.ones(3)
    for _, gradients, _ in seen:
        norms = np.linalg.norm(gradients, axis=1)
        yield (w := 0.75 * w + 0.25 * norms.sum() / norms)


def uncertainty(seen):
    s = np.zeros(3)
    for values, *_ in seen:
        s = s - 0.2 * (0.5 - 0.5 * np.exp(-s) * values)
        yield 0.5 * np.exp(-s)


def traces(seen):
    for *_, found in seen:
        yield found.sum() / found


# For every rule: its replay, and the weights before the first if they act a step late.
RULES: Any = {
    "grad_norm": (tr.GradNorm, grad_norm, 1.0),
    "soft_adapt": (lambda **e: tr.SoftAdapt(beta=5.0, **e), soft_adapt, None),
    "never": (lambda **e: tr.ReLoBRaLo(0.5, 0.9, 1.0, **e), relobralo(1), None),
    "always": (lambda **e: tr.ReLoBRaLo(0.5, 0.9, 0.0, **e), relobralo(0), None),
    "annealing": (
        lambda **e: tr.LearningRateAnnealing(0.2, 1, **e),
        annealing,
        None,
    ),
    "balance": (lambda **e: tr.GradientBalance(0.75, **e), equal_norms, None),
    "uncertainty": (lambda **e: tr.Uncertainty(optax.sgd(0.2), **e), uncertainty, 0.5),
    "traces": (tr.NTKTrace, traces, None),
}


def replayed(weights_of, first, every):
    """Weights, terms and losses of every step, and the last parameters."""
    w, seen, rows = START, [], []
    for step in range(STEPS):
        values, gradients, _ = now = looked_at(w)
        late = list(weights_of(seen))[-1] if seen else first
        seen = [*seen, now] if step % every == 0 else seen
        weights = list(weights_of(seen))[-1] if first is None else late * np.ones(3)
        offset = -0.5 * np.log(2 * weights).sum() if first == 0.5 else 0.0
        rows.append((weights, values, weights @ values + offset))
        w = w - RATE * weights @ gradients
    return *map(np.array, zip(*rows, strict=True)), w


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("every", "parts"), [(1, 1), (3, 1), (3, 2)])
def test_the_weights_of_a_run_are_those_of_a_replay(name, every, parts):
    make, weights_of, first = RULES[name]
    loss = tr.AdaptiveSum(make(every=every), **TERMS)
    update = tr.Minimize(loss, optax.sgd(RATE), micro_batches=parts)
    trainer, start = tr.Trainer(update=update), jnp.asarray(START, jnp.float32)
    result = trainer.fit(start, [BATCH], num_steps=STEPS, progress=False)
    weights, values, losses, model = replayed(weights_of, first, every)
    close = {"rtol": 2e-5, "atol": 1e-6}
    found = [result.history[f"weight/{name}"] for name in NAMES]
    np.testing.assert_allclose(np.transpose(found), weights, **close)
    found = [result.history[name] for name in NAMES]
    np.testing.assert_allclose(np.transpose(found), values, **close)
    np.testing.assert_allclose(result.history["loss"], losses, **close)
    np.testing.assert_allclose(result.model, model, **close)
    assert result.compiles == 1


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


@pytest.mark.parametrize("selector", [tr.Cycle((2, 1)), tr.Random((1, 1))])
def test_the_rule_looks_at_the_branch_that_runs(selector):
    loss = tr.AdaptiveSum(AT_ONCE, a=tr.Switch(selector, [one, ten]), b=one)
    history = run(loss, 16)[1].history
    branch = history["a/branch"]
    assert 0 < branch.sum() < 16
    expected = np.where(branch == 1, (10 + 1) / 10, 2.0)
    np.testing.assert_allclose(history["weight/a"], expected, rtol=1e-6)


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
    np.testing.assert_allclose(weights[1][1:], 1 + slope[:-1], rtol=1e-6)


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


def test_a_line_search_sees_the_weights_of_its_step():
    models = [START]

    class Keeps(tr.AbstractCallback):
        def __call__(self, info):
            models.append(np.asarray(info.model, np.float64))

    loss = tr.AdaptiveSum(tr.GradNorm(learning_rate=0.2), **TERMS)
    trainer = tr.Trainer(loss, optax.lbfgs())
    start, options = jnp.asarray(START, jnp.float32), {"progress": False}
    options |= {"num_steps": 12, "callbacks": [Keeps(every=1)]}
    history = trainer.fit(start, [BATCH], **options).history
    weights = np.transpose([history[f"weight/{name}"] for name in NAMES])
    at = lambda w, model: w @ looked_at(model)[0]
    for w, (before, after), value in zip(
        weights, pairwise(models), history["loss"], strict=True
    ):
        assert at(w, before) == pytest.approx(value, rel=1e-4, abs=1e-6)
        assert at(w, after) <= at(w, before) * (1 + 1e-5)
    assert at(w, after) < 0.5 * at(w, START)


def test_an_adversarial_gradient_is_at_the_weights_of_its_step():
    far = lambda model, batch: (model + 3) ** 4
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    sam = optax.contrib.sam(optax.sgd(1e-3), adversary, opaque_mode=True)
    _, result = run(tr.AdaptiveSum(AT_ONCE, a=one, b=far), 1, optimizer=sam)
    slopes = lambda at: np.array([2 * at, 4 * (at + 3) ** 3])
    weights = slopes(2.0).sum() / slopes(2.0)
    expected = 2.0 - 1e-3 * weights @ slopes(2.1)
    assert float(result.model) == pytest.approx(expected, rel=1e-5)


def test_evaluation_is_at_the_weights_that_the_state_has():
    trainer, result = run(tr.AdaptiveSum(AT_ONCE, a=one, b=ten))
    data = [jnp.zeros(1)]
    assert trainer.evaluate(result.state, data)["loss"] == pytest.approx(88.0)
    assert trainer.evaluate(jnp.float32(2.0), data) == {"loss": 44.0, "a": 4, "b": 40}
    other = tr.AdaptiveSum(tr.SoftAdapt(), c=one, d=ten)
    found = trainer.evaluate(result.state, data, loss=other)
    assert found == {"loss": 22.0, "c": 4.0, "d": 40.0}


def padded(model, batch):
    return jnp.stack([jax.vmap(model)(batch), batch[:, :1] ** 2], 1)


def test_the_trace_is_that_of_the_kernel_of_what_is_trained():
    x = np.random.default_rng(3).normal(size=(40, 3)).astype(np.float32)
    model = eqx.nn.MLP(3, 1, 4, 1, key=jr.key(0))
    last = lambda model: model.layers[1]
    loss = tr.AdaptiveSum(
        tr.NTKTrace(every=1),
        a=tr.MeanSquare(padded),
        b=tr.MeanSquare(lambda m, x: x[:, :1] * jax.vmap(m)(x)),
    )
    for where, rows in [(None, [40]), (last, [40]), (None, [40, 9])]:
        update = tr.Minimize(loss, optax.sgd(0.0), where=where)
        data = tr.Arrays(x[: sum(rows)], batch_size=40)
        batches = [x, x[: rows[-1]]][: len(rows)]
        trainer = tr.Trainer(update=update)
        data = tr.Loader(batches, ragged="pad")
        result = trainer.fit(model, data, num_steps=len(rows), progress=False)
        owned = model if where is None else where(model)

        def trace(residuals, batch):
            put = lambda part: (
                part if where is None else eqx.tree_at(where, model, part)
            )
            jacobian = jax.jacobian(lambda part: residuals(put(part), batch))
            return sum(
                np.sum(np.square(leaf))
                for leaf in jax.tree.leaves(eqx.filter(jacobian(owned), eqx.is_array))
            )

        for place, batch in enumerate(batches):
            found = [trace(term.residuals, batch) for term in loss.losses]
            weights = [result.history[f"weight/{name}"][place] for name in "ab"]
            np.testing.assert_allclose(weights, sum(found) / np.array(found), rtol=1e-5)
