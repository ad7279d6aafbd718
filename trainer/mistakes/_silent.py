"""Mistakes in a loss that raise nothing: the warning of them, and where they are."""

import linecache
import sys
import warnings
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import NamedTuple

from trainer.mistakes._user_code import file_name, Frame, is_of_user


class LossWarning(UserWarning):
    """A loss does something that runs without an error and is not what it looks like.

    It prints or keeps a traced value, reads the clock or draws from NumPy while the
    step is compiled, has no gradient, or compares each prediction with each target.
    Each is told once, when a Trainer traces its step, at the line of your code.

    Example:
        >>> import jax.numpy as jnp, optax, trainer as tr
        >>> def steps(model, batch): return jnp.sum(jnp.round(model))
        >>> trainer = tr.Trainer(steps, optax.sgd(0.1))
        >>> with warnings.catch_warnings(action="error", category=LossWarning):
        ...     try:
        ...         trainer.fit(jnp.ones(3), None, num_steps=9, progress=False)
        ...     except LossWarning as told:
        ...         print(str(told).split(" at ")[0])
        The gradient of `steps`
    """


class Place(NamedTuple):
    """A line of a file."""

    filename: str
    line: int

    @property
    def text(self) -> str:
        """The line itself, or `""` where there is no source."""
        return linecache.getline(self.filename, self.line).strip()

    def __str__(self) -> str:
        """As messages name it: ` at losses.py:12`, and the line."""
        return str(Frame(file_name(self.filename), self.line, self.text, True))


class Mistake(NamedTuple):
    """What is wrong, in words, and where."""

    text: str
    place: Place | None = None


def place_in(code: CodeType, line: int | None) -> Place:
    """A line of a function; its first line, if none is known."""
    return Place(code.co_filename, line or code.co_firstlineno)


def users_place(frame: FrameType | None) -> Place | None:
    """The innermost line of the user's code that a frame was called from."""
    while frame is not None and not is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    return frame and Place(frame.f_code.co_filename, frame.f_lineno)


def tell(mistakes: Iterable[Mistake]) -> None:
    """Warn of each mistake once, at its place or where the fit was called."""
    called = users_place(sys._getframe(1)) or Place("<trainer>", 0)
    for text, place in dict.fromkeys(mistakes):
        warnings.warn_explicit(text, LossWarning, *(place or called))
