"""A selector that draws its branch by chance."""

from collections.abc import Sequence
from typing import Any, final

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from trainer._counts import asks_num_steps, call_schedule, number_in
from trainer._schedules import check_schedule
from trainer._selectors import AbstractSelector, Outcome
from trainer._types import Step


@final
class Random(AbstractSelector):
    """Draw the branch by chance at every step, with the run's key.

    The same key draws the same branches, however the steps are grouped into calls.

    Attributes:
        probabilities: One number or schedule a branch. They are divided by their sum,
            so that `(3, 1)` means three steps of four on average. A schedule that is
            negative or NaN at a step counts as 0 there; where all are 0, branch 0 runs.

    Raises:
        TypeError: A probability is neither a number nor a schedule.
        ValueError: A number is negative, all are 0, or there is not one a branch.

    Example:
        >>> which, memory = Random((0, 1)), Random((0, 1)).init(2)
        >>> step, key = jnp.int32(0), jr.key(0)
        >>> int(which(step, 2, memory=memory, key=key)[0])
        1
    """

    probabilities: tuple[Any, ...]

    def __init__(self, probabilities: Sequence[Any]):
        if not isinstance(probabilities, Sequence) or isinstance(probabilities, str):
            raise TypeError(
                f"The probabilities of `Random` are `{probabilities!r}`. Give a list, "
                "as in `(0.9, 0.1)`."
            )
        self.probabilities = tuple(
            p if callable(p) else number_in(p, "a probability of `Random`")
            for p in probabilities
        )
        what = "A probability of `Random`"
        constant = [
            check_schedule(p, what) if callable(p) else p for p in self.probabilities
        ]
        numbers = [p for p in constant if p is not None]
        if any(p < 0 for p in numbers):
            raise ValueError(
                f"`Random` has probabilities `{self.probabilities}`; none may be "
                "negative."
            )
        if len(numbers) == len(self.probabilities) and sum(numbers) == 0:
            raise ValueError(
                f"`Random` has probabilities `{self.probabilities}`, of which none is "
                "ever above 0, so that no branch can be drawn."
            )

    @property
    def in_fractions(self) -> bool:
        """Whether it has to be told the run's total."""
        return any(asks_num_steps(p) for p in self.probabilities if callable(p))

    def check(self, num: int) -> None:
        """Raise ValueError unless there is one probability a branch."""
        if len(self.probabilities) != num:
            raise ValueError(
                f"`Random` has {len(self.probabilities)} probabilities, but drives "
                f"{num} branches. Give one for each branch."
            )

    def init(self, num: int) -> Array:
        """How many steps each branch has had: none."""
        return jnp.zeros(num, jnp.int32)

    def __call__(
        self,
        step: Step,
        num: int,
        *,
        memory: Any = None,
        key: Any = None,
        num_steps: Step | None = None,
    ) -> tuple[Step, Step]:
        """Draw the branch; see `AbstractSelector.__call__`."""
        del num
        now = [
            call_schedule(p, step, num_steps) if callable(p) else p
            for p in self.probabilities
        ]
        chances = jnp.stack([jnp.asarray(p, jnp.float32) for p in now])
        chances = jnp.where(chances > 0, chances, 0.0)
        index = jr.categorical(key, jnp.log(chances)).astype(jnp.int32)
        return index, memory[index]

    def after(self, memory: Any, outcome: Outcome) -> Array:
        """Count the step of the branch that ran."""
        return memory.at[outcome.branch].add(1)
