"""Metrics of a step: values that may be absent from it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, PyTree

from trainer._tree import describe, is_eager, strong, trace_once
from trainer.recompiles._differences import first_difference


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


def as_metrics(metrics: Any, owner: str, at: str = "") -> dict[str, Metric]:
    """Check the dict of scalars that a function returned.

    Args:
        metrics: What it returned.
        owner: The function's name.
        at: Where it is, as messages name it: ` at losses.py:12`.
    """
    who = f"`{owner}`{at}"
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"{who} returned metrics of type `{type(metrics).__name__}`. "
            "Metrics are a dict from names to scalars: `{'name': value}`."
        )
    checked = {}
    for name, metric in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"{who} returned a metric named `{name!r}`, not a str.")
        metric = metric if isinstance(metric, Metric) else Metric(metric)
        checked[name] = metric._replace(value=_scalar(metric.value, name, who))
    return checked


def _scalar(value: Any, name: str, who: str) -> Array:
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
            f"Metric `{name}` of {who} is {given}. A metric is one real number a "
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
    `index` is run, and each function's Python body is run once, while tracing. Where
    nothing is compiled, no other function is run at all.
    """
    if is_eager(index):
        return branches[int(jnp.clip(index, 0, len(branches) - 1))](*operands)
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
    if is_eager(live):
        out, metrics = do(*kept) if live else (kept, {})
        check_carried("", kept, out)
        return out, metrics
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
