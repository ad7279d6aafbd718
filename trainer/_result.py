"""What `fit` returns."""

from dataclasses import dataclass
from typing import Any, final

from trainer._guard import NonfiniteSteps
from trainer._history import History
from trainer._state import TrainState
from trainer.recompiles._report import CompileReport


@final
@dataclass(frozen=True)
class FitResult:
    """What `Trainer.fit` returns.

    Attributes:
        state: The TrainState after the last update. Give it to `fit` to go on.
        history: What this fit recorded.
        stop_reason: `"num_steps"`, `"num_epochs"`, or the reason a callback gave.
        compile_report: How often this Trainer's step was compiled, over all its fits,
            what that took, and what came of it.
        compile_seconds: Seconds this fit spent tracing and compiling the step.
        seconds: Seconds this fit spent on the steps and callbacks.
        nonfinite: What was not finite, and in how many steps; None if all was.
    """

    state: TrainState
    history: History
    stop_reason: str
    compile_report: CompileReport
    compile_seconds: float
    seconds: float
    nonfinite: NonfiniteSteps | None = None

    @property
    def compiles(self) -> int:
        """How often XLA compiled this Trainer's step, over all its fits.

        1; or 0 if there was no step to run, `compile_cache` had it, or with `debug`;
        more only if `on_recompile` allows it.
        """
        return self.compile_report.compiles

    @property
    def model(self) -> Any:
        """The trained model."""
        return self.state.model

    @property
    def model_state(self) -> Any:
        """The trained model's `eqx.nn.State`, or None."""
        return self.state.model_state

    def __repr__(self) -> str:
        """Say how far it came."""
        return (
            f"FitResult(step={int(self.state.step)}, stop_reason={self.stop_reason!r}, "
            f"compiles={self.compiles}, seconds={self.seconds:.3g}, {self.history!r})"
        )
