"""Random programs: a Trainer computes what a loop in plain Python does."""

import warnings
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import plain_loop as plain
import pytest
from helpers import flat
from hypothesis import given, Phase, settings, strategies as st
from plain_loop import Add, Annealed, Leaf, Min, NAMES, OPTIMIZERS, Pick, Piece, Ramp

import trainer as tr


STEPS = 13


class Several(NamedTuple):
    """A `tr.SwitchUpdate` if it has turns, else a `tr.JointUpdate`."""

    turns: Any
    by: str
    order: str
    parts: dict[str, Any]

    def build(self):
        built = {n: part and part.build() for n, part in self.parts.items()}
        if not self.turns:
            return tr.JointUpdate(built, order=self.order)
        return tr.SwitchUpdate(self.turns.build(), built, by=self.by, overlap=True)

    def init(self, p):
        return {n: part.init(p) for n, part in self.parts.items() if part}

    def interpret(self, p, state, x, now):
        state, metrics, parts, old = dict(state), {}, self.parts, p
        if self.turns:
            index, now = self.turns.pick(self.by, now)
            parts, metrics = dict([list(parts.items())[index]]), {"branch": index}
        for name, part in parts.items():
            if part is None:
                continue
            seen = old if self.order == "simultaneous" else p
            new, state[name], found = part.interpret(
                seen, state[name], x, now.below(name)
            )
            p = p | {n: v for n, v in new.items() if v is not seen[n]}
            metrics |= {f"{name}/{key}": v for key, v in found.items()}
            if self.turns and "loss" in found:
                metrics["loss"] = found["loss"]
        return p, state, metrics


class Program(NamedTuple):
    """A Trainer, the batch that is `bad`, and the step at which a first fit ends."""

    update: Any
    debias: bool
    decay: float
    every: int
    target: dict[str, Any] | None
    skip: bool
    bad: int | None
    steps_per_call: int
    cut: int

    def batches(self):
        batches = plain.BATCHES.copy()
        if self.skip and self.bad is not None:
            batches[self.bad, 2] = np.nan
        return list(batches)

    def build(self):
        transforms: dict[str, Any] = {}
        if self.target:
            follow = tr.Target(lambda m: m.a, lambda m: m.t, **self.target)
            transforms["follow"] = follow
        transforms["ema"] = tr.EMA(self.decay, debias=self.debias, every=self.every)
        more = {"steps_per_call": self.steps_per_call, "transforms": transforms}
        skip = "skip" if self.skip else None
        return tr.Trainer(update=self.update.build(), nonfinite=skip, **more)


def run_plainly(program, history):
    """Parameters and optimizer state after each step; average; what steps report."""
    p, rows, had, trail, decay = plain.first_params(), [], {}, [], program.decay
    state = program.update.init(p)
    share = 0.0 if program.debias else 1.0
    average = {n: share * v for n, v in p.items()}
    for step in range(STEPS):
        total = program.cut if step < program.cut else STEPS
        drawn, recorded = dict(had), {n: values[step] for n, values in history.items()}
        now = plain.Now(step, step // 4, total, recorded, drawn)
        x = program.batches()[step % 4]
        new, after, metrics = program.update.interpret(p, state, x, now)
        rows.append(metrics)
        losses = [v for n, v in metrics.items() if n.split("/")[-1] == "loss"]
        if program.skip:
            metrics["nonfinite"] = not np.isfinite(losses).all()
        good = not metrics.get("nonfinite")
        p, state, had = (new, after, drawn) if good else (p, state, had)
        p = plain.followed(program.target, p, step + 1)
        if good and (step + 1) % program.every == 0:
            share = decay * share + 1 - decay
            average = {n: decay * average[n] + (1 - decay) * p[n] for n in NAMES}
        trail.append((plain.only(p, None), state))
    return trail, {n: average[n] / share for n in NAMES} if share else p, rows


units = st.sampled_from(["step", "epoch"])
sorts = st.sampled_from(["fit", "fit", "size", "chase"])
leaves = st.builds(Leaf, sorts, st.sampled_from([0.5, 1.0]), st.booleans())
numbers = st.sampled_from([1.0, 0.25, 0.0, -0.5])
ends = st.sampled_from([0.0, 0.25, 1.0])
overs = st.integers(4, 12) | st.sampled_from([0.3, 0.77])
ramps = st.sampled_from([1.0, 0.5])
anneals = st.builds(Annealed, ends, ends, overs, st.integers(1, 3), ramps)
schedules = st.builds(Ramp, st.integers(0, 5), st.booleans())


kinds = st.sampled_from(["every", "cycle", "at", "fractions", "mixed", "random"])


@st.composite
def turns(draw, num):
    """A selector for so many branches, and what it counts."""
    kind, counts = draw(kinds), draw(st.permutations([1, 3, 2, 1]))
    if kind == "every":
        return plain.Turns(kind, counts[0], num), draw(units)
    if kind in ("cycle", "random"):
        by = "step" if kind == "random" else draw(units)
        return plain.Turns(kind, counts[:num], num), by
    at = sorted(draw(st.permutations(range(1, 9)))[: num - 1])
    if kind == "at":
        return plain.Turns("at", at, num), draw(units)
    shares = [0.05, 0.3, 0.7] if draw(st.booleans()) else [0.5, 0.6, 0.9]
    at = shares if kind == "fractions" else [*at[:1], *shares]
    return plain.Turns("at", at[: num - 1], num), "step"


@st.composite
def picks(draw, parts):
    chosen = draw(st.lists(parts, min_size=2, max_size=3))
    return Pick(*draw(turns(len(chosen))), chosen)


@st.composite
def adds(draw, parts):
    by = draw(units)
    weights = numbers | schedules | anneals
    if by == "epoch":  # fractions are of the steps
        weights = weights.filter(lambda w: not isinstance(getattr(w, "over", 0), float))
    terms = st.tuples(weights, parts)
    return Add(by, draw(st.lists(terms, min_size=2, max_size=3)))


def nested(*makers):
    """Losses composed to the depth of the makers, the outermost first."""
    return makers[0](leaves | nested(*makers[1:])) if makers else leaves


pairs = st.one_of(leaves, nested(picks), nested(adds))
losses = st.one_of(pairs, nested(picks, adds, picks), nested(adds, picks, adds))
optimizers = st.sampled_from(list(OPTIMIZERS))
micros = st.integers(1, 3)
splits = st.sampled_from([[("a",), ("b", "c")], [("a", "c"), ("b",)], ["a", "b", "c"]])
steps = st.sampled_from([(0, None), (3, None), (0, 7), (0.25, None), (0.3, 0.7)])
times = steps.map(lambda t: (*t, "step")) | st.just((1, 2, "epoch"))


@st.composite
def pieces(draw):
    owners = [tuple(owned) for owned in draw(splits)]
    made = [Piece(draw(optimizers), owned, *draw(times)) for owned in owners]
    return {f"p{n}": piece for n, piece in enumerate(made)}


wholes = st.builds(Min, losses, optimizers, st.none() | st.just(("a", "c")), micros)
minimize = lambda owned: st.builds(Min, pairs, optimizers, st.just(owned), micros)
split = st.builds(Min, losses, pieces(), st.just(()), micros)


@st.composite
def switches(draw, owned=None):
    """Updates that take turns; one of the places may be empty."""
    owners = [tuple(o) for o in draw(splits)] if owned is None else [owned]
    parts = [draw(minimize(o)) for o in owners]
    if owned or draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), None)
    chosen, by = draw(turns(len(parts)))
    if owned is None and draw(st.booleans()):  # these own the same
        places = [n for n, part in enumerate(parts) if part]
        parts[places[0]] = draw(split)
        parts[places[1]] = draw(minimize(("a", "b", "c")))
    named = {f"u{n}": part for n, part in enumerate(parts)}
    return Several(chosen, by, "sequential", named)


