"""Random numbers and times that a traced step has kept as constants.

Nothing is traced twice. Where the code that a step can reach names a clock or a source
of random numbers, the one trace is watched by Python's profiler, and what generators
remember is compared. Where it names none, nothing is done.
"""

import contextlib
import datetime
import dis
import itertools
import os
import random
import secrets
import sys
import time
import types
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax.tree_util as jtu
import numpy as np

from trainer.mistakes._reached import line_of, Reached, uses, Variable, variables
from trainer.mistakes._silent import Mistake, Place, place_in, users_place
from trainer.mistakes._user_code import is_of_user


_NAMES = ("time", "perf_counter", "monotonic", "process_time")
_CLOCKS = {
    *(getattr(time, f"{name}{end}") for name in _NAMES for end in ("", "_ns")),
    *(datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today),
    datetime.date.today,
}
# Where numbers come from that nobody can know before. NumPy's new generators ask it.
_ENTROPY = {
    function.__code__
    for function in (
        *(uuid.uuid1, uuid.uuid4, secrets.token_bytes, secrets.randbelow),
        *(random.SystemRandom.getrandbits, random.SystemRandom.random),
    )
}
# How many bits NumPy asks for.
_OF_NUMPY = 128
_OF_ENTROPY = {random.__file__, secrets.__file__, uuid.__file__}
# The generators behind the functions of `numpy.random` and of `random`.
_SHARED: dict[str, Any] = {
    "numpy.random": getattr(np.random.random_sample, "__self__", None),
    "random": getattr(random.random, "__self__", None),
}
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_MODULES = {"time", "datetime", "secrets", "uuid", "posix", "nt", *_SHARED}
# A module in which one name alone matters, and what that is.
_WITHIN = {
    "numpy": ("random", "numpy.random"),
    "os": ("urandom", os.urandom.__module__),
}
_MAKE = {"default_rng", "Generator", "RandomState", "Random", "SeedSequence"}
_LOADS = ("LOAD_GLOBAL", "LOAD_DEREF")
_BY_NAME = ("Global", "Variable")
_IMPORT = dis.opmap["IMPORT_NAME"]


class _Source(NamedTuple):
    """A line that names a clock or a source of random numbers.

    Attributes:
        module: The module that it is of.
        name: What is named of the module, or `""`.
        code: The function it is in.
        place: The line.
    """

    module: str
    name: str
    code: types.CodeType
    place: Place


@contextlib.contextmanager
def frozen_draws(functions: Iterable[Reached]) -> Iterator[list[Mistake]]:
    """Find what is drawn, or read from a clock, while the context lasts."""
    found: list[Mistake] = []
    sources: list[_Source] = []
    own: dict[int, tuple[Variable, Place]] = {}
    for each in functions:
        known = list(variables(each))
        sources += _sources(each, known)
        for variable in known:
            if isinstance(variable.value, _GENERATORS) and not _is_shared(variable):
                own[id(variable.value)] = variable, _first_use(each, variable)
    if not (sources or own):
        yield found
        return
    generators = [*_SHARED.values(), *(variable.value for variable, _ in own.values())]
    before = {id(generator): _memory(generator) for generator in generators}
    with _watched({source.code for source in sources}, found) as run:
        yield found
    changed = {id(g) for g in generators if not _equal(before[id(g)], _memory(g))}
    found += [_drawn(str(own[k][0]), own[k][1]) for k in own.keys() & changed]
    for module, generator in _SHARED.items():
        drawn = [s for s in sources if s.module == module and s.code in run]
        drawn = [s for s in drawn if s.name not in _MAKE]
        # What is seeded there is the same at each trace, and meant to be.
        if id(generator) in changed and drawn and "seed" not in {s.name for s in drawn}:
            found.append(_drawn(f"`{module}`", drawn[0].place))


def _is_shared(variable: Variable) -> bool:
    return any(variable.value is generator for generator in _SHARED.values())


def _first_use(each: Reached, variable: Variable) -> Place:
    places = (place for place, _ in uses(each, variable.name))
    return next(places, place_in(each.function.__code__, None))


