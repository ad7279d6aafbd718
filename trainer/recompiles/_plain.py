"""Python values as they were at one time, to be compared with what they are later."""

import abc
import contextlib
import functools
import numbers
import pathlib
import types
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.core import Tracer

from trainer._tree import describe
from trainer.recompiles._attributes import held_by, MISSING


SIMPLE = bool | int | float | complex | str | bytes | None
COMPARED = (
    numbers.Number
    | np.generic
    | np.dtype
    | range
    | slice
    | pathlib.PurePath
    | set
    | frozenset
)
_LARGE = 2**16
_SAMPLES = 1024
# Words of 8 bytes. A prime, so that rows that change places are seen.
_FOLD = 8191


class Change(NamedTuple):
    """Where, within what was remembered, and from what to what. Texts."""

    path: str
    was: str
    now: str

    def below(self, path: str) -> "Change":
        """The same, seen from what it is a part of."""
        return self._replace(path=path + self.path)

    @property
    def words(self) -> str:
        """From what to what, as far as that says something."""
        if self.was == self.now:
            return "has changed"
        return f"has changed from {self.was} to {self.now}"


def changed_to(was: Any, now: Any, path: str = "") -> Change:
    """Say that one value has become another."""
    return Change(path, _text(was), _text(now))


def _text(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"`{value.__qualname__.split('.')[-1]}`"
    return f"`{describe(value)}`"


class Remembered(abc.ABC):
    """A value as it was."""

    @abc.abstractmethod
    def change(self, now: Any, full: bool) -> Change | None:
        """How the value that stands there now differs, or None.

        Args:
            now: The value.
            full: Whether to look at all of a large array, and not at a sample of it.
        """

    def settled(self, now: Any, fresh: "Remembered | None") -> "Remembered | None":
        """What of it is still so after a trace; None if nothing is.

        Args:
            now: The value after the trace.
            fresh: The same value, remembered anew.
        """
        return fresh if self.change(now, False) is None else None


class Single(Remembered):
    """A value that does not change in place, or of which this is not looked at."""

    def __init__(self, value: Any):
        self._value = value

    def change(self, now: Any, full: bool) -> Change | None:
        """It is another one, and not an equal one."""
        del full
        if now is self._value:
            return None
        if not alike(self._value, now):
            return changed_to(self._value, now)
        self._value = now
        return None


class Numbers(Remembered):
    """The numbers in a NumPy array."""

    def __init__(self, array: np.ndarray):
        self._form = _form(array)
        self._copy = array.copy() if array.nbytes <= _LARGE else None
        self._sample, self._sum = _sample(array), _sum(array)

    def change(self, now: Any, full: bool) -> Change | None:
        """Its form, or the numbers in it."""
        if not isinstance(now, np.ndarray) or _form(now) != self._form:
            dtype, shape, _ = self._form
            return changed_to(jax.ShapeDtypeStruct(shape, dtype), now)
        if self._copy is not None:
            return self._where(self._copy, now)
        if _sample(now) != self._sample or (full and _sum(now) != self._sum):
            return Change("", "", "")
        return None

    def _where(self, was: np.ndarray, now: np.ndarray) -> Change | None:
        if was.tobytes() == now.tobytes():
            return None
        for place in np.ndindex(was.shape):
            if was[place].tobytes() != now[place].tobytes():
                path = f"[{', '.join(map(str, place))}]" if place else ""
                return changed_to(was[place].item(), now[place].item(), path)
        return Change("", "", "")


def _sample(array: np.ndarray) -> bytes:
    if array.nbytes <= _LARGE:
        return b""
    places = np.linspace(0, array.size - 1, _SAMPLES).astype(np.int64)
    return array.flat[places].tobytes()


def _sum(array: np.ndarray) -> int:
    """A number that is another one if anything in the array is.

    Ten times as fast as a checksum of all bytes. A file that is only mapped into memory
    is not read for it.
    """
    if array.nbytes <= _LARGE or isinstance(array, np.memmap):
        return 0
    raw = np.asarray(array).ravel(order="K").view(np.uint8)
    rows = raw.size // (8 * _FOLD)
    folded = raw[: rows * 8 * _FOLD].view(np.uint64).reshape(rows, _FOLD)
    total = zlib.crc32(np.bitwise_xor.reduce(folded, axis=0).tobytes())
    return zlib.crc32(raw[rows * 8 * _FOLD :].tobytes(), total)


def alike(was: Any, now: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """Whether one value may stand in the place of another.

    Functions may if their code and all that they read from around them may, as after a
    cell of a notebook has run again.
    """
    seen = set() if seen is None else seen
    if was is now or (id(was), id(now)) in seen:
        return True
    seen.add((id(was), id(now)))
    if isinstance(was, jax.Array) and isinstance(now, jax.Array):
        return _equal_arrays(was, now)
    if type(was) is not type(now):
        return False
    if isinstance(was, SIMPLE | COMPARED):
        return bool(was == now or (was != was and now != now))
    if isinstance(was, np.ndarray):
        return _form(was) == _form(now) and was.tobytes() == now.tobytes()
    before, after = _parts(was), _parts(now)
    if before is None or after is None or before.keys() != after.keys():
        return False
    return all(alike(part, after[name], seen) for name, part in before.items())


def _form(array: Any) -> tuple[Any, ...]:
    return array.dtype, array.shape, getattr(array, "weak_type", False)


def _equal_arrays(was: jax.Array, now: jax.Array) -> bool:
    if any(isinstance(x, Tracer) or x.is_deleted() for x in (was, now)):
        return False
    if _form(was) != _form(now):
        return False
    if jnp.issubdtype(was.dtype, jax.dtypes.prng_key):
        was, now = jr.key_data(was), jr.key_data(now)
    if not (was.is_fully_addressable and now.is_fully_addressable):
        return False
    return np.asarray(was).tobytes() == np.asarray(now).tobytes()


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """What makes a value what it is, by name; None if only its identity does."""
    if isinstance(value, Mapping) and isinstance(value, dict | types.MappingProxyType):
        return value
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    if isinstance(value, functools.partial):
        return {"": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, types.MethodType):
        return {"": value.__func__, "self": value.__self__}
    if isinstance(value, types.FunctionType):
        around = (value.__defaults__, value.__kwdefaults__, closure(value))
        return {"": _code(value.__code__), "around": around}
    if isinstance(value, type | types.ModuleType):
        return None
    held = held_by(value)
    wrapped = held.get("__wrapped__")
    return {"": wrapped} if wrapped else held or None


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """The defaults of a function's arguments, by name."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}


def closure(function: types.FunctionType) -> dict[str, Any]:
    """Variables of the functions around one, as they are now."""
    found = {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        # A variable that has no value yet has an empty cell.
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _code(code: types.CodeType) -> tuple[Any, ...]:
    """What code does, wherever it stands."""
    constants = (_code(c) if hasattr(c, "co_code") else c for c in code.co_consts)
    names = code.co_names, code.co_varnames, code.co_freevars
    return code.co_code, names, tuple(constants)
