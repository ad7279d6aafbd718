"""Data that a batch is read from, put back to where they were."""

import contextlib
import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from trainer.mistakes._own_code import is_of_library


# A loader has a few objects in it. What has more is a data set.
_MOST_OBJECTS = 1_000
_MOST_ROWS = 100
_MOST_BYTES = 2**26
_PLAIN = (str, bytes, int, float, complex, type(None), type, ModuleType, jax.Array)


@contextlib.contextmanager
def undisturbed(data: Any) -> Iterator[None]:
    """Put back what reading a batch changes: random states, places, orders.

    They are those of Python, NumPy and PyTorch, and what `data` holds as attributes,
    in lists and in variables of its functions. What lies elsewhere, such as the place
    in an open file, stays as it is.
    """
    back = [*_back_globally(), *_back(data)]
    try:
        yield
    finally:
        for put_back in back:
            put_back()


def _back_globally() -> Iterator[Callable[[], None]]:
    """How the random states that all share are put back."""
    yield functools.partial(random.setstate, random.getstate())
    yield functools.partial(np.random.set_state, np.random.get_state())
    torch = sys.modules.get("torch")
    if torch is not None:
        yield functools.partial(torch.set_rng_state, torch.get_rng_state())


def _back(data: Any) -> Iterator[Callable[[], None]]:
    """How everything that data hold is put back."""
    waiting, seen = [data], {}
    while waiting and len(seen) < _MOST_OBJECTS:
        node = waiting.pop()
        if id(node) in seen or isinstance(node, _PLAIN):
            continue
        seen[id(node)] = node
        put_back = _back_one(node)
        if put_back is not None:
            yield put_back
        waiting += _inside(node)


def _back_one(node: Any) -> Callable[[], None] | None:
    """How one object is put back, or None if it does not change."""
    if isinstance(node, np.random.Generator):
        bits = node.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    if isinstance(node, random.Random):
        return functools.partial(node.setstate, node.getstate())
    torch = sys.modules.get("torch")
    others = np.random.RandomState if torch is None else torch.Generator
    if isinstance(node, np.random.RandomState | others):
        return functools.partial(node.set_state, node.get_state())
    if isinstance(node, list):
        return functools.partial(node.__setitem__, slice(None), list(node))
    # An order of rows may be shuffled in place. Data are not looked at.
    if isinstance(node, np.ndarray) and _is_order(node):
        return functools.partial(node.__setitem__, ..., node.copy())
    if _has_attributes(node):
        return functools.partial(_put_back, node, dict(vars(node)))
    return None


def _is_order(array: np.ndarray) -> bool:
    whole = array.ndim == 1 and array.dtype.kind in "iu"
    return whole and array.nbytes <= _MOST_BYTES and array.flags.writeable


def _put_back(node: Any, was: dict[str, Any]) -> None:
    now = vars(node)
    for name in now.keys() - was.keys():
        del now[name]
    now.update(was)


def _has_attributes(node: Any) -> bool:
    functions = FunctionType | MethodType | functools.partial
    return isinstance(getattr(node, "__dict__", None), dict) and not isinstance(
        node, functions
    )


def _inside(node: Any) -> list[Any]:
    """What an object holds."""
    if isinstance(node, MethodType):
        return [node.__self__, node.__func__]
    if isinstance(node, functools.partial):
        return [node.func, *node.args, *node.keywords.values()]
    if isinstance(node, FunctionType):
        return [] if is_of_library(node) else _variables(node)
    if isinstance(node, list | tuple | set) and len(node) <= _MOST_ROWS:
        return list(node)
    if isinstance(node, dict) and len(node) <= _MOST_ROWS:
        return list(node.values())
    return list(vars(node).values()) if _has_attributes(node) else []


def _variables(function: FunctionType) -> list[Any]:
    """Values of the variables outside of a function that it names."""
    try:
        found = inspect.getclosurevars(function)
    except ValueError:  # a variable that has no value yet
        return []
    return [*found.nonlocals.values(), *found.globals.values()]
