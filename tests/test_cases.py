"""Mistakes that training loops were found to make, and what must come out instead.

Each test gives the product one such job and compares it with the loop that a user would
write by hand. Here: compiles, the optimizer's state, donation. The cases about losses
and randomness, data, and the host are in the other `test_cases_*.py`.
"""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import pull, Twins

import trainer as tr


class Linear(eqx.Module):
    w: jax.Array
    b: jax.Array

    def __call__(self, x):
        return self.w @ x + self.b


def linear():
    return Linear(jnp.array([0.1, 0.2], jnp.float32), jnp.zeros((), jnp.float32))


def rows(count):
    """Inputs, and what a linear model can learn of them."""
    x = np.random.default_rng(0).normal(size=(count, 2)).astype(np.float32)
    return x, (x @ np.array([1.0, 2.0]) + 0.5).astype(np.float32)


def mse(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def by_hand(loss, optimizer, model, calls):
    """A plain loop: one step for each dict of what the loss is given.

    Returns the model, the loss of every step, and the optimizer's state.
    """
    opt_state, values = optimizer.init(eqx.filter(model, eqx.is_inexact_array)), []

    @eqx.filter_jit
    def step(model, opt_state, call):
        value, grads = eqx.filter_value_and_grad(loss)(model, **call)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, value

    for call in calls:
        model, opt_state, value = step(model, opt_state, call)
        values.append(float(value))
    return model, values, opt_state


def counted(loss):
    """The same loss, and a list that grows whenever its Python body runs."""
    traces = []

    @functools.wraps(loss)
    def run(*args, **kwargs):
        traces.append(loss.__name__)
        return loss(*args, **kwargs)

    return run, traces


def fit(loss, optimizer, model, data, **kwargs):
    """Fit a new Trainer, whose loss is traced once and whose step is compiled once."""
    loss, traces = counted(loss)
    result = tr.Trainer(loss, optimizer).fit(model, data, progress=False, **kwargs)
    assert (result.compiles, len(traces)) == (1, 1)
    return result


def parameters(tree):
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    return np.concatenate([np.ravel(leaf) for leaf in leaves])


def close(tree, expected, atol=1e-6):
    """All parameters in a row, against those of another tree or a list of numbers."""
    expected = expected if isinstance(expected, list) else parameters(expected)
    np.testing.assert_allclose(parameters(tree), expected, rtol=0, atol=atol)


def same(tree, expected):
    """The same, bit for bit."""
    close(tree, expected, atol=0)


class Scaled(eqx.Module):
    w: jax.Array
    scale: jax.Array

    def __call__(self, x):
        return self.scale * (self.w @ x)


@pytest.mark.parametrize(
    ("optimizer", "trained"),
    [
        (optax.sgd(0.1), None),
        (optax.adam(0.1), [1.33543, 1.379899, 1.36065]),
        (optax.adamw(0.1), None),
        (optax.MultiSteps(optax.adam(0.1), 2), None),
    ],
    ids=["sgd", "adam", "adamw", "multisteps"],
)
def test_case_02_a_weakly_typed_parameter_is_compiled_once(optimizer, trained):
    weak, batch = jnp.asarray(1.0), rows(4)
    assert weak.weak_type
    result = fit(mse, optimizer, Scaled(jnp.ones(2), weak), [batch], num_steps=4)
    strong = Scaled(jnp.ones(2), jnp.ones(()))
    model, _, _ = by_hand(mse, optimizer, strong, [{"batch": batch}] * 4)
    same(result.model, model)
    close(result.model, trained or model)
    assert not result.model.scale.weak_type


def mlp(seed, activation=jax.nn.relu):
    return eqx.nn.MLP(2, "scalar", 4, 1, activation, key=jr.PRNGKey(seed))


def test_case_03_a_second_fit_with_a_new_model_compiles_nothing():
    loss, traces = counted(mse)
    batch, optimizer = rows(8), optax.adam(0.01)
    trainer = tr.Trainer(loss, optimizer)
    first = [[-0.279676, 0.435036, -0.174595], [-0.032573, -0.352518, 0.657667]]
    for seed in (0, 1):
        result = trainer.fit(mlp(seed), [batch], num_steps=3, progress=False)
        calls = [{"batch": batch}] * 3
        same(result.model, by_hand(mse, optimizer, mlp(seed), calls)[0])
        np.testing.assert_allclose(parameters(result.model)[:3], first[seed], atol=1e-6)
    assert (result.compiles, len(traces)) == (1, 1)


def test_case_03_a_new_lambda_in_the_model_is_named():
    trainer = tr.Trainer(mse, optax.adam(0.01))
    run = lambda model: trainer.fit(model, [rows(8)], num_steps=3, progress=False)
    run(mlp(0, lambda v: jnp.tanh(v)))
    with pytest.raises(tr.RecompileError, match=r"`model.activation` was .*lambda"):
        run(mlp(1, lambda v: jnp.tanh(v)))


class Permuted(eqx.Module):
    w: jax.Array
    order: jax.Array
    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, x):
        return self.activation(self.w @ x[self.order])


