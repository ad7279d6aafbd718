"""Selectors: from the step to the branch that runs."""

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, final, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from trainer._counts import (
    INT32_MAX,
    positive_int,
    share_of,
    steps_of,
    steps_or_fraction,
)
from trainer._metrics import Metric
from trainer._types import Step


def _check_many(value: Any, name: str, owner: str, example: str) -> None:
    if not isinstance(value, Iterable):
        raise TypeError(
            f"The {name} of `{owner}` are `{value!r}`. Give a list or tuple, as in "
            f"`{example}`, even of one."
        )


class Report(NamedTuple):
    """What a callback has measured last, and how often it has measured it.

    Attributes:
        value: A float32 scalar; NaN before the first time.
        times: An int32 scalar.
    """

    value: Any
    times: Any


class Outcome(NamedTuple):
    """What came of one step, for a selector that remembers.

    Attributes:
        step: The step as the selector saw it.
        num: How many branches there are.
        branch: The branch that ran.
        metrics: What it reported, by name, `"loss"` among it. Each has a `value`, and
            is `present` or not.
        reports: What callbacks measured, by name, as far as a selector watches it.
    """

    step: Step
    num: int
    branch: Step
    metrics: Mapping[str, Metric]
    reports: Mapping[str, Report]


class AbstractSelector(eqx.Module):
    """Picks one of several branches from the step, inside the compiled step.

    Subclass it for a choice of your own: `__call__` is traced, so it uses `jax.numpy`
    and no Python `if` on the step. It may ask by name for `key`, a random key of its
    own for this step; for `num_steps`, the total at which the run stops; and for
    `reports`, what callbacks have measured.

    One that chooses by what was seen before has a memory as well. `init` makes it,
    `after` renews it once the branch has run, and `__call__` asks for `memory` by name.

    Attributes:
        in_phases: Whether every branch has its turn once, in order. Updates that take
            over from each other may own the same parameters.
        watches: Names of metrics that callbacks report and this selector looks at.
    """

    in_phases: ClassVar[bool] = False

    @property
    def watches(self) -> tuple[str, ...]:
        """Names of metrics from callbacks; see the class."""
        return ()

    @abc.abstractmethod
    def __call__(self, step: Step, num: int) -> tuple[Step, Step]:
        """Pick the branch for one step.

        Args:
            step: Completed steps, counted from 0. A traced int32 scalar.
            num: How many branches there are.

        Returns:
            The branch's index, from 0 up to and excluding `num`, and how many steps
            that branch has had before this one. Both int32 scalars.
        """

    def init(self, num: int) -> PyTree:
        """Make the memory before the first step: arrays, or None for no memory."""
        del num
        return None

    def after(self, memory: PyTree, outcome: Outcome) -> PyTree:
        """Renew the memory once the branch has run. Traced.

        Args:
            memory: What `init` or the last call returned.
            outcome: What came of the step.

        Returns:
            The new memory, of the same structure, shapes and dtypes.
        """
        del outcome
        return memory

    def check(self, num: int) -> None:
        """Raise ValueError if this selector cannot drive `num` branches."""
        if num < 1:
            raise ValueError(f"`{type(self).__name__}` drives {num} branches.")


@final
class Every(AbstractSelector):
    """Move on to the next branch every N steps, and start again after the last.

    With `Every(100)` and two branches, steps 0-99 use branch 0, steps 100-199 use
    branch 1, and step 200 is back on branch 0.

    Attributes:
        every: Steps per turn, at least 1.

    Raises:
        TypeError: `every` is not a whole number.
        ValueError: `every` is below 1.

    Example:
        >>> which = Every(2)
        >>> [int(which(jnp.int32(s), 3)[0]) for s in range(7)]
        [0, 0, 1, 1, 2, 2, 0]
    """

    every: int

    def __init__(self, every: int):
        self.every = positive_int(every, "`every` of `Every`")

    def check(self, num: int) -> None:
        """Raise ValueError if a whole round is too long for an int32."""
        if self.every * num > INT32_MAX:
            raise ValueError(
                f"`Every({self.every})` with {num} branches has a round of "
                f"{self.every * num} steps, which an int32 step never completes."
            )

    def __call__(self, step: Step, num: int) -> tuple[Step, Step]:
        """Pick the branch; see `AbstractSelector.__call__`."""
        turn = step // self.every
        return turn % num, turn // num * self.every + step % self.every


