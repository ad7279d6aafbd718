"""The program of an ensemble: that of one member, mapped over all of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, final

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import PyTree

from trainer._guard import halting, METRIC, Nonfinite, Watchman
from trainer._metrics import Metric
from trainer._program import AbstractProgram
from trainer._state import TrainState
from trainer._tree import canonical, describe, is_eager, path_name
from trainer._types import Batch, Key, Model
from trainer._update import AbstractUpdate
from trainer.recompiles._differences import first_difference


def stacked(trees: list[PyTree]) -> PyTree:
    """Put the arrays of trees of one form behind one another, on a new first axis."""
    arrays, static = eqx.partition(trees[0], eqx.is_array)
    others = [eqx.filter(tree, eqx.is_array) for tree in trees[1:]]
    return eqx.combine(jtu.tree_map(lambda *x: jnp.stack(x), arrays, *others), static)


def taken(tree: PyTree, place: int) -> PyTree:
    """One member's part of a stacked tree."""
    return jtu.tree_map(lambda x: x[place] if eqx.is_array(x) else x, tree)


@final
class Members(AbstractProgram):
    """The programs of all members, which differ in values, as one.

    The step, the epoch and the batch are not mapped. So a choice that follows from the
    step is made once for all, and stays a choice: one by a mapped index would compute
    every branch.

    Attributes:
        make: From one member's values, by name, to its program.
        values: The values, with the members on the first axis.
        seeds: One a member, for a random key of its own, or None for the run's key.
        num: How many members there are.
        template: The first member's program. All have the same form.
        update: As the template's.
        names: As the template's.
        nonfinite: As the template's.
        in_fractions: As the template's.
        watches: As the template's.
    """

    make: Callable[..., Any]
    values: dict[str, PyTree]
    seeds: tuple[int, ...] | None = eqx.field(static=True)
    num: int = eqx.field(static=True)
    template: AbstractProgram
    update: AbstractUpdate
    names: tuple[str, ...]
    nonfinite: Nonfinite | None
    in_fractions: bool
    watches: tuple[str, ...]

    def __init__(
        self,
        make: Callable[..., Any],
        values: dict[str, PyTree],
        seeds: tuple[int, ...] | None,
        num: int,
        template: AbstractProgram,
    ):
        self.make, self.values, self.seeds, self.num = make, values, seeds, num
        self.template, self.update = template, template.update
        self.names = template.names
        self.nonfinite, self.watches = template.nonfinite, template.watches
        self.in_fractions = template.in_fractions

    def program_of(self, place: int) -> AbstractProgram:
        """The program of one member, as it would be alone."""
        return self.make(**taken(self.values, place)).program

    def member(self, state: TrainState, place: int) -> TrainState:
        """One member's state, as it would be alone."""
        keys = state.memory.keys
        own = taken(_own(state), place)
        alone = _with(state, own, key=state.key if keys is None else keys[place])
        memory = dataclasses.replace(alone.memory, keys=None)
        return dataclasses.replace(alone, memory=memory)

    def init(self, model: Model, model_state: Any, key: Key) -> TrainState:
        """Make each member's state as it would be alone, and stack them."""
        self.check_stacked(model, "model")
        self.check_stacked(model_state, "model_state")
        keys = None
        if self.seeds is not None:
            keys = jnp.stack([jr.key(seed) for seed in self.seeds])
        states = []
        for place in range(self.num):
            own = taken(model, place), taken(model_state, place)
            own_key = key if keys is None else keys[place]
            states.append(self.program_of(place).init(*own, own_key))
        for place, other in enumerate(states):
            difference = first_difference("state", states[0], other)
            if difference:
                raise ValueError(
                    f"Member {place} differs from the first in more than numbers: "
                    f"{difference}. Members of other forms are trained by Trainers of "
                    "their own."
                )
        state = _with(states[0], stacked([_own(s) for s in states]), key=key)
        memory = dataclasses.replace(state.memory, keys=keys)
        return canonical(dataclasses.replace(state, memory=memory))

    def completed(self, state: TrainState, in_fractions: bool) -> TrainState:
        """See `AbstractProgram.completed`."""
        if any(name not in state.extra for name in self.names):
            members = [self.member(state, place) for place in range(self.num)]
            found = [
                self.program_of(place).completed(alone, in_fractions).extra
                for place, alone in enumerate(members)
            ]
            state = dataclasses.replace(state, extra=stacked(found))
        return self.template.completed(state, in_fractions)

    def check_stacked(self, tree: PyTree, root: str) -> None:
        """Raise ValueError unless the first axis of each array counts the members."""
        for path, leaf in jtu.tree_leaves_with_path(tree):
            if eqx.is_array(leaf) and leaf.shape[:1] != (self.num,):
                raise ValueError(
                    f"`{path_name(root, path)}` is {describe(leaf)}, and each array of "
                    f"an ensemble of {self.num} has a first axis of {self.num}. Make "
                    "all members at once: `eqx.filter_vmap(make_model)(keys)`."
                )

    def check_state(self, state: TrainState) -> None:
        """Raise ValueError if a state was made by another program."""
        if (state.memory.keys is None) != (self.seeds is None):
            has = "no keys" if state.memory.keys is None else "keys"
            raise ValueError(
                f"The state has {has} of members' own, other than this ensemble. Go on "
                "with the ensemble that made it, or start anew from its model: "
                "`fit(state.model, ...)`."
            )
        for name in ("model", "opt_state"):
            self.check_stacked(getattr(state, name), name)
        self.template.check_state(self.member(state, 0))

    def step(
        self, state: TrainState, batch: Batch, mask: Any, epoch: Any, source: PyTree
    ) -> tuple[TrainState, dict[str, Metric]]:
        """Make one step of every member; see `AbstractProgram.step`."""
        keys = state.memory.keys

        def one(own: PyTree, key: Key, values: dict[str, PyTree]) -> Any:
            program = self.make(**values).program
            if self.nonfinite == "raise":
                # All stand still at the first member that fails: see below.
                program = eqx.tree_at(lambda p: p.nonfinite, program, "skip")
            alone = _with(state, own, key=key)
            memory = dataclasses.replace(alone.memory, keys=None, halted=None)
            alone = dataclasses.replace(alone, memory=memory)
            new, metrics = program.step(alone, batch, mask, epoch, None)
            return _own(new), metrics

        mapped = eqx.if_array(0)
        axes = (mapped, None if keys is None else 0, mapped)
        key = state.key if keys is None else keys
        alike = eqx.filter_vmap(one, in_axes=axes, axis_size=self.num)
        if is_eager(state.step):
            alike = functools.partial(_one_by_one, one, axes, self.num)
        own, metrics = alike(_own(state), key, self.values)
        new = _with(state, own, step=state.step + 1, epoch=epoch, source=source)
        if self.nonfinite == "raise" and METRIC in metrics:
            new = halting(jnp.all(metrics[METRIC].value == 0), new, state)
        return new, metrics

    def evaluated(self, state: TrainState, using: str) -> Model:
        """The stacked models that are evaluated in the place of those trained."""
        members = [self.member(state, place) for place in range(self.num)]
        return stacked(
            [self.program_of(p).evaluated(m, using) for p, m in enumerate(members)]
        )

    def branches(self) -> dict[str, tuple[str, ...]]:
        """Names of the branches, of all and of each member."""
        found = self.update.branches()
        own = {f"{place}/{m}": n for place in range(self.num) for m, n in found.items()}
        return {**found, **own}

    def watchman(self, state: TrainState) -> Watchman:
        """Make what looks at the metrics of each member."""
        prefixes = tuple(f"{place}/" for place in range(self.num))
        alone, losses = self.member(state, 0), self.update.losses()
        return Watchman(self.nonfinite, alone, losses, self.branches(), prefixes)


