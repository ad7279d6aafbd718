"""A batch in several parts gives the update of the whole batch."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import data, flat, mae, masked_mse, mlp, mse, net, net_mse

import trainer as tr


ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1)


def fit(loss, count, model=None, batches=None, optimizer=ADAM, num_steps=3, **options):
    update = tr.Minimize(loss, optimizer, micro_batches=count, **options)
    model = mlp() if model is None else model
    batches = [data(24)] if batches is None else batches
    trainer = tr.Trainer(update=update, steps_per_call=2)
    return trainer.fit(model, batches, num_steps=num_steps, progress=False)


OPTIMIZERS = {
    "adam": ADAM,
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5)),
    "lbfgs": optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(5)),
}


@pytest.mark.parametrize(
    ("loss", "size", "count"),
    [
        (mse, 24, 4),
        (mse, 24, 5),
        (mse, 5, 5),
        (masked_mse, 7, 4),
        (tr.alternate(mse, mae), 7, 4),
        (tr.WeightedSum(a=mse, b=(0.5, mae)), 24, 5),
    ],
)
def test_parts_of_a_batch_make_the_update_of_the_whole(loss, size, count):
    batches = [data(size)]
    whole, parts = (fit(loss, n, batches=batches, optimizer=SGD) for n in (1, count))
    np.testing.assert_allclose(flat(parts.model), flat(whole.model), atol=1e-6)
    found, expected = parts.history["loss"], whole.history["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert parts.compiles == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_sees_the_whole_gradient(name):
    loss = lambda model, batch: jnp.mean((batch[0] @ model - batch[1]) ** 2)
    optimizer = OPTIMIZERS[name]
    whole, parts = (fit(loss, n, jnp.zeros(10), optimizer=optimizer) for n in (1, 5))
    np.testing.assert_allclose(flat(parts.model), flat(whole.model), atol=1e-5)
    if name == "adam":
        assert parts.state.opt_state[0].count == 3


@pytest.mark.parametrize("count", [3, 8])
def test_padded_examples_weigh_nothing(count):
    x, y = data(18)
    loader = tr.Loader(
        [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])], ragged="pad"
    )

    def metric(model, batch, *, mask):
        value = masked_mse(model, batch, mask=mask)
        return value, {"again": value, "examples": jnp.sum(mask)}

    found = fit(metric, count, batches=loader)
    hand = fit(mse, 1, batches=iter([(x[:8], y[:8]), (x[8:16], y[8:16])]), num_steps=2)
    np.testing.assert_allclose(
        found.history["loss"][:2], hand.history["loss"], rtol=1e-5
    )
    last = mse(hand.model, (x[16:], y[16:]))
    np.testing.assert_allclose(found.history["loss"][2], last, rtol=1e-5)
    np.testing.assert_allclose(found.history["again"], found.history["loss"], rtol=1e-5)
    assert np.isfinite(flat(found.model)).all()


def test_metrics_are_averaged_by_examples_and_counts_are_the_last():
    def loss(model, batch):
        x, _ = batch
        return mse(model, batch), {"mean": jnp.mean(x), "size": jnp.int32(len(x))}

    history = fit(loss, 4, batches=[data(10)]).history
    np.testing.assert_allclose(history["mean"], np.mean(data(10)[0]), rtol=1e-4)
    assert history["size"].tolist() == [1, 1, 1]  # 3 + 3 + 3 + 1


def test_a_metric_that_some_branches_lack_stays_absent():
    def loud(model, batch):
        return mse(model, batch), {"top": jnp.max(batch[1])}

    history = fit(tr.alternate(loud, mse), 3).history
    assert np.ma.getmaskarray(history["top"]).tolist() == [False, True, False]


def test_the_state_goes_from_part_to_part_in_order():
    class Last(eqx.Module):
        w: jax.Array
        index: eqx.nn.StateIndex

        def __init__(self):
            self.w = jnp.float32(0)
            self.index = eqx.nn.StateIndex(jnp.float32(0))

    def loss(model, batch, *, state):
        seen = 10 * state.get(model.index) + batch[0]
        return model.w**2, state.set(model.index, seen)

    rows = jnp.arange(1.0, 8.0)  # 1 2 | 3 4 | 5 6 | 7
    model = eqx.nn.make_with_state(Last)()
    result = fit(loss, 4, model, [rows], num_steps=1)
    assert result.model_state.get(result.model.index) == 1357


def test_batchnorm_is_a_loop_over_parts():
    x, y = data(24)
    result = fit(net_mse, 3, net(), [(x, y)], SGD, num_steps=1)
    model, state = net()
    key, grads, values = jr.fold_in(jr.key(0), 0), [], []

    @eqx.filter_jit
    def part(model, state, batch, key):
        def value(model):
            return net_mse(model, batch, state=state, key=key)

        return eqx.filter_value_and_grad(value, has_aux=True)(model)

    for n in range(3):
        batch = x[8 * n : 8 * n + 8], y[8 * n : 8 * n + 8]
        (one, state), grad = part(model, state, batch, jr.fold_in(key, n))
        grads, values = [*grads, grad], [*values, one]
    mean = jax.tree.map(lambda *leaves: -0.1 * sum(leaves) / 3, *grads)
    expected = eqx.apply_updates(model, mean)
    np.testing.assert_allclose(flat(result.model), flat(expected), atol=1e-6)
    np.testing.assert_allclose(flat(result.model_state), flat(state), rtol=1e-5)
    np.testing.assert_allclose(result.history["loss"], np.mean(values), rtol=1e-5)


def test_every_part_has_a_key_of_its_own():
    def loss(model, batch, *, key):
        noise = jr.uniform(key)
        return jnp.sum(model**2), {"noise": noise, "square": noise**2}

    run = lambda count: fit(loss, count, jnp.ones(2), [jnp.zeros(6)], num_steps=2)
    history, keys = run(3).history, [jr.fold_in(jr.key(0), i) for i in range(2)]
    drawn = [[jr.uniform(jr.fold_in(key, n)) for n in range(3)] for key in keys]
    np.testing.assert_allclose(history["noise"], np.mean(drawn, 1), rtol=1e-5)
    squares = np.mean(np.square(drawn), 1)
    np.testing.assert_allclose(history["square"], squares, rtol=1e-5)


def test_a_number_in_the_batch_goes_to_every_part():
    loss = lambda model, batch: model**2 * batch["scale"] * jnp.mean(batch["x"])
    batch = {"scale": jnp.float32(2), "x": jnp.arange(5.0)}
    whole, parts = (fit(loss, n, jnp.float32(1), [batch], SGD) for n in (1, 2))
    np.testing.assert_allclose(parts.model, whole.model, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_narrow_model_is_summed_without_loss(dtype):
    """A sum over 2048 examples would overflow float16, and be rounded in bfloat16."""
    loss = lambda model, batch: jnp.mean(model * batch * 50)
    batch = jnp.ones(2048, dtype)
    result = fit(loss, 128, jnp.ones((), dtype), [batch], optax.sgd(0.01), num_steps=1)
    np.testing.assert_allclose(float(result.model), 0.5, rtol=1e-2)
    np.testing.assert_allclose(result.history["loss"], 50, rtol=1e-2)


def test_parts_of_a_batch_for_parts_of_a_model():
    parts = tr.Parts(
        head=tr.Part(ADAM, lambda m: m.layers[-1]),
        body=tr.Part(SGD, lambda m: m.layers[:-1], start=1),
    )
    whole, some = (fit(mse, n, optimizer=parts) for n in (1, 4))
    np.testing.assert_allclose(flat(some.model), flat(whole.model), atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (None, "`micro_batches=3` splits a batch of no examples. Use larger batches"),
        (jnp.float32(1), "splits a batch of no examples"),
        (jnp.ones(2), "splits a batch of 2 examples. Use larger batches, or fewer"),
        (
            (jnp.ones(4), {"x": jnp.ones((3, 2))}),
            "`batch[1]['x']` is float32[3,2] where an earlier column has 4 examples",
        ),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(batch, text):
    loss = lambda model, batch: jnp.sum(model**2)
    batches = None if batch is None else [batch]
    trainer = tr.Trainer(update=tr.Minimize(loss, SGD, micro_batches=3))
    with pytest.raises(ValueError, match=re.escape(text)):
        trainer.fit(jnp.ones(2), batches, num_steps=1, progress=False)


@pytest.mark.parametrize(
    ("count", "error", "text"),
    [
        (0, ValueError, "`micro_batches` is `0`; it must be from 1"),
        (2.0, TypeError, "`micro_batches` is `2.0`, which is not a whole number"),
    ],
)
def test_a_number_of_parts_is_checked(count, error, text):
    with pytest.raises(error, match=text):
        tr.Minimize(mse, SGD, micro_batches=count)
