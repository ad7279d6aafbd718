"""The loop on the host: feed the step, read its metrics now and then, call back."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from trainer._abstract_step import AbstractStep
from trainer._callback import AbstractCallback, checked_numbers, StepInfo, Stop
from trainer._guard import NonfiniteError, Watchman
from trainer._history import Measured
from trainer._interrupt import HeldInterrupt
from trainer._queue import Queue
from trainer._selectors import Report
from trainer._state import TrainState
from trainer._tree import canonical
from trainer._wall_time import WallTime
from trainer._watch import Watch
from trainer.data import AbstractSource, Feed, OtherForm


# Time between two reports that nothing but the progress bar asks for.
_SECONDS_PER_REPORT = 0.5


# Finds or compiles the step for a state, a source and the content of an item.
StepFor = Callable[[TrainState, AbstractSource, Any], AbstractStep]


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
        step_for: StepFor,
        state: TrainState,
        step: int,
        source: AbstractSource,
        feed: Feed,
        watch: Watch,
        watchman: Watchman,
    ):
        self.step, self.seconds, self._first = step, 0.0, step
        self.stop_reason: str | None = None
        self._step_for, self._source = step_for, source
        self._feed, self._watch = feed, watch
        self._watchman, self._watched = watchman, set(state.memory.reports)
        self._metrics = Measured()
        self._unread: tuple[Any, int] | None = None
        self._reported_at = time.perf_counter()
        self._wall = WallTime()
        self._use(state)

    def _use(self, state: TrainState) -> None:
        """Go on with the step that takes the items that come next."""
        compiled = self._step_for(state, self._source, self._feed.content)
        self._compiled = compiled
        self._resident = compiled.resident(self._source)
        self._leaves = compiled.flat.flatten(state)
        self._buffers, self._row = compiled.empty(), 0
        self._queue = Queue(compiled)
        self._wall.since = time.perf_counter()

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
        self._wall = WallTime()
        with self._watch.until_over(), HeldInterrupt() as interrupt:
            while self.stop_reason is None:
                stop, before = self._watch.next_stop(self.step, num_steps), self.step
                ended = self._run_to(stop, interrupt)
                if ended or self.step == num_steps:
                    self.stop_reason = "num_epochs" if ended else "num_steps"
                if self.step == before:
                    break  # the data ended where the last callback was
                self._call_back(lambda c: bool(c.every) and self.step % c.every == 0)
            self._compiled.baked.check()
            self._call_back(lambda c: c.every is None)
            self.seconds = time.perf_counter() - self._wall.began

    def _run_to(self, stop: float, interrupt: HeldInterrupt) -> bool:
        """Run up to `stop` completed updates and report; return whether items ended."""
        error: BaseException | None = None
        try:
            while self.step < stop and error is None:
                error = self._call_once(stop) or interrupt.taken()
                self._look()
                if isinstance(error, OtherForm):
                    self._report()
                    self._feed.turn()
                    self._use(self.state())
                    error = interrupt.taken()
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
        wall, filled = self._wall, time.perf_counter()
        wall.data += filled - wall.since
        if len(chunk):
            given = self._leaves, self._buffers, self._row, self._resident, chunk
            try:
                self._leaves, self._buffers, ticket = compiled(*given)
            except Exception:
                # A step that is not compiled leaves the state and the rows as they are.
                if not self.is_lost():
                    self._report()
                raise
            self._queue.began(ticket, chunk)
            self._row += len(chunk)
            self.step += len(chunk)
        wall.since = time.perf_counter()
        wall.dispatch += wall.since - filled
        return error

    def _look(self) -> None:
        """Report when it is time, and let the device catch up if it is far behind.

        The rows of a report are read after the next call has begun, so that the device
        need not wait for the host.
        """
        if self._unread is not None:
            self._read_rows()
        self._queue.hold()
        wall, now = self._wall, time.perf_counter()
        wall.device += now - wall.since
        wall.since = now
        late = now - self._reported_at > _SECONDS_PER_REPORT
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
        wall, began = self._wall, time.perf_counter()
        rows = self._compiled.read(buffers, count)
        wall.device += time.perf_counter() - began
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
            self._compiled.baked.check(full=False)
            self._reported_at = time.perf_counter()
        wall.since = time.perf_counter()

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

        wall = self._wall
        for callback in filter(due, self._watch.callbacks):
            began, metrics = time.perf_counter(), MappingProxyType(self._metrics)
            at = (self._first, wall.split())
            info = StepInfo(self.step, metrics, get_state, evaluate, *at)
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
            wall.since = time.perf_counter()
            wall.callbacks += wall.since - began

    def _check_now(self, step: int) -> None:
        if self.step != step:
            raise RuntimeError(
                f"A StepInfo of step {step} is asked for the state, but the run is at "
                f"step {self.step}. Ask for it in the callback, and keep the state."
            )


def _copied(state: TrainState) -> TrainState:
    return jtu.tree_map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, state)
