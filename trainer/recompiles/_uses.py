"""What the code of a function names."""

import dis
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


_HOST_CALLBACKS = {"callback", "io_callback", "pure_callback"}
# Methods that change what they are called on.
_CHANGING = {
    *("append", "appendleft", "extend", "extendleft", "insert", "add", "update"),
    *("setdefault", "pop", "popleft", "popitem", "remove", "discard", "clear"),
    *("sort", "reverse", "rotate", "fill", "put", "resize", "__setitem__"),
}
_GOING_THROUGH = {"items", "values", "keys", "copy"}
_GO_THROUGH = {"GET_ITER", "DICT_MERGE", "DICT_UPDATE"}
_STORE_WITHIN = {"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME"}
_LOADS = {*_ATTRIBUTES, *_GLOBALS, "LOAD_DEREF", "IMPORT_FROM"}
_ASSIGN = {"STORE_GLOBAL", "STORE_DEREF", "STORE_NAME", "STORE_ATTR", "DELETE_ATTR"}
_ASKING = {"get", "pop", "setdefault"}
_IN_BETWEEN = {"COPY", "CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "NOP"}


class Uses(NamedTuple):
    """What the code of a function names, that of functions in it included.

    Attributes:
        names: Names of globals and attributes.
        strings: Strings, which may be names for `getattr`.
        parts: Attributes and keys, each with the name of what it is a part of, or with
            `""` if that has none: `("self", "beta")` and `("self", "k")` for
            `self.beta["k"]`.
        bare: Names of what is used as it is, and not only for a part of it.
        globals: Names of globals.
        free: Names of variables of functions around it.
        imports: Modules that it imports when it runs.
        hosted: Names that stand in the arguments of a host callback only.
        assigned: Names, and keys, that it gives values to.
        touched: Names of what it changes in place.
        whole: Names of what it goes through, or looks up with keys not written there.
    """

    names: frozenset[str]
    strings: frozenset[str]
    parts: frozenset[tuple[str, str]]
    bare: frozenset[str]
    globals: frozenset[str]
    free: frozenset[str]
    imports: frozenset[str]
    hosted: frozenset[str]
    assigned: frozenset[str]
    touched: frozenset[str]
    whole: frozenset[str]

    def parts_of(self, name: str) -> frozenset[str]:
        """What is read of something that has a name."""
        return frozenset(part for whole, part in self.parts if whole == name)


NO_USES = Uses(*(frozenset() for _ in Uses._fields))


_Spot = tuple[int, int]


class _Instruction(NamedTuple):
    """What is needed of an instruction: `start` to `end` is its place in the source."""

    operation: str
    names: tuple[str, ...]
    value: Any
    start: _Spot | None
    end: _Spot

    @property
    def is_load(self) -> bool:
        """Whether it loads what has a name, a variable of the function included."""
        return self.operation in _LOADS or self.operation.startswith("LOAD_FAST")

    @property
    def strings(self) -> list[str]:
        """Strings that it loads."""
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        return [value for value in values if isinstance(value, str)]

    def within(self, other: "_Instruction") -> bool:
        """Whether it stands in the source of another. Yes if that is not known."""
        if self.start is None or other.start is None:
            return True
        return other.start <= self.start and self.end <= other.end


Code = Sequence[_Instruction]


def _instruction(found: dis.Instruction) -> _Instruction:
    value, (start, end) = found.argval, _span(found.positions)
    names = value if isinstance(value, tuple) else (value,)
    is_constant = "CONST" in found.opname
    return _Instruction(
        found.opname,
        () if is_constant else tuple(n for n in names if isinstance(n, str)),
        value if is_constant else None,
        start,
        end,
    )


def _span(positions: Any) -> tuple[_Spot | None, _Spot]:
    """Where an instruction begins and ends in the source, as line and column."""
    line, end_line, column, end_column = positions or (None, None, None, None)
    if line is None or column is None or end_line is None or end_column is None:
        return None, (0, 0)
    return (line, column), (end_line, end_column)


@functools.lru_cache(maxsize=1024)
def uses(code: types.CodeType) -> Uses:
    """Read from a function's compiled code what it names."""
    every = [_instruction(found) for found in dis.get_instructions(code)]
    hosted = _given_to_host(every)
    inside = [i for i, is_hosted in zip(every, hosted, strict=True) if is_hosted]
    here = [i for i, is_hosted in zip(every, hosted, strict=True) if not is_hosted]
    # A function that is only handed to a host callback runs on the host, at each step.
    on_host = _named(lambda i: i.operation.startswith("LOAD_FAST"), inside)
    codes = [i.value for i in here if isinstance(i.value, types.CodeType)]
    nested = [uses(code) for code in codes if code.co_name not in on_host]
    strings = frozenset(text for i in every for text in i.strings)
    loaded = lambda where: _named(lambda i: i.operation in _LOADS, where)
    found = Uses(
        names=loaded(every),
        strings=strings,
        parts=frozenset(_parts(every)),
        bare=_bare(every),
        globals=_named(lambda i: i.operation in _GLOBALS, every),
        free=_named(lambda i: i.operation == "LOAD_DEREF", every),
        imports=_named(lambda i: i.operation == "IMPORT_NAME", here),
        hosted=loaded(inside) - loaded(here),
        assigned=_assigned(here),
        touched=_touched(here),
        whole=_whole(here),
    )
    both = Uses(*(one.union(*more) for one, *more in zip(found, *nested, strict=True)))
    elsewhere = [one.names - one.hosted for one in (found, *nested)]
    return both._replace(hosted=both.hosted.difference(*elsewhere))


def _named(which: Callable[[_Instruction], bool], where: Code) -> frozenset[str]:
    return frozenset(name for i in where if which(i) for name in i.names)


def _parts(code: Code) -> Iterator[tuple[str, str]]:
    """Attributes and keys, with the name of what they are parts of."""
    whole = ""
    for place, now in enumerate(code):
        if now.operation in _ATTRIBUTES:
            yield from ((whole, name) for name in now.names)
        elif now.is_load:
            whole = now.names[-1] if now.names else ""
        elif "CONST" in now.operation and _is_key(code, place):
            yield from ((whole, text) for text in now.strings)
        elif now.operation not in _IN_BETWEEN and not _is_lookup(code, place):
            whole = ""


def _is_key(code: Code, place: int) -> bool:
    """Whether a constant is looked up in what was loaded before it."""
    after = next((i for i in code[place + 1 :] if i.operation != "COPY"), None)
    asks = _ASKING.intersection(code[place - 1].names) if place else ()
    return bool(asks) or (after is not None and after.operation == "BINARY_SUBSCR")


def _is_lookup(code: Code, place: int) -> bool:
    is_lookup = code[place].operation == "BINARY_SUBSCR"
    before = (i for i in code[:place][::-1] if i.operation != "COPY")
    return is_lookup and "CONST" in next(before, code[place]).operation


def _bare(code: Code) -> frozenset[str]:
    """Names of what is not only loaded for a part of it."""
    found: set[str] = set()
    kept = [i for i in code if i.operation not in _IN_BETWEEN]
    for place, now in enumerate(kept[:-1]):
        if now.is_load and now.operation not in _ATTRIBUTES:
            after = kept[place + 1]
            is_part = after.operation in _ATTRIBUTES or (
                "CONST" in after.operation and _is_key(kept, place + 1)
            )
            found.update(now.names[: -1 if is_part else None])
    return frozenset(found)


def _given_to_host(code: Code) -> list[bool]:
    """For each instruction, whether it makes an argument of a host callback."""
    inside = [False] * len(code)
    for place, name in enumerate(code):
        if name.operation in _LOADS and not _HOST_CALLBACKS.isdisjoint(name.names):
            rest = range(place + 1, len(code))
            ends = (k for k in rest if _is_call_of(code[k], name))
            for k in range(place + 1, next(ends, place)):
                inside[k] = True
    return inside


def _is_call_of(call: _Instruction, name: _Instruction) -> bool:
    return call.operation.startswith("CALL") and name.within(call)


def _assigned(code: Code) -> frozenset[str]:
    """Variables and attributes that it gives values to, and keys that are strings."""
    found = set(_named(lambda i: i.operation in _ASSIGN, code))
    for store in code:
        if store.operation in _STORE_WITHIN:
            found.update(s for i in code if i.within(store) for s in i.strings)
    if any("setattr" in name for i in code for name in i.names):
        found.update(text for i in code for text in i.strings)
    return frozenset(found)


def _touched(code: Code) -> frozenset[str]:
    """Names of what it changes in place, and of what these are parts of."""
    found, loads = set[str](), [i for i in code if i.is_load]
    for before, change in itertools.pairwise(code):
        calls = change.operation in _ATTRIBUTES and _CHANGING.intersection(change.names)
        if calls or change.operation in {*_STORE_WITHIN, "STORE_ATTR"}:
            found.update(before.names)
            found.update(*(i.names for i in loads if i.within(change)))
    return frozenset(found)


def _whole(code: Code) -> frozenset[str]:
    """Names of what it goes through, or looks up with keys that are no constants."""
    found, loads = set[str](), [i for i in code if i.is_load]
    # `x[k] += 1` copies the key before it looks it up.
    for before, now in itertools.pairwise(i for i in code if i.operation != "COPY"):
        goes = now.operation in _GO_THROUGH or (
            now.operation in _ATTRIBUTES and _GOING_THROUGH.intersection(now.names)
        )
        if goes and before.is_load:
            found.update(before.names)
        if now.operation == "BINARY_SUBSCR" and "CONST" not in before.operation:
            found.update(*(i.names for i in loads if now.start and i.within(now)))
    return frozenset(found)
