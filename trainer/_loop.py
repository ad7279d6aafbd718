"""The loop on the host: feed the step, read its metrics now and then, call back."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
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
from trainer._queue import Queue
from trainer._selectors import Report
from trainer._state import TrainState
from trainer._step import CompiledStep
from trainer._tree import canonical
from trainer.callbacks import Progress
from trainer.data import AbstractSource, Feed


# Time between two reports that nothing but the progress bar asks for.
_SECONDS_PER_REPORT = 0.5


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
        feed: Feed,
        watch: Watch,
        watchman: Watchman,
    ):
        self.step, self.seconds = step, 0.0
        self.stop_reason: str | None = None
        self._compiled, self._feed, self._watch = compiled, feed, watch
        self._watchman, self._watched = watchman, set(state.memory.reports)
        self._resident = compiled.resident(source)
        self._leaves = compiled.flat.flatten(state)
        self._buffers = compiled.empty()
        self._row, self._metrics = 0, Measured()
        self._unread: tuple[Any, int] | None = None
        self._reported_at = time.perf_counter()
        self._queue = Queue(compiled)

    def state(self) -> TrainState:
        """The state as it is. Its arrays are gone after the next step."""
        return self._compiled.flat.unflatten(self._leaves)

    def is_lost(self) -> bool:
        """Whether a call took the state and failed.

        A call may fail after it has handed out the arrays of its state: waiting for
        them tells. After the last report they are there already.
        """
        if any(leaf.is_deleted() for leaf in self._leaves):
            return True
        try:
            jax.block_until_ready(self._leaves)
        except jax.errors.JaxRuntimeError:
            return True
        return False

    def run(self, num_steps: int | None) -> None:
        """Run up to `num_steps` completed updates, or the end of the items."""
        began = time.perf_counter()
        with HeldInterrupt() as interrupt:
            while self.stop_reason is None:
                stop, before = self._next_callback(num_steps), self.step
                ended = self._run_to(stop, interrupt)
                if ended or self.step == num_steps:
                    self.stop_reason = "num_epochs" if ended else "num_steps"
                if self.step == before:
                    break  # the data ended where the last callback was
                self._call_back(lambda c: bool(c.every) and self.step % c.every == 0)
            self._compiled.baked.check()
            self._call_back(lambda c: c.every is None)
        self.seconds = time.perf_counter() - began

    def _next_callback(self, num_steps: int | None) -> float:
        """The step at which the steps have to be over, and be reported."""
        periods = [c.every for c in self._watch.callbacks if c.every]
        due = [(self.step // every + 1) * every for every in periods]
        return min([*due, float("inf") if num_steps is None else num_steps])

    def _run_to(self, stop: float, interrupt: HeldInterrupt) -> bool:
        """Run up to `stop` completed updates and report; return whether items ended."""
        error: BaseException | None = None
        try:
            while self.step < stop and error is None:
                error = self._call_once(stop) or interrupt.taken()
                self._look()
            self._report()
        except NonfiniteError as bad:
            raise bad from error
        if error is not None and not isinstance(error, StopIteration):
            raise error
        return error is not None

    def _call_once(self, stop: float) -> BaseException | None:
        """Fill a chunk and begin its steps.

        What ended the items early is returned, to be raised after they were used.
        """
        compiled, chunk, error = self._compiled, self._queue.chunk(), None
        most = int(min(compiled.most, stop - self.step, compiled.rows - self._row))
        try:
            self._feed.fill(chunk, most)
        except (Exception, KeyboardInterrupt) as ended:
            error = ended
        if len(chunk):
            self._leaves, self._buffers, ticket = compiled(
                self._leaves, self._buffers, self._row, self._resident, chunk
            )
            self._queue.began(ticket, chunk)
            self._row += len(chunk)
            self.step += len(chunk)
        return error

    def _look(self) -> None:
        """Report when it is time, and let the device catch up if it is far behind.

        The rows of a report are read after the next call has begun, so that the device
        need not wait for the host.
        """
        if self._unread is not None:
            self._read_rows()
        self._queue.hold()
        late = time.perf_counter() - self._reported_at > _SECONDS_PER_REPORT
        if self._row and (late or self._row == self._compiled.rows):
            self._put_aside()

    def _put_aside(self) -> None:
        """Let the rows wait to be read, and the next steps write to new ones."""
        self._unread = self._buffers, self._row
        self._buffers, self._row = self._compiled.empty(), 0

    def _report(self) -> None:
        """Read all rows that are left. Waits for the steps."""
        if self._unread is not None:
            self._read_rows()
        if self._row:
            self._put_aside()
            self._read_rows()
        self._queue.clear()

    def _read_rows(self) -> None:
        """Read the rows that wait for it, and show them."""
        assert self._unread is not None
        (buffers, count), self._unread = self._unread, None
        rows = self._compiled.read(buffers, count)
        first = self.step - self._row - count
        bad = self._watchman.look(first, rows)
        if bad is not None:
            # The steps after it have changed nothing; they are as if they had not been.
            rows = {name: values[: bad + 1] for name, values in rows.items()}
        self._watch.history.extend(first, rows)
        if bad is not None:
            self._row = 0
            self._go_back(first + bad)
        last = {name: values[-1] for name, values in rows.items()}
        found = {n: v for n, v in last.items() if v is not np.ma.masked}
        self._metrics = Measured(found)
        self._watch.progress.update(count, self._metrics)
        if time.perf_counter() - self._reported_at > _SECONDS_PER_REPORT:
            self._compiled.baked.check()
            self._reported_at = time.perf_counter()

    def _go_back(self, step: int) -> None:
        """Take the state before a step that was not finite, and end the run."""
        self.step = step
        self._remember(halted=jnp.asarray(False))
        raise self._watchman.error()

    def _remember(self, **changed: Any) -> None:
        """Change something in the state's memory, between two calls."""
        state = self.state()
        memory = dataclasses.replace(state.memory, **changed)
        self._leaves = self._compiled.flat.flatten(
            canonical(dataclasses.replace(state, memory=memory), copy=False)
        )

    def _hand_in(self, numbers: Mapping[str, float]) -> None:
        """Tell the selectors in the step what a callback has measured."""
        reports = dict(self.state().memory.reports)
        for name in self._watched & numbers.keys():
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
                if self._watched & numbers.keys():
                    self._hand_in(numbers)

    def _check_now(self, step: int) -> None:
        if self.step != step:
            raise RuntimeError(
                f"A StepInfo of step {step} is asked for the state, but the run is at "
                f"step {self.step}. Ask for it in the callback, and keep the state."
            )


def _copied(state: TrainState) -> TrainState:
    return jtu.tree_map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, state)
