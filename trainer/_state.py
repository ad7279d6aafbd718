"""Everything that evolves while training, in one PyTree."""

from typing import final

import equinox as eqx
from jaxtyping import PyTree

from trainer._memory import Memory
from trainer._types import Key, Model, Step


@final
class TrainState(eqx.Module):
    """The whole of a training run between two steps.

    A TrainState given to `Trainer.fit` continues the run; nothing else is needed. It is
    never changed in place: `fit` copies what it is given, so an older state stays
    usable.

    Attributes:
        step: Number of completed updates. The first update sees 0.
        epoch: Epoch that the last update's batch began in, from 0.
        model: The model, as given, with every array strongly typed.
        model_state: The `eqx.nn.State` of a model with BatchNorm or the like, or None.
        opt_state: What the update's optimizer remembers.
        memory: What selectors, adaptive weights and loss scales remember.
        extra: What transforms keep, by name: averages of the model.
        source: What a `tr.AbstractSampler` carries along, or None.
        key: The run's random key. It never changes: the update of a step uses
            `jax.random.fold_in(key, step)`.
    """

    step: Step
    epoch: Step
    model: Model
    model_state: PyTree
    opt_state: PyTree
    key: Key
    memory: Memory = eqx.field(default_factory=Memory)
    extra: PyTree = eqx.field(default_factory=dict)
    source: PyTree = None
