"""Errors of tracing, in the words of the mistake that was made."""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import equinox
import jax
import jaxtyping
import numpy
import optax


_TRACED = "the step, the batch and the model have no values while the step is compiled"
_REMEDY = {
    jax.errors.TracerBoolConversionError: (
        "A Python `if`, `while`, `and`, `not` or `assert` looks at a traced value",
        "Choose between losses with `tr.switch_every`, `tr.piecewise` or `tr.Switch`, "
        "and between values with `jnp.where` or `jax.lax.cond`",
    ),
    jax.errors.TracerArrayConversionError: (
        "A NumPy function is given a traced value",
        "Use the function of the same name in `jax.numpy`",
    ),
    jax.errors.TracerIntegerConversionError: (
        "A traced value is used as a Python index or in `range`",
        "Index a `jnp` array, or use `jax.lax.fori_loop`",
    ),
    jax.errors.NonConcreteBooleanIndexError: (
        "An array is indexed by a traced mask, which has no fixed number of rows",
        "Keep the shape and use `jnp.where(mask, x, 0)`",
    ),
    jax.errors.ConcretizationTypeError: (
        "A traced value is turned into a Python number, or into a shape",
        "Keep it an array, and report it as a metric: `return loss, {'name': value}`",
    ),
}
_LIBRARIES = [
    Path(__file__).parent,
    *(
        Path(m.__file__).parent
        for m in (jax, equinox, optax, numpy, jaxtyping)
        if m.__file__
    ),
]


class TraceError(TypeError):
    """A loss or an update does something that a compiled step cannot.

    JAX's own error is its cause.
    """


@contextlib.contextmanager
def explain_trace() -> Iterator[None]:
    """Say what was done, and where, when tracing raises one of JAX's errors."""
    try:
        yield
    except tuple(_REMEDY) as error:
        did, instead = next(
            _REMEDY[kind] for kind in type(error).__mro__ if kind in _REMEDY
        )
        raise TraceError(f"{did}{_place(error)}: {_TRACED}. {instead}.") from error


def _place(error: BaseException) -> str:
    """File and line of the innermost frame that is not a library's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        in_library = any(path.is_relative_to(library) for library in _LIBRARIES)
        if not in_library and not frame.filename.startswith(("<frozen", "<__")):
            text = frame.line or ""
            line = text if len(text) < 80 else f"{text[:77]}..."
            return f" at {path.name}:{frame.lineno}" + (f", `{line}`" if line else "")
    return ""