def _one_by_one(one: Callable[..., Any], axes: Any, num: int, *given: Any) -> Any:
    """What `filter_vmap` does, one member after the other, each with its own values."""
    found = []
    for place in range(num):
        pairs = zip(given, axes, strict=True)
        found.append(one(*(x if a is None else taken(x, place) for x, a in pairs)))
    names = dict.fromkeys(name for _, metrics in found for name in metrics)
    metrics = {name: _together([m.get(name) for _, m in found]) for name in names}
    return stacked([own for own, _ in found]), metrics


def _together(metrics: list[Metric | None]) -> Metric:
    """One metric of all members, absent where a member has not reported it."""
    like = next(m.value for m in metrics if m is not None)
    each = [Metric(jnp.zeros_like(like), False) if m is None else m for m in metrics]
    present = [m.present for m in each]
    certain = all(p is True for p in present)
    return Metric(
        jnp.stack([m.value for m in each]),
        True if certain else jnp.stack([jnp.asarray(p) for p in present]),
    )


def _own(state: TrainState) -> tuple[PyTree, ...]:
    """What each member has for itself."""
    return (
        state.model,
        state.model_state,
        state.opt_state,
        state.extra,
        state.memory.program,
    )


def _with(state: TrainState, own: tuple[PyTree, ...], **changed: Any) -> TrainState:
    """The state with other members, or another one, in it."""
    model, model_state, opt_state, extra, program = own
    return dataclasses.replace(
        state,
        model=model,
        model_state=model_state,
        opt_state=opt_state,
        extra=extra,
        memory=dataclasses.replace(state.memory, program=program),
        **changed,
    )
