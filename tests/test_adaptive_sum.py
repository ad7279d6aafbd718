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
from jax.flatten_util import ravel_pytree

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


ROWS = rows_of_fit, rows_of_size, rows_of_power
TERMS: Any = dict(zip(NAMES, map(tr.MeanSquare, ROWS), strict=True))


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
    w, m, v, first = np.ones(3), 0.0, 0.0, np.nan
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
    "anneal": (lambda **e: tr.LearningRateAnnealing(0.2, 1, **e), annealing, None),
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
        weights = list(weights_of(seen))[-1] if first is None else late * np.ones(3)  # pyright: ignore[reportOptionalOperand]
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
    w, after = START, START
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


def two_columns(model, x):
    return jnp.stack([jax.vmap(model)(x), x[:, :1] ** 2], 1)


def one_column(model, x):
    return x[:, :1] * jax.vmap(model)(x)


def traces_of(model, where, batch):
    """The squares of the whole Jacobian, of what `where` picks, added up."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    vector, rebuild = ravel_pytree(params)
    marks = jax.tree.map(lambda leaf: 0 * leaf, params)
    picked = where(jax.tree.map(jnp.ones_like, params))
    owned, _ = ravel_pytree(eqx.tree_at(where, marks, picked))
    for rows in (two_columns, one_column):
        of = lambda v, rows=rows: rows(eqx.combine(rebuild(v), static), batch).ravel()
        jacobian = jax.jit(jax.jacobian(of))(vector)
        yield float(jnp.sum((jacobian * owned) ** 2))


@pytest.mark.parametrize("where", [lambda model: model, lambda model: model.layers[1]])
@pytest.mark.parametrize("rows", [[40], [40, 9]])
def test_the_trace_is_that_of_the_kernel_of_what_is_trained(where, rows):
    x = np.random.default_rng(3).normal(size=(40, 3)).astype(np.float32)
    model, data = eqx.nn.MLP(3, 1, 4, 1, key=jr.key(0)), [x[:n] for n in rows]
    terms = {"a": tr.MeanSquare(two_columns), "b": tr.MeanSquare(one_column)}
    loss = tr.AdaptiveSum(tr.NTKTrace(every=1), **terms)
    trainer = tr.Trainer(update=tr.Minimize(loss, optax.sgd(0.0), where=where))
    loader = tr.Loader(data, ragged="pad")  # the second batch is padded to 40
    history = trainer.fit(model, loader, num_steps=len(rows), progress=False).history
    for step, batch in enumerate(data):
        found = np.array(list(traces_of(model, where, batch)))
        weights = [history[f"weight/{name}"][step] for name in "ab"]
        np.testing.assert_allclose(weights, found.sum() / found, rtol=1e-5)
