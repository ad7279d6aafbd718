"""A Trainer's program: its update, its transforms, and how they make one step."""

import dataclasses
from collections.abc import Mapping
from typing import Any, final

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import PyTree

from trainer._counts import asks_num_steps, INT32_MAX
from trainer._guard import guarded, Nonfinite
from trainer._history import unknown
from trainer._losses import Given
from trainer._memory import Memory, salted
from trainer._metrics import Metric
from trainer._selectors import AbstractSelector, Report
from trainer._state import TrainState
from trainer._transforms import AbstractTransform
from trainer._tree import canonical, describe, modules_in
from trainer._types import Batch, Key, Model
from trainer._update import AbstractUpdate


OPTIMIZER = "optimizer"


@final
class Program(eqx.Module):
    """Everything that happens in the compiled step.

    Attributes:
        update: From the model and a batch to the next model.
        names: Names of the transforms.
        transforms: What is done to the model after the update, in order.
        nonfinite: What is done about a step that is not finite.
    """

    update: AbstractUpdate
    names: tuple[str, ...]
    transforms: tuple[AbstractTransform, ...]
    nonfinite: Nonfinite | None

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

    @property
    def in_fractions(self) -> bool:
        """Whether anything in it is given in fractions of the run."""
        return any(asks_num_steps(node) for node in modules_in(self.update))

    @property
    def watches(self) -> tuple[str, ...]:
        """Names of the metrics from callbacks that a selector looks at."""
        selectors = [n for n in modules_in(self) if isinstance(n, AbstractSelector)]
        return tuple(dict.fromkeys(name for s in selectors for name in s.watches))

    def init(self, model: Model, model_state: Any, key: Key) -> TrainState:
        """Make the state before the first step, of new arrays."""
        model = canonical(model)
        named = zip(self.names, self.transforms, strict=True)
        never = Report(jnp.float32(jnp.nan), jnp.int32(0))
        memory = Memory(
            program=salted(self.update.memory()),
            reports={name: never for name in self.watches},
            num_steps=jnp.int32(INT32_MAX) if self.in_fractions else None,
            halted=jnp.asarray(False) if self.nonfinite == "raise" else None,
        )
        state = TrainState(
            step=jnp.int32(0),
            epoch=jnp.int32(0),
            model=model,
            model_state=model_state,
            opt_state=self.update.init(model),
            key=key,
            memory=memory,
            extra={name: transform.init(model) for name, transform in named},
        )
        return canonical(state)

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
        model, extra = found.model, {}
        for name, transform in zip(self.names, self.transforms, strict=True):
            kept = state.extra[name]
            model, extra[name] = transform(model, kept, step=state.step + 1)
        new = TrainState(
            step=state.step + 1,
            epoch=epoch,
            model=model,
            model_state=found.state,
            opt_state=found.opt_state,
            key=state.key,
            memory=dataclasses.replace(memory, program=found.memory),
            extra=extra,
            source=source,
        )
        return guarded(self.nonfinite, state, new, found.metrics)

    def evaluated(self, state: TrainState, using: str) -> Model:
        """The model that a transform, or the optimizer, puts in the model's place."""
        if using == OPTIMIZER:
            return self.update.evaluated(state.model, state.opt_state)
        if using not in self.names:
            raise unknown(using, (*self.names, OPTIMIZER), "transform")
        transform = self.transforms[self.names.index(using)]
        return transform.evaluated(state.model, state.extra[using])
