"""Trainer: construction, continuing a run, the guard, and what is never lost."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import batches, data, equal, mae, mlp, mse, net, net_mae, net_mse

import trainer as tr


SGD = optax.sgd(0.1)


def test_fit_in_pieces_equals_fit_in_one():
    loss = tr.switch_every(3, net_mse, net_mae)
    for source in (batches(), tr.Arrays(*data(), batch_size=24)):
        trainer = tr.Trainer(loss, optax.adam(1e-2), steps_per_call=4)
        whole = trainer.fit(net(), source, num_steps=20, progress=False)
        parts, state = [], net()
        for stop in (7, 13, 20):
            parts.append(trainer.fit(state, source, num_steps=stop, progress=False))
            state = parts[-1].state
        assert equal(state, whole.state)
        history = parts[0].history + parts[1].history + parts[2].history
        assert np.array_equal(history["loss"], whole.history["loss"])
        assert history.steps("loss").tolist() == list(range(20))
        assert whole.compiles == parts[2].compiles == 1


def test_a_script_started_again_after_its_end_does_nothing():
    trainer = tr.Trainer(mse, SGD)
    result = trainer.fit(mlp(), batches(), num_steps=5, progress=False)
    again = trainer.fit(result.state, batches(), num_steps=5, progress=False)
    assert equal(again.state, result.state)
    assert len(again.history) == 0
    assert again.stop_reason == "num_steps"


def test_key_decides_the_run_and_is_kept(key):
    def noisy(model, batch, *, key):
        return mse(model, (batch[0] + jr.normal(key, batch[0].shape), batch[1]))

    trainer = tr.Trainer(noisy, SGD)
    fits = [
        trainer.fit(mlp(), batches(), num_steps=4, key=k, progress=False)
        for k in (key, key, jr.fold_in(key, 1))
    ]
    assert equal(fits[0].state, fits[1].state)
    assert not equal(fits[0].model, fits[2].model)
    assert jnp.array_equal(jr.key_data(fits[0].state.key), jr.key_data(key))


def test_raw_keys_work_and_other_arrays_are_refused():
    trainer = tr.Trainer(mse, SGD)
    result = trainer.fit(
        mlp(), batches(), num_steps=2, key=jr.PRNGKey(3), progress=False
    )
    assert result.state.key.dtype == jnp.uint32
    for bad in (0, jnp.zeros(2), jr.split(jr.key(0), 2)):
        with pytest.raises(TypeError, match="not one random key"):
            trainer.init(mlp(), key=bad)
    with pytest.raises(TypeError, match="has its key already"):
        trainer.fit(result.state, batches(), num_steps=3, key=jr.key(0))


def test_exactly_one_end_is_given():
    trainer = tr.Trainer(mse, SGD)
    for ends in ({}, {"num_steps": 1, "num_epochs": 1}):
        with pytest.raises(TypeError, match="give one of them"):
            trainer.fit(mlp(), batches(), **ends)
    with pytest.raises(ValueError, match="must be from 1"):
        trainer.fit(mlp(), batches(), num_steps=0)


class WithLoss(tr.Trainer):
    def loss(self, model, batch):
        return mse(model, batch)


class WithUpdate(tr.Trainer):
    def update(self, model, opt_state, batch, *, step):
        loss, grad = eqx.filter_value_and_grad(mse)(model, batch)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grad))
        return model, opt_state, {"loss": loss, "seen": step}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tr.Trainer(), "given no losses"),
        (lambda: tr.Trainer(optimizer=SGD), "given no losses"),
        (lambda: WithLoss(mse, SGD), "`loss` is passed and `loss` is overridden"),
        (lambda: WithUpdate(mse), "`loss` is passed and `update` is overridden"),
        (lambda: tr.Trainer(mse, update=tr.Minimize(mse, SGD)), "`update=` is passed"),
        (lambda: tr.Trainer(mse), "has a loss but no optimizer"),
        (lambda: tr.Trainer(mse, "adam"), "is not an optimizer"),
        (lambda: tr.Trainer("mse", SGD), "is not a loss"),
        (lambda: tr.Trainer(update=mse), "is not an update"),
        (lambda: tr.Trainer(None, SGD, update=tr.Minimize(mse, SGD)), "both given"),
    ],
)
def test_the_loss_is_given_in_exactly_one_way(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_the_four_ways_to_give_a_loss_train_alike():
    trainers = [
        tr.Trainer(mse, SGD),
        WithLoss(optimizer=SGD),
        tr.Trainer(update=tr.Minimize(mse, SGD)),
        WithUpdate(),
    ]
    results = [t.fit(mlp(), batches(), num_steps=9, progress=False) for t in trainers]
    for result in results[1:3]:
        assert equal(result.model, results[0].model)
    for a, b in zip(*(jax.tree.leaves(r.model) for r in results[::3]), strict=True):
        if eqx.is_array(a):
            np.testing.assert_allclose(a, b, rtol=1e-5)
    assert results[3].history["seen"].tolist() == list(range(9))
    assert [r.compiles for r in results] == [1, 1, 1, 1]


@pytest.mark.parametrize("name", ["init", "fit", "evaluate"])
def test_final_methods_cannot_be_overridden(name):
    with pytest.raises(TypeError, match=f"overrides `Trainer.{name}`, which is final"):
        type("Mine", (tr.Trainer,), {name: lambda self: None})


def test_result_says_what_happened():
    result = tr.Trainer(tr.alternate(mse, mae), SGD).fit(
        mlp(), batches(), num_epochs=2, progress=False
    )
    assert result.stop_reason == "num_epochs"
    assert int(result.state.step) == 8
    assert result.compile_seconds > 0
    assert result.seconds > 0
    assert result.history.branches == {"branch": ("mse", "mae")}
    assert "step=8" in repr(result)
    assert "loss: 8" in repr(result)
