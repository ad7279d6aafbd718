"""Lists, dicts and objects as they were."""

import argparse
import functools
import types
from collections.abc import Collection
from typing import Any

from trainer.mistakes._own_code import top_of
from trainer.recompiles._attributes import attribute, held_by, in_class, MISSING
from trainer.recompiles._plain import alike, Change, changed_to, Remembered, Single


Parts = dict[Any, Remembered]
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_DICTS = (dict, types.MappingProxyType)
# Libraries whose configurations are looked up like dicts.
_OF_CONFIGURATIONS = ("ml_collections", "omegaconf")


def is_dict(value: Any) -> bool:
    """Whether its values are looked up by keys."""
    kind = type(value)
    is_configuration = top_of(kind) in _OF_CONFIGURATIONS and hasattr(kind, "keys")
    return issubclass(kind, _DICTS) or is_configuration


def _is_by_content(value: Any) -> bool:
    """Whether another one is the same setting, if what is read of it is the same."""
    by_content = (*NAMESPACES, types.ModuleType, type)
    return is_dict(value) or issubclass(type(value), by_content)


class Items(Remembered):
    """A list or the like, item by item."""

    def __init__(self, value: Any, parts: list[Remembered | None] | None):
        self._type, self._copy, self._parts = type(value), list(value), parts
        self._types = list(map(type, self._copy))

    def change(self, now: Any, full: bool) -> Change | None:
        if type(now) is not self._type:
            return changed_to(self._copy, now)
        items, was = list(now), self._copy
        if len(items) != len(was):
            return Change("", str(len(was)), f"{len(items)} items")
        same_types = self._parts is None and list(map(type, items)) == self._types
        if same_types and items == was:
            return None
        parts = map(Single, was) if self._parts is None else self._parts
        for place, (part, item) in enumerate(zip(parts, items, strict=True)):
            found = part and part.change(item, full)
            if found:
                return found.below(f"[{place}]")
        return None


class Members(Remembered):
    """A set."""

    def __init__(self, value: Any):
        self._copy = set(value)

    def change(self, now: Any, full: bool) -> Change | None:
        del full
        same = isinstance(now, set | frozenset) and now == self._copy
        return None if same else changed_to(self._copy, now)


class Entries(Remembered):
    """A dict, or an object, class or module with its attributes, by name.

    Attributes:
        parts: What is remembered.
        known: Names of all that was there, though it may not be remembered.
        grows: Whether a new name is no change.

    Args:
        value: The dict, object, class or module.
        parts: See above.
        scope: Names that a new entry has to be one of to be a change, or None for all.
        known: See above.
        grows: See above.
    """

    def __init__(
        self,
        value: Any,
        parts: Parts,
        scope: Collection[Any] | None,
        known: Collection[Any],
        grows: bool,
    ):
        self._value, self.parts, self._scope = value, parts, scope
        self.known, self.grows = frozenset(known), grows

    def change(self, now: Any, full: bool) -> Change | None:
        by_key = is_dict(now)
        if type(now) is not type(self._value):
            return changed_to(self._value, now)
        for name, part in self.parts.items():
            value = now.get(name, MISSING) if by_key else attribute(now, name)
            found = part.change(value, full)
            if found:
                return found.below(f"[{name!r}]" if by_key else f".{name}")
        if now is not self._value and not _is_by_content(now):
            if not alike(self._value, now):
                return Change("", "", "")
            self._value = now
        return None if self.grows else self._grown(now, by_key)

    def _grown(self, now: Any, by_key: bool) -> Change | None:
        names: set[Any] = {*(now if by_key else held_by(now)).keys()}
        if self._scope is not None:
            names = names.intersection(self._scope)
        for name in names - self.known:
            if by_key:
                return changed_to(MISSING, now[name], f"[{name!r}]")
            # A cached property may be asked for at any time.
            if not isinstance(in_class(now, name), functools.cached_property):
                return changed_to(MISSING, attribute(now, name), f".{name}")
        return None

    def settled(self, now: Any, fresh: Remembered | None) -> Remembered | None:
        if type(now) is not type(self._value) or not isinstance(fresh, Entries):
            return None
        by_key = is_dict(now)
        kept: Parts = {}
        for name, part in fresh.parts.items():
            value = now.get(name, MISSING) if by_key else attribute(now, name)
            before = self.parts.get(name)
            # What an object has got while it was traced is a cached property.
            settled = part if before is None else before.settled(value, part)
            if settled is not None and not (before is None and by_key):
                kept[name] = settled
        fresh.grows = self.grows or (by_key and not fresh.known <= self.known)
        fresh.parts, fresh.known = kept, fresh.known | self.known
        return fresh
