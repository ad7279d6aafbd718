"""Metrics on the device: values that may be absent from a step, and their buffer."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, PyTree

from trainer._tree import describe, first_difference, strong, trace_once


class Metric(NamedTuple):
    """A scalar, and whether the step reported it; both one a member in an ensemble.

    `present` is True where that is known while tracing. Otherwise it is a traced bool,
    and `value` means nothing where it is False.
    """

    value: Any
    present: Any = True


MetricTree = Mapping[str, Metric]


def under(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """The same by names that begin with that of a part: `name/`."""
    return {f"{name}/{metric}": value for metric, value in found.items()}


def as_metrics(metrics: Any, owner: str) -> dict[str, Metric]:
    """Check the dict of scalars that the function named `owner` returned."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"`{owner}` returned metrics of type `{type(metrics).__name__}`. "
            "Metrics are a dict from names to scalars."
        )
    checked = {}
    for name, metric in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"`{owner}` returned a metric named `{name!r}`, not a str.")
        metric = metric if isinstance(metric, Metric) else Metric(metric)
        checked[name] = metric._replace(value=_scalar(metric.value, name, owner))
    return checked


def _scalar(value: Any, name: str, owner: str) -> Array:
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):
        array = None
    real = array is not None and (
        jnp.issubdtype(array.dtype, np.floating)
        or jnp.issubdtype(array.dtype, np.integer)
        or array.dtype == np.bool_
    )
    if array is None or not real or array.shape != ():
        given = describe(value if array is None else array)
        raise TypeError(
            f"Metric `{name}` of `{owner}` is {given}. A metric is one real number a "
            "step; reduce it, for example with `jnp.mean`."
        )
    return jax.lax.convert_element_type(array, _stored_dtype(array.dtype))


def _stored_dtype(dtype: Any) -> np.dtype:
    """Half precision is kept as float32, bools and integers that fit as int32."""
    wide = np.dtype(dtype).itemsize == 8
    if jnp.issubdtype(dtype, np.floating) or dtype == np.uint32:
        return np.dtype("float64" if wide else "float32")
    return np.dtype("int64" if wide else "int32")


def switch(
    index: Array, branches: Sequence[Callable[..., Any]], *operands: PyTree
) -> tuple[PyTree, dict[str, Metric]]:
    """`jax.lax.switch` over functions whose metrics may differ.

    Every branch returns `(out, metrics)`. The outputs have one structure. A metric that
    the running branch did not report is absent: never 0, never NaN. Only the branch at
    `index` is run, and each function's Python body is run once, while tracing.
    """
    traced = [trace_once(branch, *operands) for branch in branches]
    outs = [out for _, (out, _) in traced]
    reports = [metrics for _, (_, metrics) in traced]
    names = list(dict.fromkeys(name for report in reports for name in report))
    dtypes = {
        n: jnp.result_type(*(r[n].value for r in reports if n in r)) for n in names
    }
    always = {n: all(n in r and r[n].present is True for r in reports) for n in names}
    out_dtypes = [
        jnp.result_type(*leaves) if _is_number(leaves[0]) else None
        for leaves in zip(*(jtu.tree_leaves(out) for out in outs), strict=True)
    ]

    def uniform(replay: Callable[..., Any]) -> Callable[..., Any]:
        def branch(*operands: PyTree) -> Any:
            out, metrics = replay(*operands)
            leaves, treedef = jtu.tree_flatten(out)
            leaves = [
                x if dtype is None else jax.lax.convert_element_type(x, dtype)
                for x, dtype in zip(leaves, out_dtypes, strict=True)
            ]
            values = [
                jax.lax.convert_element_type(metrics[n].value, dtypes[n])
                if n in metrics
                else jnp.zeros((), dtypes[n])
                for n in names
            ]
            present = [
                jnp.asarray(metrics[n].present if n in metrics else False)
                for n in names
                if not always[n]
            ]
            return jtu.tree_unflatten(treedef, leaves), values, present

        return branch

    out, values, present = jax.lax.switch(
        index, [uniform(replay) for replay, _ in traced], *operands
    )
    reported = iter(present)
    metrics = {
        name: Metric(value, True if always[name] else next(reported))
        for name, value in zip(names, values, strict=True)
    }
    return out, metrics


def do_if(
    live: Array, do: Callable[..., Any], *kept: PyTree
) -> tuple[tuple[PyTree, ...], dict[str, Metric]]:
    """`do(*kept)` if `live` is 1, and `kept` as it is if `live` is 0.

    `do` returns the next `kept`, of the same form, and metrics. They are absent where
    it is not done. It is a loop of one turn or none, and not a cond: XLA changes the
    state of a loop in place, where a cond copies all that it does not change.

    Raises:
        TypeError: `do` changes the structure, a shape or a dtype of what is kept.
    """
    replay, (out, report) = trace_once(do, *kept)
    check_carried("", kept, out)

    def turn(_: Any, carry: Any) -> Any:
        next_kept, metrics = replay(*carry[0])
        values = {n: m.value for n, m in metrics.items()}
        present = {n: jnp.asarray(m.present) for n, m in metrics.items()}
        return jtu.tree_map(strong, (next_kept, values, present))

    zeros = {n: jnp.zeros((), m.value.dtype) for n, m in report.items()}
    absent = {n: jnp.asarray(False) for n in report}
    start = (jtu.tree_map(strong, kept), zeros, absent)
    kept, values, present = jax.lax.fori_loop(0, live, turn, start)
    return kept, {n: Metric(values[n], present[n]) for n in report}


def check_carried(root: str, before: PyTree, after: PyTree) -> None:
    """Raise TypeError unless what comes out of an update can go into the next."""
    difference = first_difference(root, before, after)
    if difference:
        raise TypeError(
            f"An update changes the state: {difference}, so that it cannot take turns "
            "with others. It keeps the structure, shapes, dtypes and non-array values "
            "of the model and of `opt_state`."
        )


def _is_number(leaf: Any) -> bool:
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


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
                values = np.array(values)
                if name in present:
                    if values.dtype.kind == "f":
                        values[~present[name]] = np.nan  # for code that drops the mask
                    values = np.ma.MaskedArray(values, mask=~present[name])
                if values.ndim == 1:
                    found[name] = values
                    continue
                found[name] = _in_common(values)
                found |= {f"{i}/{name}": own for i, own in enumerate(values.T)}
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
