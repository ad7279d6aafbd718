"""Selectors that go on to the next branch when a metric says so."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, final, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from trainer._counts import number_in, positive_int
from trainer._history import unknown
from trainer._selectors import AbstractSelector, Outcome
from trainer._types import Step


class AbstractAdvancing(AbstractSelector):
    """Stays with a branch until what is measured says to go on to the next."""

    metric: eqx.AbstractVar[str]
    reported: eqx.AbstractVar[bool]
    in_phases: ClassVar[bool] = True

    @property
    def watches(self) -> tuple[str, ...]:
        """The metric, if it comes from a callback."""
        return (self.metric,) if self.reported else ()

    def init(self, num: int) -> dict[str, Any]:
        """Branch 0 has had no step, and nothing was seen."""
        del num
        zero = jnp.int32(0)
        seen = self._nothing_seen()
        return {"index": zero, "local": zero, "reports": zero, "seen": seen}

    def __call__(
        self, step: Step, num: int, *, memory: Any = None, reports: Any = None
    ) -> tuple[Step, Step]:
        """Pick the branch; see `AbstractSelector.__call__`."""
        del step
        memory = self._with_report(memory, reports, num)
        return memory["index"], memory["local"]

    def after(self, memory: Any, outcome: Outcome) -> dict[str, Any]:
        """Count the step, look at the metric, and go on if that is due."""
        memory = self._with_report(memory, outcome.reports, outcome.num)
        memory = {**memory, "local": memory["local"] + 1}
        if self.reported:
            return memory
        if self.metric not in outcome.metrics:
            raise unknown(self.metric, outcome.metrics)
        value, present = outcome.metrics[self.metric]
        return self._advanced(memory, value, jnp.asarray(present), outcome.num)

    def _with_report(self, memory: Any, reports: Any, num: int) -> dict[str, Any]:
        """Look at what a callback has measured, if it has since the last step."""
        if not self.reported:
            return memory
        value, times = reports[self.metric]
        is_new = times != memory["reports"]
        return self._advanced(memory, value, is_new, num) | {"reports": times}

    def _advanced(
        self, memory: Any, value: Any, is_new: Array, num: int
    ) -> dict[str, Any]:
        """Take in a value that is new, and go on to the next branch if that is due."""
        value = jnp.asarray(value, jnp.float32)
        seen, move = self._look(memory["seen"], value, memory["index"])
        move = is_new & move & (memory["index"] < num - 1)
        seen = _where(is_new, seen, memory["seen"])
        return {
            **memory,
            "index": memory["index"] + move.astype(jnp.int32),
            "local": jnp.where(move, 0, memory["local"]),
            "seen": _where(move, self._nothing_seen(), seen),
        }

    @abc.abstractmethod
    def _nothing_seen(self) -> PyTree:
        """What a branch starts with."""

    @abc.abstractmethod
    def _look(self, seen: PyTree, value: Array, index: Step) -> tuple[PyTree, Array]:
        """Take a new value in; return what is kept, and whether to go on."""


def _where(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


@final
class Plateau(AbstractAdvancing):
    """Move on to the next branch when a metric has stopped getting better.

    The metric is looked at after every step that reports it; with `reported`, after
    every time that a callback has measured it. A value counts as better if it is below
    the best one of this branch by more than `min_delta`. After `patience` values in a
    row that are not, the next step uses the next branch, and the search for the best
    starts again. NaN is never better. The last branch is never left.

    Attributes:
        metric: Name of the metric, as the history has it: `"loss"`, or one that the
            losses below this selector report, or that a callback does.
        patience: How many values in a row may fail to be better, at least 1.
        min_delta: How much is better, not included.
        mode: `"min"` if less is better, `"max"` if more is.
        smoothing: Share of the old in a running average of the metric that is looked
            at in its place, from 0 to below 1. A loss of single batches is noisy.
        reported: Whether the metric comes from a callback, such as a validation loss.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: One is out of bounds.

    Example:
        >>> Plateau("validation/loss", patience=3, reported=True).watches
        ('validation/loss',)
    """

    metric: str
    patience: int
    min_delta: float
    mode: Literal["min", "max"]
    smoothing: float
    reported: bool

    def __init__(
        self,
        metric: str = "loss",
        *,
        patience: int,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        smoothing: float = 0.0,
        reported: bool = False,
    ):
        self.metric = _checked_name(metric, "Plateau")
        self.patience = positive_int(patience, "`patience` of `Plateau`")
        self.min_delta = number_in(min_delta, "`min_delta` of `Plateau`")
        self.smoothing = number_in(smoothing, "`smoothing` of `Plateau`", below=1.0)
        if self.min_delta < 0 or self.smoothing < 0:
            raise ValueError(
                f"`min_delta` and `smoothing` of `Plateau` are `{min_delta}` and "
                f"`{smoothing}`; neither may be negative."
            )
        if mode not in ("min", "max"):
            raise ValueError(
                f"`mode` of `Plateau` is `{mode!r}`; it is `'min'` or `'max'`."
            )
        self.mode, self.reported = mode, bool(reported)

    def _nothing_seen(self) -> dict[str, Array]:
        return {
            "best": jnp.float32(jnp.inf),
            "average": jnp.float32(jnp.nan),
            "not_better": jnp.int32(0),
        }

    def _look(self, seen: Any, value: Array, index: Step) -> tuple[Any, Array]:
        del index
        value = value if self.mode == "min" else -value
        average = value
        if self.smoothing:
            old = jnp.where(jnp.isfinite(seen["average"]), seen["average"], value)
            average = self.smoothing * old + (1 - self.smoothing) * value
        is_better = average < seen["best"] - self.min_delta
        bad = jnp.where(is_better, 0, seen["not_better"] + 1)
        best = jnp.where(is_better, average, seen["best"])
        kept = {"best": best, "average": average, "not_better": bad}
        return kept, bad >= self.patience


@final
class Threshold(AbstractAdvancing):
    """Move on to the next branch when a metric crosses a threshold.

    The metric is looked at after every step that reports it; with `reported`, after
    every time that a callback has measured it. The step after that uses the next
    branch. There is no way back, and the last branch is never left.

    Attributes:
        metric: Name of the metric; see `tr.Plateau`.
        thresholds: One number for every branch but the last.
        side: `"below"` or `"above"`: where a value has to be, the threshold excluded.
        reported: Whether the metric comes from a callback.

    Raises:
        TypeError: An argument is of the wrong kind, or not exactly one of `below` and
            `above` is given.
        ValueError: There is not one threshold for every branch but the last.

    Example:
        >>> which = Threshold("loss", below=0.1)
        >>> which.thresholds, which.side
        ((0.1,), 'below')
    """

    metric: str
    thresholds: tuple[float, ...]
    side: Literal["below", "above"]
    reported: bool

    def __init__(
        self,
        metric: str = "loss",
        *,
        below: float | Sequence[float] | None = None,
        above: float | Sequence[float] | None = None,
        reported: bool = False,
    ):
        self.metric = _checked_name(metric, "Threshold")
        if (below is None) == (above is None):
            raise TypeError(
                f"`Threshold` is given `below={below}` and `above={above}`. Give one "
                "of them: the number that the metric has to cross."
            )
        given = above if below is None else below
        many = given if isinstance(given, Sequence) else (given,)
        if not many:
            raise ValueError(
                "`Threshold` was given no threshold. Give one number for every branch "
                "but the last."
            )
        self.thresholds = tuple(number_in(t, "a threshold") for t in many)
        self.side = "above" if below is None else "below"
        self.reported = bool(reported)

    def check(self, num: int) -> None:
        """Raise ValueError unless there is one threshold between every two branches."""
        if len(self.thresholds) + 1 != num:
            raise ValueError(
                f"`Threshold` has {len(self.thresholds)} thresholds, "
                f"`{self.thresholds}`, but drives {num} branches. Give one fewer than "
                "there are branches."
            )

    def _nothing_seen(self) -> tuple[()]:
        return ()

    def _look(self, seen: Any, value: Array, index: Step) -> tuple[Any, Array]:
        bounds = jnp.asarray(self.thresholds, jnp.float32)
        bound = bounds[jnp.minimum(index, len(self.thresholds) - 1)]
        return seen, value < bound if self.side == "below" else value > bound


def _checked_name(metric: Any, owner: str) -> str:
    if not isinstance(metric, str):
        raise TypeError(
            f"The metric of `{owner}` is `{metric!r}`. Give its name, such as `'loss'`."
        )
    return metric
