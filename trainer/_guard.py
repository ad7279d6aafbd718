"""Numbers that are not finite: found in the step, told on the host."""

import dataclasses
from collections.abc import Mapping
from typing import Any, final, Literal

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array

from trainer._metrics import Metric
from trainer._precision import choose
from trainer._state import TrainState
from trainer._tree import path_name


METRIC = "nonfinite"
Nonfinite = Literal["raise", "skip"]


class NonfiniteError(ArithmeticError):
    """A step made the loss or the state infinite or NaN.

    The state before that step is in `trainer.last_state`, and the history up to and
    with that step in `trainer.last_history`.
    """


def check_nonfinite(nonfinite: Any) -> Nonfinite | None:
    """Check the option of a Trainer; return it."""
    if nonfinite not in ("raise", "skip", None):
        raise ValueError(
            f"`nonfinite` is `{nonfinite!r}`; it is `'raise'`, `'skip'` or None."
        )
    return nonfinite


def _checked(state: TrainState) -> dict[str, Any]:
    """The arrays in which a number that is not finite does lasting harm, by path.

    Scalars of an optimizer are left out: some begin at infinity, and some line searches
    report one.
    """
    checked = {}
    for field in ("model", "model_state", "opt_state"):
        for path, leaf in jtu.tree_leaves_with_path(getattr(state, field)):
            if eqx.is_inexact_array(leaf) and (leaf.ndim or field != "opt_state"):
                checked[path_name(field, path)] = leaf
    return checked


def bad_code(
    losses: tuple[str, ...],
    old: TrainState,
    new: TrainState,
    metrics: Mapping[str, Metric],
) -> Array:
    """What a step has made that is not finite. Traced.

    0 for nothing, 1 for a loss alone, and 2 and more for the first array, by its place
    among those that are checked. What was not finite before is not looked at.
    """
    found = jnp.asarray(False)
    for loss in (metrics[name] for name in losses if name in metrics):
        found = found | (jnp.asarray(loss.present) & ~jnp.isfinite(loss.value))
    code = found.astype(jnp.int32)
    is_bad = [
        jnp.any(jnp.isfinite(was) & ~jnp.isfinite(now))
        for was, now in zip(_checked(old).values(), _checked(new).values(), strict=True)
    ]
    if not is_bad:
        return code
    bad = jnp.stack(is_bad)
    return jnp.where(jnp.any(bad), 2 + jnp.argmax(bad).astype(jnp.int32), code)


def without_update(is_finite: Array, new: TrainState, old: TrainState) -> TrainState:
    """The new state, with what the update has made in it only if it is finite."""
    kept = {
        name: choose(is_finite, getattr(new, name), getattr(old, name))
        for name in ("model", "model_state", "opt_state")
    }
    program = choose(is_finite, new.memory.program, old.memory.program)
    memory = dataclasses.replace(new.memory, program=program)
    return dataclasses.replace(new, **kept, memory=memory)


def halting(is_finite: Array, new: TrainState, old: TrainState) -> TrainState:
    """The new state, or the old one if this step or one before it was not finite.

    The steps that are under way already stand still, until the host looks.
    """
    is_finite = is_finite & ~old.memory.halted
    kept = choose(is_finite, new, old)
    memory = dataclasses.replace(kept.memory, halted=~is_finite)
    return dataclasses.replace(kept, memory=memory)


@final
@dataclasses.dataclass(frozen=True)
class NonfiniteSteps:
    """What was not finite in a fit.

    Attributes:
        count: In how many steps; those of an ensemble's members are added up.
        step: The first of them, as that step counts: completed updates before it.
        leaf: Path of the first array that it would have spoiled, or None if the loss
            alone was not finite.
        loss: Value of the loss at that step; NaN if the step reported none. Where
            several are minimized, the first that is not finite, if there is one.
        metric: Name of that loss.
        branches: Names of the branches that were active, by metric.
    """

    count: int
    step: int
    leaf: str | None
    loss: float
    metric: str
    branches: Mapping[str, str]

    def __str__(self) -> str:
        """Say it in a sentence."""
        active = ", ".join(f"`{m}` was `{name}`" for m, name in self.branches.items())
        where = f"; {active}" if active else ""
        leaf = f"`{self.leaf}` not finite" if self.leaf else "the loss not finite"
        loss = "the loss" if self.metric == "loss" else f"`{self.metric}`"
        return f"Step {self.step} made {leaf} ({loss} was {self.loss:g}{where})"


