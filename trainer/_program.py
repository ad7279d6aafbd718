"""A Trainer's program: its update, its transforms, and how they make one step."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, final

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import PyTree

from trainer._counts import asks_num_steps, INT32_MAX
from trainer._guard import (
    bad_code,
    halting,
    METRIC,
    Nonfinite,
    Watchman,
    without_update,
)
from trainer._history import unknown
from trainer._losses import Given
from trainer._memory import Memory, salted
from trainer._metrics import Metric
from trainer._precision import choose
from trainer._selectors import AbstractSelector, Report
from trainer._state import TrainState
from trainer._transforms import AbstractTransform
from trainer._tree import canonical, describe, modules_in
from trainer._types import Batch, Key, Model
from trainer._update import AbstractOwnUpdate, AbstractUpdate
from trainer.mistakes._trace_errors import explain_trace
from trainer.recompiles._differences import first_difference


OPTIMIZER = "optimizer"


class AbstractProgram(eqx.Module):
    """Everything that happens in the compiled step.

    Attributes:
        update: From the model and a batch to the next model.
        names: Names of the transforms.
        nonfinite: What is done about a step that is not finite.
        in_fractions: Whether anything in it is given in fractions of the run.
        watches: Names of the metrics from callbacks that a selector looks at.
    """

    update: eqx.AbstractVar[AbstractUpdate]
    names: eqx.AbstractVar[tuple[str, ...]]
    nonfinite: eqx.AbstractVar[Nonfinite | None]
    in_fractions: eqx.AbstractVar[bool]
    watches: eqx.AbstractVar[tuple[str, ...]]

    @abc.abstractmethod
    def init(self, model: Model, model_state: Any, key: Key) -> TrainState:
        """Make the state before the first step, of new arrays."""

    @abc.abstractmethod
    def completed(self, state: TrainState, in_fractions: bool) -> TrainState:
        """The state with all that this program keeps beside model and optimizer."""

    @abc.abstractmethod
    def check_state(self, state: TrainState) -> None:
        """Raise ValueError if a state was made by another program."""

    @abc.abstractmethod
    def step(
        self, state: TrainState, batch: Batch, mask: Any, epoch: Any, source: PyTree
    ) -> tuple[TrainState, dict[str, Metric]]:
        """Make one step. Traced.

        Args:
            state: The state before it.
            batch: What the losses are given.
            mask: As `Given.mask`.
            epoch: The epoch that the batch begins in.
            source: What the sampler carries on to the next step.
        """

    @abc.abstractmethod
    def evaluated(self, state: TrainState, using: str) -> Model:
        """The model that a transform, or the optimizer, puts in the model's place."""

    def branches(self) -> dict[str, tuple[str, ...]]:
        """For every metric that is a branch's index: the names of the branches."""
        return self.update.branches()

    def watchman(self, state: TrainState) -> Watchman:
        """Make what looks for steps that are not finite, among metrics on the host."""
        return Watchman(self.nonfinite, state, self.update.losses(), self.branches())


