"""What the functions of a program read from outside of themselves, and where it is."""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from trainer.mistakes._own_code import is_of_library, top_of
from trainer.mistakes._user_code import file_name
from trainer.recompiles._attributes import attribute, held_by, is_class, MISSING
from trainer.recompiles._look import Look
from trainer.recompiles._plain import closure, defaults_of, Remembered, SIMPLE
from trainer.recompiles._uses import NO_USES, Uses, uses


# Methods by which a program calls what the user has written.
_ENTRIES = ("__call__", "sample", "renew")
_MOST_FUNCTIONS = 1000
_MOST_PASSES = 5
_MOST_WITHIN = 100


class Place(NamedTuple):
    """Where a value stands that a step has read.

    Attributes:
        label: What it is, in words; `{}` is where its name goes.
        root: Its name.
        read: Reads it.
        was: What it was.
    """

    label: str
    root: str
    read: Callable[[], Any]
    was: Remembered

    def changed(self, full: bool) -> str | None:
        """How it has changed, in words, or None."""
        now = self.read()
        # A variable that was deleted is not read by anyone.
        found = None if now is MISSING else self.was.change(now, full)
        if found is None:
            return None
        name = (self.root + found.path).lstrip(".")
        return f"{self.label.replace('{}', name, 1)} {found.words}"


class Reads(NamedTuple):
    """What a program reads.

    Attributes:
        places: Where that stands, by what identifies it.
        wide: Names of what any function reads of what it is given.
    """

    places: dict[Any, Place]
    wide: frozenset[str]


def reads(program: PyTree, model: PyTree, wide: frozenset[str] = frozenset()) -> Reads:
    """Find what a program reads.

    Args:
        program: Functions, and the modules that they are fields of.
        model: What they are given, without its arrays.
        wide: As it was found before, if it was.
    """
    walk = _walked(program, model, wide)
    for _ in range(_MOST_PASSES):
        if walk.loose <= wide:
            break
        # What one function hands on, another one reads.
        wide = wide | walk.loose
        walk = _walked(program, model, wide)
    return Reads(walk.places, wide)


def _walked(program: PyTree, model: PyTree, wide: frozenset[str]) -> "_Walk":
    walk = _Walk(program, wide)
    walk.begin("program", program, is_model=False)
    walk.begin("model", model, is_model=True)
    walk.finish()
    return walk


