"""What looks on while the steps of a fit run."""

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainer._callback import AbstractCallback
from trainer._history import History
from trainer.callbacks import Progress


class Watch(NamedTuple):
    """What looks on while the steps run.

    Attributes:
        history: Where metrics are recorded.
        progress: Where they are shown.
        callbacks: Called in this order.
        evaluate: `Trainer.evaluate`, for the callbacks.
    """

    history: History
    progress: Progress
    callbacks: Sequence[AbstractCallback]
    evaluate: Callable[..., dict[str, float]]

    @property
    def period(self) -> int | None:
        """The shortest period of a callback, or None."""
        return min((c.every for c in self.callbacks if c.every), default=None)

    def next_stop(self, step: int, num_steps: int | None) -> float:
        """The step at which the steps have to be over, and be reported."""
        periods = [c.every for c in self.callbacks if c.every]
        due = [(step // every + 1) * every for every in periods]
        return min([*due, float("inf") if num_steps is None else num_steps])

    def until_over(self) -> contextlib.ExitStack:
        """A context at whose end all callbacks are told, also if one of them raises."""
        stack = contextlib.ExitStack()
        for callback in reversed(self.callbacks):
            stack.callback(callback.after_fit)
        return stack
