"""Where the time of a fit goes: a split of the wall time, and a trace of some steps."""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import final, NamedTuple

import jax

from trainer._callback import AbstractCallback, StepInfo


_MOST_ROWS = 20
# What bounds a run whose most time goes there, and what to do about it.
_ADVICE = {
    "data": (
        "Waiting for batches bounds the run ({share}): make the loader faster, give "
        "data that fit into memory as `tr.Arrays`, or make small batches larger."
    ),
    "dispatch": (
        "Handing calls over bounds the run ({share}): let a call have more steps, by a "
        "larger `steps_per_call` and a larger `every` of the callbacks, or a step more "
        "examples; on a CPU a part of it may be the steps, which share its cores."
    ),
    "device": (
        "The steps themselves bound the run ({share}): compute less in them, or in a "
        "narrower type with `compute='bfloat16'` of `tr.Minimize`; a trace, as "
        "`tr.profile(folder)` makes it, shows what takes long."
    ),
    "callbacks": (
        "Callbacks bound the run ({share}): call them less often, by a larger `every`, "
        "or let them do less."
    ),
    "other": (
        "What the loop itself does on the host bounds the run ({share}): it is less "
        "with `progress=False`, and with fewer metrics."
    ),
}


class _Window(NamedTuple):
    """Some steps one after another, and where their time went."""

    first: int
    last: int
    seconds: Mapping[str, float]
    begins: bool
    traced: bool


@final
class Profile(AbstractCallback):
    """Records where the wall time goes, and traces some steps; see `tr.profile`.

    `print(profile)` shows a table of what was recorded, also while training.

    Args:
        folder: Where a trace is written, or None.
        every: Period in steps.

    Raises:
        OSError: The folder cannot be made.

    Example:
        >>> print(Profile(every=50))
        Nothing is recorded yet: no 50 steps are over.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, every: int = 100
    ):
        super().__init__(every)
        self._folder = None if folder is None else _made(folder)
        self._windows: list[_Window] = []
        self._before: StepInfo | None = None
        self._running: contextlib.ExitStack | None = None
        self._own_seconds = 0.0

    def __call__(self, info: StepInfo) -> dict[str, float]:
        """Record the time since the last call, and begin or end the trace."""
        window = self._window(info)
        self._windows.append(window)
        self._before, began = info, time.perf_counter()
        if window.traced:
            self._stop()
        elif self._folder is not None and not self._is_traced():
            self._start(self._folder, info.step)
        self._own_seconds = time.perf_counter() - began
        return {f"seconds/{name}": spent for name, spent in window.seconds.items()}

    def after_fit(self) -> None:
        """End a trace that is under way."""
        self._before, self._own_seconds = None, 0.0
        self._stop()
        # An error says more than that there is no trace.
        if self._folder is None or self._is_traced() or sys.exc_info()[0] is not None:
            return
        warnings.warn(
            f"The fit ended before `tr.profile` had traced {self.every} steps into "
            f"`{self._folder}`: it leaves out those up to its first call. Give more "
            "steps, or a smaller `every`.",
            # The caller of `fit`.
            stacklevel=7,
        )

    def _window(self, info: StepInfo) -> _Window:
        """What happened since the last call, but for the profiler's start and stop."""
        before, traced = self._before, self._running is not None
        if before is None:
            return _Window(info.first_step, info.step, info.seconds, True, traced)
        spent = {name: info.seconds[name] - was for name, was in before.seconds.items()}
        spent["callbacks"] -= self._own_seconds
        return _Window(before.step, info.step, spent, False, traced)

    def _is_traced(self) -> bool:
        return any(window.traced for window in self._windows)

    def _start(self, folder: Path, step: int) -> None:
        running = contextlib.ExitStack()
        try:
            jax.profiler.start_trace(folder)
        except RuntimeError as error:
            raise RuntimeError(
                f"`tr.profile` cannot begin its trace at step {step}: {error} End the "
                "other one before, or leave out `folder`."
            ) from error
        running.callback(jax.profiler.stop_trace)
        name = f"{self.every} steps from {step}"
        running.enter_context(jax.profiler.TraceAnnotation(name))
        self._running = running

    def _stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def __str__(self) -> str:
        """A table of the windows, and a sentence on what bounds the run."""
        if not self._windows:
            return f"Nothing is recorded yet: no {self.every} steps are over."
        shown = self._windows[-_MOST_ROWS:]
        heads = ["steps", "a step", *_ADVICE]
        cells = [heads, *map(_cells, shown)]
        sizes = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.rjust(size) for cell, size in zip(line, sizes, strict=True))
            for line in cells
        ]
        if len(self._windows) > len(shown):
            lines.insert(1, f"... {len(self._windows) - len(shown):,} more before")
        lines.append(self._verdict())
        for window in self._windows:
            if window.traced:
                steps = f"Steps {window.first} to {window.last}"
                lines.append(f"{steps} were traced into `{self._folder}`.")
        return "\n".join(lines)

    __repr__ = __str__

    def _verdict(self) -> str:
        """What bounds the run, by the windows without first calls and tracing."""
        steady = [w for w in self._windows if not (w.begins or w.traced)]
        windows = steady or [w for w in self._windows if not w.begins] or self._windows
        totals = {name: sum(w.seconds[name] for w in windows) for name in _ADVICE}
        most = max(totals, key=totals.__getitem__)
        return _ADVICE[most].format(share=_percent(totals[most], sum(totals.values())))


