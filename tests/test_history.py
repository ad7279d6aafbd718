"""History: values with their steps, on the host."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batches, mlp, mse

import trainer as tr


def test_values_keep_their_steps_and_absent_ones_are_masked():
    history = tr.History()
    history.extend(3, {"a": np.arange(2.0), "b": np.ma.array([1.0, 2.0], mask=[0, 1])})
    history.record(5, {"c": 6.0})
    history.record(5, {"c": 7.0})
    history.extend(5, {"a": np.arange(2.0, 4.0), "b": np.array([3.0, 4.0])})
    assert history["a"].tolist() == [0, 1, 2, 3]
    assert history.steps("a").tolist() == [3, 4, 5, 6]
    assert history["b"].tolist() == [1.0, None, 3.0, 4.0]
    assert history.steps("c").tolist() == [5]
    assert history["c"].tolist() == [7.0]
    assert set(history) == {"a", "b", "c"}
    with pytest.raises(KeyError, match=r"There are \['a', 'b', 'c'"):
        history["d"]
    with pytest.raises(ValueError, match="read-only"):
        history["a"][0] = 5.0


def test_histories_of_one_run_join_and_others_do_not():
    parts = []
    for first in (0, 3):
        parts.append(tr.History({"branch": ("x", "y")}))
        parts[-1].extend(first, {"a": np.arange(3.0)})
    joined = parts[0] + parts[1]
    assert joined.steps("a").tolist() == list(range(6))
    assert joined.branches == {"branch": ("x", "y")}
    with pytest.raises(ValueError, match="`a` do not increase"):
        _ = parts[1] + parts[0]


@pytest.mark.slow
def test_a_long_run_keeps_no_device_arrays_and_numbers_on_the_host():
    live = {}

    class Count(tr.AbstractCallback):
        def __call__(self, info):
            gc.collect()
            live[info.step] = len(jax.live_arrays())

    trainer = tr.Trainer(mse, optax.sgd(0.01), steps_per_call=1)
    result = trainer.fit(
        mlp(), batches(), num_steps=3000, callbacks=[Count(100)], progress=False
    )
    assert live[3000] == live[100]
    assert type(result.history["loss"]) is np.ndarray
    assert result.history["loss"].shape == (3000,)
    assert result.history["loss"].dtype == np.float32


def test_a_trainer_leaves_nothing_behind():
    def make():
        table = jnp.ones(5000)

        class Own(tr.Trainer):
            def loss(self, model, batch):
                return mse(model, batch) + 0 * jnp.sum(table)

        trainer = Own(optimizer=optax.sgd(0.01))
        result = trainer.fit(mlp(), batches(), num_steps=2, progress=False)
        trainer.evaluate(result.state, batches())
        return weakref.ref(trainer)

    make()
    gc.collect()
    before = len(jax.live_arrays())
    trainers = [make() for _ in range(3)]
    gc.collect()
    assert [trainer() for trainer in trainers] == [None] * 3
    assert len(jax.live_arrays()) == before
