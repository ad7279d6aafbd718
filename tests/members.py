"""Members of ensembles that several test files use."""

import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from helpers import flat


SEEDS = (3, 5)
RATES = (0.01, 0.05)
DATA = list(np.random.default_rng(3).normal(size=(3, 4, 2)).astype(np.float32))
of_a, of_b, of_t = (operator.itemgetter(name) for name in "abt")


def model(seed):
    """Parts `a` and `b`, and `t`, which follows `a`."""
    a, b = jr.normal(jr.key(seed), (2, 2))
    return {"a": a, "b": b, "t": 1.0 * a}


MODELS = [model(0), model(1)]


def stack(models):
    """Models stacked by hand."""
    arrays, static = eqx.partition(list(models), eqx.is_array)
    return eqx.combine(jax.tree.map(lambda *x: jnp.stack(x), *arrays), static[0])


def fit(model, batch):
    return jnp.mean((model["a"] * batch + model["b"] - 1) ** 2)


def size(model, batch, *, step):
    return jnp.sum(model["a"] ** 2 + model["b"] ** 2), {"seen": step}


def noisy(model, batch, *, key):
    return jnp.mean((model["b"] * batch - jr.normal(key, batch.shape)) ** 2)


def spoiled(value, rate, step):
    """The third step of the second member is not finite."""
    return value * jnp.where((step == 2) & (rate > 0.02), jnp.nan, 1.0)


def close(a, b, within=1e-6):
    return np.allclose(flat(a), flat(b), rtol=within, atol=within, equal_nan=True)
