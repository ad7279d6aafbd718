"""The user's functions that a step can run, and the variables that they share."""

import contextlib
import dis
import functools
import inspect
import itertools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxtyping import PyTree

from trainer._tree import modules_in
from trainer.mistakes._own_code import is_of_library
from trainer.mistakes._silent import Place, place_in
from trainer.mistakes._user_code import is_of_user
from trainer.recompiles._plain import closure, defaults_of


_MOST_FUNCTIONS = 1000
_MOST_ENTRIES = 100
_USES = ("LOAD_ATTR", "LOAD_DEREF", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_METHOD", "STORE_")


class Reached(NamedTuple):
    """A function of the user's, and the object whose method it is, or None."""

    function: types.FunctionType
    owner: Any

    @property
    def codes(self) -> list[types.CodeType]:
        """Its own code, and that of the functions that are written inside of it."""
        return list(_codes(self.function.__code__))


class Variable(NamedTuple):
    """What a function uses that is not its own.

    Attributes:
        kind: What it is, as it begins a sentence: `Global`, `Attribute`.
        name: Its name in the code.
        of: What it belongs to, or `""`.
        value: What it is now.
    """

    kind: str
    name: str
    of: str
    value: Any

    def __str__(self) -> str:
        """As messages name it: ``Attribute `last` of `Tracker` ``."""
        return f"{self.kind} `{self.name}`" + (f" of `{self.of}`" if self.of else "")


def reached(tree: PyTree) -> list[Reached]:
    """All functions of the user's that what is in a tree can call.

    It is found by name alone, and may hold more than what is run. A function that is
    only an entry of a longer list, or made while the step is traced, is not found.
    """
    waiting = [_functions(node) for node in modules_in(tree)]
    found: list[Reached] = []
    seen: set[tuple[int, int]] = set()
    while waiting and len(found) < _MOST_FUNCTIONS:
        for each in waiting.pop():
            key = id(each.function), id(each.owner)
            if key not in seen:
                seen.add(key)
                found.append(each)
                waiting += [_functions(v.value) for v in variables(each)]
    return found


def variables(each: Reached) -> Iterator[Variable]:
    """What a function uses by name: of its closure, its module and its object."""
    function, owner = each
    words = {name for code in each.codes for name in code.co_names}
    own = list(_own(function, words))
    if owner is not None:
        own += _attributes(owner, words)
    for variable in own:
        yield variable
        yield from _attributes(variable.value, words)


def uses(each: Reached, name: str) -> Iterator[tuple[Place, list[dis.Instruction]]]:
    """Where a variable is read or set: the line, and the code from there on."""
    for code in each.codes:
        instructions = list(dis.get_instructions(code))
        for number, instruction in enumerate(instructions):
            if instruction.opname.startswith(_USES) and instruction.argval == name:
                place = place_in(code, line_of(instruction))
                yield place, instructions[number:]


def line_of(instruction: dis.Instruction) -> int | None:
    """The line that an instruction was made of, if that is known."""
    return instruction.positions and instruction.positions.lineno


def _own(function: types.FunctionType, words: set[str]) -> Iterator[Variable]:
    for name, value in closure(function).items():
        yield Variable("Variable", name, "", value)
    for name in sorted(words & function.__globals__.keys()):
        yield Variable("Global", name, "", function.__globals__[name])
    for name, value in defaults_of(function).items():
        yield Variable("Default", name, function.__name__, value)


def _attributes(value: Any, words: set[str]) -> list[Variable]:
    """Those that a function names of a module, a class or an object of the user's."""
    if isinstance(value, types.FunctionType | types.ModuleType | type):
        of, is_own = value.__name__, not is_of_library(value)
    else:
        is_own = isinstance(value, types.SimpleNamespace)
        is_own = is_own or not is_of_library(type(value))
        of = type(value).__name__
    named: Any = {}
    with contextlib.suppress(Exception):  # what refuses to be looked at
        named = vars(value) if is_own else {}
    return [
        Variable("Attribute", name, of, named[name])
        for name in sorted(words & {*named})
    ]


def _functions(value: Any) -> Iterator[Reached]:
    """The user's functions in a value that may be called."""
    with contextlib.suppress(Exception):  # what refuses to be looked at
        value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, functools.partial):
        for held in (value.func, *value.args, *value.keywords.values()):
            yield from _functions(held)
    elif isinstance(value, list | tuple | dict):
        values = value.values() if isinstance(value, dict) else value
        for held in itertools.islice(values, _MOST_ENTRIES):
            yield from _functions(held) if callable(held) else ()
    elif isinstance(value, types.MethodType | types.FunctionType):
        yield from _one(value, getattr(value, "__self__", None))
    elif isinstance(value, type) or not is_of_library(type(value)):
        owner, cls = (None, value) if isinstance(value, type) else (value, type(value))
        for function in _methods(cls):
            yield from _one(function, owner)


def _methods(cls: type) -> Iterator[Any]:
    for base in cls.__mro__:
        if not is_of_library(base):
            for found in vars(base).values():
                yield found.fget if isinstance(found, property) else found


def _one(function: Any, owner: Any) -> Iterator[Reached]:
    with contextlib.suppress(Exception):
        function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    is_function = isinstance(function, types.FunctionType)
    if is_function and is_of_user(function.__code__.co_filename):
        yield Reached(function, owner)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
