"""The loop on the host: feed the step, read its metrics now and then, call back."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from trainer._callback import AbstractCallback, checked_numbers, StepInfo, Stop
from trainer._guard import NonfiniteError, Watchman
from trainer._history import History, Measured
from trainer._interrupt import HeldInterrupt
from trainer._selectors import Report
from trainer._state import TrainState
from trainer._step import CompiledStep
from trainer._tree import canonical
from trainer.callbacks import Progress
from trainer.data import AbstractSource, Chunk, Item


# Time between two reports that nothing but the progress bar asks for. It bounds how far
# the host runs ahead of the device, too.
_SECONDS_PER_REPORT = 0.5
_FEWEST = 4


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


class Loop:
    """One `fit`, from its first step to its last.

    The host reads the device in `_report` and nowhere else.

    Attributes:
        step: Completed updates.
        stop_reason: Why the loop ended; None while it runs.
        seconds: How long it took.
    """

    def __init__(
        self,
        compiled: CompiledStep,
        state: TrainState,
        step: int,
        source: AbstractSource,
        items: Iterator[Item],
        watch: Watch,
        watchman: Watchman,
    ):
        self.step, self.seconds = step, 0.0
        self.stop_reason: str | None = None
        self._compiled, self._items, self._watch = compiled, items, watch
        self._watchman, self._reported = watchman, set(state.memory.reports)
        self._resident = compiled.resident(source)
        self._leaves = compiled.flatten(state)
        self._buffers = compiled.empty()
        self._row, self._metrics = 0, Measured()
        self._checked = time.perf_counter()

    def state(self) -> TrainState:
        """The state as it is. Its arrays are gone after the next step."""
        return self._compiled.unflatten(self._leaves)

    def is_lost(self) -> bool:
        """Whether a call was cut off after it had taken the state."""
        return any(leaf.is_deleted() for leaf in self._leaves)

    def run(self, num_steps: int | None) -> None:
        """Run up to `num_steps` completed updates, or the end of the items."""
        began = time.perf_counter()
        with HeldInterrupt() as interrupt:
            while self.stop_reason is None:
                stop, before = self._next_report(num_steps), self.step
                ended = self._run_to(stop, interrupt)
                if ended or self.step == num_steps:
                    self.stop_reason = "num_epochs" if ended else "num_steps"
                if self.step == before:
                    break  # the data ended where the last report was
                self._call_back(lambda c: bool(c.every) and self.step % c.every == 0)
            self._compiled.baked.check()
            self._call_back(lambda c: c.every is None)
        self.seconds = time.perf_counter() - began

    def _run_to(self, stop: int, interrupt: HeldInterrupt) -> bool:
        """Run up to `stop` completed updates and report; return whether items ended."""
        began, first = time.perf_counter(), self.step
        while self.step < stop:
            most = min(self._compiled.steps_per_call, stop - self.step)
            chunk, epochs, error = self._take(most)
            if epochs:
                self._leaves, self._buffers = self._compiled(
                    self._leaves,
                    self._buffers,
                    self._row,
                    self._resident,
                    chunk,
                    epochs,
                )
                self._row += len(epochs)
                self.step += len(epochs)
            error = error or interrupt.taken()
            if error is not None:
                break
        else:
            error = None
        try:
            self._report()
        except NonfiniteError as bad:
            raise bad from error
        if self.step > first:
            elapsed = time.perf_counter() - began
            self._compiled.pace = elapsed / (self.step - first)
        if error is not None and not isinstance(error, StopIteration):
            raise error
        return error is not None

    def _take(self, count: int) -> tuple[Chunk, list[int], BaseException | None]:
        """Take up to `count` items, and their epochs.

        What ended them early is returned, to be raised after they were used.
        """
        chunk, epochs = Chunk(self._compiled.layout), []
        try:
            while len(epochs) < count:
                item = next(self._items)
                chunk.add(item.content)
                epochs.append(item.epoch)
        except (Exception, KeyboardInterrupt) as error:
            return chunk, epochs, error
        return chunk, epochs, None

    def _next_report(self, num_steps: int | None) -> int:
        """The step at which the host next has to look."""
        pace = self._compiled.pace
        # The first step is waited for: what one takes cannot be known before.
        # After that a few are under way at a time, so that loading overlaps with them.
        paced = 1 if pace is None else max(int(_SECONDS_PER_REPORT / pace), _FEWEST)
        due = [self.step + min(paced, self._compiled.rows)]
        periods = [c.every for c in self._watch.callbacks if c.every]
        due += [(self.step // every + 1) * every for every in periods]
        return min(due if num_steps is None else [*due, num_steps])

    def _report(self) -> None:
        """Read the rows written since the last report, and show them."""
        count, self._row = self._row, 0
        if not count:
            return
        rows = self._compiled.read(self._buffers, count)
        bad = self._watchman.look(self.step - count, rows)
        if bad is not None:
            # The steps after it have changed nothing; they are as if they had not been.
            rows = {name: values[: bad + 1] for name, values in rows.items()}
        self._watch.history.extend(self.step - count, rows)
        if bad is not None:
            self._go_back(self.step - count + bad)
        last = {name: values[-1] for name, values in rows.items()}
        found = {n: v for n, v in last.items() if v is not np.ma.masked}
        self._metrics = Measured(found)
        self._watch.progress.update(count, self._metrics)
        if time.perf_counter() - self._checked > _SECONDS_PER_REPORT:
            self._compiled.baked.check()
            self._checked = time.perf_counter()

    def _go_back(self, step: int) -> None:
        """Take the state before a step that was not finite, and end the run."""
        self.step = step
        self._remember(halted=jnp.asarray(False))
        raise self._watchman.error()

    def _remember(self, **changed: Any) -> None:
        """Change something in the state's memory, between two calls."""
        state = self.state()
        memory = dataclasses.replace(state.memory, **changed)
        self._leaves = self._compiled.flatten(
            canonical(dataclasses.replace(state, memory=memory), copy=False)
        )

    def _hand_in(self, numbers: Mapping[str, float]) -> None:
        """Tell the selectors in the step what a callback has measured."""
        reports = dict(self.state().memory.reports)
        for name in self._reported & numbers.keys():
            times = reports[name].times + 1
            reports[name] = Report(jnp.float32(numbers[name]), times)
        self._remember(reports=reports)

    def _call_back(self, due: Callable[[AbstractCallback], bool]) -> None:
        step, copy = self.step, []

        def get_state() -> TrainState:
            if not copy:
                self._check_now(step)
                copy.append(_copied(self.state()))
            return copy[0]

        def evaluate(data: Any, **options: Any) -> dict[str, float]:
            self._check_now(step)
            return self._watch.evaluate(self.state(), data, **options)

        for callback in filter(due, self._watch.callbacks):
            metrics = MappingProxyType(self._metrics)
            info = StepInfo(self.step, metrics, get_state, evaluate)
            returned = callback(info)
            if isinstance(returned, Stop):
                self.stop_reason = returned.reason
            elif returned is not None:
                numbers = checked_numbers(
                    callback, returned, self._compiled.metric_names
                )
                self._watch.history.record(self.step, numbers)
                self._metrics = Measured({**self._metrics, **numbers})
                if self._reported & numbers.keys():
                    self._hand_in(numbers)

    def _check_now(self, step: int) -> None:
        if self.step != step:
            raise RuntimeError(
                f"A StepInfo of step {step} is asked for the state, but the run is at "
                f"step {self.step}. Ask for it in the callback, and keep the state."
            )


def _copied(state: TrainState) -> TrainState:
    return jtu.tree_map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, state)
