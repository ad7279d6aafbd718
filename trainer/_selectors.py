"""Selectors: from the step to the branch that runs."""

import abc
import operator
from collections.abc import Iterable, Sequence
from typing import Any, final

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from trainer._types import Step


_INT32_MAX = 2**31 - 1


def positive_int(value: Any, what: str) -> int:
    """Check that `value` is a whole number from 1 to 2**31 - 1; return it as an int."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(
            f"{what} is `{value!r}`, which is not a whole number. Steps are counted "
            "in Python ints."
        )
    if not 1 <= number <= _INT32_MAX:
        raise ValueError(
            f"{what} is `{value!r}`; it must be from 1 to 2**31 - 1, "
            "because the step is an int32."
        )
    return number


def _check_many(value: Any, name: str, owner: str, example: str) -> None:
    if not isinstance(value, Iterable):
        raise TypeError(
            f"The {name} of `{owner}` are `{value!r}`. Give a list or tuple, as in "
            f"`{example}`, even of one."
        )


class AbstractSelector(eqx.Module):
    """Picks one of several branches from the step, inside the compiled step.

    Subclass it for a rule of your own: `__call__` is traced, so it uses `jax.numpy` and
    no Python `if` on the step.
    """

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
        if self.every * num > _INT32_MAX:
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
        if sum(self.counts) > _INT32_MAX:
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

    Attributes:
        boundaries: The first step of every branch but the first, each at least 1 and
            above the one before it.

    Raises:
        TypeError: A boundary is not a whole number.
        ValueError: A boundary is below 1 or not above the one before it, or their
            number is not one less than the number of branches driven.

    Example:
        >>> which = At((2, 3))
        >>> [tuple(map(int, which(jnp.int32(s), 3))) for s in range(5)]
        [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    """

    boundaries: tuple[int, ...]

    def __init__(self, boundaries: Sequence[int]):
        _check_many(boundaries, "boundaries", "At", "[1_000]")
        self.boundaries = tuple(
            positive_int(b, "a boundary of `At`") for b in boundaries
        )
        if sorted(set(self.boundaries)) != list(self.boundaries):
            raise ValueError(
                f"`At` has boundaries `{self.boundaries}`; each must be above the one "
                "before it, or a branch would have no step."
            )

    def check(self, num: int) -> None:
        """Raise ValueError unless there is one boundary between every two branches."""
        if len(self.boundaries) + 1 != num:
            raise ValueError(
                f"`At` has {len(self.boundaries)} boundaries, `{self.boundaries}`, "
                f"which makes {len(self.boundaries) + 1} phases, but drives {num} "
                "branches. Give one boundary fewer than there are branches."
            )

    def __call__(self, step: Step, num: int) -> tuple[Step, Step]:
        """Pick the branch; see `AbstractSelector.__call__`."""
        del num
        starts = np.asarray((0, *self.boundaries), np.int32)
        index = jnp.sum(step >= starts[1:], dtype=jnp.int32)
        return index, step - jnp.asarray(starts)[index]
