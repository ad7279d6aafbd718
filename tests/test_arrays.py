"""Arrays: one stream of epochs, gathered inside the step."""

import contextlib

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import data, mlp, mse
from hypothesis import given, strategies as st

import trainer as tr
from trainer.data import Chunk, Layout, Wanted


def wanted(start=0, num_epochs=None, seed=0, mask=False):
    return Wanted(start, num_epochs, jr.key(seed), mask, mask, None)


def rows(source, n, at_once=4, **kwargs):
    """The rows and epochs of up to `n` batches, in chunks of `at_once`."""
    feed, found = source.feed(wanted(**kwargs)), []
    with contextlib.suppress(StopIteration):
        while len(found) < n:
            chunk = Chunk(Layout(feed.content, at_once))
            try:
                feed.fill(chunk, min(at_once, n - len(found)))
            finally:
                batches = np.reshape(chunk.leaves()[0], (-1, source.batch_size))
                assert not kwargs.get("mask") or np.all(
                    np.ravel(chunk.leaves()[1])[: len(chunk)]
                )
                found += zip(batches.tolist(), chunk.epochs, strict=False)
    return found


@given(
    n=st.integers(1, 13),
    size=st.integers(1, 13),
    steps=st.integers(1, 30),
    start=st.integers(0, 30),
    shuffle=st.booleans(),
    mask=st.booleans(),
    at_once=st.integers(1, 9),
)
def test_arrays_are_one_stream_of_epochs_cut_into_full_batches(
    n, size, steps, start, shuffle, mask, at_once
):
    size = min(n, size)
    source = tr.Arrays(np.arange(n), batch_size=size, shuffle=shuffle)
    found = rows(source, start + steps, at_once, mask=mask)
    assert rows(source, steps, start=start) == found[start:]
    stream = [row for batch, _ in found for row in batch]
    for epoch in range(len(stream) // n):
        part = stream[epoch * n : (epoch + 1) * n]
        assert sorted(part) == list(range(n))
        assert shuffle or part == list(range(n))
    assert all(len(batch) == size for batch, _ in found)
    assert [e for _, e in found] == [s * size // n for s in range(start + steps)]


def test_arrays_shuffle_anew_each_epoch_and_by_the_key():
    source = tr.Arrays(np.arange(12), batch_size=4)
    first, again, other = (rows(source, 9, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    orders = [str(first[e * 3 : e * 3 + 3]) for e in range(3)]
    assert len({o.split("]")[0] for o in orders}) == 3


@pytest.mark.parametrize(("n", "size", "epochs"), [(10, 4, 1), (10, 4, 2), (12, 4, 3)])
def test_arrays_num_epochs_sees_every_example_that_often(n, size, epochs):
    source = tr.Arrays(np.arange(n), batch_size=size)
    found = rows(source, 99, num_epochs=epochs)
    assert len(found) == -(-n * epochs // size) == source.num_steps(epochs)


def test_arrays_gather_what_the_host_would():
    x, y = data(20)
    source = tr.Arrays({"x": x, "y": y}, batch_size=8)

    def loss(model, batch):
        return mse(model, (batch["x"], batch["y"]))

    order = [b for b, _ in rows(tr.Arrays(np.arange(20), batch_size=8), 11)]
    feed = [(x[r], y[r]) for r in order]
    sgd = optax.sgd(0.1)
    a = tr.Trainer(loss, sgd).fit(mlp(), source, num_steps=11, progress=False)
    b = tr.Trainer(mse, sgd).fit(mlp(), feed, num_steps=11, progress=False)
    np.testing.assert_allclose(a.history["loss"], b.history["loss"], rtol=1e-6)


def test_arrays_do_not_see_later_changes():
    raw = np.empty(64 * 4 + 16, np.float32)
    start = -raw.ctypes.data % 64 // 4
    x = raw[start : start + 64].reshape(8, 8)  # memory that JAX takes over as it is
    x[:] = 1.0
    source = tr.Arrays(x, batch_size=4, shuffle=False)

    def loss(model, batch):
        return jnp.sum(batch) * model

    trainer = tr.Trainer(loss, optax.sgd(0.0))
    first = trainer.fit(jnp.float32(1), source, num_steps=2, progress=False)
    x[:] = 5.0
    second = trainer.fit(first.state, source, num_steps=4, progress=False)
    assert second.history["loss"].tolist() == first.history["loss"].tolist()


def test_lists_of_numbers_are_arrays():
    source = tr.Arrays([[1.0, 2.0], [3.0, 4.0]], [0, 1], batch_size=1)
    assert repr(source).startswith("Arrays(float32[2,2], int32[2]")


def test_data_of_another_size_is_refused():
    trainer = tr.Trainer(mse, optax.sgd(0.1))
    first = tr.Arrays(*data(20), batch_size=8)
    state = trainer.fit(mlp(), first, num_steps=2, progress=False).state
    again = trainer.fit(
        state, tr.Arrays(*data(20), batch_size=8), num_steps=4, progress=False
    )
    assert again.compiles == 1
    with pytest.raises(tr.RecompileError, match="data"):
        trainer.fit(
            state, tr.Arrays(*data(24), batch_size=8), num_steps=6, progress=False
        )
