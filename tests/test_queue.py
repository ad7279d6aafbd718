"""How far the host runs ahead, and how many steps it puts into a call."""

import time
import types
from typing import Any

import jax
import numpy as np
import optax
import pytest
from helpers import batches, mlp, mse

import trainer as tr
from trainer import _queue
from trainer._cost import choose_steps_per_call
from trainer._queue import Queue
from trainer.data import Chunk, Layout
from trainer.data._source import Feed, Item


class Ticket:
    """A result that is there after it has been asked for so many times."""

    def __init__(self, asks):
        self.asks = asks

    def is_ready(self):
        self.asks -= 1
        return self.asks < 0


def chunk_of(steps, size=1):
    chunk = Chunk(Layout(np.zeros(size, np.float32), 100))
    for number in range(steps):
        chunk.add([np.zeros(size, np.float32)], number)
    return chunk


def queue(pace=1e-6, most=1, steps_per_call=100):
    compiled = types.SimpleNamespace(
        pace=pace, most=most, steps_per_call=steps_per_call
    )
    return Queue(compiled), compiled


@pytest.fixture
def sleeps(monkeypatch):
    """The pauses that were made, without making them."""
    made = []
    monkeypatch.setattr(_queue.time, "sleep", made.append)
    return made


def test_few_calls_are_ahead_if_they_take_long(sleeps):
    ahead, _ = queue(pace=1.0)
    tickets = [Ticket(1000) for _ in range(2)]
    for ticket in tickets:
        ahead.began(ticket, chunk_of(1))
        ahead.hold()
    assert sleeps == []
    ahead.began(Ticket(1000), chunk_of(1))
    tickets[0].asks = 5
    ahead.hold()
    assert len(sleeps) == 5


def test_a_quarter_of_a_second_is_ahead_if_they_take_little(sleeps):
    ahead, compiled = queue(pace=0.01)
    ahead.began(Ticket(0), chunk_of(1))
    ahead.hold()
    compiled.pace = 0.01
    for _ in range(25):
        ahead.began(Ticket(3), chunk_of(1))
        ahead.hold()
        compiled.pace = 0.01
    assert sleeps == []


def test_few_megabytes_are_ahead_however_quick_the_steps(sleeps):
    ahead, compiled = queue(pace=1e-6)
    ahead.began(Ticket(0), chunk_of(1))
    ahead.hold()
    compiled.pace = 1e-6  # and not what the clock says
    tickets = [Ticket(1000) for _ in range(5)]
    for ticket in tickets[:4]:
        ahead.began(ticket, chunk_of(100, size=10_000))  # 4 MB
        ahead.hold()
    assert sleeps == []
    tickets[0].asks = 3
    ahead.began(tickets[4], chunk_of(100, size=10_000))
    ahead.hold()
    assert len(sleeps) == 3


def test_memory_of_a_call_that_is_over_is_used_again():
    ahead, compiled = queue()
    compiled.layout = Layout(np.float32(0), 100)
    first, second = ahead.chunk(), ahead.chunk()
    assert first is not second
    first.add([np.float32(1)], 5)
    memory = first.leaves()[0]
    ahead.began(Ticket(0), first)
    ahead.began(Ticket(1000), second)
    ahead.hold()
    again = ahead.chunk()
    assert (again is first, len(again), again.epochs) == (True, 0, [])
    again.add([np.float32(2)], 6)
    assert again.leaves()[0] is memory
    assert memory[0] == 2.0
    # The second is still read, so that its memory is not.
    assert ahead.chunk() is not second
    ahead.clear()
    assert ahead.chunk() is second


def test_not_many_calls_are_begun_before_one_is_over(sleeps):
    ahead, _ = queue(pace=1e-6)
    tickets = [Ticket(1000) for _ in range(9)]
    for ticket in tickets[:8]:
        ahead.began(ticket, chunk_of(1))
        ahead.hold()
    assert sleeps == []
    tickets[0].asks = 40
    ahead.began(tickets[8], chunk_of(1))
    ahead.hold()
    assert len(sleeps) == 40


