"""Rows of metrics: written on the device, read on the host, one for each step."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from trainer._metrics import MetricTree


class MetricBuffer:
    """The layout of the rows that the step writes and the host reads once a report.

    Metrics of one dtype share one array of shape `(rows, columns)`, so that a call of
    the step hands over a few buffers however many metrics there are. A metric has one
    column; in an ensemble it has one for each member.
    """

    def __init__(self, metrics: MetricTree, rows: int):
        self.rows = rows
        self.columns: dict[str, list[str]] = {}
        for name, metric in metrics.items():
            self.columns.setdefault(str(metric.value.dtype), []).append(name)
        self.optional = [n for n, m in metrics.items() if m.present is not True]
        self._shapes = {name: metric.value.shape for name, metric in metrics.items()}

    @property
    def names(self) -> frozenset[str]:
        """Names of all that `read` may find."""
        members = {n: range(*shape) for n, shape in self._shapes.items() if shape}
        own = {f"{i}/{name}" for name, places in members.items() for i in places}
        return frozenset(own | self._shapes.keys())

    def _width(self, names: list[str]) -> int:
        return sum(math.prod(self._shapes[name]) for name in names)

    def empty(self) -> dict[str, np.ndarray]:
        """Buffers with no row written."""
        arrays = {
            dtype: np.zeros((self.rows, self._width(names)), dtype)
            for dtype, names in self.columns.items()
        }
        if self.optional:
            width = self._width(self.optional)
            arrays["present"] = np.zeros((self.rows, width), np.bool_)
        return arrays

    def write(
        self, buffers: dict[str, Array], row: Array, metrics: MetricTree
    ) -> dict[str, Array]:
        """Write one step's metrics to `row`. Traced."""
        cells = {
            dtype: [metrics[n].value for n in names]
            for dtype, names in self.columns.items()
        }
        if self.optional:
            cells["present"] = [metrics[n].present for n in self.optional]
        return {
            dtype: jax.lax.dynamic_update_index_in_dim(
                buffers[dtype], _row([jnp.asarray(v) for v in values]), row, 0
            )
            for dtype, values in cells.items()
        }

    def read(
        self, buffers: Mapping[str, np.ndarray], rows: int
    ) -> dict[str, np.ma.MaskedArray | np.ndarray]:
        """Take the first `rows` rows apart, by metric; absent steps are masked.

        In an ensemble, a member's metrics begin with its place, as in `3/loss`. What
        the members have in common has no such prefix; see `_in_common`.
        """
        found: dict[str, np.ma.MaskedArray | np.ndarray] = {}
        present = self._apart(buffers, "present", self.optional, rows)
        for dtype, names in self.columns.items():
            for name, values in self._apart(buffers, dtype, names, rows).items():
                found |= as_rows(name, np.array(values), present.get(name))
        return found

    def _apart(
        self, buffers: Mapping[str, np.ndarray], key: str, names: list[str], rows: int
    ) -> dict[str, np.ndarray]:
        """The columns of each metric, without an axis for one that has a single one."""
        found, place = {}, 0
        for name in names:
            shape = self._shapes[name]
            end = place + math.prod(shape)
            found[name] = buffers[key][:rows, place:end].reshape(rows, *shape)
            place = end
        return found


def _row(cells: list[Array]) -> Array:
    if all(cell.ndim == 0 for cell in cells):
        return jnp.stack(cells)
    return jnp.concatenate([jnp.ravel(cell) for cell in cells])


def as_rows(
    name: str, values: np.ndarray, present: np.ndarray | None
) -> dict[str, np.ma.MaskedArray | np.ndarray]:
    """One metric as it is recorded: masked, and each member's; see `MetricBuffer.read`.

    Args:
        name: Its name.
        values: Its own rows, which may be changed.
        present: Where it was reported; None for everywhere.
    """
    if present is not None:
        if values.dtype.kind == "f":
            values[~present] = np.nan  # for code that drops the mask
        values = np.ma.MaskedArray(values, mask=~present)
    if values.ndim == 1:
        return {name: values}
    own = {f"{place}/{name}": column for place, column in enumerate(values.T)}
    return {name: _in_common(values), **own}


def _in_common(values: Any) -> Any:
    """The mean of a metric over members, one value a step, of those that report it.

    Whole numbers, such as the index of a branch, have no mean. They are there at the
    steps in which all members have the same.
    """
    masked = np.ma.getmaskarray(values)
    if values.dtype.kind == "f":
        total = np.ma.mean(values, axis=1, dtype=np.float64).astype(values.dtype)
        return total if masked.any() else np.ma.getdata(total)
    first = np.ma.getdata(values)[:, 0]
    differ = masked.any(1) | (np.ma.getdata(values) != first[:, None]).any(1)
    return np.ma.MaskedArray(first, mask=differ) if differ.any() else first.copy()
