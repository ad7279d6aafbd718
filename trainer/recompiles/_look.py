"""What one function reads, remembered as deep as its code names it."""

import inspect
import types
from collections import deque
from collections.abc import Collection
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from trainer.mistakes._own_code import is_of_library
from trainer.recompiles._attributes import (
    attribute,
    classes_of,
    held_by,
    is_class,
    is_method,
    MISSING,
)
from trainer.recompiles._plain import Numbers, Remembered, SIMPLE, Single
from trainer.recompiles._remembered import (
    Entries,
    is_dict,
    Items,
    Members,
    NAMESPACES,
    Parts,
)
from trainer.recompiles._uses import Uses


_LISTS = (list, tuple, deque, set, frozenset)
# Names that read all attributes of an object.
_ALL = {"vars", "__dict__", "asdict", "astuple"}
_DEEPEST = 8
_LONGEST = 10_000
_MOST = 1000


class _Scope(NamedTuple):
    """Names of what is read of a value, and of the values in it."""

    here: frozenset[str]
    below: frozenset[str]


class Look:
    """Remembers what one function reads.

    Args:
        uses: What its code names.
        own: Names of installed packages that count as the user's.
        wide: Names of what any function reads of what it is given.

    Attributes:
        met: What was found that may be called, or has methods that may be.
    """

    def __init__(self, uses: Uses, own: Collection[str], wide: frozenset[str]):
        self.uses, self._own, self._wide = uses, own, wide
        self.met: list[Any] = []
        self._left = _MOST

    def of_name(self, value: Any, name: str) -> Remembered | None:
        """Remember what has a name in the code; None if it is no setting."""
        return self._remember(value, name, self._scope(name), _DEEPEST)

    def of_object(self, value: Any, name: str) -> Entries:
        """Remember the attributes of an object, class or module that has a name.

        Without a name, it may be asked for anything that any function reads.
        """
        return self._attributes(value, self._scope(name), _DEEPEST)

    def _scope(self, name: str) -> _Scope:
        if not name:
            return _Scope(self._wide, self._wide)
        exact = self.uses.parts_of(name)
        used = self.uses
        is_handed_on = name in used.bare | used.imports or "super" in used.names
        wide = exact | self._wide
        return _Scope(wide if is_handed_on else exact, wide)

    def _remember(
        self, value: Any, name: str, scope: _Scope, depth: int
    ) -> Remembered | None:
        self._left -= 1
        kind = type(value)
        if issubclass(kind, SIMPLE | jax.Array):
            return Single(value)
        touched = name in self.uses.touched
        if issubclass(kind, np.ndarray):
            is_free = touched or value.dtype.hasobject or value.dtype.kind == "T"
            return Single(value) if is_free else Numbers(value)
        # What a host callback is given is read while the step runs.
        if name in self.uses.hosted:
            return None
        is_record = touched and issubclass(kind, list | set | deque)
        if is_record or not depth or self._left < 0:
            return Single(value)
        if issubclass(kind, _LISTS):
            return self._list(value, name, scope, depth - 1)
        if is_dict(value):
            return self._dict(value, name, scope, depth - 1)
        return self._other(value, scope, depth - 1)

    def _list(self, value: Any, name: str, scope: _Scope, depth: int) -> Remembered:
        if len(value) > _LONGEST:
            return Single(value)
        if isinstance(value, set | frozenset):
            return Members(value)
        if all(isinstance(item, SIMPLE) for item in value):
            return Items(value, None)
        below = _Scope(scope.below, scope.below)
        parts = [self._remember(item, name, below, depth) for item in value]
        return Items(value, parts)

    def _dict(self, value: Any, name: str, scope: _Scope, depth: int) -> Remembered:
        """A dict: the keys that the code has, or all if it has none or may have any."""
        named = {key for key in value if isinstance(key, str) and key in scope.here}
        is_whole = name in self.uses.whole or not named
        if len(value) > _MOST and is_whole:
            return Single(value)
        known, parts = set(value) if is_whole else named, Parts()
        below = _Scope(scope.below, scope.below)
        for key in known - self.uses.assigned:
            child = key if key in named else name
            part = self._remember(value[key], child, below, depth)
            if part is not None:
                parts[key] = part
        grows = name in self.uses.touched
        return Entries(value, parts, None if is_whole else scope.here, known, grows)

    def _other(self, value: Any, scope: _Scope, depth: int) -> Remembered | None:
        """A function, class or module, or an object."""
        self.met.append(value)
        kind = type(value)
        is_kind = issubclass(kind, type | types.ModuleType)
        is_library = is_of_library(value if is_kind else kind, self._own)
        if is_library and not issubclass(kind, NAMESPACES):
            return None if is_kind else Single(value)
        found = self._attributes(value, scope, depth, may_be_whole=True)
        is_fixed = issubclass(kind, eqx.Module)
        return Single(value) if is_fixed and not found.parts else found

    def _attributes(
        self, value: Any, scope: _Scope, depth: int, may_be_whole: bool = False
    ) -> Entries:
        held, names = held_by(value), scope.here | self.uses.strings
        # A module gets new names when others import a part of it.
        is_module = issubclass(type(value), types.ModuleType)
        above = [] if is_module else self._own_classes(value)
        is_plain = not is_class(value) and len(above) + 1 == len(classes_of(value))
        is_whole = may_be_whole and is_plain and not _ALL.isdisjoint(self.uses.names)
        is_fixed = issubclass(type(value), eqx.Module)
        found = {*held} if is_whole else names & set(held).union(*map(vars, above))
        parts, below = Parts(), _Scope(scope.below, scope.below)
        for name in found - self.uses.assigned:
            part = self._attribute(value, name, below, depth)
            # A field of a module is what it is, unless it is changed in place.
            is_constant = is_fixed and name in held and isinstance(part, Single)
            if part is not None and not is_constant:
                parts[name] = part
        known = found | self.uses.assigned
        grows = is_fixed or is_module
        return Entries(
            value, parts, None if is_whole else self.uses.strings, known, grows
        )

    def _own_classes(self, value: Any) -> list[type]:
        return [c for c in classes_of(value) if not is_of_library(c, self._own)]

    def _attribute(
        self, owner: Any, name: str, scope: _Scope, depth: int
    ) -> Remembered | None:
        value = attribute(owner, name)
        if value is MISSING or name.startswith("__"):
            return None
        is_own = name in held_by(owner) and not is_class(owner)
        if isinstance(value, property) and not is_own:
            if value.fget is not None:
                self.met.append(types.MethodType(value.fget, owner))
            return None
        if is_own or not is_method(value):
            return self._remember(value, name, scope, depth)
        # What it calls by `super()` stands in a class above its own.
        above = self._own_classes(owner) if "super" in self.uses.names else []
        methods = [value, *(vars(c).get(name) for c in above)]
        bound = [types.MethodType(inspect.unwrap(m), owner) for m in methods if m]
        self.met += bound
        return Single(value)
