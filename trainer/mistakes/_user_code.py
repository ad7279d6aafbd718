"""Which code is the user's: frames of a traceback, and where a function is defined."""

import dis
import functools
import inspect
import linecache
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, Literal, NamedTuple

import equinox
import jax
import jaxlib
import jaxtyping
import numpy
import optax


_BUILT_ON = (jax, jaxlib, equinox, optax, numpy, jaxtyping)
_LIBRARIES = [
    *(Path(m.__file__).parent for m in _BUILT_ON if m.__file__),
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")),
]
_INSTALLED = {"site-packages", "dist-packages"}
# Code that is made while a program runs: by Python, NumPy, beartype and attrs.
_GENERATED = ("<frozen", "<__", "<@", "<attrs")
# What `dataclasses` makes has the same file name as what `exec` runs.
_OF_DATACLASS = {"__init__", "__setattr__", "__delattr__", "__eq__", "__repr__"}
# What JAX calls the traceback of an operation that it transforms. It is no public name.
_BEFORE = "JaxStackTraceBeforeTransformation"
_LONGEST = 80


class Frame(NamedTuple):
    """A place in the user's code.

    Attributes:
        file: The file's name, without its folder.
        line: The line's number.
        text: The line itself, or `""` where there is no source.
        is_direct: Whether what was raised there came from this line itself, or from a
            library that this package builds on, and not from one more between them.
        raises: Whether the line is a `raise`, and what was raised is the user's own.
    """

    file: str
    line: int
    text: str
    is_direct: bool
    raises: bool = False

    def __str__(self) -> str:
        """As messages name it: ` at losses.py:12`, and the line."""
        long = len(self.text) >= _LONGEST
        text = f"{self.text[: _LONGEST - 3]}..." if long else self.text
        return f" at {self.file}:{self.line}" + (f", `{text}`" if text else "")


def is_of_user(filename: str) -> bool:
    """Whether code of this file is the user's, and not a library's."""
    return _owner(filename) == "user"


@functools.lru_cache(maxsize=1024)
def _owner(filename: str) -> Literal["user", "ours", "other"]:
    """Whose a file is: the user's, of what this package builds on, or another's.

    Code without a file, as that of a notebook or a REPL, is the user's.
    """
    if filename.startswith(_GENERATED):
        return "ours"
    path = Path(filename)
    # A library that is not installed, but used from where it is written, is the user's.
    if path.is_relative_to(Path(__file__).parents[1]):
        return "ours"
    installed = bool(_INSTALLED & set(path.parts))
    for library in _LIBRARIES:
        within = path.is_relative_to(library)
        if within and not _INSTALLED & set(path.relative_to(library).parts):
            return "ours"
    return "other" if installed else "user"


def user_frame(error: BaseException) -> Frame | None:
    """The innermost place in the user's code that an error was raised through.

    A mistake inside of another library is the user's call of it. Where all code is
    that of libraries, as in a project that is installed, it is the innermost of those
    that this package does not build on. None if there is none.
    """
    for raised in _sources(error):
        steps = [*_steps(raised.__traceback__)][::-1]
        owners = [_owner_of(step.tb_frame.f_code) for step in steps]
        for wanted in ("user", "other"):
            if wanted in owners:
                place = owners.index(wanted)
                direct = "other" not in owners[:place]
                raises = place == 0 and _is_raise(steps[0])
                return _as_frame(steps[place])._replace(is_direct=direct, raises=raises)
    return None


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_raise(step: TracebackType) -> bool:
    code = step.tb_frame.f_code.co_code
    at = step.tb_lasti
    return 0 <= at < len(code) and dis.opname[code[at]] == "RAISE_VARARGS"


def _sources(error: BaseException) -> list[BaseException]:
    """The errors to look through, the one that knows most first.

    What JAX raises when it goes back through a program was raised through none of the
    user's code, or through the call of a gradient. Where the operation is, is in the
    traceback of one of its causes.
    """
    chain, cause = [error], error.__cause__ or error.__context__
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    is_backward = str(error).startswith("Reverse-mode differentiation")
    return sorted(
        chain, key=lambda e: not (is_backward and type(e).__name__ == _BEFORE)
    )


def _owner_of(code: CodeType) -> Literal["user", "ours", "other"]:
    if code.co_filename == "<string>" and code.co_name in _OF_DATACLASS:
        return "ours"
    return _owner(code.co_filename)


def _as_frame(step: TracebackType) -> Frame:
    frame, line = step.tb_frame, step.tb_lineno
    filename = frame.f_code.co_filename
    text = linecache.getline(filename, line, frame.f_globals).strip()
    return Frame(file_name(filename), line, text, True)


def traceback_of(eqn: Any) -> Any:
    """Where an operation of a jaxpr was made; None if that is not known.

    JAX documents no way from an operation to its line.
    """
    return getattr(getattr(eqn, "source_info", None), "traceback", None)


def file_name(filename: str) -> str:
    """A file's name; a cell of a notebook has one that says nothing."""
    path = Path(filename)
    return "notebook cell" if path.parent.name.startswith("ipykernel") else path.name


def name_of(fn: Any) -> str:
    """Name of a loss or an update in messages and in the history."""
    return getattr(fn, "__name__", None) or type(fn).__name__


def defined_at(fn: Any) -> str:
    """Where a function, or the class of a callable object, is: ` at losses.py:12`.

    Empty for what is of this package or what it builds on, or not written in Python.
    """
    code = code_of(fn)
    if code is None or _owner_of(code) == "ours":
        return ""
    return f" at {file_name(code.co_filename)}:{code.co_firstlineno}"


def code_of(fn: Any) -> CodeType | None:
    """The code of a function, or of what a callable object does when it is called."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    for found in (fn, inspect.getattr_static(type(fn), "__call__", None)):
        found = inspect.unwrap(found) if callable(found) else found
        code = getattr(getattr(found, "__func__", found), "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None
