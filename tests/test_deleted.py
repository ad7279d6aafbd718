"""Arrays whose memory was given away, in a model, a state, a batch or a loss."""

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from mistakes import marked_line, MODEL

import trainer as tr


def deleted(shape=(3,)):
    array = jnp.ones(shape)
    array.delete()
    return array


def fit(loss):
    tr.Trainer(loss, optax.sgd(0.1)).fit(MODEL, None, num_steps=1, progress=False)


def squared(model, batch):
    return jnp.sum(model["a"][0] ** 2)


def test_a_model_that_was_given_away_is_named():
    trainer = tr.Trainer(squared, optax.sgd(0.1))
    model = {"a": [deleted()], "b": deleted()}
    text = r"`model\['a'\]\[0\]`, float32\[3\], was deleted \(and 1 more\).*a copy made"
    for use in (
        trainer.init,
        lambda model: trainer.fit(model, None, num_steps=1, progress=False),
        lambda model: trainer.evaluate(model, [jnp.zeros(2)]),
    ):
        with pytest.raises(ValueError, match=text):
            use(model)


def test_a_state_that_was_given_away_is_named():
    trainer = tr.Trainer(squared, optax.sgd(0.1))
    state = trainer.init({"a": [MODEL]})
    state.model["a"][0].delete()
    text = r"`state\.model\['a'\]\[0\]`, float32\[3\], was deleted: a function with"
    with pytest.raises(ValueError, match=text):
        trainer.fit(state, None, num_steps=1, progress=False)
    with pytest.raises(ValueError, match=text):
        trainer.evaluate(state, [jnp.zeros(2)])


def summed(model, batch):
    return jnp.sum(model * batch["x"])


def test_data_that_was_given_away_are_named():
    trainer = tr.Trainer(summed, optax.sgd(0.1), steps_per_call=2)
    fit = lambda data: trainer.fit(MODEL, data, num_steps=2, progress=False)
    text = r"`batch\['x'\]`, float32\[3\], was deleted"
    with pytest.raises(ValueError, match=text):
        fit([{"x": deleted()}])
    with pytest.raises(ValueError, match=text):
        trainer.evaluate(MODEL, [{"x": deleted()}])
    # When the step is compiled, batches are looked at by JAX alone.
    with pytest.raises(ValueError, match=text) as caught:
        fit([{"x": jnp.ones(3)}, {"x": deleted()}])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_arrays_that_were_given_away_are_named():
    rows = jnp.ones((4, 3))
    data = tr.Arrays({"x": rows}, batch_size=2)
    rows.delete()
    trainer = tr.Trainer(summed, optax.sgd(0.1))
    for use in (
        lambda: trainer.fit(MODEL, data, num_steps=1, progress=False),
        lambda: trainer.evaluate(MODEL, data),
    ):
        with pytest.raises(ValueError, match=r"`arrays\['x'\]`, float32\[4,3\], was"):
            use()


def test_an_array_in_a_loss_that_was_given_away_is_named():
    class Scaled(tr.AbstractLoss):
        scale: jax.Array

        def __call__(self, model, batch):
            return jnp.sum(model * self.scale)

    with pytest.raises(ValueError, match=r"`update\.loss\.scale`, float32\[3\], was"):
        fit(Scaled(deleted()))


def test_an_array_around_a_loss_that_was_given_away_is_explained():
    gone = deleted()

    def loss(model, batch):
        return jnp.sum(model * gone)  # here

    with pytest.raises(tr.TraceError, match="whose memory was given away") as caught:
        fit(loss)
    assert marked_line(loss) in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    line = inspect.getsourcelines(loss)[1]
    with pytest.raises(tr.TraceError, match=rf" in `loss` at .*\.py:{line}: a func"):
        tr.Trainer(loss, optax.sgd(0.1)).evaluate(MODEL, [jnp.zeros(2)])
