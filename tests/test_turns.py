"""A choice written as loops of one turn or none: the same step."""

import jax
import jax.extend
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import batches, flat, mae, mlp, mse, net, net_mae, net_mse

import trainer as tr
from trainer import _step
from trainer._turns import in_turns


def huber(model, batch):
    x, y = batch
    return jnp.mean(optax.huber_loss(jax.vmap(model)(x), y))


def quartic(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 4), {"bias": jnp.mean(y)}


def noisy(model, batch, *, key):
    x, y = batch
    return mse(model, (x + 0.1 * jr.normal(key, x.shape), y))


ADAM = optax.adam(1e-2)
CASES = {
    "two losses": lambda: tr.Trainer(tr.switch_every(3, mse, mae), ADAM),
    "four, one with a metric": lambda: tr.Trainer(
        tr.alternate(mse, mae, quartic, noisy), ADAM
    ),
    "a phase": lambda: tr.Trainer(
        tr.piecewise([mse, huber], boundaries=[0.5]), optax.adamw(1e-2)
    ),
    "by chance": lambda: tr.Trainer(tr.Switch(tr.Random([0.5, 0.5]), [mse, mae]), ADAM),
    "a plateau": lambda: tr.Trainer(
        tr.Switch(tr.Plateau(patience=2), [mse, mae]), optax.sgd(0.1, momentum=0.9)
    ),
    "an average and a guard": lambda: tr.Trainer(
        tr.switch_every(2, mse, mae),
        ADAM,
        transforms={"ema": tr.EMA(0.9)},
        nonfinite="skip",
    ),
    "a sum around it": lambda: tr.Trainer(
        tr.WeightedSum(
            a=(optax.linear_schedule(0.0, 1.0, 5), mae),
            b=tr.switch_every(3, mse, huber),
        ),
        ADAM,
    ),
}


@pytest.fixture
def changed(monkeypatch):
    """Whether each step that was compiled was changed."""
    found = []

    def noting(closed, num_state):
        after = in_turns(closed, num_state)
        found.append(after is not closed)
        return after

    monkeypatch.setattr(_step, "in_turns", noting)
    return found


@pytest.mark.parametrize("steps_per_call", [1, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_a_fit_is_the_same_with_and_without(name, steps_per_call, changed, monkeypatch):
    found = []
    for small in (_step._SMALL_STEP, 0.0):
        monkeypatch.setattr(_step, "_SMALL_STEP", small)
        trainer = CASES[name]()
        trainer.steps_per_call = steps_per_call
        result = trainer.fit(
            mlp(), batches(), num_steps=20, key=jr.key(1), progress=False
        )
        assert result.compiles == 1
        found.append(result)
    assert changed == [name != "a sum around it" or changed[0]]
    one, other = found
    np.testing.assert_allclose(flat(one.state), flat(other.state), rtol=1e-6, atol=1e-7)
    assert set(one.history) == set(other.history)
    for metric in one.history:
        a, b = one.history[metric], other.history[metric]
        assert np.array_equal(np.ma.getmaskarray(a), np.ma.getmaskarray(b))
        np.testing.assert_allclose(np.ma.filled(a, 0), np.ma.filled(b, 0), rtol=2e-6)


def test_a_model_with_state_and_dropout(changed, monkeypatch):
    found = []
    for small in (_step._SMALL_STEP, 0.0):
        monkeypatch.setattr(_step, "_SMALL_STEP", small)
        loss = tr.switch_every(2, net_mse, net_mae)
        trainer = tr.Trainer(loss, optax.sgd(0.05), steps_per_call=3)
        result = trainer.fit(net(), batches(), num_steps=9, progress=False)
        found.append(flat((result.model, result.model_state)))
    assert changed == [True]
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)


def test_a_bad_step_is_found_and_taken_back(changed):
    def bad(model, batch, *, step):
        return mae(model, batch) * jnp.where(step == 1, jnp.nan, 1.0)

    loss = tr.switch_every(3, mse, bad)
    trainer = tr.Trainer(loss, ADAM, nonfinite="raise", steps_per_call=4)
    with pytest.raises(tr.NonfiniteError, match=r"Step 4 .*`branch` was `bad`"):
        trainer.fit(mlp(), batches(), num_steps=12, progress=False)
    assert int(trainer.last_state.step) == 4


def step(after, before=lambda x: x, branches=2):
    """A step of one array, with a choice in the middle."""
    choices = [lambda x, k=k: x * (k + 1.0) for k in range(branches)]

    def run(number, x):
        x = jax.lax.switch(number % branches, choices, before(x))
        return number + 1, after(x), jnp.sum(x)

    return jax.make_jaxpr(run)(jnp.int32(0), jnp.ones(3))


def test_what_it_computes_is_the_same_for_each_branch():
    for branches in (2, 3, 4):
        closed = step(lambda x: x + 1, before=jnp.sin, branches=branches)
        after = in_turns(closed, 2)
        names = [eqn.primitive.name for eqn in after.jaxpr.eqns]
        assert (names.count("cond"), names.count("while")) == (0, branches)
        assert after.out_avals == closed.out_avals
        for number in range(branches):
            arguments = jnp.int32(number), jnp.arange(3.0)
            one = jax.extend.core.jaxpr_as_fun(after)(*arguments)
            other = jax.extend.core.jaxpr_as_fun(closed)(*arguments)
            assert all(map(np.array_equal, one, other))


def test_other_steps_stay_as_they_are():
    def twice(x):
        return jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)

    def printing(x):
        jax.debug.print("{}", x[0])
        return x

    heavy = jnp.ones((3, 3))
    plain = jax.make_jaxpr(lambda number, x: (number + 1, x, jnp.sum(x)))
    for closed in (
        step(twice),
        step(lambda x: x, before=twice),
        step(lambda x: heavy @ x),
        step(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y + 1, x)),
        step(lambda x: jax.jit(lambda y: heavy @ y)(x)),
        step(printing),
        step(lambda x: x, branches=5),
        plain(jnp.int32(0), jnp.ones(3)),
    ):
        assert in_turns(closed, 2) is closed
    # Another output that is not one number is of an ensemble.
    many = step(lambda x: x)
    assert in_turns(many, 1) is many
