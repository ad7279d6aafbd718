"""Errors of tracing, in the words of the mistake that was made."""

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer

from trainer._tree import describe, path_name
from trainer.mistakes._deleted import is_deleted
from trainer.mistakes._form_errors import OF_FORMS
from trainer.mistakes._known_errors import of_assignment, of_item, of_name, Said
from trainer.mistakes._user_code import (
    defined_at,
    Frame,
    name_of,
    traceback_of,
    user_frame,
)
from trainer.mistakes._value_errors import OF_VALUES


_MOST_LEAVES = 4
_NOTE = "In the "


class TraceError(TypeError):
    """A loss or an update does something that a compiled step cannot.

    JAX's own error is its cause.
    """


def explain_trace(fn: Any = None) -> contextlib.AbstractContextManager[None]:
    """Say what was done, and where, when tracing raises one of JAX's errors.

    What is not known as a mistake is raised as it is.

    Args:
        fn: The loss that is traced, if it is one. It is named where no line is known.
    """
    return _Explained(fn)


class _Explained(contextlib.AbstractContextManager[None]):
    """Written out, as it is entered for every batch that is evaluated."""

    def __init__(self, fn: Any):
        self._fn = fn

    def __exit__(
        self, kind: Any, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, trace
        found = explained(error, self._fn) if isinstance(error, Exception) else None
        if found is not None:
            raise found from error


def explained(error: Exception, fn: Any = None) -> TraceError | None:
    """The same error in the words of the mistake; None for one that is not known."""
    if isinstance(error, TraceError):
        return None
    frame = user_frame(error)
    said = _said(error, frame)
    if said is None:
        return None
    place = f" in `{name_of(fn)}`{defined_at(fn)}" if fn is not None else ""
    stop = "" if said.instead.endswith("?") else "."
    return TraceError(f"{said.did}{frame or place}: {said.why}. {said.instead}{stop}")


def _said(error: Exception, frame: Frame | None) -> Said | None:
    if frame and frame.raises:  # the user's own, whatever it says
        return None
    line = frame.text if frame else ""
    found = (known.find(error, line) for known in (*OF_VALUES, *OF_FORMS))
    said = next(filter(None, found), None) or of_item(error) or of_assignment(error)
    if said is None and (frame is None or frame.is_direct):
        return of_name(error)
    return said


@contextlib.contextmanager
def noted(kind: str, fn: Any, batch: Any) -> Iterator[None]:
    """Add to an error that is raised as it is where it was, and what the batch was.

    Args:
        kind: What is called: `"loss"` or `"update"`.
        fn: The loss or the update.
        batch: What it is given.
    """
    try:
        yield
    except Exception as error:
        notes = getattr(error, "__notes__", ())
        is_new = not any(note.startswith(_NOTE) for note in notes)
        # Where no line of the user's is, the error is this package's, and says it all.
        frame = user_frame(error) if is_new else None
        known = isinstance(error, TraceError) or explained(error)
        if frame and not known:
            error.add_note("\n".join(_lines(kind, fn, batch, frame)))
        raise


def _lines(kind: str, fn: Any, batch: Any, frame: Frame) -> Iterator[str]:
    """At most six lines."""
    yield f"{_NOTE}{kind} `{name_of(fn)}`{defined_at(fn)}, raised{frame}."
    leaves = jtu.tree_leaves_with_path(batch)
    texts = [f"    {path_name('batch', p)}: {describe(leaf)}" for p, leaf in leaves]
    if len(texts) > _MOST_LEAVES:
        rest = len(texts) - _MOST_LEAVES + 1
        texts = [*texts[: _MOST_LEAVES - 1], f"    and {rest} more"]
    yield "Its batch:" if texts else "It has no batch."
    yield from texts


def check_constants(closed: Any) -> None:
    """Raise JAX's own error if a jaxpr uses a constant that cannot be computed with.

    That is an array that was deleted, or a value that was kept from an earlier trace:
    some versions of JAX take it for a constant, and say nothing until the program runs.

    Raises:
        UnexpectedTracerError: There is a value of an earlier trace.
        RuntimeError: There is an array that was deleted.
    """
    for name, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        if isinstance(value, Tracer) or is_deleted(value):
            try:
                jnp.negative(value)
            except (jax.errors.UnexpectedTracerError, RuntimeError) as error:
                raise error.with_traceback(_used_at(closed.jaxpr, name)) from None


def _used_at(jaxpr: Any, name: Any) -> TracebackType | None:
    """The traceback of the first operation on a variable, if that is known."""
    users = (eqn for eqn in jaxpr.eqns if any(v is name for v in eqn.invars))
    found = traceback_of(next(users, None))
    as_python = getattr(found, "as_python_traceback", None)
    return None if as_python is None else as_python()
