"""Random programs: a Trainer computes what a loop in plain Python does."""

import warnings
from typing import Any, NamedTuple

import numpy as np
import plain_loop as plain
import pytest
from helpers import flat
from hypothesis import given, Phase, settings, strategies as st
from plain_loop import Add, Annealed, Leaf, Min, NAMES, OPTIMIZERS, Pick, Piece, Ramp

import trainer as tr


STEPS = 13
BATCHES = np.random.default_rng(7).normal(size=(4, 5, 2)).astype(np.float32)


class Several(NamedTuple):
    """A `tr.SwitchUpdate` if it has turns, else a `tr.JointUpdate`."""

    turns: Any
    by: str
    order: str
    parts: dict[str, Any]

    def build(self):
        built = {n: part and part.build() for n, part in self.parts.items()}
        if self.turns is None:
            return tr.JointUpdate(built, order=self.order)
        return tr.SwitchUpdate(self.turns.build(), built, by=self.by)

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
    update: Any
    debias: bool
    decay: float
    average_every: int
    target: dict[str, Any] | None
    skip: bool
    bad: int | None
    steps_per_call: int
    cut: int

    def batches(self):
        batches = BATCHES.copy()
        if self.skip and self.bad is not None:
            batches[self.bad, 2] = np.nan
        return batches

    def build(self):
        average = {"debias": self.debias, "every": self.average_every}
        transforms: dict[str, Any] = {}
        if self.target:
            follow = tr.Target(lambda m: m.a, lambda m: m.t, **self.target)
            transforms["follow"] = follow
        transforms["ema"] = tr.EMA(self.decay, **average)
        return tr.Trainer(
            update=self.update.build(),
            transforms=transforms,
            nonfinite="skip" if self.skip else None,
            steps_per_call=self.steps_per_call,
        )


def run_plainly(program, history):
    """Parameters, optimizer state, average, and what each step reports."""
    p, rows, had = plain.first_params(), [], {}
    state = program.update.init(p)
    share = 0.0 if program.debias else 1.0
    average = {n: share * v for n, v in p.items()}
    for step in range(STEPS):
        total = program.cut if step < program.cut else STEPS
        drawn, recorded = dict(had), {n: values[step] for n, values in history.items()}
        now = plain.Now(step, step // 4, total, recorded, drawn)
        x = program.batches()[step % 4]
        new, new_state, metrics = program.update.interpret(p, state, x, now)
        rows.append(metrics)
        losses = [v for n, v in metrics.items() if n.split("/")[-1] == "loss"]
        if program.skip:
            metrics["nonfinite"] = not np.isfinite(losses).all()
            if metrics["nonfinite"]:
                continue
        p, state, had = plain.followed(program.target, new, step + 1), new_state, drawn
        if (step + 1) % program.average_every == 0:
            decay = program.decay
            share = decay * share + 1 - decay
            average = {n: decay * average[n] + (1 - decay) * p[n] for n in NAMES}
    return p, state, {n: average[n] / share for n in NAMES} if share else p, rows


units = st.sampled_from(["step", "epoch"])
leaves = st.builds(
    Leaf,
    st.sampled_from(["fit", "fit", "size", "chase"]),
    st.sampled_from([0.5, 1.0]),
    st.booleans(),
)
numbers = st.sampled_from([1.0, 0.25, 0.0, -0.5])
ends = st.sampled_from([0.0, 0.25, 1.0])
overs = st.integers(4, 12) | st.sampled_from([0.3, 0.77])
anneals = st.builds(
    Annealed, ends, ends, overs, st.integers(1, 3), st.sampled_from([1.0, 0.5])
)
schedules = st.builds(Ramp, st.integers(0, 5), st.booleans())


@st.composite
def turns(draw, num, kinds=("every", "cycle", "at", "fractions", "mixed", "random")):
    """A selector for so many branches, and what it counts."""
    kind = draw(st.sampled_from(kinds))
    if kind == "every":
        return plain.Turns(kind, draw(st.integers(1, 4)), num), draw(units)
    if kind == "cycle":
        return plain.Turns(kind, draw(st.permutations([1, 2, 3, 1]))[:num], num), draw(
            units
        )
    if kind == "random":
        return plain.Turns(kind, draw(st.permutations([1, 3, 2, 1]))[:num], num), "step"
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
    if not makers:
        return leaves
    return makers[0](leaves | nested(*makers[1:]))


pairs = st.one_of(leaves, nested(picks), nested(adds))
losses = st.one_of(pairs, nested(picks, adds, picks), nested(adds, picks, adds))
optimizers = st.sampled_from(list(OPTIMIZERS))
micros = st.integers(1, 3)
splits = st.sampled_from([[("a",), ("b", "c")], [("a", "c"), ("b",)], ["a", "b", "c"]])
times = st.sampled_from(
    [
        (0, None, "step"),
        (3, None, "step"),
        (0, 7, "step"),
        (1, 2, "epoch"),
        (0.25, None, "step"),
        (0.3, 0.7, "step"),
        (0, 0.5, "step"),
    ]
)


@st.composite
def pieces(draw):
    owners = [tuple(owned) for owned in draw(splits)]
    made = [Piece(draw(optimizers), owned, *draw(times)) for owned in owners]
    return {f"p{n}": piece for n, piece in enumerate(made)}


wholes = st.builds(Min, losses, optimizers, st.none() | st.just(("a", "c")), micros)
split = st.builds(Min, losses, pieces(), st.none(), micros)


@st.composite
def switches(draw, owned=None):
    """Updates that take turns; one of the places may be empty."""
    owners = [tuple(o) for o in draw(splits)] if owned is None else [owned]
    parts = [
        draw(st.builds(Min, pairs, optimizers, st.just(o), micros)) for o in owners
    ]
    if owned or draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), None)
    chosen, by = draw(turns(len(parts)))
    if chosen.kind == "at" and owned is None:  # these may own the same
        places = [n for n, part in enumerate(parts) if part]
        parts[places[0]] = draw(split)
        parts[places[1]] = draw(wholes)
    named = {f"u{n}": part for n, part in enumerate(parts)}
    return Several(chosen, by, "sequential", named)


