"""What would compile again, or cannot work, stops a run before anything is lost."""

import os
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import batches, data, equal, mlp, mse, net, net_mse

import trainer as tr


SGD = optax.sgd(0.1)
x, y = data(16)


def test_an_attribute_changed_after_compiling_raises_and_before_is_honored():
    class Ridge(tr.Trainer):
        def __init__(self, beta):
            self.beta = beta
            super().__init__(optimizer=SGD)

        def loss(self, model, batch):
            return mse(model, batch) + self.beta * jnp.sum(model.layers[0].weight ** 2)

    one = Ridge(0.0)
    one.beta = 1.0
    result = one.fit(mlp(), batches(), num_steps=2, progress=False)
    other = Ridge(1.0).fit(mlp(), batches(), num_steps=2, progress=False)
    assert equal(result.model, other.model)
    with pytest.raises(tr.RecompileError, match=r"`beta` of `Ridge` is set to `2\.0`"):
        one.beta = 2.0
    with pytest.raises(tr.RecompileError, match="`beta` of `Ridge` is deleted"):
        del one.beta
    assert one.beta == 1.0


def test_refitting_another_model_of_the_structure_does_not_compile(step_compiles):
    trainer = tr.Trainer(mse, SGD)
    for seed in (0, 1):
        trainer.fit(mlp(seed), batches(), num_steps=3, progress=False)
    assert step_compiles() == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            mlp(width=17),
            r"`model\.layers\[0\]\.weight` was float32\[16,10\] and is now",
        ),
        (
            eqx.nn.MLP(10, "scalar", 16, 1, activation=lambda x: x, key=jr.key(0)),
            r"`model\.activation` was .* and is now <function",
        ),
        (
            eqx.tree_at(lambda m: m.layers[1].bias, mlp(), None),
            r"`model\.layers\[1\]\.bias` was float32.* and is now gone",
        ),
    ],
    ids=["shape", "static", "structure"],
)
def test_a_state_that_would_compile_again_is_refused_by_path(
    model, message, step_compiles
):
    trainer = tr.Trainer(mse, SGD)
    result = trainer.fit(mlp(), batches(), num_steps=3, progress=False)
    with pytest.raises(tr.RecompileError, match=message):
        trainer.fit(model, batches(), num_steps=3, progress=False)
    again = trainer.fit(result.state, batches(), num_steps=6, progress=False)
    assert int(again.state.step) == 6
    assert step_compiles() == 1


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ((x[:, :9], y), tr.RecompileError, r"`batch\[0\]` was float32\[16,10\] and is"),
        ((x.astype(np.int32), y), tr.RecompileError, r"and is now int32\[16,10\]"),
        (
            (np.vstack([x, x]), np.hstack([y, y])),
            tr.RecompileError,
            r"float32\[32,10\]",
        ),
        ({"x": x, "y": y}, tr.RecompileError, "`batch` was of class `tuple`"),
        ((x, y, y), tr.RecompileError, r"`batch\[2\]` is new: float32\[16\]"),
        ((x, np.array(["a"] * 16)), TypeError, r"Column `batch\[1\]` has dtype `<U1`"),
        ((x, np.array([None] * 16)), TypeError, r"Column `batch\[1\]` has dtype `obj"),
    ],
)
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_batch_that_does_not_fit_stops_before_anything_is_lost(
    bad, error, message, steps_per_call, step_compiles
):
    trainer = tr.Trainer(mse, SGD, steps_per_call=steps_per_call)
    good = trainer.fit(mlp(), [(x, y)] * 6, num_steps=6, progress=False)
    feed = [(x, y)] * 6 + [bad]
    with pytest.raises(error, match=message):
        trainer.fit(mlp(), feed, num_steps=20, progress=False)
    assert trainer.last_state is not None
    assert int(trainer.last_state.step) == 6
    assert equal(trainer.last_state, good.state)
    more = trainer.fit(trainer.last_state, [(x, y)], num_steps=8, progress=False)
    assert int(more.state.step) == 8
    assert step_compiles() == 1


def test_an_error_in_the_loader_keeps_every_step_before_it():
    def broken():
        yield from batches()[:3]
        raise OSError("the disk is gone")

    trainer = tr.Trainer(mse, SGD, steps_per_call=10)
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.fit(mlp(), broken, num_steps=20, progress=False)
    three = tr.Trainer(mse, SGD).fit(mlp(), batches(), num_steps=3, progress=False)
    assert equal(trainer.last_state, three.state)


def test_what_is_not_a_model_is_refused_with_what_to_give():
    trainer = tr.Trainer(mse, SGD)
    result = trainer.fit(mlp(), batches(), num_steps=2, progress=False)
    for bad, text in (
        (result, "Give `result.state` to go on"),
        (None, "has no floating array to train"),
        (batches, "has no floating array to train"),
    ):
        with pytest.raises(TypeError, match=text):
            trainer.fit(bad, batches(), num_steps=3, progress=False)
    with pytest.raises(TypeError, match="A TrainState is given where a model starts"):
        trainer.init(result.state)
    with pytest.raises(TypeError, match=r"what `eqx\.nn\.make_with_state`"):
        tr.Trainer(net_mse, SGD).init(net()[0])


def test_a_failure_on_the_device_leaves_the_state_that_the_fit_began_with():
    def loss(model, batch, *, step):
        value = jnp.sum(model**2)
        return eqx.error_if(value, step == 5, "the step is 5")

    trainer = tr.Trainer(loss, SGD)
    begun = trainer.fit(jnp.ones(2), None, num_steps=3, progress=False)
    with pytest.raises(Exception, match="the step is 5"):
        trainer.fit(begun.state, None, num_steps=9, progress=False)
    assert equal(trainer.last_state, begun.state)
    assert int(trainer.fit(trainer.last_state, None, num_steps=4).state.step) == 4


def test_the_history_of_a_fit_that_raised_is_kept():
    def broken():
        yield from batches()[:3]
        raise OSError("the disk is gone")

    trainer = tr.Trainer(mse, SGD)
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.fit(mlp(), broken, num_steps=20, progress=False)
    assert trainer.last_history is not None
    assert len(trainer.last_history["loss"]) == 3


def test_ctrl_c_in_the_middle_of_a_call_loses_nothing():
    def slow(model, batch):
        a = jnp.eye(300) * (1 + 0 * model.layers[0].bias[0])
        a = jax.lax.fori_loop(
            0, 20, lambda i, a: a @ a / jnp.maximum(jnp.linalg.norm(a), 1), a
        )
        return mse(model, batch) + 0 * jax.lax.stop_gradient(a.sum())

    def interrupted():
        for number, batch in enumerate(batches() * 10):
            if number == 6:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    handler = signal.getsignal(signal.SIGINT)
    trainer = tr.Trainer(slow, SGD, steps_per_call=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(mlp(), interrupted, num_steps=30, progress=False)
    assert signal.getsignal(signal.SIGINT) is handler
    assert int(trainer.last_state.step) == 7
    seven = trainer.fit(mlp(), batches(), num_steps=7, progress=False)
    assert equal(trainer.last_state, seven.state)
