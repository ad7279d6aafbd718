"""What differs between two PyTrees, leaf by leaf, in words."""

import dataclasses
from collections.abc import Iterator
from typing import Any, final

import jax.tree_util as jtu
from jaxtyping import PyTree

from trainer._tree import describe, is_array_like, path_name
from trainer.recompiles._forms import array_differences, strong_like


_ABSENT = "not there"
_NUMBERS = bool | int | float | complex


@final
@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing for which a function compiles again.

    Attributes:
        path: Where it is, as the Python that reaches it: `model.layers[0].weight`.
        what: What differs: `"shape"`, `"dtype"`, `"weak type"`, `"key"`,
            `"structure"`, `"static value"`, `"traced"` (an array that was none, or the
            other way round), `"committed"`, `"sharding"`, `"memory kind"`,
            `"call"` (how an argument is given), `"function"` or `"context"`.
        was: What it was, in a few characters.
        now: What it is.
        remedy: What to do about it, in a sentence.

    Example:
        >>> import numpy as np
        >>> import trainer as tr
        >>> step = lambda x: 2 * x
        >>> [found] = tr.explain(step, (np.zeros(2),), (np.zeros(3),))
        >>> found.path, found.what, found.was, found.now
        ('x', 'shape', 'float32[2]', 'float32[3]')
    """

    path: str
    what: str
    was: str
    now: str
    remedy: str

    @property
    def text(self) -> str:
        """What differs, without the remedy and the full stop."""
        if self.was == _ABSENT:
            return f"`{self.path}` is new: {self.now}"
        if self.now == _ABSENT:
            return f"`{self.path}` was {self.was} and is now gone"
        other = ", another one" if self.was == self.now else ""
        return f"`{self.path}` was {self.was} and is now {self.now}{other}"

    def __str__(self) -> str:
        """Say what differs, and what to do about it, in one line."""
        return f"{self.text}. {self.remedy}"


def differences(
    root: str, old: PyTree, new: PyTree, *, forms_only: bool = False
) -> Iterator[Difference]:
    """Find all for which a function that takes `new` after `old` compiles again.

    Structure and static values are compared as JAX's cache does, by identity and then
    by `==`. Of arrays no number is read, so they may be donated or deleted already.

    Args:
        root: What paths begin with, such as `"batch"`.
        old: A tree of arrays, structs or forms, and of anything else.
        new: Another one.
        forms_only: Whether weak types and placement are left out.
    """
    for found in _of_trees(root, old, new, forms_only):
        yield dataclasses.replace(found, path=found.path.lstrip(".") or "state")


def first_difference(root: str, old: PyTree, new: PyTree) -> str | None:
    """Say where two trees differ in structure, shape, dtype or static value, or None.

    Array leaves are compared by shape and dtype alone, other leaves by identity and
    then by `==`.
    """
    for found in differences(root, old, new, forms_only=True):
        if found.what == "structure":
            was, now = (
                _ABSENT if text == "None" or text.startswith("of class") else text
                for text in (found.was, found.now)
            )
            # A leaf where there was none. Two classes stay as they are.
            if was != now:
                found = dataclasses.replace(found, was=was, now=now)
        return found.text
    return None


def _of_trees(name: str, was: Any, now: Any, forms_only: bool) -> Iterator[Difference]:
    if was is now:
        return
    try:
        alike = jtu.tree_structure(was) == jtu.tree_structure(now)
    except (TypeError, ValueError):
        # A static field that cannot be compared, such as an array. It is named below.
        alike = False
    if not alike:
        yield from _of_nodes(name, was, now, forms_only)
        return
    leaves = zip(jtu.tree_leaves_with_path(was), jtu.tree_leaves(now), strict=True)
    for (path, one), other in leaves:
        if one is not other:
            yield from _of_leaves(path_name(name, path), one, other, forms_only)


def _of_nodes(name: str, was: Any, now: Any, forms_only: bool) -> Iterator[Difference]:
    """Compare two trees that are known to have other structures."""
    nodes = [not jtu.all_leaves([x]) for x in (was, now)]
    if not all(nodes) or type(was) is not type(now):
        yield _structure(name, *(_kind(x, all(nodes)) for x in (was, now)))
        return
    old, new = _children(was), _children(now)
    found = False
    for key in [*old, *(key for key in new if key not in old)]:
        below = name + jtu.keystr((key,))
        if key in old and key in new:
            parts = _of_trees(below, old[key], new[key], forms_only)
        else:
            texts = (_kind(x[key]) if key in x else _ABSENT for x in (old, new))
            parts = iter([_structure(below, *texts)])
        for part in parts:
            found = True
            yield part
    for part in _of_static_fields(name, was, now, {str(key) for key in old}):
        found = True
        yield part
    if not found:
        texts = [f"of class `{type(x).__name__}` with {_rest(x)}" for x in (was, now)]
        yield _structure(name, *texts)


def _children(node: Any) -> dict[Any, Any]:
    """What is directly below a node, by key."""
    pairs = jtu.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    return {path[0]: child for path, child in pairs}


def _kind(node: Any, by_class: bool = False) -> str:
    """Describe a leaf, or say of which class a node is."""
    is_leaf = jtu.all_leaves([node]) or (node is None and not by_class)
    return describe(node) if is_leaf else f"of class `{type(node).__name__}`"


def _rest(node: Any) -> str:
    """What a node holds besides its children."""
    data = jtu.tree_structure(node).node_data()
    return describe(data[1] if data else None)


def _structure(name: str, was: str, now: str) -> Difference:
    remedy = "Give every call the same structure, with arrays in the same places."
    return Difference(name, "structure", was, now, remedy)


def _of_static_fields(
    name: str, was: Any, now: Any, children: set[str]
) -> Iterator[Difference]:
    """Name the fields of a dataclass that are a part of its structure, and differ."""
    fields = dataclasses.fields(was) if dataclasses.is_dataclass(was) else ()
    for field in fields:
        one, other = (getattr(x, field.name, None) for x in (was, now))
        if f".{field.name}" in children or one is other:
            continue
        below = f"{name}.{field.name}"
        try:
            if not bool(one == other):
                remedy = _static_remedy(one, other, _NOT_STATIC)
                yield Difference(
                    below, "static value", _text(one), _text(other), remedy
                )
        except (TypeError, ValueError):
            yield Difference(below, "static value", _text(one), _text(other), _NO_EQUAL)


_NUMBER = "Give it as an array, with `jnp.asarray(...)`, or the same at every call."
_NOT_STATIC = "Make it an array in a field that is not static, or keep it the same."
_NO_EQUAL = (
    "A static field is compared by `==`, and an array cannot be, so that the call "
    "raises `ValueError`: make it a field that is not static."
)


def _text(value: Any) -> str:
    return (
        f"of class `{value.__name__}`" if isinstance(value, type) else describe(value)
    )


def _of_leaves(name: str, was: Any, now: Any, forms_only: bool) -> Iterator[Difference]:
    arrays = [is_array_like(leaf) for leaf in (was, now)]
    if all(arrays):
        found = array_differences(was, now, forms_only)
        yield from (Difference(name, *each) for each in found)
    elif any(arrays):
        array, other = (was, now) if arrays[0] else (now, was)
        remedy = (
            f"Make it an array from the first call on, with {strong_like(array.dtype)}."
            if isinstance(other, _NUMBERS)
            else "Give it as an array at every call, or at none."
        )
        yield Difference(name, "traced", describe(was), describe(now), remedy)
    elif not equal(was, now):
        remedy = _static_remedy(was, now, _NUMBER)
        yield Difference(name, "static value", _text(was), _text(now), remedy)


def equal(was: Any, now: Any) -> bool:
    """Whether two values that are no arrays are one to JAX: by identity, then `==`."""
    try:
        return was is now or bool(was == now)
    except (TypeError, ValueError):
        return False


def _static_remedy(was: Any, now: Any, of_number: str) -> str:
    if isinstance(was, _NUMBERS) and isinstance(now, _NUMBERS):
        is_nan = was != was and now != now
        return "NaN is not equal to itself: give one object." if is_nan else of_number
    if callable(now) and not isinstance(now, type):
        return "Make the function once, outside of the loop, and give that one."
    if type(was) is type(now) and type(was).__eq__ is object.__eq__:
        name = type(was).__name__
        return f"Keep one `{name}` for all calls, or give it `__eq__` and `__hash__`."
    return "What is no array is a part of the program: give every call the same."
