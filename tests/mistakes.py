"""Mistakes that a loss makes: the table that `value_mistakes.py` and others fill."""

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp


MODEL = jnp.arange(1.0, 4.0)


class Layer(eqx.Module):
    w: jax.Array
    table: jax.Array
    activation: Any

    def __init__(self):
        self.w, self.table = jnp.ones(3), jnp.arange(3)
        self.activation = jax.nn.relu


class Row(NamedTuple):
    """One mistake.

    Attributes:
        function: Makes it, in the line that is marked.
        cause: Class of the error that it is shown by.
        did: A part of what the message says was done.
        instead: A part of what it says to write.
        model: What is trained.
        when_evaluated: Whether it is a mistake without a gradient, too.
    """

    function: Any
    cause: type[Exception]
    did: str
    instead: str
    model: Any = MODEL
    when_evaluated: bool = True


ROWS: dict[str, Row] = {}


def row(cause, did, instead, **options):
    def add(function):
        ROWS[function.__name__] = Row(function, cause, did, instead, **options)
        return function

    return add


def marked_line(function):
    """The place of the line that is marked `# here`, as a message names it."""
    lines, first = inspect.getsourcelines(function)
    (place,) = [number for number, line in enumerate(lines) if "# here" in line]
    text = lines[place].strip()
    text = text if len(text) < 80 else f"{text[:77]}..."
    name = Path(inspect.getsourcefile(function) or "").name
    return f" at {name}:{first + place}, `{text}`"