def profile(
    folder: str | os.PathLike[str] | None = None, *, every: int = 100
) -> Profile:
    """Make a callback that says where the time of a fit goes.

    Every so many steps it records what the host did with the wall time since its last
    call, in seconds: `seconds/data` waiting for batches and filling calls with them,
    `seconds/dispatch` handing calls over, `seconds/device` waiting for the device,
    `seconds/callbacks`, and `seconds/other` for the rest, such as the progress bar and
    the history. They add up to the wall time of these steps: those from the step of its
    last call, or the fit's first, up to that of this call, which is not among them.
    `print(profile)` shows them as a table, with what bounds the run.

    As with every callback, the steps before its call are waited for, and a call of the
    compiled function ends there. With an `every` of thousands that does not show.

    Args:
        folder: If given, the `every` steps after its first call run under
            `jax.profiler`, and the trace is written there. So neither compiling nor a
            first call is in it. If the fit ends or raises before, the trace ends too.
            Tracing makes these steps slower, and their split shows it; the time to
            begin and to end the trace is left out of the split.
        every: Period in steps.

    Returns:
        A Profile, for `callbacks=[...]` of `fit`. Given to another fit, it goes on.

    Raises:
        TypeError: `folder` is not a path, or `every` not a whole number.
        ValueError: `every` is below 1.
        OSError: The folder cannot be made.
        RuntimeError: In `fit`, when the trace is to begin, another one is under way.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from trainer import Trainer
        >>> def square(model, batch): return jnp.sum(model**2)
        >>> watch = profile(every=10)
        >>> trainer = Trainer(square, optax.sgd(0.1))
        >>> result = trainer.fit(
        ...     jnp.ones(3), None, num_steps=20, callbacks=[watch], progress=False)
        >>> result.history.steps("seconds/device").tolist()
        [10, 20]
    """
    return Profile(folder, every=every)


def _made(folder: str | os.PathLike[str]) -> Path:
    """The folder, made if it is not there."""
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(
            f"`folder` is `{folder!r}`, which is not a path. Write "
            "`tr.profile(every=100)` for a period, and `tr.profile('trace')` for a "
            "folder."
        )
    path = Path(folder).expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path


def _cells(window: _Window) -> list[str]:
    """One row of the table."""
    whole = sum(window.seconds.values())
    step = _time(whole / (window.last - window.first))
    shares = [_percent(window.seconds[name], whole) for name in _ADVICE]
    return [f"{window.first}..{window.last}", step, *shares]


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-6:.3g} us"
