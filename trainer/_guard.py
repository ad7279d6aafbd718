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
from trainer._tree import first_difference, path_name


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


def _is_loss(name: str) -> bool:
    """Whether a metric is what an update has minimized."""
    return name.split("/")[-1] == "loss"


def guarded(
    nonfinite: Nonfinite | None,
    old: TrainState,
    new: TrainState,
    metrics: dict[str, Metric],
) -> tuple[TrainState, dict[str, Metric]]:
    """Keep the state that a step began with if what it made is not finite. Traced.

    The metric says what was found: 0 for nothing, 1 for the loss alone, and 2 and more
    for the first array, by its place among those that are checked.
    """
    # A state of another structure is refused by whoever asked for the step.
    if nonfinite is None or first_difference("", old, new):
        return new, metrics
    is_bad = [
        jnp.any(jnp.isfinite(was) & ~jnp.isfinite(now))
        for was, now in zip(_checked(old).values(), _checked(new).values(), strict=True)
    ]
    losses = [metric for name, metric in metrics.items() if _is_loss(name)]
    found = jnp.asarray(False)
    for loss in losses:
        found = found | (jnp.asarray(loss.present) & ~jnp.isfinite(loss.value))
    code = found.astype(jnp.int32)
    if is_bad:
        bad = jnp.stack(is_bad)
        first = 2 + jnp.argmax(bad).astype(jnp.int32)
        code = jnp.where(jnp.any(bad), first, code)
    kept = _kept(nonfinite, code == 0, old, new)
    return kept, {**metrics, METRIC: Metric(code)}


def _kept(
    nonfinite: Nonfinite, is_finite: Array, old: TrainState, new: TrainState
) -> TrainState:
    if nonfinite == "raise":
        # The steps that are under way already stand still, until the host looks.
        is_finite = is_finite & ~old.memory.halted
        kept = choose(is_finite, new, old)
        memory = dataclasses.replace(kept.memory, halted=~is_finite)
        return dataclasses.replace(kept, memory=memory)
    names = ("model", "model_state", "opt_state", "extra")
    kept = {
        name: choose(is_finite, getattr(new, name), getattr(old, name))
        for name in names
    }
    program = choose(is_finite, new.memory.program, old.memory.program)
    memory = dataclasses.replace(new.memory, program=program)
    return dataclasses.replace(new, **kept, memory=memory)


@final
@dataclasses.dataclass(frozen=True)
class NonfiniteSteps:
    """What was not finite in a fit.

    Attributes:
        count: In how many steps.
        step: The first of them, as that step counts: completed updates before it.
        leaf: Path of the first array that it would have spoiled, or None if the loss
            alone was not finite.
        loss: Value of the loss at that step; NaN if the step reported none.
        branches: Names of the branches that were active, by metric.
    """

    count: int
    step: int
    leaf: str | None
    loss: float
    branches: Mapping[str, str]

    def __str__(self) -> str:
        """Say it in a sentence."""
        active = ", ".join(f"`{m}` was `{name}`" for m, name in self.branches.items())
        where = f"; {active}" if active else ""
        leaf = f"`{self.leaf}` not finite" if self.leaf else "the loss not finite"
        return f"Step {self.step} made {leaf} (the loss was {self.loss:g}{where})"


class Watchman:
    """Looks for steps that were not finite among the rows that the host reads.

    Attributes:
        found: What was found so far, or None.
    """

    def __init__(
        self,
        nonfinite: Nonfinite | None,
        state: TrainState,
        branches: Mapping[str, tuple[str, ...]],
    ):
        self._nonfinite, self._branches = nonfinite, branches
        self._leaves = list(_checked(state)) if nonfinite else []
        self.found: NonfiniteSteps | None = None

    def look(self, first_step: int, rows: Mapping[str, np.ndarray]) -> int | None:
        """Look at some steps; return the row at which the run has to end, or None."""
        codes = self._codes(rows)
        bad = np.flatnonzero(codes)
        if not len(bad):
            return None
        if self._nonfinite == "raise":
            bad = bad[:1]
        if self.found is None:
            self.found = self._described(first_step, bad[0], int(codes[bad[0]]), rows)
        else:
            count = self.found.count + len(bad)
            self.found = dataclasses.replace(self.found, count=count)
            return None
        self.found = dataclasses.replace(self.found, count=len(bad))
        return int(bad[0]) if self._nonfinite == "raise" else None

    def _codes(self, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        if self._nonfinite:
            return np.asarray(rows[METRIC])
        losses = [values for name, values in rows.items() if _is_loss(name)]
        bad = [~np.isfinite(np.ma.filled(values, 0.0)) for values in losses]
        return np.any(bad, axis=0).astype(int) if bad else np.zeros(0, int)

    def _described(
        self, first_step: int, row: int, code: int, rows: Mapping[str, np.ndarray]
    ) -> NonfiniteSteps:
        at = {name: values[row] for name, values in rows.items()}
        at = {name: value for name, value in at.items() if value is not np.ma.masked}
        active = {m: n[int(at[m])] for m, n in self._branches.items() if m in at}
        leaf = self._leaves[code - 2] if code >= 2 else None
        loss = float(at.get("loss", np.nan))
        return NonfiniteSteps(1, first_step + int(row), leaf, loss, active)

    def tell(self) -> str | None:
        """What the user is to know when the fit has ended, or None."""
        if self.found is None:
            return None
        if self._nonfinite == "skip":
            return (
                f"{self.found}. {self.found.count} such steps were left out: model, "
                "optimizer and averages are as if they had not been."
            )
        return (
            f"{self.found}, and so were {self.found.count - 1} steps after it. Give "
            "the Trainer `nonfinite='raise'` to stop there with the last good state, "
            "or `'skip'` to leave such steps out."
        )

    def error(self) -> NonfiniteError:
        """The error that ends the run."""
        return NonfiniteError(
            f"{self.found}. The state before it is in `trainer.last_state`. Look at "
            "that step's batch, or give `nonfinite='skip'` to leave such steps out."
        )
