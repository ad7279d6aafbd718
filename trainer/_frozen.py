"""Attributes that a compiled step has read, and would not read again."""

from typing import Any, ClassVar

from trainer._steps import Steps
from trainer._tree import describe
from trainer._types import RecompileError
from trainer.recompiles._attributes import attribute, MISSING


class Frozen:
    """Refuses to set or delete attributes once the step is compiled.

    What a loss reads from `self` is a constant of the compiled step. Without this, a
    value assigned later would be ignored without a word.
    """

    _steps: Steps | None = None
    _own: ClassVar[frozenset[str]] = frozenset({"last_state", "last_history", "_steps"})

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a change that the compiled step would not see."""
        if self._steps is not None and name not in self._own:
            was = attribute(self, name)
            old = "without it" if was is MISSING else f"with `{describe(was)}`"
            raise RecompileError(
                f"`{name}` of `{type(self).__name__}` is set to `{describe(value)}`, "
                f"but its step was compiled {old} and would not see the change. Use a "
                "schedule of the step for what changes while training, or make a new "
                "Trainer."
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Refuse a deletion that the compiled step would not see."""
        if self._steps is not None:
            raise RecompileError(
                f"`{name}` of `{type(self).__name__}` is deleted, but its step was "
                "compiled with it. Make a new Trainer."
            )
        super().__delattr__(name)