class Watchman:
    """Looks for steps that were not finite among the rows that the host reads.

    Args:
        nonfinite: What is done about them.
        state: The state that the steps see, or that of one member of an ensemble.
        losses: Names of the metrics that are minimized.
        branches: Names of the branches, by metric.
        prefixes: What the names of each member's metrics begin with.

    Attributes:
        found: What was found so far, or None.
    """

    def __init__(
        self,
        nonfinite: Nonfinite | None,
        state: TrainState,
        losses: tuple[str, ...],
        branches: Mapping[str, tuple[str, ...]],
        prefixes: tuple[str, ...] = ("",),
    ):
        self._nonfinite, self._branches, self._losses = nonfinite, branches, losses
        self._prefixes = prefixes
        self._leaves = list(_checked(state)) if nonfinite else []
        self.found: NonfiniteSteps | None = None

    def look(self, first_step: int, rows: Mapping[str, np.ndarray]) -> int | None:
        """Look at some steps; return the row at which the run has to end, or None."""
        # One row a step, and one column a member.
        codes = np.stack([self._codes(rows, p) for p in self._prefixes], axis=1)
        bad = np.argwhere(codes)
        if not len(bad):
            return None
        if self._nonfinite == "raise":
            bad = bad[:1]
        if self.found is None:
            row, member = map(int, bad[0])
            prefix, code = self._prefixes[member], int(codes[row, member])
            self.found = self._described(first_step, row, code, rows, prefix)
        count = self.found.count + len(bad)
        self.found = dataclasses.replace(self.found, count=count)
        return int(bad[0][0]) if self._nonfinite == "raise" else None

    def _codes(self, rows: Mapping[str, np.ndarray], prefix: str) -> np.ndarray:
        if self._nonfinite:
            return np.asarray(rows[prefix + METRIC])
        names = [prefix + name for name in self._losses]
        losses = [rows[name] for name in names if name in rows]
        bad = [~np.isfinite(np.ma.filled(values, 0.0)) for values in losses]
        return np.any(bad, axis=0).astype(int) if bad else np.zeros(0, int)

    def _described(
        self,
        first_step: int,
        row: int,
        code: int,
        rows: Mapping[str, np.ndarray],
        prefix: str,
    ) -> NonfiniteSteps:
        at = {name: values[row] for name, values in rows.items()}
        at = {name: value for name, value in at.items() if value is not np.ma.masked}
        own = {m: names for m, names in self._branches.items() if m.startswith(prefix)}
        active = {m: names[int(at[m])] for m, names in own.items() if m in at}
        leaf = self._leaves[code - 2] if code >= 2 else None
        names = [prefix + name for name in self._losses]
        losses = {name: float(at[name]) for name in names if name in at}
        bad = [name for name, value in losses.items() if not np.isfinite(value)]
        metric = next(iter([*bad, *losses]), "loss")
        loss = losses.get(metric, np.nan)
        return NonfiniteSteps(0, first_step + row, leaf, loss, metric, active)

    def tell(self) -> str | None:
        """What the user is to know when the fit has ended, or None."""
        if self.found is None:
            return None
        if self._nonfinite == "skip":
            return (
                f"{self.found}. Steps left out: {self.found.count}. Model, optimizer "
                "and averages are as if they had not been."
            )
        return (
            f"{self.found}. Such steps in all: {self.found.count}. Give the Trainer "
            "`nonfinite='raise'` to stop there with the last good state, or `'skip'` "
            "to leave such steps out."
        )

    def error(self) -> NonfiniteError:
        """The error that ends the run."""
        return NonfiniteError(
            f"{self.found}. The state before it is in `trainer.last_state`. Look at "
            "that step's batch, or give `nonfinite='skip'` to leave such steps out."
        )