@st.composite
def joints(draw):
    first, *rest = (tuple(o) for o in draw(splits))
    parts = [draw(minimize(o)) for o in rest]
    parts.insert(0, draw(switches(owned=first)))
    named = {f"j{n}": part for n, part in enumerate(parts)}
    order = draw(st.sampled_from(["simultaneous", "sequential"]))
    return Several(None, "", order, named)


programs = st.builds(
    Program,
    st.one_of(wholes, split, switches(), joints()),
    st.booleans(),
    st.sampled_from([0.5, 0.9]),
    st.integers(1, 3),
    st.sampled_from([None, {"every": 3}, {"tau": 0.25}, {"tau": 0.5, "every": 2}]),
    st.booleans(),
    st.none() | st.integers(0, 3),
    st.sampled_from([1, 3, 7]),
    st.integers(0, STEPS - 1),
).filter(lambda p: not (p.target and getattr(p.update, "owned", ()) is None))


def fit(program, trainer, callbacks=()):
    """Train, stopping once on the way; the last result and the whole history."""
    state: Any = plain.Model(**plain.first_params())
    history: Any = None
    result: Any = None
    for num_steps in filter(None, [program.cut, STEPS]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says which steps were left out
            more = {"callbacks": callbacks, "progress": False}
            result = trainer.fit(state, program.batches(), num_steps=num_steps, **more)
        state = result.state
        history = history + result.history if history else result.history
    return result, history


def check_metrics(history, rows):
    assert set().union(*rows) <= set(history)
    for name in history:
        present = ~np.ma.getmaskarray(history[name])
        assert present.tolist() == [name in row for row in rows], name
        found = np.asarray(history[name])[present].astype(float)
        if name == "nonfinite":
            found = found > 0
        expected = [float(row[name]) for row in rows if name in row]
        np.testing.assert_allclose(found, expected, 1e-5, 1e-5, err_msg=name)


def check(program):
    trainer = program.build()
    result, history = fit(program, trainer)
    trail, average, rows = run_plainly(program, history)
    check_metrics(history, rows)
    model = trainer.evaluated_model(result.state, "ema")
    for found, expected in (
        ((result.model, result.state.opt_state), trail[-1]),
        (model, plain.only(average, None)),
    ):
        np.testing.assert_allclose(flat(found), flat(expected), 1e-5, 1e-5)
    assert result.compiles == 1
    bad = sum(row.get("nonfinite", False) for row in rows[program.cut :])
    assert getattr(result.nonfinite, "count", 0) == bad


# Every example is compiled, so that looking for a smaller one would take minutes.
@settings(max_examples=12, phases=[Phase.explicit, Phase.generate])
@given(program=programs)
def test_a_program_trains_as_a_plain_loop_does(program):
    check(program)


@pytest.mark.slow
@settings(max_examples=25)
@given(program=programs)
def test_many_programs_train_as_plain_loops_do(program):
    check(program)


class Keep(tr.AbstractCallback):
    every, states = 1, []

    def __call__(self, info):
        self.states.append((info.state.model, info.state.opt_state))


@pytest.mark.slow
@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
@given(program=programs.filter(lambda program: not isinstance(program.update, Min)))
def test_what_rests_does_not_change_by_a_bit(program):
    Keep.states.clear()
    _, history = fit(program, program.build(), [Keep()])
    trail, *_ = run_plainly(program, history)
    assert len(trail) == len(Keep.states)
    for two, ours in zip(pairwise(trail), pairwise(Keep.states), strict=True):
        rests = np.equal(*map(flat, two))
        before, after = map(flat, ours)
        np.testing.assert_array_equal(after[rests], before[rests])