def _memory(generator: Any) -> list[Any]:
    """What a generator remembers: numbers, arrays and names."""
    if isinstance(generator, np.random.Generator):
        return jtu.tree_leaves(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return jtu.tree_leaves(generator.get_state(legacy=False))
    return jtu.tree_leaves(generator.getstate()) if generator else []


def _equal(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(map(np.array_equal, before, after))


def _drawn(source: str, place: Place) -> Mistake:
    return Mistake(
        f"{source} draws random numbers{place}: that is done once, while the step is "
        "compiled, and every step uses the same. Ask for the key of the step, "
        "`def loss(model, batch, *, key)`, and draw with `jax.random`.",
        place,
    )


def _read(clock: Any, place: Place) -> Mistake:
    return Mistake(
        f"`{clock.__self__.__name__}.{clock.__name__}` reads the clock{place}: that is "
        "done once, while the step is compiled, and every step sees the same time. Ask "
        "for `step` to follow the run; measure time in a callback.",
        place,
    )


@contextlib.contextmanager
def _watched(
    codes: set[types.CodeType], found: list[Mistake]
) -> Iterator[set[types.CodeType]]:
    """Find clocks and entropy that are asked for; tell which of the codes are run."""
    run: set[types.CodeType] = set()

    def heard(frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and arg in _CLOCKS:
            if is_of_user(frame.f_code.co_filename):
                found.append(
                    _read(arg, Place(frame.f_code.co_filename, frame.f_lineno))
                )
        elif event == "call" and frame.f_code in codes:
            run.add(frame.f_code)
        elif (event == "call" and frame.f_code in _ENTROPY) or arg is os.urandom:
            place = _asked(frame)
            found.extend([_drawn("The system", place)] if place else [])

    if sys.getprofile() is not None:  # the user's own profiler is not disturbed
        yield codes
        return
    sys.setprofile(heard)
    try:
        yield run
    finally:
        sys.setprofile(None)


def _asked(frame: types.FrameType) -> Place | None:
    """Where the user's code asks for entropy; None if it is a library that does.

    NumPy's `RandomState(0)` asks for it and does not use it.
    """
    size, asks = frame.f_locals.get("k"), frame
    while asks is not None and asks.f_code.co_filename in _OF_ENTROPY:
        asks = asks.f_back
    if asks is None or not is_of_user(asks.f_code.co_filename):
        return None
    arguments = asks.f_code.co_code[asks.f_lasti + 1]
    is_seeded = size == _OF_NUMPY and arguments > 0
    return None if is_seeded else users_place(asks)


def _sources(each: Reached, known: list[Variable]) -> Iterator[_Source]:
    """The lines of a function that name a source."""
    origins = {v.name: _origin(v.value) for v in known if v.kind in _BY_NAME}
    origins = {n: o for n, o in origins.items() if o[0] in _MODULES | _WITHIN.keys()}
    for code in each.codes:
        if not origins.keys().isdisjoint(code.co_names + code.co_freevars) or (
            _IMPORT in code.co_code[::2]
        ):
            yield from _named(code, origins)


def _origin(value: Any) -> tuple[str, str]:
    """The module that something is or comes from, and its name there."""
    if isinstance(value, types.ModuleType):
        return value.__name__, ""
    name = getattr(value, "__name__", "") if callable(value) else ""
    for module, generator in _SHARED.items():
        if name and getattr(value, "__self__", None) is generator:
            return module, name
    module = str(getattr(value, "__module__", "")) if name else ""
    return "numpy.random" if module.startswith("numpy.random") else module, name


def _named(code: types.CodeType, origins: dict[str, Any]) -> Iterator[_Source]:
    instructions = list(dis.get_instructions(code))
    for number, instruction in enumerate(instructions):
        if instruction.opname == "IMPORT_NAME":
            module = instruction.argval
            names = [n for n in code.co_names if n in _WITHIN.get(module, (n,))]
        elif instruction.opname in _LOADS and instruction.argval in origins:
            module, name = origins[instruction.argval]
            after = itertools.takewhile(_is_attribute, instructions[number + 1 :])
            names = [name] if name else [each.argval for each in after]
        else:
            continue
        if module in _WITHIN and _WITHIN[module][0] in names[:1]:
            module, names = _WITHIN[module][1], names[1:]
        if module in _MODULES:
            place = place_in(code, line_of(instruction))
            yield _Source(module, next(iter(names), ""), code, place)


def _is_attribute(instruction: dis.Instruction) -> bool:
    return instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
