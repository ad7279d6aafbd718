"""Attributes of objects, classes and modules, looked up without running any code."""

import types
from collections.abc import Mapping
from typing import Any


# What stands where there is no value.
MISSING = object()
_NONE: Mapping[str, Any] = {}


def held_by(value: Any) -> Mapping[str, Any]:
    """The attributes that an object, class or module has itself."""
    try:
        # Equinox's modules look at every name that they are asked for.
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return _NONE


def classes_of(value: Any) -> tuple[type, ...]:
    """A class and those above it, or those of an object."""
    return value.__mro__ if is_class(value) else type(value).__mro__


def is_class(value: Any) -> bool:
    """Whether it is a class. `isinstance` is slow where it is one of Equinox's."""
    return issubclass(type(value), type)


def in_class(value: Any, name: str) -> Any:
    """What a class, or that of an object, has under a name; MISSING if nothing."""
    found = next((vars(c)[name] for c in classes_of(value) if name in vars(c)), MISSING)
    is_wrapped = isinstance(found, staticmethod | classmethod)
    return found.__func__ if is_wrapped else found


def is_method(value: Any) -> bool:
    """Whether it is a method where it stands in a class, also one that is wrapped."""
    is_wrapped = hasattr(type(value), "__get__") and hasattr(value, "__wrapped__")
    return isinstance(value, types.FunctionType) or is_wrapped


def attribute(owner: Any, name: str) -> Any:
    """What an object, class or module has under a name; MISSING if nothing.

    A property or a method is what the class has. What other descriptors would return is
    not asked for.
    """
    held = held_by(owner)
    if name in held and not is_class(owner):
        return held[name]
    value = in_class(owner, name)
    if isinstance(value, types.MemberDescriptorType) and not is_class(owner):
        return getattr(owner, name, MISSING)
    is_descriptor = hasattr(type(value), "__get__")
    is_read = isinstance(value, property) or is_method(value)
    return MISSING if is_descriptor and not is_read else value
