"""Every schedule equals, bit for bit, the loop that one would write."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from helpers import batches, equal, net, net_mae, net_mse

import trainer as tr
from trainer import _step


def gradient(loss, model, state, batch, key):
    def value(model):
        returned = loss(model, batch, state=state, key=key)
        return returned[0], returned[-1]

    (value, state), grad = eqx.filter_value_and_grad(value, has_aux=True)(model)
    return value, grad, state


def one_of(losses, which):
    """What a user writes to swap losses: lax.switch over their gradients."""

    def compute(model, state, batch, key, i):
        functions = [
            lambda state, loss=loss: gradient(loss, model, state, batch, key)
            for loss in losses
        ]
        return jax.lax.switch(which(i), functions, state)

    return compute


def sum_of(a, b):
    """What a user writes for a sum of losses: one gradient of it."""

    def both(model, batch, *, state, key):
        first, state = a(model, batch, state=state, key=key)
        second, _, state = b(model, batch, state=state, key=key)
        return 2.0 * first + 0.5 * second, state

    return lambda model, state, batch, key, i: gradient(both, model, state, batch, key)


def ramp(step):
    return jnp.clip(step / 8, 0.0, 1.0)


def annealed(a, b):
    """A second loss whose weight grows from 0, and which is not computed at 0."""

    def compute(model, state, batch, key, i):
        first, grad, state = gradient(a, model, state, batch, key)

        def add(state):
            second, more, state = gradient(b, model, state, batch, key)
            scale = lambda tree: jax.tree.map(lambda leaf: ramp(i) * leaf, tree)
            return scale(second), scale(more), state

        def leave(state):
            return (*jax.tree.map(jnp.zeros_like, (first, grad)), state)

        second, more, state = jax.lax.cond(ramp(i) != 0, add, leave, state)
        return first + second, jax.tree.map(lambda x, y: x + y, grad, more), state

    return compute


def by_hand(compute, model, state, num_steps):
    """The loop a user writes: one filter_jit step, called once a batch."""
    optimizer = optax.adam(1e-2)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, opt_state, batch, i):
        key = jr.fold_in(jr.key(0), i)
        value, grad, state = compute(model, state, batch, key, i)
        updates, opt_state = optimizer.update(
            grad, opt_state, eqx.filter(model, eqx.is_inexact_array)
        )
        return eqx.apply_updates(model, updates), state, opt_state, value

    values = []
    feed = itertools.cycle(batches())
    for i in range(num_steps):
        args = (model, state, opt_state, next(feed), jnp.int32(i))
        model, state, opt_state, value = step(*args)
        values.append(float(value))
    return model, state, values


@pytest.mark.parametrize("steps_per_call", [1, 7])
@pytest.mark.parametrize(
    ("loss", "compute"),
    [
        (net_mse, one_of([net_mse], lambda i: 0)),
        (
            tr.switch_every(3, net_mse, net_mae),
            one_of([net_mse, net_mae], lambda i: i // 3 % 2),
        ),
        (tr.alternate(net_mse, net_mae), one_of([net_mse, net_mae], lambda i: i % 2)),
        (
            tr.piecewise([net_mse, net_mae], boundaries=[11]),
            one_of([net_mse, net_mae], lambda i: jnp.int32(i >= 11)),
        ),
        (
            tr.WeightedSum(a=(2.0, net_mse), b=(0.5, net_mae)),
            sum_of(net_mse, net_mae),
        ),
        (tr.WeightedSum(a=net_mse, b=(ramp, net_mae)), annealed(net_mse, net_mae)),
    ],
    ids=["plain", "every", "alternate", "piecewise", "sum", "annealed"],
)
def test_batchnorm_and_dropout_equal_a_loop_by_hand(
    loss, compute, steps_per_call, monkeypatch
):
    # XLA fuses a small step with a choice otherwise than the loop: see test_turns.
    monkeypatch.setattr(_step, "_SMALL_STEP", 0.0)
    model, state, values = by_hand(compute, *net(), num_steps=30)
    trainer = tr.Trainer(loss, optax.adam(1e-2), steps_per_call=steps_per_call)
    result = trainer.fit(net(), batches(), num_steps=30, key=jr.key(0), progress=False)
    assert equal(result.model, model)
    assert equal(result.model_state, state)
    assert result.history["loss"].tolist() == values
    assert result.compiles == 1
