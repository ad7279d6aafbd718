"""Gradients of composed losses: the values of plain Python, and taken in the branch."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, Phase, settings, strategies as st

import trainer as tr
from trainer._composed import evaluate_loss
from trainer._grad import value_and_grad
from trainer._losses import Given


STEPS = 13
EPOCHS = [step // 3 for step in range(STEPS)]
# Every number is a small multiple of a power of 2, so float32 computes exactly.
POINT = np.array([0.5, -1.0, 2.0])


class Ramp(NamedTuple):
    """A schedule that is 0 at `zero` only."""

    zero: int

    def __call__(self, step):
        return (step - self.zero) / 4


class Late(NamedTuple):
    """A schedule that is 0 before `start`."""

    start: int

    def __call__(self, step):
        return 1.5 * (step >= self.start)


class Leaf(NamedTuple):
    curve: float
    report: bool

    def build(self, runs):
        def loss(model, batch, *, step, epoch):
            runs.append(self)
            value = self.curve * jnp.sum(model**2) / 2
            value += (step + epoch) / 8 * jnp.sum(model * batch)
            return (value, {f"m{self.curve}": step}) if self.report else value

        return loss

    def interpret(self, step, epoch):
        slope = (step + epoch) / 8
        value = self.curve * float(POINT @ POINT) / 2 + slope * float(POINT.sum())
        metrics = {f"m{self.curve}": step} if self.report else {}
        return value, self.curve * POINT + slope, metrics


class Pick(NamedTuple):
    selector: tr.AbstractSelector
    turns: list[int]
    by: Any
    parts: list[Any]

    def build(self, runs):
        losses = {f"b{n}": part.build(runs) for n, part in enumerate(self.parts)}
        return tr.Switch(self.selector, losses, by=self.by)

    def interpret(self, step, epoch):
        count = step if self.by == "step" else epoch
        index = self.turns[count]
        local = self.turns[:count].count(index)
        step, epoch = (local, epoch) if self.by == "step" else (step, local)
        value, grad, metrics = self.parts[index].interpret(step, epoch)
        inner = lambda name: name.split("/")[-1] == "branch"
        renamed = {f"b{index}/{k}" if inner(k) else k: v for k, v in metrics.items()}
        return value, grad, {**renamed, "branch": index}


class Add(NamedTuple):
    by: Any
    terms: list[Any]

    def build(self, runs):
        terms = {f"t{n}": (w, t.build(runs)) for n, (w, t) in enumerate(self.terms)}
        return tr.WeightedSum(by=self.by, **terms)

    def interpret(self, step, epoch):
        value, grad, metrics = 0.0, np.zeros(3), {}
        for n, (weight, term) in enumerate(self.terms):
            now = weight
            if callable(weight):
                now = weight(step if self.by == "step" else epoch)
                metrics[f"weight/t{n}"] = now
            if now == 0:
                continue
            part, slope, inner = term.interpret(step, epoch)
            value, grad = value + now * part, grad + now * slope
            metrics |= {f"t{n}": part, **{f"t{n}/{k}": v for k, v in inner.items()}}
        return value, grad, metrics


units = st.sampled_from(["step", "epoch"])
numbers = st.sampled_from([0.0, 0.25, 1.0, -2.0])
schedules = st.integers(0, 4).map(Ramp) | st.integers(1, 6).map(Late)
leaves = st.builds(Leaf, st.sampled_from([0.5, 1.0, -2.0, 4.0]), st.booleans())


@st.composite
def picks(draw, parts):
    chosen = draw(st.lists(parts, min_size=2, max_size=3))
    num, kind = len(chosen), draw(st.sampled_from(["every", "cycle", "at"]))
    if kind == "every":
        every = draw(st.integers(1, 4))
        selector, turns = tr.Every(every), [s // every % num for s in range(STEPS)]
    elif kind == "cycle":
        counts = draw(st.permutations([1, 2, 3]))[:num]
        turn = [index for index, count in enumerate(counts) for _ in range(count)]
        selector, turns = tr.Cycle(counts), (turn * STEPS)[:STEPS]
    else:
        at = sorted(draw(st.permutations(range(1, 9)))[: num - 1])
        selector, turns = tr.At(at), [sum(s >= b for b in at) for s in range(STEPS)]
    return Pick(selector, turns, draw(units), chosen)


def adds(parts):
    terms = st.lists(st.tuples(numbers | schedules, parts), min_size=2, max_size=3)
    return st.builds(Add, units, terms)


pairs = picks(leaves) | adds(leaves)
programs = st.one_of(
    [make(pairs | leaves) for make in (picks, adds)]
    + [outer(inner(leaves)) for outer, inner in ((picks, adds), (adds, picks))]
    + [picks(adds(pairs | leaves)), adds(picks(pairs | leaves))]
)


def run_all(loss, over):
    """Value, gradient and metrics at every step, in one compiled call."""
    point, batch = jnp.asarray(POINT, jnp.float32), jnp.float32(1.0)

    def one(place):
        given = Given(*place)
        (value, grad), metrics, _, _ = value_and_grad(loss, point, batch, given)
        plain = evaluate_loss(loss, point, batch, given)
        return value, grad, dict(metrics), plain.value, dict(plain.metrics)

    places = jnp.arange(STEPS, dtype=jnp.int32), jnp.asarray(EPOCHS, jnp.int32)
    run = jax.vmap(one) if over == "vmap" else lambda p: jax.lax.map(one, p)
    return jax.device_get(jax.jit(run)(places))


def present(metrics, step):
    return {
        name: float(metric.value[step])
        for name, metric in metrics.items()
        if np.broadcast_to(metric.present, STEPS)[step]
    }


# Every example is compiled, so that looking for a smaller one would take minutes.
@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
@given(program=programs, over=st.sampled_from(["vmap", "map"]))
def test_a_program_computes_what_plain_python_does(program, over):
    value, grad, metrics, plain, plain_metrics = run_all(program.build([]), over)
    for step, epoch in enumerate(EPOCHS):
        expected, slope, reported = program.interpret(step, epoch)
        assert value[step] == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert plain[step] == pytest.approx(expected, rel=1e-6, abs=1e-6)
        np.testing.assert_allclose(grad[step], slope, rtol=1e-6, atol=1e-6)
        assert present(metrics, step) == pytest.approx(reported, rel=1e-6, abs=1e-6)
        assert present(plain_metrics, step) == present(metrics, step)


@settings(max_examples=12)
@given(program=programs)
def test_each_loss_is_run_once_when_a_program_is_traced(program):
    runs = []
    loss = program.build(runs)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    point = jax.ShapeDtypeStruct((3,), jnp.float32)

    def traced(point, step):
        return value_and_grad(loss, point, jnp.float32(1.0), Given(step, step)).value

    jax.eval_shape(traced, point, step)
    assert len(runs) == count_leaves(program)


def count_leaves(program):
    if isinstance(program, Leaf):
        return 1
    pick = isinstance(program, Pick)
    parts = program.parts if pick else [term for _, term in program.terms]
    return sum(map(count_leaves, parts))


class Model(eqx.Module):
    """Integer values, so that any order of the operations gives the same floats."""

    w: jax.Array
    table: jax.Array
    act: Any

    def __init__(self):
        self.w = jnp.arange(1.0, 4.0)
        self.table = jnp.arange(3)
        self.act = jax.nn.relu


def cubic(model, batch):
    return jnp.sum(model.act(model.w * batch) ** 3)


def mse(model, batch):
    return jnp.sum((model.w - model.table * batch) ** 2)


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_the_gradient_of_a_switch_is_that_of_the_picked_loss(step):
    model, batch, loss = Model(), jnp.float32(2.0), tr.switch_every(1, cubic, mse)
    at = Given(jnp.int32(step), jnp.int32(0))
    (value, grad), *_ = eqx.filter_jit(value_and_grad)(loss, model, batch, at)
    picked = eqx.filter_value_and_grad((cubic, mse)[step % 2])(model, batch)
    assert value == picked[0]
    assert eqx.tree_equal(grad, picked[1])
    assert grad.table is None
    assert grad.act is None


def broken(model, batch):
    """NaN, and a NaN gradient, wherever the model is below 0."""
    return jnp.sum(jnp.sqrt(model - 10.0))


def healthy(model, batch):
    return jnp.sum(model**2)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        tr.switch_every(1, healthy, broken),
        tr.WeightedSum(a=healthy, b=(lambda step: step % 2, broken)),
        tr.Switch(tr.Every(1), [tr.WeightedSum(a=healthy, b=(0.0, broken)), broken]),
        tr.WeightedSum(a=healthy, b=(lambda s: s % 2, tr.switch_every(1, broken))),
    ],
    ids=["switch", "sum", "zero", "sum of switch"],
)
def test_a_loss_that_is_not_active_cannot_poison_the_gradient(loss, batched):
    model = jnp.arange(1.0, 4.0)
    run = lambda s: value_and_grad(loss, model, None, Given(s, jnp.int32(0))).value
    steps = jnp.arange(4, dtype=jnp.int32)
    over = jax.vmap(run) if batched else lambda s: jax.lax.map(run, s)
    value, grad = jax.jit(over)(steps)
    np.testing.assert_array_equal(value[::2], healthy(model, None))
    np.testing.assert_array_equal(grad[::2], np.stack([2 * model] * 2))
    assert np.isnan(value[1::2]).all()
    assert np.isnan(grad[1::2]).all()


def conds(jaxpr):
    """Every `cond` that is not inside another, and the primitives outside of them."""
    found, outside = [], set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            found.append(eqn)
            continue
        outside.add(eqn.primitive.name)
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            below, names = conds(inner)
            found, outside = found + below, outside | names
    return found, outside


@pytest.mark.parametrize(
    "make",
    [tr.switch_every, lambda _, *f: tr.WeightedSum(f=f[0], g=(lambda s: s, f[1]))],
)
def test_the_gradient_is_taken_inside_the_branch(make):
    wave = lambda model, batch: jnp.sum(jnp.sin(jnp.tanh(model)))
    loss = make(1, healthy, wave)
    run = lambda m, s: value_and_grad(loss, m, None, Given(s, jnp.int32(0))).value
    jaxpr = jax.make_jaxpr(run)(jnp.ones(3), jnp.int32(0)).jaxpr
    (cond,), outside = conds(jaxpr)
    inside = [conds(branch.jaxpr)[1] for branch in cond.params["branches"]]
    # `cos` is the derivative of `sin`; a cond that was differentiated would be two.
    assert "cos" in inside[1]
    assert "cos" not in inside[0] | outside
    # No residual leaves the branch: numbers, and one gradient of the model's shape.
    assert sum(v.aval.shape != () for v in cond.outvars) == 1
