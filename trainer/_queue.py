"""How far the host runs ahead of the device."""

import time
from collections import deque
from typing import Any

import jax

from trainer._abstract_step import AbstractStep
from trainer.data import Chunk


# How long a call is to take, and for how long the device is to have work ahead. Longer
# would be batches that wait in memory, and steps that an interrupt waits for.
_SECONDS_PER_CALL = 0.1
_SECONDS_AHEAD = 0.25
_BYTES_AHEAD = 2**24
_SECONDS_PER_LOOK = 0.02
# Calls ahead: so many even if they take long, and at most so many before one is over.
_FEWEST, _MOST = 2, 8


class Queue:
    """The calls that the device has not finished.

    No result is waited for: it is only asked now and then whether one is there. How
    long they take is how many steps the next calls have.
    """

    def __init__(self, compiled: AbstractStep):
        self._compiled, self._is_known = compiled, False
        self._calls: deque[tuple[Any, Chunk]] = deque()
        self._free: list[Chunk] = []
        self.clear()

    def clear(self) -> None:
        """Take it that all are over, since their results have been read."""
        self._free += [chunk for _, chunk in self._calls]
        self._calls.clear()
        self._steps, self._bytes, self._since = 0, 0, time.perf_counter()

    def chunk(self) -> Chunk:
        """An empty chunk, in the memory of one that no call reads any more."""
        if self._free:
            return self._free.pop().emptied()
        return Chunk(self._compiled.layout)

    def began(self, ticket: jax.Array, chunk: Chunk) -> None:
        """Note a call, and which of its results to look at."""
        if not self._calls:
            self._since = time.perf_counter()
        self._calls.append((ticket, chunk))
        self._steps += len(chunk)
        self._bytes += chunk.nbytes

    def hold(self) -> None:
        """Return when the device has work for no longer than it should."""
        self._look()
        while self._is_far():
            seconds = self._steps * self._compiled.pace
            time.sleep(min(_SECONDS_PER_LOOK, max(seconds / 4, 1e-4)))
            self._look()

    def _is_far(self) -> bool:
        calls, seconds = len(self._calls), self._steps * self._compiled.pace
        is_much = seconds > _SECONDS_AHEAD or self._bytes > _BYTES_AHEAD
        return (calls > _FEWEST and is_much) or (calls > _MOST and not self._is_known)

    def _look(self) -> None:
        """Take away the calls that are over, and see how long a step takes."""
        compiled, over, last = self._compiled, 0, 0
        while self._calls and self._calls[0][0].is_ready():
            _, chunk = self._calls.popleft()
            self._free.append(chunk)
            self._bytes -= chunk.nbytes
            last = len(chunk)
            over += last
        if over:
            now = time.perf_counter()
            compiled.pace = max((now - self._since) / over, 1e-9)
            self._is_known = True
            self._since, self._steps = now, self._steps - over
            most = min(_SECONDS_PER_CALL / compiled.pace, max(compiled.most, 2 * last))
            compiled.most = max(int(min(most, compiled.steps_per_call)), 1)