@final
class Cycle(AbstractSelector):
    """Give each branch a fixed number of consecutive steps, then start again.

    With counts `(5, 1)` steps 0-4 use branch 0, step 5 uses branch 1, and step 6 is
    back on branch 0. This is how a critic gets several updates for each one of its
    generator.

    Attributes:
        counts: Steps per turn, one per branch, each at least 1.

    Raises:
        TypeError: A count is not a whole number.
        ValueError: A count is below 1, or their number differs from the number of
            branches driven.

    Example:
        >>> which = Cycle((2, 1))
        >>> [int(which(jnp.int32(s), 2)[0]) for s in range(6)]
        [0, 0, 1, 0, 0, 1]

    Source:
        Five critic steps per generator step: Arjovsky, Chintala and Bottou,
        "Wasserstein GAN", 2017, arXiv:1701.07875, Algorithm 1.
    """

    counts: tuple[int, ...]

    def __init__(self, counts: Sequence[int]):
        _check_many(counts, "counts", "Cycle", "(5, 1)")
        self.counts = tuple(positive_int(c, "a count of `Cycle`") for c in counts)
        if sum(self.counts) > INT32_MAX:
            raise ValueError(
                f"`Cycle` has a round of {sum(self.counts)} steps, which an int32 "
                "step never completes."
            )

    def check(self, num: int) -> None:
        """Raise ValueError unless there is one count a branch."""
        if len(self.counts) != num:
            raise ValueError(
                f"`Cycle` has {len(self.counts)} counts, `{self.counts}`, but drives "
                f"{num} branches. Give one count for each branch."
            )

    def __call__(self, step: Step, num: int) -> tuple[Step, Step]:
        """Pick the branch; see `AbstractSelector.__call__`."""
        del num
        lengths = np.asarray(self.counts, np.int32)
        ends = np.cumsum(lengths, dtype=np.int32)
        starts, counts = jnp.asarray(ends - lengths), jnp.asarray(lengths)
        place, turn = step % ends[-1], step // ends[-1]
        index = jnp.sum(place >= ends[:-1], dtype=jnp.int32)
        return index, turn * counts[index] + place - starts[index]


@final
class At(AbstractSelector):
    """Move on to the next branch at given steps, once each.

    With boundaries `(100, 300)` steps 0-99 use branch 0, steps 100-299 use branch 1,
    and from step 300 on branch 2 runs. A boundary is the first step of the branch
    after it, and that branch counts its own steps from there.

    A float is a fraction of the run: with `(0.5,)` and `num_steps=1_000` branch 1 runs
    from step 500 on. It is rounded down to a whole step.

    Attributes:
        boundaries: The first step of every branch but the first, each at least 1 and
            above the one before it; or fractions of the run, above 0 and below 1.

    Raises:
        TypeError: A boundary is not a number.
        ValueError: A boundary is out of bounds or not above the one before it, or their
            number is not one less than the number of branches driven.

    Example:
        >>> which = At((2, 3))
        >>> [tuple(map(int, which(jnp.int32(s), 3))) for s in range(5)]
        [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
        >>> which = At((0.5,))
        >>> [int(which(jnp.int32(s), 2, num_steps=jnp.int32(4))[0]) for s in range(4)]
        [0, 0, 1, 1]
    """

    in_phases: ClassVar[bool] = True
    boundaries: tuple[int | float, ...]

    def __init__(self, boundaries: Sequence[int | float]):
        _check_many(boundaries, "boundaries", "At", "[1_000]")
        self.boundaries = tuple(
            steps_or_fraction(b, "a boundary of `At`") for b in boundaries
        )
        whole = [b for b in self.boundaries if isinstance(b, int)]
        shares = [share_of(b) for b in self.boundaries if isinstance(b, float)]
        for alike in (whole, shares):
            if sorted(set(alike)) != alike:
                raise ValueError(
                    f"`At` has boundaries `{self.boundaries}`; each must be above the "
                    "one before it, or a branch would have no step."
                )

    @property
    def in_fractions(self) -> bool:
        """Whether it has to be told the run's total."""
        return any(isinstance(b, float) for b in self.boundaries)

    def check(self, num: int) -> None:
        """Raise ValueError unless there is one boundary between every two branches."""
        if len(self.boundaries) + 1 != num:
            raise ValueError(
                f"`At` has {len(self.boundaries)} boundaries, `{self.boundaries}`, "
                f"which makes {len(self.boundaries) + 1} phases, but drives {num} "
                "branches. Give one boundary fewer than there are branches."
            )

    def __call__(
        self, step: Step, num: int, *, num_steps: Step | None = None
    ) -> tuple[Step, Step]:
        """Pick the branch; see `AbstractSelector.__call__`."""
        del num
        if not self.in_fractions:
            starts = jnp.asarray((0, *self.boundaries), jnp.int32)
        else:
            found = [steps_of(b, num_steps) for b in self.boundaries]
            # Of steps and fractions together, the later one may come out first.
            starts = jax.lax.cummax(jnp.stack([jnp.int32(0), *found]))
        index = jnp.sum(step >= starts[1:], dtype=jnp.int32)
        return index, step - starts[index]
