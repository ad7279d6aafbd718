"""Plain Python values: copied so that later changes do not reach the copy, compared."""

import sys
import types
from typing import Any

import numpy as np

from trainer._tree import describe


SIMPLE = bool | int | float | complex | str | bytes | None
_LIBRARIES = frozenset(
    ("jax", "jaxlib", "equinox", "optax", "numpy", "jaxtyping", "trainer")
) | frozenset(sys.stdlib_module_names)
_DEEPEST = 3
_LONGEST = 100
_LARGEST = 2**16


def is_of_library(value: Any) -> bool:
    """Whether a function, class or module belongs to Python or to what we build on."""
    module = getattr(value, "__module__", None) or getattr(value, "__name__", "")
    return str(module).split(".")[0] in _LIBRARIES


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
    if isinstance(value, SIMPLE):
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
    settings = hasattr(value, "__dict__") and not callable(value)
    namespace = isinstance(value, types.SimpleNamespace)
    return settings and (namespace or not is_of_library(type(value)))


def unchanged(was: Any, now: Any) -> bool:
    """Whether what was read is still so. A list or dict may have grown since.

    A list that only grows is a record of the run, and seldom a setting of it.
    """
    if isinstance(was, np.ndarray) or isinstance(now, np.ndarray):
        arrays = isinstance(was, np.ndarray) and isinstance(now, np.ndarray)
        return arrays and was.dtype == now.dtype and was.tobytes() == now.tobytes()
    if type(was) is not type(now):
        return False
    if isinstance(was, dict):
        return all(k in now and unchanged(v, now[k]) for k, v in was.items())
    if isinstance(was, list):
        return len(was) <= len(now) and all(map(unchanged, was, now))
    if isinstance(was, set):
        return was <= now
    return was is now or was == now or (was != was and now != now)