@final
class Program(AbstractProgram):
    """The step of one Trainer; see `AbstractProgram`.

    Attributes:
        update: From the model and a batch to the next model.
        names: Names of the transforms.
        transforms: What is done to the model after the update, in order.
        nonfinite: What is done about a step that is not finite.
        in_fractions: Whether anything in it is given in fractions of the run.
        watches: Names of the metrics from callbacks that a selector looks at.
    """

    update: AbstractUpdate
    names: tuple[str, ...]
    transforms: tuple[AbstractTransform, ...]
    nonfinite: Nonfinite | None
    in_fractions: bool
    watches: tuple[str, ...]

    def __init__(self, update: AbstractUpdate, transforms: Any, nonfinite: Any):
        self.update, self.nonfinite = update, nonfinite
        transforms = {} if transforms is None else transforms
        if not isinstance(transforms, Mapping):
            raise TypeError(
                f"`transforms` is `{describe(transforms)}`. Give a dict that names "
                "them, as in `transforms={'ema': tr.EMA(0.999)}`."
            )
        for name, transform in transforms.items():
            if not isinstance(transform, AbstractTransform):
                raise TypeError(
                    f"Transform `{name}` is `{describe(transform)}`. Use `tr.EMA`, "
                    "`tr.Target` or another subclass of `tr.AbstractTransform`."
                )
        if OPTIMIZER in transforms:
            raise ValueError(
                f"A transform is named `{OPTIMIZER}`, which `using=` takes for the "
                "parameters that the optimizer means. Give it another name."
            )
        self.names, self.transforms = tuple(transforms), tuple(transforms.values())
        # Looked for once, as it takes milliseconds.
        nodes = list(modules_in(update))
        self.in_fractions = any(asks_num_steps(node) for node in nodes)
        selectors = [node for node in nodes if isinstance(node, AbstractSelector)]
        watched = (name for selector in selectors for name in selector.watches)
        self.watches = tuple(dict.fromkeys(watched))

    def init(self, model: Model, model_state: Any, key: Key) -> TrainState:
        """Make the state before the first step, of new arrays."""
        model = canonical(model, copy=False)
        if isinstance(self.update, AbstractOwnUpdate):
            owned = self.update.owned(model)
            for transform in self.transforms:
                transform.check(model, owned)
        with explain_trace():
            opt_state = self.update.init(model)
        state = TrainState(
            step=jnp.int32(0),
            epoch=jnp.int32(0),
            model=model,
            model_state=model_state,
            opt_state=opt_state,
            key=key,
            memory=self._first_memory(),
        )
        return canonical(self.completed(state, self.in_fractions))

    def _first_memory(self) -> Memory:
        return Memory(program=salted(self.update.memory()))

    def completed(self, state: TrainState, in_fractions: bool) -> TrainState:
        """The state with all that this program keeps beside model and optimizer.

        A state of a program without a transform, or without the guard, is given what
        they start with: so a run can go on with an average from some step on.
        """
        never = lambda: Report(jnp.float32(jnp.nan), jnp.int32(0))
        memory, extra = state.memory, dict(state.extra)
        for name, transform in zip(self.names, self.transforms, strict=True):
            if name not in extra:
                # Of its own arrays: an average begins as the very model.
                extra[name] = canonical(transform.init(state.model))
        memory = dataclasses.replace(
            memory,
            reports={n: memory.reports.get(n) or never() for n in self.watches},
            num_steps=jnp.int32(INT32_MAX) if in_fractions else None,
            halted=jnp.asarray(False) if self.nonfinite == "raise" else None,
        )
        return dataclasses.replace(state, memory=memory, extra=extra)

    def check_state(self, state: TrainState) -> None:
        """Raise ValueError if a state was made by another program."""
        try:
            opt_state = eqx.filter_eval_shape(self.update.init, state.model)
        except Exception:  # an update of the user's that cannot be traced here
            opt_state = state.opt_state
        for name in state.extra.keys() - set(self.names):
            raise ValueError(
                f"The state keeps `{name}`, and this Trainer has no transform of that "
                "name. Give it one, or start anew from the model: `fit(state.model, "
                "...)`."
            )
        pairs = {
            "opt_state": (opt_state, state.opt_state),
            "memory": (self._first_memory().program, state.memory.program),
        }
        for name, (own, given) in pairs.items():
            difference = first_difference(name, own, given)
            if difference:
                raise ValueError(
                    f"The state is of another program: here {difference}. Go on with "
                    "the Trainer that made it, or start anew from its model: "
                    "`fit(state.model, ...)`."
                )

    def step(
        self, state: TrainState, batch: Batch, mask: Any, epoch: Any, source: PyTree
    ) -> tuple[TrainState, dict[str, Metric]]:
        """Make one step; see `AbstractProgram.step`."""
        memory = state.memory
        given = Given(
            step=state.step,
            epoch=epoch,
            key=jr.fold_in(state.key, state.step),
            mask=mask,
            state=state.model_state,
            memory=memory.program,
            reports=memory.reports,
            num_steps=memory.num_steps,
        )
        found = self.update.run(state.model, state.opt_state, batch, given)
        new = TrainState(
            step=state.step + 1,
            epoch=epoch,
            model=found.model,
            model_state=found.state,
            opt_state=found.opt_state,
            key=state.key,
            memory=dataclasses.replace(memory, program=found.memory),
            extra=state.extra,
            source=source,
        )
        # A state of another structure is refused by whoever asked for the step.
        if self.nonfinite is None or first_difference("", state, new):
            return self._transformed(new), found.metrics
        code = bad_code(self.update.losses(), state, new, found.metrics)
        metrics = {**found.metrics, METRIC: Metric(code)}
        kept = self._transformed(without_update(code == 0, new, state))
        # A copy or a projection is made all the same, but nothing is averaged.
        extra = choose(code == 0, kept.extra, state.extra)
        kept = dataclasses.replace(kept, extra=extra)
        if self.nonfinite == "raise":
            kept = halting(code == 0, kept, state)
        return kept, metrics

    def _transformed(self, state: TrainState) -> TrainState:
        """What the transforms make of the state after an update."""
        model, extra = state.model, {}
        for name, transform in zip(self.names, self.transforms, strict=True):
            kept = state.extra[name]
            model, extra[name] = transform(model, kept, step=state.step)
        return dataclasses.replace(state, model=model, extra=extra)

    def evaluated(self, state: TrainState, using: str) -> Model:
        """The model that a transform, or the optimizer, puts in the model's place."""
        if using == OPTIMIZER:
            return self.update.evaluated(state.model, state.opt_state)
        if using not in self.names:
            raise unknown(using, (*self.names, OPTIMIZER), "transform")
        transform = self.transforms[self.names.index(using)]
        if type(transform).evaluated is AbstractTransform.evaluated:
            raise TypeError(
                f"Transform `{using}` is a `{type(transform).__name__}`, which has no "
                "average to evaluate. Use the name of a `tr.EMA` or `tr.SWA`."
            )
        return transform.evaluated(state.model, state.extra[using])
