"""How a fit is set up, run, and left in order: what is behind `Trainer.fit`."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import jax.random as jr

from trainer._callback import AbstractCallback
from trainer._eager import EagerSteps, values_if
from trainer._frozen import Frozen
from trainer._guard import Watchman
from trainer._history import History
from trainer._loop import Loop
from trainer._optax import left_over
from trainer._program import AbstractProgram
from trainer._result import FitResult
from trainer._state import TrainState
from trainer._steps import OnRecompile, Steps
from trainer._tree import canonical, is_eager
from trainer._types import Key
from trainer._watch import Watch
from trainer.callbacks import Evaluate
from trainer.data import AbstractSource, Sampled, Wanted


_NOT_A_STEP = 2**32 - 1


def check_watched(
    program: AbstractProgram, callbacks: Sequence[AbstractCallback]
) -> None:
    """Raise ValueError if a selector waits for what no callback can report."""
    if program.watches and not any(callback.every for callback in callbacks):
        raise ValueError(
            f"A selector waits for `{program.watches[0]}` from a callback, and no "
            "callback is given that is called while training. Add one, such as "
            "`tr.Evaluate(data, every=100)`."
        )


def check_measured(own_loss: Any, callbacks: Sequence[AbstractCallback]) -> None:
    """Raise TypeError if a callback is to measure a loss that there is not."""
    for callback in callbacks:
        if isinstance(callback, Evaluate) and own_loss is callback.loss is None:
            raise TypeError(
                "The Trainer has no loss of its own for `tr.Evaluate` to measure. "
                "Write `tr.Evaluate(data, every=100, loss=loss)`."
            )


def started(
    program: AbstractProgram,
    state: TrainState,
    source: AbstractSource,
    total: int | None,
) -> TrainState:
    """The state, told the run's total, and with the sampler's carry.

    Raises:
        ValueError: A schedule is given in fractions of a run whose total is not known.
    """
    in_fractions = program.in_fractions or source.in_fractions
    state = program.completed(state, in_fractions)
    if isinstance(source, Sampled) and state.source is None:
        key = jr.fold_in(state.key, _NOT_A_STEP)
        # A copy: it may be what the sampler itself holds, and is donated.
        state = dataclasses.replace(state, source=canonical(source.start(key)))
    elif isinstance(source, Sampled):
        source.check_carry(state.source)
    if in_fractions:
        if total is None:
            raise ValueError(
                "A schedule is given in fractions of the run, and how many steps the "
                "epochs have is not known. Give `num_steps`, or a loader with a length."
            )
        memory = dataclasses.replace(state.memory, num_steps=jnp.int32(total))
        state = dataclasses.replace(state, memory=memory)
    return canonical(state, copy=False)


def _left_to_say(
    state: TrainState, history: History, watchman: Watchman
) -> Iterator[str]:
    """What a user may not expect of a fit that has ended well."""
    rest = left_over(state.opt_state)
    if rest:
        yield (
            f"The fit ends {rest} micro-batches into an accumulation of "
            "`optax.MultiSteps`. They are kept in `opt_state` for a fit that goes on, "
            "and have not moved the model."
        )
    never = [name for name, r in state.memory.reports.items() if not r.times]
    if never and history.measured:
        yield (
            f"A selector waits for `{never[0]}`, and no callback has reported it. "
            f"Callbacks have reported {sorted(history.measured)}."
        )
    if watchman.tell():
        yield str(watchman.tell())


class Fitting(Frozen):
    """Runs fits, one after another, with one compiled step.

    Attributes:
        program: What the step does.
        steps_per_call: As given to the Trainer.
        on_recompile: As given to the Trainer.
        debug: As given to the Trainer.
        last_state: As documented on the Trainer.
        last_history: As documented on the Trainer.
    """

    program: AbstractProgram
    steps_per_call: int | Literal["auto"]
    on_recompile: OnRecompile
    debug: bool
    last_state: TrainState | None
    last_history: History | None

    def _copied(self, state: TrainState) -> TrainState:
        """A copy of a state that the user has, for a fit to donate."""
        if self._steps is None:
            self.program.check_state(state)
        return canonical(state)

    def _run(
        self,
        new_state: Callable[[], TrainState],
        source: AbstractSource,
        ends: tuple[int | None, int | None, int | None],
        watch: Watch,
    ) -> FitResult:
        """Run a fit.

        Args:
            new_state: Makes the state that it begins with, of arrays of its own.
            source: The data.
            ends: Steps and epochs at which to stop, and the total of steps, or None.
            watch: What looks on.
        """
        num_steps, num_epochs, total = ends

        def start() -> TrainState:
            with values_if(self.debug):
                return started(self.program, new_state(), source, total)

        own = self.last_state = start()
        first = int(own.step)
        steps = self._steps_to_run()
        steps.begin(own, source)
        ended = num_steps is not None and first >= num_steps
        wanted = self._wanted(own.key, first, num_epochs)
        feed = None if ended else source.feed(wanted)
        if feed is None or feed.content is None:
            reason = "num_steps" if ended else "num_epochs"
            return FitResult(own, watch.history, reason, steps.report, 0.0, 0.0)
        before = steps.seconds
        step_for = functools.partial(steps.find, period=watch.period)
        watchman = self.program.watchman(own)
        loop = Loop(step_for, own, first, source, feed, watch, watchman)
        if isinstance(steps, Steps):
            self._steps = steps
        watch.progress.compiled()
        try:
            loop.run(num_steps)
        finally:
            self.last_state = start() if loop.is_lost() else loop.state()
        for text in _left_to_say(self.last_state, watch.history, watchman):
            warnings.warn(text, stacklevel=3)
        return FitResult(
            self.last_state,
            watch.history,
            loop.stop_reason or "",
            steps.report,
            steps.seconds - before,
            loop.seconds,
            watchman.found,
        )

    def _steps_to_run(self) -> Steps | EagerSteps:
        """The steps that are compiled, or others of which nothing stays."""
        if self.debug or is_eager():
            return EagerSteps(self.program)
        return self._steps or Steps(
            self.program, self.steps_per_call, self.on_recompile
        )

    def _wanted(self, key: Key, first: int, num_epochs: int | None) -> Wanted:
        asked = self.program.update.takes("mask")
        steps = self._steps
        like = steps.current.layout.like if steps and steps.current else None
        others = self.on_recompile != "error"
        return Wanted(first, num_epochs, key, any(asked), all(asked), like, others)
