"""Evaluate: inference mode, weighted by examples, one compile a shape."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import batches, data, equal, mae, masked_mse, mlp, mse, net, net_mae

import trainer as tr


SGD = optax.sgd(0.1)


def trainer(loss=mse):
    return tr.Trainer(loss, SGD)


@pytest.mark.parametrize("size", [1, 7, 16, 50, 64])
def test_any_batch_size_gives_the_mean_over_all_examples(size):
    expected = float(mse(mlp(), data()))
    for loss in (mse, masked_mse):
        for source in (tr.Arrays(*data(), batch_size=size), batches(size)):
            found = trainer(loss).evaluate(mlp(), source)
            assert found["loss"] == pytest.approx(expected, rel=1e-6)


def test_inference_mode_leaks_nothing_and_repeats():
    model, state = net()
    t = trainer(net_mae)
    result = t.fit((model, state), batches(), num_steps=5, progress=False)
    before = jax.tree.map(jnp.copy, result.model_state)
    first = t.evaluate(result.state, batches())
    assert first == t.evaluate(result.state, batches())
    assert first == t.evaluate((result.model, result.model_state), batches())
    assert equal(before, result.model_state)
    assert set(first) == {"loss", "top"}
    trained = t.fit(result.state, batches(), num_steps=9, progress=False)
    straight = trainer(net_mae).fit(net(), batches(), num_steps=9, progress=False)
    assert equal(trained.state, straight.state)


def test_evaluation_is_compiled_once_for_equal_shapes():
    names = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **kw: (
            names.append(kw.get("fun_name"))
            if event == "/jax/core/compile/backend_compile_duration"
            else None
        )
    )

    def loss(model, batch):
        return mse(model, batch)

    t = trainer(loss)
    check = tr.Evaluate(batches(), every=2)
    result = t.fit(mlp(), batches(), num_steps=6, callbacks=[check], progress=False)
    t.evaluate(result.state, batches())
    t.evaluate(result.model, batches())
    assert sum("_one_batch" in str(name) for name in names) == 1


def test_a_schedule_is_evaluated_at_the_step_of_the_state():
    t = trainer(tr.piecewise([mse, mae], boundaries=[3]))
    early = t.fit(mlp(), batches(), num_steps=2, progress=False)
    late = t.fit(early.state, batches(), num_steps=4, progress=False)
    assert set(t.evaluate(late.state, batches())) == {"loss"}
    for state, loss in ((early.state, mse), (late.state, mae)):
        found = t.evaluate(state, batches())["loss"]
        assert found == t.evaluate(state, batches(), loss=loss)["loss"]


def test_a_schedule_by_epoch_is_evaluated_at_the_epoch_of_the_state():
    t = trainer(tr.piecewise([mse, mae], boundaries=[1], by="epoch"))
    for num_steps, loss in ((4, mse), (5, mae)):
        state = t.fit(mlp(), batches(), num_steps=num_steps, progress=False).state
        found = t.evaluate(state, batches())["loss"]
        assert found == t.evaluate(state, batches(), loss=loss)["loss"]


def test_another_loss_may_be_an_accuracy():
    def accuracy(model, batch):
        x, y = batch
        right = jnp.sign(jax.vmap(model)(x)) == jnp.sign(y)
        return jnp.mean(right, dtype=jnp.float32), {"right": jnp.sum(right)}

    found = trainer().evaluate(mlp(), batches(), loss=accuracy)
    x, y = data()
    expected = np.mean(np.sign(jax.vmap(mlp())(x)) == np.sign(y))
    assert found["loss"] == pytest.approx(expected)


def test_evaluation_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="has no batches"):
        trainer().evaluate(mlp(), [])

    class Own(tr.Trainer):
        def update(self, model, opt_state, batch):
            return model, opt_state, {}

    with pytest.raises(TypeError, match="has no loss of its own"):
        Own().evaluate(mlp(), batches())


def test_a_first_batch_that_is_the_shortest_counts_by_its_examples():
    x, y = data(10)
    ragged = [(x[a:b], y[a:b]) for a, b in ((0, 2), (2, 6), (6, 10))]
    expected = float(mse(mlp(), (x, y)))
    for loss in (mse, masked_mse):
        found = trainer(loss).evaluate(mlp(), ragged)
        assert found["loss"] == pytest.approx(expected, rel=1e-6)


def test_a_schedule_in_which_some_losses_take_a_mask():
    mixed = tr.alternate(masked_mse, mae)
    found = trainer(mixed).evaluate(mlp(), batches(7))
    expected = float(mse(mlp(), data()))
    assert found["loss"] == pytest.approx(expected, rel=1e-6)


def test_convolutions_of_a_branch_are_in_the_order_that_is_fast_on_a_cpu():
    conv = eqx.nn.Conv2d(8, 16, 3, key=jr.key(0))
    x = jr.normal(jr.key(1), (4, 8, 6, 6))

    def square(model, batch):
        return jnp.mean(jax.vmap(model)(batch) ** 2)

    def size(model, batch):
        return jnp.mean(jnp.abs(jax.vmap(model)(batch)))

    own = tr.Trainer(tr.switch_every(2, square, size), SGD)
    found = own.evaluate(conv, [x])
    assert found["loss"] == pytest.approx(float(square(conv, x)), rel=1e-5)
    one_batch = own._evaluator._known[0].one_batch
    state = dataclasses.replace(own.init(conv), opt_state=None)
    memory = dataclasses.replace(state.memory, num_steps=jnp.int32(1))
    arrays = eqx.filter(dataclasses.replace(state, memory=memory), eqx.is_array)
    program = jax.make_jaxpr(one_batch)(arrays, None, x, None, np.uint32(0))
    text = str(program)
    assert "conv_general_dilated" in text
    assert "lhs_spec=(0, 3, 1, 2)" in text
    assert "lhs_spec=(0, 1, 2, 3)" not in text
