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
import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from trainer._plain import frozen, is_of_library, SIMPLE, unchanged
from trainer._tree import describe, path_name
from trainer._types import RecompileError


_HOST_CALLBACKS = {"callback", "io_callback", "pure_callback"}


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
        kept = {k for k, v in self._values.items() if k in now and unchanged(v, now[k])}
        self._values = {k: now[k] for k in kept}

    def changed(self) -> str | None:
        """What is no longer as the step has read it, in words, or None."""
        now = dict(_read(self._program))
        for key, was in self._values.items():
            if key in now and not unchanged(was, now[key]):
                texts = [f"`{describe(value)}`" for value in (was, now[key])]
                how = f" from {texts[0]} to {texts[1]}" if len({*texts}) == 2 else ""
                return f"{key[0]} has changed{how}"
        return None

    def check(self) -> None:
        """Raise RecompileError if a value is no longer what the step has read."""
        changed = self.changed()
        if changed:
            raise RecompileError(
                f"{changed} since the step was compiled, which does not see it. Use a "
                "schedule of the step for what changes while training, or make a new "
                "Trainer."
            )


def _read(program: PyTree) -> Iterator[tuple[tuple[str, str], Any]]:
    """Name, reader and a copy of all that the program's own functions read."""
    waiting: list[Any] = []
    for path, node in _nodes((), program):
        if callable(node):
            waiting.append(node)
        elif not isinstance(node, jax.Array | eqx.Module):
            yield (f"`{path_name('loss', path)}`", ""), frozen(node, None)
    seen: set[int] = set()
    while waiting:
        function, owner, held = _taken_apart(waiting.pop())
        if _is_own(function) and id(function) not in seen:
            seen.add(id(function))
            yield from _read_by(function, owner, held, waiting)


def _nodes(path: tuple[Any, ...], tree: PyTree) -> Iterator[tuple[Any, Any]]:
    """The leaves of a program, and the modules in it, which can be called as well."""
    stop = lambda node: isinstance(node, eqx.Module) and node is not tree
    if isinstance(tree, eqx.Module):
        yield path, tree
    for below, node in jtu.tree_leaves_with_path(tree, is_leaf=stop):
        if stop(node):
            yield from _nodes((*path, *below), node)
        else:
            yield (*path, *below), node


def _read_by(
    function: types.FunctionType, owner: Any, held: list[Any], waiting: list[Any]
) -> Iterator[tuple[tuple[str, str], Any]]:
    """What one function reads; functions among it are put to those that are waiting."""
    codes = list(_codes(function.__code__))
    words = {name for code in codes for name in code.co_names}
    words |= {c for code in codes for c in code.co_consts if isinstance(c, str)}
    # What a host callback writes while the step runs is no setting of the step.
    calls_host = bool(words & _HOST_CALLBACKS)
    codes = codes[:1] if calls_host else codes
    for name, value in [*held, *_variables(function, codes, owner, words)]:
        if calls_host and not isinstance(value, SIMPLE | jax.Array | np.ndarray):
            continue
        if isinstance(value, types.ModuleType | type):
            named = {} if is_of_library(value) else vars(value)
            simple = {n: v for n, v in named.items() if isinstance(v, SIMPLE)}
            value = {n: v for n, v in simple.items() if n in words}
        elif callable(value) and hasattr(inspect.unwrap(value), "__code__"):
            waiting.append(value)
            continue
        waiting += _methods(value, words)
        yield (name, function.__qualname__), frozen(value, words)


def _methods(owner: Any, words: set[str]) -> list[types.MethodType]:
    """Methods and properties that a function may call on what it reads."""
    if is_of_library(type(owner)):
        return []
    found = (inspect.getattr_static(type(owner), name, None) for name in words)
    functions = (f.fget if isinstance(f, property) else f for f in found)
    own = [f for f in functions if isinstance(f, types.FunctionType)]
    return [types.MethodType(f, owner) for f in own]


def _call_of(value: Any) -> Any:
    return inspect.getattr_static(type(value), "__call__", None)


def _taken_apart(function: Any) -> tuple[Any, Any, list[tuple[str, Any]]]:
    """A callable as a function, the object it belongs to, and arguments it holds."""
    held: list[tuple[str, Any]] = []
    while isinstance(function, functools.partial):
        arguments = {str(n): v for n, v in enumerate(function.args)} | function.keywords
        held += [(f"Argument `{n}` of a partial", v) for n, v in arguments.items()]
        function = function.func
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", None)
    if not isinstance(function, types.FunctionType | types.MethodType):
        owner, function = function, _call_of(function)
    function = getattr(function, "__func__", function)
    defaults = dict(enumerate(getattr(function, "__defaults__", None) or ()))
    defaults |= getattr(function, "__kwdefaults__", None) or {}
    name = getattr(function, "__name__", "")
    held += [(f"Default `{n}` of `{name}`", v) for n, v in defaults.items()]
    return function, owner, held


def _is_own(function: Any) -> bool:
    """Whether it is a Python function that no library brought."""
    return isinstance(function, types.FunctionType) and not is_of_library(function)


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
    if owner is None or isinstance(owner, types.ModuleType | type):
        return
    yield from ((m.__name__, m) for m in _methods(owner, words))
    for name in words & {*dir(owner)}:
        in_class = inspect.getattr_static(type(owner), name, None)
        value = getattr(owner, "__dict__", {}).get(name, in_class)
        if not (hasattr(type(value), "__get__") or name.startswith("__")):
            yield f"Attribute `{name}` of `{type(owner).__name__}`", value


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
    return {name for code in codes for name in _loaded_by(code, operation)}


@functools.lru_cache(maxsize=1024)
def _loaded_by(code: types.CodeType, operation: str) -> frozenset[str]:
    found = dis.get_instructions(code)
    return frozenset(each.argval for each in found if each.opname == operation)
