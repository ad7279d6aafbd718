"""Traced values that a step's functions keep outside of it."""

import collections
import dis
import itertools
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax.core
import jax.tree_util as jtu

from trainer.mistakes._own_code import is_of_library
from trainer.mistakes._reached import line_of, Reached, uses, Variable, variables
from trainer.mistakes._silent import Mistake, Place, place_in


_MOST_VALUES = 2_000
_MOST_ENTRIES = 100
_CONTAINERS = list | tuple | dict | set | collections.deque
# Methods that put something into a container.
_KEEP = {"add", "append", "appendleft", "extend", "insert", "setdefault", "update"}


def kept_outside(functions: Iterable[Reached]) -> list[Mistake]:
    """What holds a traced value now that the trace is over.

    A number that a function counts with is left alone: it is no traced value.
    """
    found: dict[int, tuple[int, Variable, Place]] = {}
    for each in functions:
        for variable in variables(each):
            if holds_traced(variable.value):
                lines = [(0, place_in(each.function.__code__, None))]
                used = uses(each, variable.name)
                lines += [(_rank(variable.value, code), place) for place, code in used]
                rank, place = max(lines, key=lambda line: line[0])
                known = found.get(id(variable.value))
                if known is None or rank > known[0]:
                    found[id(variable.value)] = rank, variable, place
    return [
        Mistake(
            f"{variable} is given a traced value{place}: that is done once, while the "
            "step is compiled, and what is kept has no number. Return it as a metric, "
            "`return loss, {'name': value}`, and read it in `result.history`.",
            place,
        )
        for _, variable, place in found.values()
    ]


def holds_traced(value: Any) -> bool:
    """Whether it is a traced value, or a model or a container with one in it.

    Not all of what is large is looked at. An object is not looked into unless it is in
    a container: its attributes are variables of their own.
    """
    if not isinstance(value, jax.core.Tracer | eqx.Module | _CONTAINERS):
        return False
    waiting = [value]
    for _ in range(_MOST_VALUES):
        if not waiting:
            return False
        value = waiting.pop()
        if isinstance(value, jax.core.Tracer):
            return True
        waiting += _held(value)
    return False


def _held(value: Any) -> Iterable[Any]:
    """What is in a container, a model or an object of the user's, or some of it."""
    if isinstance(value, eqx.Module):
        return [x for x in jtu.tree_leaves(value) if isinstance(x, jax.core.Tracer)]
    if isinstance(value, _CONTAINERS):
        entries: Any = value.values() if isinstance(value, dict) else value
        first = [*itertools.islice(entries, _MOST_ENTRIES)]
        if len(value) <= _MOST_ENTRIES or isinstance(value, set):
            return first
        # What was put there last is at the end.
        return [*first, *itertools.islice(reversed(entries), _MOST_ENTRIES)]
    attributes = getattr(value, "__dict__", None)
    is_own = attributes and not callable(value) and not is_of_library(type(value))
    return [*attributes.values()] if attributes and is_own else []


def _rank(value: Any, code: list[dis.Instruction]) -> int:
    """How likely a line has kept a value: 2 for likely, 0 for a mere use."""
    line = [i for i in code if line_of(i) == line_of(code[0])]
    changes = any(i.opname == "STORE_SUBSCR" or i.argval in _KEEP for i in line)
    stores = code[0].opname.startswith("STORE_")
    first, second = changes, stores
    if not isinstance(value, _CONTAINERS):
        first, second = stores, changes
    return 2 if first else int(second)
