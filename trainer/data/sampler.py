"""Batches made on the device, inside the step."""

import abc
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from trainer._tree import describe
from trainer._types import Batch, Key, Model
from trainer.data._source import AbstractSource, Feed, Item, num_examples, Wanted
from trainer.recompiles._differences import first_difference


class AbstractSampler(eqx.Module):
    """Makes each batch in the compiled step: from a replay buffer, by simulation.

    It goes where data go: `fit(model, sampler, num_steps=...)`. What it carries from
    step to step is a part of the training state: it is donated, and so changed in
    place, and goes on where it was with the state. Both methods are pure and traced.

    Example:
        >>> import jax.random as jr, jax.numpy as jnp
        >>> class Points(AbstractSampler):
        ...     def init(self, key):
        ...         return None
        ...     def sample(self, carry, model, *, step, key):
        ...         return jr.uniform(key, (64, 2)), carry
        >>> batch, _ = Points().sample(None, None, step=0, key=jr.key(0))
        >>> batch.shape
        (64, 2)
    """

    @abc.abstractmethod
    def init(self, key: Key) -> PyTree:
        """Make the carry before the first step, of arrays, or None."""

    @abc.abstractmethod
    def sample(
        self, carry: PyTree, model: Model, *, step: Any, key: Key
    ) -> tuple[Batch, PyTree]:
        """Make one batch.

        Args:
            carry: What `init` or the step before returned.
            model: The model before this step's update.
            step: Completed updates, an int32 scalar.
            key: The step's key, the same as the losses are given. One more may be
                asked for by name: `num_steps`, the run's total, for a schedule in
                fractions of it.

        Returns:
            The batch, and the carry for the next step, of the same structure, shapes
            and dtypes.
        """


class Sampled(AbstractSource):
    """A sampler as a source: the host hands nothing to the step."""

    def __init__(self, sampler: AbstractSampler):
        self.sampler = sampler
        self.resident, self.static = eqx.partition(sampler, eqx.is_array)
        self.in_fractions = "num_steps" in inspect.signature(sampler.sample).parameters

    def start(self, key: Key) -> PyTree:
        """Make the carry before the first step."""
        carry = self.sampler.init(key)
        for leaf in jtu.tree_leaves(carry):
            if not eqx.is_array(leaf):
                raise TypeError(
                    f"`{self._name}.init` returned a carry that holds "
                    f"`{describe(leaf)}`, which a compiled step cannot change. Make it "
                    "of arrays, such as `jnp.int32(0)`."
                )
        return carry

    def check_carry(self, carry: PyTree) -> None:
        """Raise ValueError unless the carry is of this sampler's form."""
        key = jax.eval_shape(lambda: jr.key(0))
        like = eqx.filter_eval_shape(self.sampler.init, key)
        difference = first_difference("state.source", like, carry)
        if difference:
            raise ValueError(
                f"The state was made with another sampler than `{self._name}`: here "
                f"{difference}. Go on with that sampler, or start anew from the model: "
                "`fit(state.model, ...)`."
            )

    @property
    def _name(self) -> str:
        return type(self.sampler).__name__

    def fetch(
        self, resident: PyTree, content: PyTree, carry: PyTree, model: Model, **at: Any
    ) -> tuple[Batch, Any, PyTree]:
        """Let the sampler make the batch. Traced."""
        del content
        sampler = eqx.combine(resident, self.static)
        if not self.in_fractions:
            del at["num_steps"]
        returned = sampler.sample(carry, model, **at)
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise TypeError(
                f"`{self._name}.sample` returned {describe(returned)}. It returns "
                "`(batch, carry)`, with the carry for the next step."
            )
        batch, carry = returned
        rows = any(np.ndim(leaf) for leaf in jtu.tree_leaves(batch))
        # Nothing is padding, for losses that ask.
        mask = jnp.ones(num_examples(batch), bool) if rows else None
        return batch, mask, carry

    def feed(self, wanted: Wanted) -> Feed:
        """A step for as long as steps are wanted."""
        del wanted
        return Feed(itertools.repeat(Item([], 0)), lambda _: ())

    def num_steps(self, num_epochs: int) -> int | None:
        """There are no epochs."""
        del num_epochs
        raise TypeError(
            "A sampler has no epochs. Give `num_steps` in the place of `num_epochs`."
        )

    def batches(self, pad: bool) -> Iterator[tuple[Batch, Any, int]]:
        """There is no last batch to evaluate on."""
        del pad
        raise TypeError(
            "A sampler has no end to evaluate up to. Evaluate on arrays or on a loader."
        )
