"""Plain Python values: copied so that later changes do not reach the copy, compared."""

from typing import Any

import numpy as np

from trainer._tree import describe


LIBRARIES = ("jax", "equinox", "optax", "numpy", "jaxtyping", "trainer")
_DEEPEST = 4
_LONGEST = 1000
_LARGEST = 2**20


class _Same:
    """An object compared by identity, and kept alive so that this means something."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __repr__(self) -> str:
        return describe(self.value)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def frozen(value: Any, words: set[str] | None, depth: int = _DEEPEST) -> Any:
    """A copy of plain values that later changes do not reach.

    Of an object, and of a dict with names for keys, only what the function names in its
    code is taken (`words`, if given): it is free to hold other things that change.
    """
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return value
    if isinstance(value, np.ndarray) and value.nbytes <= _LARGEST:
        return value.copy()
    within = lambda v: frozen(v, words, depth - 1)
    if depth and isinstance(value, dict) and len(value) <= _LONGEST:
        named = {k: v for k, v in value.items() if words is None or k in words}
        return {k: within(v) for k, v in (named or value).items()}
    if depth and isinstance(value, list | tuple) and len(value) <= _LONGEST:
        return [within(v) for v in value]
    if depth and isinstance(value, set | frozenset) and len(value) <= _LONGEST:
        return set(value)
    if depth and _is_plain(value):
        kept = vars(value).keys() if words is None else vars(value).keys() & words
        return {k: within(vars(value)[k]) for k in sorted(kept)}
    return _Same(value)


def _is_plain(value: Any) -> bool:
    """Whether it is an object that holds settings, and not one that does something."""
    library = type(value).__module__.split(".")[0] in LIBRARIES
    return hasattr(value, "__dict__") and not (library or callable(value))


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        arrays = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
        return arrays and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a is b or a == b or (a != a and b != b)