def _nodes(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """All that is no plain value: modules and what is in them, functions, arrays."""
    kind = type(tree)
    if issubclass(kind, SIMPLE | jax.Array):
        return
    below: dict[str, Any] = {}
    if issubclass(kind, dict):
        below = {f"[{key!r}]": node for key, node in tree.items()}
    elif issubclass(kind, list | tuple):
        below = {f"[{place}]": node for place, node in enumerate(tree)}
    else:
        yield path, tree
        if issubclass(kind, eqx.Module):
            below = {f".{name}": node for name, node in held_by(tree).items()}
    for step, node in below.items():
        yield from _nodes(path + step, node)


class _Walk:
    """Goes from function to function, and notes what they read.

    What it takes apart is kept alive, so that what identifies it means something.
    """

    def __init__(self, program: PyTree, wide: frozenset[str]):
        kinds = (n if callable(n) else type(n) for _, n in _nodes("", program))
        self._own = frozenset(map(top_of, kinds)) - sys.stdlib_module_names
        self._wide, self.loose = wide, frozenset[str]()
        self.places: dict[Any, Place] = {}
        self._waiting: list[Any] = []
        self._model: list[tuple[str, Any]] = []
        self._taken: dict[Any, Any] = {}
        self._uses: list[Uses] = [NO_USES]

    def begin(self, root: str, tree: PyTree, is_model: bool) -> None:
        """Begin with what is in a tree."""
        arrays = Look(NO_USES, self._own, self._wide)
        for path, node in _nodes(root, tree):
            if isinstance(node, np.ndarray):
                self._note((id(node), path), "Array `{}`", path, node, arrays)
            else:
                self._waiting.append(node)
                if is_model and not is_of_library(type(node), self._own):
                    self._model.append((path, node))

    def finish(self) -> None:
        """Go on until there is no function left that was not read."""
        self._go_on()
        every = Uses(*(frozenset().union(*u) for u in zip(*self._uses, strict=True)))
        nothing: frozenset[str] = frozenset()
        look = Look(
            every._replace(hosted=nothing, strings=nothing), self._own, self._wide
        )
        for path, node in self._model:
            self._attributes("model", f"`{path}.{{}}`", node, "", look)
        self._waiting += look.met
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and len(self._uses) < _MOST_FUNCTIONS:
            self._take(self._waiting.pop())

    def _note(
        self,
        key: Any,
        label: str,
        name: str,
        value: Any,
        look: Look,
        read: Callable[[], Any] | None = None,
    ) -> None:
        was = look.of_name(value, name)
        if was is not None:
            self.places[key] = Place(label, name, read or (lambda: value), was)

    def _attributes(
        self, reader: Any, label: str, owner: Any, name: str, look: Look
    ) -> None:
        was = look.of_object(owner, name)
        if issubclass(type(owner), eqx.Module):
            # What many modules share is looked at once.
            for part in list(was.parts):
                key = reader, part, id(attribute(owner, part))
                if self._taken.setdefault(key, owner) is not owner:
                    del was.parts[part]
        if was.parts or not issubclass(type(owner), eqx.Module):
            place = Place(label, "", lambda: owner, was)
            self.places[reader, id(owner)] = place

    def _take(self, value: Any) -> None:
        """Take apart what may be called, and read the functions in it."""
        kind = type(value)
        if id(value) in self._taken or issubclass(kind, type | types.ModuleType):
            return
        self._taken[id(value)] = value
        held, is_library = held_by(value), is_of_library(kind, self._own)
        if issubclass(kind, functools.partial):
            self._partial(value)
        elif issubclass(kind, types.MethodType) or "__func__" in held:
            self._function(value.__func__, value.__self__)
        elif issubclass(kind, types.FunctionType):
            self._function(value, None)
        elif not is_library:
            for name in _ENTRIES:
                self._function(attribute(value, name), value)
        if issubclass(kind, eqx.Module) or (is_library and callable(value)):
            self._within(dict(held))

    def _within(self, value: Any) -> None:
        """Take what may be called out of what a library holds."""
        kind = type(value)
        if issubclass(kind, dict):
            value, kind = tuple(value.values()), tuple
        if issubclass(kind, list | tuple):
            for part in value[:_MOST_WITHIN]:
                self._within(part)
        elif issubclass(kind, eqx.Module) or callable(value):
            self._waiting.append(value)

    def _function(self, function: Any, owner: Any) -> None:
        if not isinstance(function, types.FunctionType):
            self._within(function)
        elif is_of_library(function, self._own):
            self._within(closure(function))
        elif (id(function), id(owner)) not in self._taken:
            self._taken[id(function), id(owner)] = function, owner
            look = Look(uses(function.__code__), self._own, self._wide)
            self._read(function, owner, look)
            self._waiting += look.met

    def _read(self, function: types.FunctionType, owner: Any, look: Look) -> None:
        """Note what a function reads, and what it reads of the object that it is of."""
        where, code = _where(function), function.__code__
        if (id(function), None) not in self._taken:
            self._taken[id(function), None] = function
            self._uses.append(look.uses)
            self.loose |= _loose(function, look.uses)
            for kind, name, value, read in _variables(function, look.uses):
                label = f"{kind} `{{}}` of {where}"
                self._note((id(function), kind, name), label, name, value, look, read)
        if owner is not None and not isinstance(owner, types.ModuleType):
            of = (owner if is_class(owner) else type(owner)).__name__
            label = f"Attribute `{{}}` of `{of}`, read by {where},"
            name = code.co_varnames[0] if code.co_argcount else ""
            self._attributes(id(function), label, owner, name, look)

    def _partial(self, value: functools.partial) -> None:
        self._waiting.append(value.func)
        function = value.func
        while isinstance(function, functools.partial):
            function = function.func
        function = inspect.unwrap(function)
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType):
            function = attribute(function, "__call__")
        if isinstance(function, types.FunctionType):
            code = function.__code__
            look = Look(uses(code), self._own, self._wide)
            by_place = dict(zip(code.co_varnames, value.args, strict=False))
            label = f"Argument `{{}}` of a partial of {_where(function)}"
            for name, argument in {**by_place, **value.keywords}.items():
                self._note((id(value), name), label, name, argument, look)
            self._waiting += look.met


def _loose(function: types.FunctionType, used: Uses) -> frozenset[str]:
    """What a function reads of what it is given, or has found somewhere."""
    known = {*function.__code__.co_freevars, *function.__globals__}
    return frozenset(part for whole, part in used.parts if whole not in known)


def _where(function: types.FunctionType) -> str:
    return f"`{function.__name__}` ({file_name(function.__code__.co_filename)})"


def _variables(
    function: types.FunctionType, used: Uses
) -> Iterator[tuple[str, str, Any, Callable[[], Any]]]:
    """What a function reads by name: its kind, name, value, and what reads it anew."""
    names = function.__code__.co_freevars
    cells = dict(zip(names, function.__closure__ or (), strict=True))
    around, shared = closure(function), function.__globals__
    for name in (used.free & around.keys()) - used.assigned:
        read = functools.partial(_content, cells[name])
        yield "Variable", name, around[name], read
    for name in (used.globals & shared.keys()) - used.assigned:
        read = functools.partial(shared.get, name, MISSING)
        yield "Global", name, shared[name], read
    for name, value in defaults_of(function).items():
        yield "Default", name, value, lambda value=value: value
    for name in used.imports:
        package = f"{shared.get('__package__')}.{name}".rstrip(".")
        module = sys.modules.get(name) or sys.modules.get(package)
        if module is not None:
            yield "Import", name, module, lambda module=module: module


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING
