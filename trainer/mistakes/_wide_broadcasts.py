"""A prediction of `(n,)` and a target of `(n, 1)`, which broadcast to `(n, n)`."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp

from trainer._cost import inner_jaxprs
from trainer.mistakes._silent import Mistake, Place
from trainer.mistakes._user_code import is_of_user, traceback_of


_ELEMENTWISE = {
    *("add", "sub", "mul", "div", "pow", "max", "min", "atan2", "rem"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
}
# A line that says itself that it makes a row or a column.
_ASKED = re.compile(r"\[[^]]*\b(None|newaxis)\b|expand_dims|reshape")


def wide_broadcasts(jaxpr: Any, parameters: Iterable[Any]) -> list[Mistake]:
    """Where a row meets a column, and nobody has made them a row and a column for it.

    The row has got its second axis on the very line where they meet. The column has it
    from where it comes from: a batch, a network. One that was made of a row, as by
    `x[:, None]`, and one that is a constant or a parameter, says that all pairs are
    meant.

    Args:
        jaxpr: The step.
        parameters: Those of its inputs that are arrays of the model.
    """
    return [
        Mistake(
            f"Shapes {row} and {(*row, 1)} are combined{place}: they broadcast to "
            f"{(*row, row[-1])}, so that each prediction meets each target. Give both "
            "the same shape: `jnp.squeeze(target, -1)`, or `x[:, None]` where all "
            "pairs are meant.",
            place,
        )
        for row, place in _unasked(jaxpr, parameters)
    ]


def _unasked(jaxpr: Any, meant: Iterable[Any]) -> Iterator[tuple[tuple, Place]]:
    """Shapes and lines.

    Args:
        jaxpr: The jaxpr.
        meant: Columns that say that all pairs are meant.
    """
    meant = {*meant, *jaxpr.constvars}
    made: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        made.update((v, eqn) for v in eqn.outvars)
        if eqn.primitive.name in _ELEMENTWISE:
            pair = _row_and_column(eqn)
            if pair is not None and not _is_meant(pair[1], made, meant):
                found = _promoted(pair[0], made, eqn)
                yield from [found] if found else []
        for inner in inner_jaxprs(eqn):
            # What comes first is the index of a branch, or of the test of a loop.
            pairs = zip(reversed(inner.invars), reversed(eqn.invars), strict=False)
            known = [i for i, v in pairs if _is_column(v) and _is_meant(v, made, meant)]
            yield from _unasked(inner, known)


def _row_and_column(eqn: Any) -> tuple[Any, Any] | None:
    row, column = eqn.invars
    if _is_column(row):
        row, column = column, row
    is_pair = _is_column(column) and row.aval.shape[-2:] == (1, column.aval.shape[-2])
    is_float = is_pair and jnp.issubdtype(row.aval.dtype, jnp.floating)
    return (row, column) if is_float else None


def _is_column(variable: Any) -> bool:
    shape = getattr(variable.aval, "shape", ())
    return len(shape) > 1 and shape[-1] == 1 and shape[-2] > 1


def _promoted(row: Any, made: dict[Any, Any], eqn: Any) -> tuple[tuple, Place] | None:
    """The shape of a row before, and the line, if it was made a row on that line."""
    size, place, before = row.aval.shape[-1], _place(eqn), made.get(row)
    while before is not None and before.primitive.name == "broadcast_in_dim":
        out = before.outvars[0].aval
        if out.ndim - 2 not in before.params["broadcast_dimensions"]:
            if place is None or place != _place(before) or _ASKED.search(place.text):
                return None
            return (size,), place
        # The members of an ensemble come in front.
        before = made.get(before.invars[0])
    return None


def _is_meant(column: Any, made: dict[Any, Any], meant: set[Any]) -> bool:
    """Whether a column was made of a row, or of one that is known to be meant."""
    while not hasattr(column, "val") and column not in meant:
        eqn = made.get(column)
        read = [v for v in eqn.invars if not hasattr(v, "val")] if eqn else []
        if eqn is None or len(read) != 1:
            return False
        before, name = read[0].aval.shape, eqn.primitive.name
        if name == "broadcast_in_dim":
            dims = eqn.params["broadcast_dimensions"]
            if before and column.aval.ndim - 1 not in dims:
                return True
        elif name == "reshape" and before[-1:] not in ((), (1,)):
            return True
        elif before != column.aval.shape:
            return False
        column = read[0]
    return True


def _place(eqn: Any) -> Place | None:
    """The line of the user's code that an operation comes from.

    None for what this package or an optimizer does: JAX notes the calls since the trace
    began. They are no part of its documented interface: without them, nothing is told.
    """
    for frame in getattr(traceback_of(eqn), "frames", ()):
        if is_of_user(frame.file_name):
            return Place(frame.file_name, frame.line_num)
    return None
