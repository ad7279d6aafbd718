"""A model, its losses, and fits with `debug=True` beside those that are compiled."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

import trainer as tr
from tests.helpers import flat, Twins


ADAM, SGD = optax.adam(1e-2), optax.sgd(0.05)
STEPS = 20
BOUNDS = {"rtol": 1e-5, "atol": 1e-5}
MODEL = Twins(jnp.array([0.5, -0.4, 0.1]), jnp.float32(0.2))
X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
Y = np.sin(X.sum(1))
FEED = [(X[i : i + 4], Y[i : i + 4]) for i in (0, 4, 8)]


def fit(trainer, model=MODEL, source=FEED, num_steps=STEPS, **options):
    """A fit, and what it warned of when it ended."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", tr.LossWarning)
        result = trainer.fit(
            model, source, num_steps=num_steps, progress=False, **options
        )
    return result, [str(warning.message) for warning in caught]


def same_history(history, of_compiled, bounds):
    # What no step has reported is not known without compiling.
    rest = [name for name in of_compiled if name not in history]
    assert all(np.ma.getmaskarray(of_compiled[name]).all() for name in rest)
    assert not set(history) - set(of_compiled)
    for name in history:
        a, b = history[name], of_compiled[name]
        assert np.array_equal(np.ma.getmaskarray(a), np.ma.getmaskarray(b)), name
        assert history.steps(name).tolist() == of_compiled.steps(name).tolist()
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.ma.filled(a, 0), np.ma.filled(b, 0), **bounds)
    return True


def same_state(state, of_compiled, bounds):
    form = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    arrays = [eqx.filter(s, eqx.is_array) for s in (state, of_compiled)]
    assert form(arrays[0]) == form(arrays[1])
    np.testing.assert_allclose(flat(state), flat(of_compiled), equal_nan=True, **bounds)
    return True


def same(debug, compiled, within=1e-5):
    """Whether two fits have the same numbers, those that are absent included."""
    (result, said), (like, like_said) = debug, compiled
    assert said == like_said
    assert (result.compiles, result.compile_seconds, like.compiles) == (0, 0.0, 1)
    assert (result.stop_reason, str(result.nonfinite)) == (
        like.stop_reason,
        str(like.nonfinite),
    )
    bounds = {"rtol": within, "atol": within}
    return same_history(result.history, like.history, bounds) and same_state(
        result.state, like.state, bounds
    )


def mse(model, batch):
    x, y = batch
    return jnp.mean((x @ model.a + model.b - y) ** 2)


def masked(model, batch, *, mask):
    x, y = batch
    return jnp.mean((x @ model.a + model.b - y) ** 2, where=mask)


def noisy(model, batch, *, step, epoch, key):
    noise = jr.uniform(key, (4, 3))[: len(batch[0])]
    value = mse(model, (batch[0] + noise, batch[1]))
    return value, {"at": step + 100 * epoch, "noise": noise[0, 0]}


def small(model, batch):
    return jnp.sum(model.a**2) + model.b**2


def told(model, batch):
    value = small(model, batch)
    return value, {"double": 2 * value}


class Values:
    """Looks at values with Python's own means."""

    def __init__(self):
        self.seen = []

    def __call__(self, value):
        if value < -1e9:
            return -value
        assert np.isfinite(value.item())
        self.seen.append(float(jax.lax.stop_gradient(value)))
        return value
