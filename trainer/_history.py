"""What a run recorded, as NumPy arrays on the host."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np


class Measured(dict[str, Any]):
    """Metrics by name; an unknown name is an error that says the known ones."""

    def __missing__(self, name: str) -> Any:
        """Raise KeyError with what there is."""
        raise unknown(name, self)


def unknown(name: str, known: Iterable[str], what: str = "metric") -> KeyError:
    """Make the error for a metric, or another `what`, that is not there."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, 1)
    hint = f"Did you mean `{near[0]}`?" if near else f"There are {sorted(known)}."
    return KeyError(f"No {what} `{name}` here. {hint}")


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Put the parts together, in place, so that this is done once."""
    if len(parts) > 1:
        masked = any(isinstance(part, np.ma.MaskedArray) for part in parts)
        parts[:] = [np.ma.concatenate(parts) if masked else np.concatenate(parts)]
    # It is the history's own array: what was recorded is not to be edited.
    parts[0].flags.writeable = False
    return parts[0]


def _absent(count: int, dtype: Any) -> np.ma.MaskedArray:
    """Values of a metric for steps that did not report it."""
    fill = np.nan if dtype.kind == "f" else 0  # for code that drops the mask
    return np.ma.MaskedArray(np.full(count, fill, dtype), mask=True)


class History(Mapping[str, Any]):
    """Everything a run recorded, by name.

    `history["loss"]` is a NumPy array with one value a step. A metric that some steps
    did not report is a masked array: absent steps are masked, never 0 and never NaN.
    What callbacks measured, such as a validation loss, has one value each time it was
    measured. `history.steps(name)` says which step each value belongs to.

    Two histories of one run are joined with `+`.

    Attributes:
        branches: For every metric that is the index of the active branch of a Switch,
            the names of its branches.
        measured: Names of what callbacks have measured.
    """

    def __init__(self, branches: Mapping[str, tuple[str, ...]] | None = None):
        self.branches: dict[str, tuple[str, ...]] = dict(branches or {})
        self.measured: set[str] = set()
        self._first: int | None = None
        self._reported: set[str] = set()
        self._rows: dict[str, list[np.ndarray]] = {}
        self._steps: dict[str, list[np.ndarray]] = {}

    def extend(self, first_step: int, rows: Mapping[str, np.ndarray]) -> None:
        """Append values of consecutive steps, of which the first saw `first_step`.

        What these steps report and those before did not, or the other way round, is
        masked where it was not reported.
        """
        if not rows:
            return
        if self._first is None:
            self._first = first_step
        now = first_step + np.arange(len(next(iter(rows.values()))))
        for name, values in rows.items():
            if name not in self._reported and first_step > self._first:
                before = np.arange(self._first, first_step)
                self._append(name, before, _absent(len(before), values.dtype))
            self._append(name, now, values)
        for name in self._reported - rows.keys():
            like = self._rows[name][-1]
            self._append(name, now, _absent(len(now), like.dtype))
        self._reported |= rows.keys()

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Append what a callback measured after `step` completed updates.

        A second value for one step takes the place of the first.
        """
        self.measured |= set(values)
        for name, value in values.items():
            if name in self._rows and self._steps[name][-1][-1] == step:
                for parts in (self._rows[name], self._steps[name]):
                    parts[-1] = parts[-1][:-1]
            self._append(name, np.asarray([step]), np.asarray([value]))

    def _append(self, name: str, steps: np.ndarray, values: np.ndarray) -> None:
        self._rows.setdefault(name, []).append(values)
        self._steps.setdefault(name, []).append(steps)

    def __getitem__(self, name: str) -> Any:
        """All values of one metric, in order of the steps."""
        if name not in self._rows:
            raise unknown(name, self._rows)
        return _joined(self._rows[name])

    def steps(self, name: str) -> np.ndarray:
        """The step of each value of a metric.

        For what the step itself reports this is the step it saw, from 0; for what a
        callback measured it is the number of completed updates.
        """
        if name not in self._steps:
            raise unknown(name, self._steps)
        return _joined(self._steps[name])

    def __iter__(self) -> Iterator[str]:
        """Names of everything recorded."""
        return iter(self._rows)

    def __len__(self) -> int:
        """How many metrics there are."""
        return len(self._rows)

    def __repr__(self) -> str:
        """Show the number of values by name."""
        counts = ", ".join(f"{n}: {sum(map(len, p))}" for n, p in self._rows.items())
        return f"History({counts})"

    def __add__(self, later: "History") -> "History":
        """Join a run's history and that of its continuation.

        Raises:
            ValueError: `later` holds a step that is not after all of this one's.
        """
        joined = History({**self.branches, **later.branches})
        joined.measured = self.measured | later.measured
        for name in dict.fromkeys([*self, *later]):
            for part in (self, later):
                if name in part:
                    joined._append(name, part.steps(name), part[name])
            steps = joined.steps(name)
            if np.any(np.diff(steps) <= 0):
                raise ValueError(
                    f"The steps of `{name}` do not increase where the histories meet. "
                    "Join the history of a run and of what continued it, in that order."
                )
        return joined
