"""Python values that the step read while it was traced, and would not read again."""

import contextlib
import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from trainer._tree import describe
from trainer._types import RecompileError


_LIBRARIES = ("jax", "equinox", "optax", "numpy", "jaxtyping", "trainer")
_HOST_CALLBACKS = {"callback", "io_callback", "pure_callback"}
_DEEPEST = 4
_LONGEST = 1000
_LARGEST = 2**20


class Baked:
    """The values that the functions of a program read from outside of themselves.

    They are variables of a closure, globals, and attributes of the object that a method
    belongs to. A compiled step keeps what they were. Those that change while the step
    is traced are left out: a loss that counts its own calls is not mistaken for one
    whose settings were changed.
    """

    def __init__(self, program: PyTree):
        self._program = program
        self._values = dict(_read(program))

    def traced(self) -> None:
        """Say that the step was traced just now."""
        now = dict(_read(self._program))
        kept = {k for k, v in self._values.items() if k in now and _equal(v, now[k])}
        self._values = {k: now[k] for k in kept}

    def check(self) -> None:
        """Raise RecompileError if a value is no longer what the step has read."""
        now = dict(_read(self._program))
        for key, was in self._values.items():
            if key in now and not _equal(was, now[key]):
                raise RecompileError(
                    f"{key[0]} has changed from {_text(was)} to {_text(now[key])} "
                    "since the step was compiled, which does not see it. Use a "
                    "schedule of the step for what changes while training, or make a "
                    "new Trainer."
                )


def _read(program: PyTree) -> Iterator[tuple[tuple[str, str], Any]]:
    """Name, reader and frozen value of all that the program's own functions read."""
    waiting = [leaf for leaf in jtu.tree_leaves(program) if callable(leaf)]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if isinstance(function, functools.partial):
            waiting.append(function.func)
            continue
        function = inspect.unwrap(function)
        owner = getattr(function, "__self__", None)
        function = getattr(function, "__func__", function)
        if not _is_own(function) or id(function) in seen:
            continue
        seen.add(id(function))
        codes = list(_codes(function.__code__))
        words = {name for code in codes for name in code.co_names}
        words |= {c for code in codes for c in code.co_consts if isinstance(c, str)}
        # What a host callback writes while the step runs is no setting of the step.
        calls_host = bool(words & _HOST_CALLBACKS)
        codes = codes[:1] if calls_host else codes
        for name, value in _variables(function, codes, owner, words):
            if isinstance(value, types.FunctionType | types.MethodType):
                waiting += [] if calls_host else [value]
            elif not isinstance(value, types.ModuleType | type):
                yield (name, function.__qualname__), _frozen(value, words, _DEEPEST)


def _is_own(function: Any) -> bool:
    """Whether it is a Python function that no library brought."""
    python = isinstance(function, types.FunctionType)
    return python and (function.__module__ or "").split(".")[0] not in _LIBRARIES


def _variables(
    function: types.FunctionType, codes: list[types.CodeType], owner: Any, words: set
) -> Iterator[tuple[str, Any]]:
    """What a function reads that is not its argument, and the methods it may call."""
    where = f"of `{function.__name__}` ({Path(function.__code__.co_filename).name})"
    own = _closure(function)
    found = _loaded(codes, "LOAD_DEREF") & own.keys()
    yield from ((f"Variable `{n}` {where}", own[n]) for n in found)
    found = _loaded(codes, "LOAD_GLOBAL") & function.__globals__.keys()
    yield from ((f"Global `{n}` {where}", function.__globals__[n]) for n in found)
    if owner is None or isinstance(owner, eqx.Module | types.ModuleType | type):
        return
    for name in words & getattr(owner, "__dict__", {}).keys():
        yield f"Attribute `{name}` of `{type(owner).__name__}`", vars(owner)[name]
    for name in words & set(dir(type(owner))):
        method = getattr(type(owner), name)
        if isinstance(method, types.FunctionType):
            yield name, types.MethodType(method, owner)


def _closure(function: types.FunctionType) -> dict[str, Any]:
    found = {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        # A variable that has no value yet has an empty cell.
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _loaded(codes: Iterable[types.CodeType], operation: str) -> set[str]:
    """Names that an operation loads. Of globals, `co_names` has attributes as well."""
    return {
        instruction.argval
        for code in codes
        for instruction in dis.get_instructions(code)
        if instruction.opname == operation
    }


class _Same:
    """An object compared by identity, and kept alive so that this means something."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __repr__(self) -> str:
        return describe(self.value)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _frozen(value: Any, words: set[str], depth: int) -> Any:
    """A copy of plain values that later changes do not reach.

    Of an object, and of a dict with names for keys, only what the function names in its
    code is taken: it is free to hold other things that change.
    """
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return value
    if isinstance(value, np.ndarray) and value.nbytes <= _LARGEST:
        return value.copy()
    within = lambda v: _frozen(v, words, depth - 1)
    if depth and isinstance(value, dict) and len(value) <= _LONGEST:
        named = {k: v for k, v in value.items() if isinstance(k, str) and k in words}
        return {k: within(v) for k, v in (named or value).items()}
    if depth and isinstance(value, list | tuple) and len(value) <= _LONGEST:
        return [within(v) for v in value]
    if depth and isinstance(value, set | frozenset) and len(value) <= _LONGEST:
        return set(value)
    if depth and _is_plain(value):
        return {k: within(v) for k, v in vars(value).items() if k in words}
    return _Same(value)


def _is_plain(value: Any) -> bool:
    """Whether it is an object that holds settings, and not one that does something."""
    library = type(value).__module__.split(".")[0] in _LIBRARIES
    return hasattr(value, "__dict__") and not (library or callable(value))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        arrays = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
        return arrays and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a is b or a == b or (a != a and b != b)


def _text(value: Any) -> str:
    return f"`{describe(value)}`"
