"""Columns of a batch that are kept aside, and not given to the step."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any


Column = Hashable
"""The key of a column, or its position, or a tuple of these for one deeper down."""


def check_aside(aside: Any) -> tuple[Column, ...]:
    """Check the names of columns that are to be kept aside; return them."""
    if isinstance(aside, str | bytes | Mapping) or not isinstance(aside, Iterable):
        raise TypeError(
            f"`aside` is `{aside!r}`, and not a tuple of columns. Write "
            f"`aside=({aside!r},)`."
        )
    return tuple(aside)


def put_aside(batch: Any, names: tuple[Column, ...]) -> tuple[Any, dict[Column, Any]]:
    """Take columns out of a batch; return the rest of it, and them by name.

    A named tuple keeps its fields: what was taken out is None.

    Raises:
        KeyError: The batch has no such column.
    """
    if type(batch) in (tuple, list) and len(batch) == 1:
        batch = batch[0]
    paths = [name if isinstance(name, tuple) else (name,) for name in names]
    taken: dict[Column, Any] = {}
    for name, path in zip(names, paths, strict=True):
        node = batch
        for key in path:
            place = _place(node, key)
            if place is None:
                raise KeyError(
                    f"`aside` names `{name!r}`, and the batch has {_columns(node)}."
                )
            node = node[place]
        taken[name] = node
    return _without(batch, paths), taken


def _place(node: Any, key: Any) -> Any:
    """What finds a key in a node: itself, or a position from the front; or None."""
    if isinstance(node, Mapping):
        return key if key in node else None
    if not isinstance(node, tuple | list):
        return None
    fields = getattr(node, "_fields", ())
    if key in fields:
        return fields.index(key)
    is_position = isinstance(key, int) and -len(node) <= key < len(node)
    return key % len(node) if is_position else None


def _columns(node: Any) -> str:
    if isinstance(node, Mapping):
        return f"{[*node]} there"
    if isinstance(node, tuple | list):
        return f"{len(node)} columns there"
    return f"a `{type(node).__name__}` there, which has no columns"


def _without(node: Any, paths: list[tuple[Any, ...]]) -> Any:
    below: dict[Any, list[tuple[Any, ...]]] = {}
    for first, *rest in paths:
        below.setdefault(_place(node, first), []).append(tuple(rest))
    keys = node if isinstance(node, Mapping) else range(len(node))
    gone = {place for place, rest in below.items() if () in rest}
    kept = {
        key: _without(node[key], below[key]) if key in below else node[key]
        for key in keys
        if key not in gone
    }
    if isinstance(node, Mapping):
        return kept
    if hasattr(node, "_fields"):
        return type(node)(*(kept.get(place) for place in range(len(node))))
    return type(node)(kept.values())
