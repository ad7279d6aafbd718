"""Cases of the host: when it waits for the device, and what it keeps."""

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_cases import by_hand, close, counted, linear, mse, rows, same

import trainer as tr


class Hook(tr.AbstractCallback):
    """Calls a function, and keeps what it returned."""

    def __init__(self, every: int, function: Callable[[], Any]):
        super().__init__(every)
        self.function, self.returned = function, []

    def __call__(self, info):
        self.returned.append(self.function())


@pytest.fixture
def host_reads(monkeypatch):
    """A list that grows with every read of a JAX array; nested reads count once."""
    reads, inside = [], []

    def is_held(leaf):
        return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)

    def watch(owner, name):
        original = getattr(owner, name)

        def counting(*args, **kwargs):
            if not inside and any(map(is_held, jax.tree.leaves(args[:1]))):
                reads.append(name)
            inside.append(name)
            try:
                return original(*args, **kwargs)
            finally:
                inside.pop()

        monkeypatch.setattr(owner, name, counting)

    conversions = "__float__ __int__ __bool__ __index__ __array__ __format__"
    for name in [*conversions.split(), "item", "tolist", "block_until_ready"]:
        watch(type(jnp.ones(())), name)
    watch(np, "asarray")
    watch(np, "array")
    watch(jax, "device_get")
    watch(jax, "block_until_ready")
    return reads


def test_case_42_the_host_reads_once_a_refresh(host_reads, capsys):
    assert float(jnp.ones(())) == 1.0
    assert host_reads == ["__float__"]
    batch, hook = rows(8), Hook(50, lambda: len(host_reads))
    trainer = tr.Trainer(mse, optax.sgd(0.01))
    host_reads.clear()
    result = trainer.fit(linear(), [batch], num_steps=200, callbacks=[hook])
    reads = list(host_reads)
    assert "200/200" in capsys.readouterr().err
    assert np.diff(hook.returned).tolist() == [1, 1, 1]
    loss = result.history["loss"]
    assert type(loss) is np.ndarray
    hand = by_hand(mse, optax.sgd(0.01), linear(), [{"batch": batch}] * 200)
    close(loss, hand[1])
    assert result.compiles == 1
    assert len(reads) <= 6, reads


def test_case_44_three_fits_make_one_history():
    batch = rows(8)
    loss, traces = counted(mse)
    trainer = tr.Trainer(loss, optax.sgd(0.1))
    validate = lambda every: [tr.Evaluate([batch], every, loss=mse)]
    run = functools.partial(trainer.fit, data=[batch], progress=False)
    first = run(linear(), num_steps=4, callbacks=validate(2))
    second = run(first.state, num_steps=7)
    third = run(second.state, num_steps=9, callbacks=validate(None))
    history = first.history + second.history + third.history

    model, values, _ = by_hand(mse, optax.sgd(0.1), linear(), [{"batch": batch}] * 9)
    same(third.model, model)
    assert history.steps("loss").tolist() == list(range(9))
    close(history["loss"], values)
    close(history["loss"][[0, 4, 8]], [3.390333, 0.662973, 0.267613])
    assert history.steps("validation/loss").tolist() == [2, 4, 9]
    close(history["validation/loss"], [1.301674, 0.662973, 0.224078])
    assert (third.compiles, len(traces)) == (1, 1)


def test_case_56_the_history_keeps_nothing_on_the_device():
    def live():
        gc.collect()
        return len(jax.live_arrays())

    batch, hook = rows(8), Hook(100, live)
    trainer = tr.Trainer(mse, optax.sgd(0.001))
    result = trainer.fit(
        linear(), [batch], num_steps=500, callbacks=[hook], progress=False
    )
    assert hook.returned == hook.returned[:1] * 5
    loss = result.history["loss"]
    assert type(loss) is np.ndarray
    hand = by_hand(mse, optax.sgd(0.001), linear(), [{"batch": batch}] * 500)
    close(loss, hand[1])
    close(loss[-1:], [0.575232])
    assert result.compiles == 1


def slow(model, batch):
    """An error, and some 10 ms of work that does not change it."""

    def work(i, a):
        return a @ a / jnp.linalg.norm(a) + i * 1e-3

    a = jax.lax.fori_loop(0, 20, work, jnp.eye(400) * model.b + 0.5)
    return mse(model, batch) + 0 * jax.lax.stop_gradient(a.sum())


class Timed:
    """Ten batches, and when each was asked for."""

    def __init__(self, batch):
        self.batch, self.asked = batch, []

    def __iter__(self):
        for _ in range(10):
            self.asked.append(time.perf_counter())
            yield self.batch


@pytest.mark.parametrize("steps_per_call", ["auto", 1])
def test_case_63_the_host_asks_for_batches_while_the_device_works(steps_per_call):
    batch, shares = rows(8), []
    hand = by_hand(slow, optax.sgd(0.01), linear(), [{"batch": batch}] * 10)[0]
    # Another process may hold one run up; a host that waits is late in all of them.
    for _ in range(3):
        (loss, traces), data = counted(slow), Timed(batch)
        trainer = tr.Trainer(loss, optax.sgd(0.01), steps_per_call=steps_per_call)
        result = trainer.fit(linear(), data, num_epochs=1, progress=False)
        end = time.perf_counter()
        # The first batch is asked for before the step is compiled.
        shares.append((data.asked[-1] - data.asked[1]) / (end - data.asked[1]))
        close(result.model, hand)
        close(result.model, [0.396658, 0.391515, -0.001394])
        assert (result.compiles, len(traces)) == (1, 1)
    assert min(shares) < 0.5, shares


def test_case_63_the_compiled_step_refuses_another_shape():
    trainer = tr.Trainer(mse, optax.sgd(0.01))
    trainer.fit(linear(), [rows(8)], num_steps=2, progress=False)
    x, y = rows(8)
    wide = [(np.concatenate([x, x], axis=1), y)]
    for data in (wide, [(x, y), wide[0]], [rows(9)]):
        with pytest.raises(tr.RecompileError, match=r"batch\[0\].* was float32\[8,2\]"):
            trainer.fit(linear(), data, num_steps=4, progress=False)
