"""Attributes that a compiled step has read, and would not read again."""

from typing import Any, ClassVar

from trainer._step import CompiledStep
from trainer._types import RecompileError


class Frozen:
    """Refuses to set or delete attributes once the step is compiled.

    What a loss reads from `self` is a constant of the compiled step. Without this, a
    value assigned later would be ignored without a word.
    """

    _compiled: CompiledStep | None = None
    _own: ClassVar[frozenset[str]] = frozenset(
        {"last_state", "last_history", "_compiled"}
    )

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a change that the compiled step would not see."""
        if self._compiled is not None and name not in self._own:
            old = f"with `{vars(self)[name]!r}`" if name in vars(self) else "without it"
            raise RecompileError(
                f"`{name}` of `{type(self).__name__}` is set to `{value!r}`, but its "
                f"step was compiled {old} and would not see the change. Use a schedule "
                "of the step for what changes while training, or make a new Trainer."
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Refuse a deletion that the compiled step would not see."""
        if self._compiled is not None:
            raise RecompileError(
                f"`{name}` of `{type(self).__name__}` is deleted, but its step was "
                "compiled with it. Make a new Trainer."
            )
        super().__delattr__(name)