@st.composite
def joints(draw):
    first, *rest = (tuple(o) for o in draw(splits))
    parts = [draw(st.builds(Min, pairs, optimizers, st.just(o), micros)) for o in rest]
    parts.insert(0, draw(switches(owned=first)))
    named = {f"j{n}": part for n, part in enumerate(parts)}
    return Several(
        None, "", draw(st.sampled_from(["simultaneous", "sequential"])), named
    )


targets = st.sampled_from([None, {"every": 3}, {"tau": 0.25}, {"tau": 0.5, "every": 2}])
programs = st.builds(
    Program,
    update=st.one_of(wholes, split, switches(), joints()),
    debias=st.booleans(),
    decay=st.sampled_from([0.5, 0.9]),
    average_every=st.integers(1, 3),
    target=targets,
    skip=st.booleans(),
    bad=st.none() | st.integers(0, 3),
    steps_per_call=st.sampled_from([1, 3, 7]),
    cut=st.integers(0, STEPS - 1),
)


def fit(program, trainer, callbacks=()):
    """Train, stopping once on the way; the last result and the whole history."""
    state, history = plain.Model(**plain.first_params()), None
    for num_steps in filter(None, [program.cut, STEPS]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says which steps were left out
            options = {"callbacks": callbacks, "progress": False}
            batches = list(program.batches())
            result = trainer.fit(state, batches, num_steps=num_steps, **options)
        state = result.state
        history = history + result.history if history else result.history
    return result, history


def check_metrics(history, rows):
    assert set().union(*rows) <= set(history)
    for name in history:
        values = history[name]
        assert len(values) == len(rows)
        present = ~np.ma.getmaskarray(values)
        assert present.tolist() == [name in row for row in rows], name
        found = np.asarray(values)[present].astype(float)
        if name == "nonfinite":
            found = found > 0
        expected = [float(row[name]) for row in rows if name in row]
        np.testing.assert_allclose(found, expected, 1e-5, 1e-5, err_msg=name)


def check(program):
    trainer = program.build()
    result, history = fit(program, trainer)
    p, state, average, rows = run_plainly(program, history)
    check_metrics(history, rows)
    model = trainer.evaluated_model(result.state, "ema")
    for found, expected in (
        (result.model, plain.only(p, None)),
        (result.state.opt_state, state),
        (model, plain.only(average, None)),
    ):
        np.testing.assert_allclose(flat(found), flat(expected), 1e-5, 1e-5)
    assert result.compiles == 1
    skipped = sum(row.get("nonfinite", False) for row in rows[program.cut :])
    assert (result.nonfinite.count if result.nonfinite else 0) == skipped


# Every example is compiled, so that looking for a smaller one would take minutes.
@settings(max_examples=25, phases=[Phase.explicit, Phase.generate])
@given(program=programs)
def test_a_program_trains_as_a_plain_loop_does(program):
    check(program)


@pytest.mark.slow
@settings(max_examples=200)
@given(program=programs)
def test_many_programs_train_as_plain_loops_do(program):
    check(program)
