"""The compiled steps of one Trainer: one, or one for each form that it may have."""

import contextlib
import warnings
from typing import get_args, Literal

from jaxtyping import PyTree

from trainer._program import AbstractProgram
from trainer._state import TrainState
from trainer._step import CompiledStep
from trainer._types import RecompileError
from trainer.data import AbstractSource
from trainer.mistakes._silent import LossWarning
from trainer.recompiles._report import CompileReport, in_all, NO_STEP


OnRecompile = Literal["error", "warn", "allow"]


def check_on_recompile(on_recompile: object) -> OnRecompile:
    """Check the option of a Trainer; return it."""
    for known in get_args(OnRecompile):
        if on_recompile == known:
            return known
    raise ValueError(
        f"`on_recompile` is `{on_recompile!r}`; it is `'error'`, `'warn'` or `'allow'`."
    )


class Steps:
    """The steps that a Trainer has compiled, the one in use first.

    Args:
        program: What a step does.
        steps_per_call: As given to the Trainer.
        on_recompile: What to do when the step in use does not fit.
    """

    def __init__(
        self,
        program: AbstractProgram,
        steps_per_call: int | Literal["auto"],
        on_recompile: OnRecompile,
    ):
        self._program = program
        self._steps_per_call: int | Literal["auto"] = steps_per_call
        self.on_recompile: OnRecompile = on_recompile
        self._known: list[CompiledStep] = []
        # Those that fit the state and source of this fit, and why the first does not.
        self._fitting: list[CompiledStep] = []
        self._reason: str | None = None

    @property
    def current(self) -> CompiledStep | None:
        """The step in use, or None before the first."""
        return self._known[0] if self._known else None

    @property
    def report(self) -> CompileReport:
        """What compiling all of them took, and what came of the one in use."""
        reports = [step.report for step in self._known]
        return in_all(reports) if reports else NO_STEP

    @property
    def seconds(self) -> float:
        """Seconds from the first trace until it was compiled, of all of them."""
        return sum(step.seconds for step in self._known)

    def begin(self, state: TrainState, source: AbstractSource) -> None:
        """Note for which steps a state and a source are of the right form.

        Raises:
            RecompileError: A value that the step in use has read has changed; or it is
                none of those, and `on_recompile` is `"error"`.
        """
        if self.current is None:
            return
        self.current.baked.check()
        reasons = [step.mismatch(state, source) for step in self._known]
        if reasons[0] and self.on_recompile == "error":
            raise RecompileError(reasons[0])
        pairs = zip(self._known, reasons, strict=True)
        self._fitting = [step for step, reason in pairs if reason is None]
        self._reason = reasons[0]

    def find(
        self,
        state: TrainState,
        source: AbstractSource,
        content: PyTree,
        period: int | None,
    ) -> CompiledStep:
        """Find or compile the step for the content of an item, after `begin`.

        Raises:
            RecompileError: There is a step for another content, and `on_recompile` is
                `"error"`; or a value that the step has read has changed.
        """
        for step in self._fitting:
            if step.refusal(content) is None:
                step.baked.check()
                return self._in_use(step)
        if self.current is not None:
            text = self._reason or self.current.refusal(content) or ""
            if self.on_recompile == "error":
                raise RecompileError(text)
            if self.on_recompile == "warn":
                warnings.warn(f"Compiling once more: {text}", stacklevel=2)
        told = warnings.catch_warnings(action="ignore", category=LossWarning)
        # What is wrong in a loss is told when the first of them is traced.
        with told if self._known else contextlib.nullcontext():
            step = CompiledStep(
                self._program, state, source, content, self._steps_per_call, period
            )
        self._reason = None
        return self._in_use(step)

    def _in_use(self, step: CompiledStep) -> CompiledStep:
        for steps in (self._known, self._fitting):
            steps[:] = [step, *(other for other in steps if other is not step)]
        return step
