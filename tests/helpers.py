"""Small models, data and losses that several test files use."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np


def data(n=64, d=10):
    x = np.random.default_rng(0).normal(size=(n, d)).astype(np.float32)
    return x, np.sin(x.sum(1))


def batches(size=16, n=64):
    x, y = data(n)
    return [(x[i : i + size], y[i : i + size]) for i in range(0, n, size)]


def mlp(seed=0, width=16):
    return eqx.nn.MLP(10, "scalar", width, 1, key=jr.key(seed))


def mse(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def mae(model, batch):
    x, y = batch
    return jnp.mean(jnp.abs(jax.vmap(model)(x) - y))


def masked_mse(model, batch, *, mask):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2, where=mask)


def flat(tree):
    """All arrays of a tree as one vector, for comparing bit for bit."""
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    leaves = [
        jr.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in leaves
    ]
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in leaves])


def equal(a, b):
    """Whether two trees hold the same numbers, bit for bit."""
    return np.array_equal(flat(a), flat(b), equal_nan=True)


class Net(eqx.Module):
    """BatchNorm and Dropout: needs a state and a key."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key):
        a, b = jr.split(key)
        self.first = eqx.nn.Linear(10, 16, key=a)
        self.norm = eqx.nn.BatchNorm(16, "batch", mode="batch")
        self.drop = eqx.nn.Dropout(0.5)
        self.last = eqx.nn.Linear(16, "scalar", key=b)

    def __call__(self, x, state, key):
        h, state = self.norm(self.first(x), state)
        return self.last(self.drop(jax.nn.tanh(h), key=key)), state


def net():
    return eqx.nn.make_with_state(Net)(jr.key(1))


def predict(model, x, state, key):
    keys = jr.split(key, len(x))
    axes = {"in_axes": (0, None, 0), "out_axes": (0, None), "axis_name": "batch"}
    return jax.vmap(model, **axes)(x, state, keys)


def net_mse(model, batch, *, state, key):
    x, y = batch
    prediction, state = predict(model, x, state, key)
    return jnp.mean((prediction - y) ** 2), state


def net_mae(model, batch, *, state, key):
    x, y = batch
    prediction, state = predict(model, x, state, key)
    return jnp.mean(jnp.abs(prediction - y)), {"top": prediction.max()}, state


class Counting(eqx.Module):
    """Keeps a number in its state; each reading doubles it."""

    w: jax.Array
    index: eqx.nn.StateIndex

    def __init__(self):
        self.w = jnp.float32(2.0)
        self.index = eqx.nn.StateIndex(jnp.float32(1.0))


def doubles(model, batch, *, state):
    seen = state.get(model.index)
    return model.w * seen, {"seen": seen}, state.set(model.index, 2 * seen)


class Twins(eqx.Module):
    a: jax.Array
    b: jax.Array


def pull(model, batch):
    return jnp.sum(model.a**2) + jnp.sum((model.b - 3) ** 2)
