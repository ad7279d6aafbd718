"""What is behind `Trainer.check`: a program looked at on a model and a first batch."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from trainer._losses import Given
from trainer._members import Members
from trainer._program import AbstractProgram, Program
from trainer._state import TrainState
from trainer._step import CompiledStep
from trainer._steps import Steps
from trainer._tree import describe, parameters, path_name
from trainer.data import AbstractSource, Chunk, Layout, Loader, Wanted
from trainer.mistakes._user_code import defined_at, name_of
from trainer.preflight._faults import faults_after, faults_in, nonfinite, zero_gradients
from trainer.preflight._first_look import FirstLook, look, run_once, Seen
from trainer.preflight._pieces import in_words, Leaf, Pieces
from trainer.preflight._preflight import Column, Loss, Owned, Part, Preflight
from trainer.preflight._undisturbed import undisturbed


_MOST_PARTS = 16
# What Python hides unless it is asked for.
_HIDDEN = (
    DeprecationWarning | PendingDeprecationWarning | ImportWarning | ResourceWarning
)
_GUARD = {
    None: "None: such steps are made, and a warning comes at the end",
    "skip": "'skip': such steps are left out",
    "raise": "'raise': such a step ends the run",
}


def check_again(source: AbstractSource) -> AbstractSource:
    """Raise TypeError if a batch that is read is gone; return the source."""
    if isinstance(source, Loader) and source.is_used_up:
        raise TypeError(
            "The data is an iterator, and `check` would take a batch of it that `fit` "
            "then lacks. Give a list, a loader, or a function that makes an iterator: "
            "`lambda: batches()`."
        )
    return source


def preflight(
    program: AbstractProgram,
    new_state: Callable[[], TrainState],
    source: AbstractSource,
    steps_per_call: int | Literal["auto"],
    steps: Steps | None,
) -> Preflight:
    """Look at a program before it runs; see `Trainer.check`.

    Args:
        program: What a step does.
        new_state: Makes the state that it would begin with, of arrays of its own.
        source: The data.
        steps_per_call: As given to the Trainer.
        steps: The steps that the Trainer has compiled, or None. They are left alone.
    """
    with warnings.catch_warnings(record=True) as told, jax.disable_jit(False):
        warnings.simplefilter("always")
        state = new_state()
        content, epoch = _first_content(program, source, state)
        compiles, faults = _compiles(steps, state, source, content)
        compiled = CompiledStep(program, state, source, content, steps_per_call, None)
        alone, one = program, state
        if isinstance(program, Members):
            alone, one = program.program_of(0), program.member(state, 0)
        pieces = _pieces(alone, one, epoch)
        seen = look(pieces.leaves, one, source, content)
        owners, parts = _owners(pieces, one), _parts_of(one.model)
        model, rest = _model(alone, one, seen, parts)
        watchman, first = program.watchman(state), int(state.step)
        # The state's memory goes to the step.
        rows, after = run_once(compiled, state, source, content, epoch)
        watchman.look(first, rows)
        faults += faults_in(seen, pieces.leaves)
        faults += [] if faults else faults_after(watchman.found, after)
    texts = [str(w.message) for w in told if not issubclass(w.category, _HIDDEN)]
    return Preflight(
        choices=pieces.choices,
        weights={
            name: weight._replace(value=_number(rows, name, weight.value))
            for name, weight in pieces.weights.items()
        },
        owners=owners,
        settings=_settings(alone),
        members=program.num if isinstance(program, Members) else None,
        batch={path: _column(one) for path, one in seen.batch.items()},
        num_examples=seen.num_examples,
        masked=seen.masked,
        parameters=model,
        not_trained=rest,
        losses=_losses(seen, pieces.leaves, parts),
        metrics={n: v[0].item() for n, v in rows.items() if v[0] is not np.ma.masked},
        zero_gradients=tuple(zero_gradients(seen)),
        nonfinite=tuple(nonfinite(seen)),
        compile_report=compiled.report,
        compiles=compiles,
        warnings=tuple(dict.fromkeys([*faults, *texts])),
    )


def _first_content(
    program: AbstractProgram, source: AbstractSource, state: TrainState
) -> tuple[PyTree, int]:
    """What the host would hand to the first step, and its epoch.

    A loader is read from its beginning, also for a state that is further on.
    """
    asked = program.update.takes("mask")
    start = 0 if isinstance(source, Loader) else int(state.step)
    wanted = Wanted(start, None, state.key, any(asked), all(asked), None, True)
    with undisturbed(source):
        feed = source.feed(wanted)
        layout = Layout(feed.content, 1)
        chunk = Chunk(layout)
        feed.fill(chunk, 1)
        del feed  # what it has opened is closed here
    content = jtu.tree_unflatten(layout.treedef, chunk.leaves())
    return content, max(chunk.epochs[0], int(state.epoch))


def _compiles(
    steps: Steps | None, state: TrainState, source: AbstractSource, content: PyTree
) -> tuple[int, list[str]]:
    """How often a fit has to compile, and why it may not."""
    step = None if steps is None else steps.current
    if steps is None or step is None:
        return 1, []
    changed = step.baked.changed()
    if changed:
        return 1, [f"{changed} since the step was compiled. Make a new Trainer."]
    mismatch = step.mismatch(state, source) or step.refusal(content)
    if mismatch is None:
        return 0, []
    return 1, [mismatch] if steps.on_recompile == "error" else []


def _pieces(program: AbstractProgram, state: TrainState, epoch: int) -> Pieces:
    given = Given(
        step=state.step,
        epoch=jnp.int32(epoch),
        key=jr.fold_in(state.key, state.step),
        state=state.model_state,
        memory=state.memory.program,
        reports=state.memory.reports,
        num_steps=state.memory.num_steps,
    )
    return Pieces(program.update, state.model, state.opt_state, given)


def _owners(pieces: Pieces, state: TrainState) -> dict[str, Owned]:
    found = {}
    for name, owner in pieces.owners.items():
        mine = jtu.tree_leaves_with_path(eqx.filter(state.model, owner.spec))
        paths = tuple(path_name("model", path) for path, _ in mine)
        size = sum(np.size(leaf) for _, leaf in mine)
        found[name] = Owned(owner.optimizer, owner.acts, paths, size)
    return found


def _parts_of(model: PyTree) -> dict[str, str]:
    """The part of the model that each of its floating arrays is counted to, by path.

    That is a field of the model; or one entry of it, where it is a list of a few, or
    the only field that has parameters.
    """
    paths = [path for path, _ in jtu.tree_leaves_with_path(parameters(model))]
    fields = {path[:1] for path in paths}
    entries = {
        field: {path[:2] for path in paths if path[:1] == field} for field in fields
    }

    def part(path: tuple[Any, ...]) -> str:
        is_list = len(path) > 1 and isinstance(path[1], jtu.SequenceKey)
        few = len(entries[path[:1]]) <= _MOST_PARTS
        is_split = few and (is_list or len(fields) == 1)
        return path_name("model", path[: 2 if is_split else 1])

    return {path_name("model", path): part(path) for path in paths}


def _model(
    program: AbstractProgram,
    state: TrainState,
    seen: FirstLook,
    parts: Mapping[str, str],
) -> tuple[dict[str, Part], dict[str, str]]:
    """The floating arrays by part of the model, and everything else in it."""
    owned = jtu.tree_leaves(program.update.owned(state.model))
    leaves = jtu.tree_leaves_with_path(state.model)
    found: dict[str, list[tuple[Seen, Any, bool]]] = {}
    rest = {}
    for (path, leaf), is_owned in zip(leaves, owned, strict=True):
        name = path_name("model", path)
        if name in parts:
            group = found.setdefault(parts[name], [])
            group.append((seen.model[name], leaf, bool(is_owned)))
        elif type(leaf) is not object:  # a mark without a meaning of its own
            rest[name] = name_of(leaf) if callable(leaf) else describe(leaf)
    return {name: _part(group) for name, group in found.items()}, rest


def _part(group: list[tuple[Seen, Any, bool]]) -> Part:
    return Part(
        arrays=len(group),
        parameters=sum(one.size for one, _, _ in group),
        trained=sum(one.size for one, _, is_owned in group if is_owned),
        nbytes=sum(leaf.nbytes for _, leaf, _ in group),
        dtypes=tuple(dict.fromkeys(str(leaf.dtype) for _, leaf, _ in group)),
        norm=math.sqrt(sum(one.squares for one, _, _ in group)),
    )


def _column(one: Seen) -> Column:
    return Column(one.form, one.least, one.most, one.bad)


def _losses(
    seen: FirstLook, leaves: Mapping[str, Leaf], parts: Mapping[str, str]
) -> dict[str, Loss]:
    found = {}
    for name, loss in seen.losses.items():
        squares: dict[str, float] = {}
        for path, one in loss.gradient.items():
            squares[parts[path]] = squares.get(parts[path], 0.0) + one.squares
        found[name] = Loss(
            value=loss.value,
            metrics=loss.metrics,
            gradient={part: math.sqrt(total) for part, total in squares.items()},
            norm=math.sqrt(sum(squares.values())),
            active=leaves[name].active,
            place=defined_at(leaves[name].loss).removeprefix(" at "),
        )
    return found


def _settings(program: AbstractProgram) -> dict[str, str]:
    """What else the Trainer was given, in words."""
    found = {}
    if isinstance(program, Program):
        pairs = zip(program.names, program.transforms, strict=True)
        found |= {f"transform {name}": in_words(one) for name, one in pairs}
    if program.watches:
        found["waits for"] = f"{', '.join(program.watches)} from a callback"
    return {**found, "nonfinite": _GUARD[program.nonfinite]}


def _number(rows: Mapping[str, Any], name: str, otherwise: float) -> float:
    """A number that the first step reports, or another one if it does not."""
    if name not in rows or rows[name][0] is np.ma.masked:
        return otherwise
    return float(rows[name][0])