def test_steps_per_call_grow_while_calls_are_short_and_shrink_when_long(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(_queue.time, "perf_counter", lambda: clock[0])
    ahead, compiled = queue()

    def call(steps, seconds):
        ahead.began(Ticket(0), chunk_of(steps))
        clock[0] += seconds
        ahead.hold()
        return compiled.most

    assert [call(compiled.most, 1e-4) for _ in range(8)] == [
        2,
        4,
        8,
        16,
        32,
        64,
        100,
        100,
    ]
    assert call(3, 1e-4) == 100  # a remainder is no reason to go back
    assert call(100, 1.0) == 10
    assert call(10, 5.0) == 1
    assert call(1, 5.0) == 1
    assert call(1, 1e-3) == 2


@pytest.mark.parametrize(
    ("seconds", "size", "period", "steps"),
    [
        (1e-6, 100, None, 100),
        (1e-2, 100, None, 10),
        (1.0, 100, None, 1),
        (1e-6, 2**21, None, 4),
        (1e-6, 2**30, None, 1),
        (1e-6, 100, 20, 20),
        (1e-6, 100, 1, 8),
        (5e-2, 100, 1, 2),
    ],
)
def test_steps_per_call_from_cost_size_and_period(seconds, size, period, steps):
    content = np.zeros(size, np.int8)
    assert choose_steps_per_call(seconds, content, period, "cpu")[0] == steps


def test_a_later_fit_is_not_bound_by_the_first_ones_callbacks():
    trainer = tr.Trainer(mse, optax.sgd(0.01))
    every = tr.Evaluate(batches(), every=1)
    first = trainer.fit(
        mlp(), batches(), num_steps=3, callbacks=[every], progress=False
    )
    assert trainer._steps.current.steps_per_call == 8
    again = trainer.fit(first.state, batches(), num_steps=60, progress=False)
    assert again.compiles == 1


def items(seconds, count):
    for number in range(count):
        time.sleep(seconds)
        yield Item([np.float32(number)], number)


def filled(feed, most):
    """The numbers of the items that came into a chunk."""
    chunk = Chunk(Layout(np.float32(0), 100))
    try:
        feed.fill(chunk, most)
    except StopIteration:
        return [*chunk.epochs, "end"]
    assert chunk.leaves()[0][: len(chunk)].tolist() == chunk.epochs
    return chunk.epochs


def test_a_slow_loader_hands_over_what_it_has():
    feed = Feed(items(0.03, 4), list)
    found = []
    while not (found and found[-1] == "end"):
        part = filled(feed, 100)
        assert len(part) <= 2
        found += part
    assert found == [0, 1, 2, 3, "end"]


def test_a_quick_loader_fills_the_chunk_and_says_when_it_ends():
    feed = Feed(items(0.0, 7), list)
    assert filled(feed, 3) == [0, 1, 2]
    assert filled(feed, 4) == [3, 4, 5, 6]
    assert filled(feed, 4) == ["end"]


def test_an_error_in_the_data_comes_after_the_items_before_it():
    def failing():
        yield from items(0.0, 2)
        raise OSError("gone")

    feed, chunk = Feed(failing(), list), Chunk(Layout(np.float32(0), 100))
    with pytest.raises(OSError, match="gone"):
        feed.fill(chunk, 5)
    assert len(chunk) == 2


def test_tickets_say_when_a_call_is_over():
    trainer = tr.Trainer(mse, optax.sgd(0.01), steps_per_call=4)
    state = trainer.fit(mlp(), batches(), num_steps=4, progress=False).state
    compiled: Any = trainer._steps.current
    chunk = Chunk(compiled.layout)
    chunk.add(jax.tree.leaves(batches()[0]), 0)
    leaves, buffers, ticket = compiled(
        compiled.flat.flatten(state), compiled.empty(), 0, [], chunk
    )
    jax.block_until_ready(leaves)
    assert ticket.is_ready()
    # It is not one of the arrays that the next call takes over.
    compiled(leaves, buffers, 1, [], chunk)
    assert not ticket.is_deleted()
    assert int(ticket) == 2
