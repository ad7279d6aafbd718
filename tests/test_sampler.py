"""Batches made in the compiled step."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import equal

import trainer as tr


SGD = optax.sgd(0.05)
SIZE = 16


class Ring(tr.AbstractSampler):
    """A replay buffer: writes one row a step, made from the model; draws four rows."""

    shift: jax.Array
    scale: float = 1.0

    def init(self, key):
        return {"rows": jr.normal(key, (SIZE, 2)), "place": jnp.int32(0)}

    def sample(self, carry, model, *, step, key):
        write, read = jr.split(key)
        row = model + self.shift + self.scale * jr.normal(write, (2,)) + step
        rows = carry["rows"].at[carry["place"]].set(row)
        drawn = rows[jr.randint(read, (4,), 0, SIZE)]
        return drawn, {"rows": rows, "place": (carry["place"] + 1) % SIZE}


def distance(model, batch):
    return jnp.mean((model - batch) ** 2)


def fit(trainer, model, sampler, num_steps):
    return trainer.fit(model, sampler, num_steps=num_steps, progress=False)


def start(k=7):
    return tr.Trainer(distance, SGD, steps_per_call=k), jnp.zeros(2)


def by_hand(sampler, num_steps):
    key, model = jr.key(0), jnp.zeros(2)
    carry, values = sampler.init(jr.fold_in(key, 2**32 - 1)), []

    @jax.jit
    def step(model, carry, i):
        at = {"step": i, "key": jr.fold_in(key, i)}
        batch, carry = sampler.sample(carry, model, **at)
        value, grad = jax.value_and_grad(distance)(model, batch)
        return model - 0.05 * grad, carry, value

    for i in range(num_steps):
        model, carry, value = step(model, carry, jnp.int32(i))
        values.append(float(value))
    return model, carry, values


@pytest.mark.parametrize("k", [1, 7])
def test_a_ring_buffer_is_a_loop(k):
    sampler = Ring(jnp.ones(2))
    model, carry, values = by_hand(sampler, 40)
    trainer, first = start(k)
    result = fit(trainer, first, sampler, 40)
    np.testing.assert_allclose(result.history["loss"], values, rtol=1e-5)
    np.testing.assert_allclose(result.model, model, rtol=1e-5)
    np.testing.assert_allclose(result.state.source["rows"], carry["rows"], rtol=1e-5)
    assert result.state.source["place"] == 40 % SIZE
    assert result.compiles == 1


def test_the_carry_goes_on_with_the_state():
    sampler, (trainer, model) = Ring(jnp.ones(2)), start()
    whole = fit(trainer, model, sampler, 20)
    some = fit(trainer, model, sampler, 9)
    before = jax.tree.map(jnp.copy, some.state.source)
    rest = fit(trainer, some.state, sampler, 20)
    assert equal(rest.state, whole.state)
    assert equal(some.state.source, before)
    assert rest.compiles == 1
    other = fit(start(3)[0], some.state, sampler, 20)
    assert equal(other.state, whole.state)


def test_arrays_of_a_sampler_are_arguments(step_compiles):
    trainer, model = start()
    fit(trainer, model, Ring(jnp.ones(2)), 6)
    moved = Ring(jnp.full(2, -9.0))
    again = fit(trainer, model, moved, 6)
    assert step_compiles() == 1
    values = by_hand(moved, 6)[2]
    np.testing.assert_allclose(again.history["loss"], values, rtol=1e-5)


def test_a_number_of_a_sampler_is_not_silently_kept():
    trainer, model = start()
    fit(trainer, model, Ring(jnp.ones(2)), 6)
    with pytest.raises(tr.RecompileError, match="scale"):
        fit(trainer, model, Ring(jnp.ones(2), scale=5.0), 6)


class Points(tr.AbstractSampler):
    def init(self, key):
        return None

    def sample(self, carry, model, *, step, key):
        return jr.uniform(key, (3,)), carry


def test_a_sampler_without_a_carry():
    def loss(model, batch, *, step, key, epoch):
        same = jnp.all(batch == jr.uniform(key, (3,)))
        return jnp.sum(model**2), {"same": same, "epoch": epoch, "step": step}

    result = fit(tr.Trainer(loss, SGD), jnp.ones(2), Points(), 5)
    assert result.history["same"].tolist() == [1] * 5
    assert result.history["epoch"].tolist() == [0] * 5
    assert result.state.source is None


def test_a_loss_that_asks_for_a_mask_is_given_one():
    loss = lambda model, batch, *, mask: jnp.sum(model**2 * jnp.mean(batch * mask))
    result = fit(tr.Trainer(loss, SGD), jnp.ones(2), Points(), 2)
    plain = lambda model, batch: jnp.sum(model**2 * jnp.mean(batch))
    expected = fit(tr.Trainer(plain, SGD), jnp.ones(2), Points(), 2)
    assert result.history["loss"].tolist() == expected.history["loss"].tolist()


def test_a_guard_takes_the_carry_back():
    class Bad(Ring):
        def sample(self, carry, model, *, step, key):
            batch, carry = super().sample(carry, model, step=step, key=key)
            return jnp.where(step == 5, jnp.nan, batch), carry

    sampler = Bad(jnp.ones(2))
    trainer = tr.Trainer(distance, SGD, nonfinite="raise", steps_per_call=4)
    with pytest.raises(tr.NonfiniteError, match="Step 5 made `model` not finite"):
        fit(trainer, jnp.zeros(2), sampler, 20)
    assert trainer.last_state.source["place"] == 5
    assert equal(trainer.last_state, fit(trainer, jnp.zeros(2), sampler, 5).state)


def test_what_a_sampler_cannot_do_is_refused():
    trainer, model = start()
    with pytest.raises(TypeError, match=r"A sampler has no epochs\. Give `num_steps`"):
        trainer.fit(model, Points(), num_epochs=2, progress=False)
    with pytest.raises(TypeError, match=r"no end to evaluate up to\. Evaluate on"):
        trainer.evaluate(model, Points())


def returns(made):
    class Odd(tr.AbstractSampler):
        def init(self, key):
            return jnp.zeros(3)

        def sample(self, carry, model, *, step, key):
            return made(carry)

    return Odd()


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda c: (c, c[:2]), "`source` was float32[3] and is now float32[2]"),
        (lambda c: (c, c.astype(int)), "`source` was float32[3] and is now int32[3]"),
        (lambda c: (c, (c, c)), "`source` was float32[3] and is now gone"),
        (lambda c: c, "(batch, carry)"),
        (lambda c: (c, c, c), "(batch, carry)"),
    ],
)
def test_what_a_sampler_may_not_return(made, text):
    loss = lambda model, batch: jnp.sum(model**2)
    with pytest.raises(TypeError, match=re.escape(text)):
        fit(tr.Trainer(loss, SGD), jnp.zeros(2), returns(made), 2)


def test_another_form_of_sampler_is_refused_by_name():
    trainer, model = start()
    state = fit(trainer, model, Ring(jnp.ones(2)), 3).state
    for other in (Ring(jnp.ones(1)), returns(lambda c: (c, c)), None, [jnp.ones(2)]):
        with pytest.raises((tr.RecompileError, ValueError)) as caught:
            fit(trainer, state, other, 5)
        if isinstance(other, tr.AbstractSampler):
            assert "`tr.Arrays`" not in str(caught.value)


def test_the_carry_of_another_sampler_is_refused():
    state = fit(*start(), Ring(jnp.ones(2)), 3).state

    class Other(Ring):
        def init(self, key):
            return {"table": jnp.zeros(3)}

        def sample(self, carry, model, *, step, key):
            return carry["table"], carry

    with pytest.raises((TypeError, ValueError), match=r"`state.source"):
        fit(tr.Trainer(distance, SGD), state, Other(jnp.ones(2)), 5)


def test_a_class_of_samplers_is_not_a_sampler():
    with pytest.raises(TypeError, match="Points"):
        fit(*start(), Points, 2)
    assert eqx.is_array(Points().sample(None, None, step=0, key=jr.key(0))[0])