@pytest.mark.parametrize(
    ("optimizer", "trained"),
    [
        (optax.sgd(0.1), [0.466516, 0.683905]),
        (optax.adam(0.1), [0.395147, 0.493314]),
        (optax.adamw(0.1), [0.395141, 0.493305]),
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_case_21_only_float_leaves_are_trained(optimizer, trained):
    order = jnp.array([1, 0], jnp.int32)
    model = Permuted(jnp.array([0.1, 0.2], jnp.float32), order, jnp.tanh)
    result = fit(mse, optimizer, model, [rows(8)], num_steps=3)
    hand, _, opt_state = by_hand(mse, optimizer, model, [{"batch": rows(8)}] * 3)
    same(result.model, hand)
    close(result.model, trained)
    assert result.model.order.tolist() == [1, 0]
    assert result.model.order.dtype == jnp.int32
    assert result.model.activation is jnp.tanh
    shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    assert shapes(result.state.opt_state) == shapes(opt_state)
    moments = jax.tree.leaves(eqx.filter(result.state.opt_state, eqx.is_inexact_array))
    assert [leaf.shape for leaf in moments] == [(2,)] * len(moments)


@pytest.mark.parametrize(
    ("optimizer", "trained"),
    [
        (optax.adamw(0.1, weight_decay=0.1), [0.392114, 0.48984, -0.04839]),
        (optax.lamb(0.1, weight_decay=0.1), [0.152355, 0.251857, -0.098999]),
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
            [0.399879, 0.500198, -0.038096],
        ),
    ],
    ids=["adamw", "lamb", "clip"],
)
def test_case_22_the_optimizer_is_given_the_parameters(optimizer, trained):
    result = fit(mse, optimizer, linear(), [rows(8)], num_steps=3)
    same(result.model, by_hand(mse, optimizer, linear(), [{"batch": rows(8)}] * 3)[0])
    close(result.model, trained)


def test_case_33_one_array_in_two_leaves_becomes_two():
    shared = jnp.ones(3)
    model = Twins(shared, shared)
    result = fit(pull, optax.sgd(0.1), model, None, num_steps=2)
    same(result.model, by_hand(pull, optax.sgd(0.1), model, [{"batch": None}] * 2)[0])
    close(result.model, [0.64] * 3 + [1.72] * 3)
    assert shared.tolist() == [1.0] * 3


class Averaged(tr.Trainer):
    """Keeps an average of the parameters next to them."""

    def update(self, model, opt_state, batch):
        net, average = model
        net = jax.tree.map(lambda p: 0.8 * p, net)
        average = jax.tree.map(lambda a, p: 0.5 * a + 0.5 * p, average, net)
        return (net, average), opt_state, {"size": jnp.sum(net.w)}


def test_case_33_an_average_may_start_as_the_model_itself():
    net = linear()
    result = Averaged().fit((net, net), None, num_steps=2, progress=False)
    close(result.model[0], [0.064, 0.128, 0.0])
    close(result.model[1], [0.077, 0.154, 0.0])
    close(net, linear())
    assert result.compiles == 1


def decaying(model, batch, *, step):
    return mse(model, batch) + jnp.exp(-step / 10) * jnp.sum(model.w**2)


def test_case_57_the_step_reaches_the_loss_traced():
    seen = []

    def loss(model, batch, *, step):
        traced = isinstance(step, jax.core.Tracer)
        seen.append((step.dtype, step.shape, step.aval.weak_type, traced))
        return decaying(model, batch, step=step)

    optimizer, batch = optax.sgd(0.05), rows(8)
    result = fit(loss, optimizer, linear(), [batch], num_steps=50)
    calls = [{"batch": batch, "step": jnp.int32(i)} for i in range(50)]
    close(result.model, by_hand(decaying, optimizer, linear(), calls)[0])
    close(result.model, [1.167005, 1.501492, 0.489233])
    assert seen == [(jnp.int32, (), False, True)]


def test_case_57_a_python_if_on_the_step_says_what_to_write():
    def loss(model, batch, *, step):
        if step > 10:
            return mse(model, batch)
        return 2 * mse(model, batch)

    with pytest.raises(tr.TraceError) as error:
        tr.Trainer(loss, optax.sgd(0.05)).fit(
            linear(), [rows(8)], num_steps=50, progress=False
        )
    line = loss.__code__.co_firstlineno + 1
    for hint in (f"test_cases.py:{line}", "tr.switch_every", "jax.lax.cond"):
        assert hint in str(error.value)
