"""Values that a compiled step has read by way of its model, or of a sampler."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trainer as tr


SETTINGS = {"beta": 0.0}


class Options:
    def __init__(self):
        self.k, self.table = 1.0, np.ones(2)


class Net(eqx.Module):
    weight: jax.Array
    options: Options = eqx.field(static=True)

    def __call__(self, x):
        return jnp.sum(self.weight * x) * self.scale()

    def scale(self):
        return self.options.k * self.options.table[0] * SETTINGS["beta"]


def by_call(model, batch):
    return model(jnp.ones(2)) ** 2


def by_field(model, batch):
    return jnp.sum(model.weight) * model.options.k


@pytest.mark.parametrize(
    ("loss", "change", "text"),
    [
        (by_call, lambda m: setattr(m.options, "k", 2.0), "`options.k` of `Net`, read"),
        (by_call, lambda m: m.options.table.fill(2.0), "`options.table[0]` of `Net`"),
        (by_call, lambda m: SETTINGS.update(beta=2.0), "`SETTINGS['beta']` of `scale`"),
        (by_field, lambda m: setattr(m.options, "k", 2.0), "options.k` "),
    ],
    ids=["object", "array", "global", "field"],
)
def test_what_a_model_reads_raises_in_fit_and_is_seen_by_evaluate(
    loss, change, text, monkeypatch
):
    monkeypatch.setitem(SETTINGS, "beta", 1.0)
    model = Net(jnp.ones(2), Options())
    trainer = tr.Trainer(loss, optax.sgd(0.1))
    result = trainer.fit(model, None, num_steps=3, progress=False)
    before = trainer.evaluate(model, None)["loss"]
    change(model)
    assert trainer.evaluate(model, None)["loss"] > before
    with pytest.raises(tr.RecompileError, match=re.escape(text)):
        trainer.fit(result.state, None, num_steps=6, progress=False)


def test_what_a_sampler_reads_raises():
    options = {"k": 1.0}

    class Points(tr.AbstractSampler):
        def init(self, key):
            return None

        def sample(self, carry, model, *, step, key):
            return jnp.ones(2) * options["k"], carry

    trainer = tr.Trainer(lambda model, batch: jnp.sum(model * batch), optax.sgd(0.1))
    result = trainer.fit(jnp.ones(2), Points(), num_steps=2, progress=False)
    options["k"] = 2.0
    with pytest.raises(tr.RecompileError, match=r"`options\['k'\]` of `sample`"):
        trainer.fit(result.state, Points(), num_steps=4, progress=False)
