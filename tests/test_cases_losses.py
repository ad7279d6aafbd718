"""Cases of losses that change, of randomness, and of a model's state."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from test_cases import by_hand, close, counted, fit, Linear, linear, mse, rows, same

import trainer as tr


def size(model, batch):
    return jnp.sum(model.w**2)


class Ridge(tr.Trainer):
    def __init__(self, beta):
        self.beta = beta
        super().__init__(optimizer=optax.sgd(0.1))

    def loss(self, model, batch):
        return mse(model, batch) + self.beta * size(model, batch)


class SetBeta(tr.AbstractCallback):
    def __init__(self, trainer):
        super().__init__(every=2)
        self.trainer = trainer

    def __call__(self, info):
        self.trainer.beta = 1.0


def test_case_05_an_attribute_set_between_epochs_is_refused_by_name():
    trainer = Ridge(0.0)
    hook = SetBeta(trainer)
    with pytest.raises(tr.RecompileError, match=r"`beta` of `Ridge` is set to `1\.0`"):
        trainer.fit(
            linear(), [rows(4)] * 2, num_epochs=2, callbacks=[hook], progress=False
        )
    assert trainer.beta == 0.0
    assert trainer.last_state is not None
    assert int(trainer.last_state.step) == 2


def test_case_05_a_schedule_changes_the_weight_between_epochs():
    def penalized(model, batch, *, beta):
        return mse(model, batch) + beta * size(model, batch)

    (data, traces), (penalty, more) = counted(mse), counted(size)
    loss = tr.WeightedSum(data=data, penalty=(lambda epoch: epoch, penalty), by="epoch")
    batch, optimizer = rows(4), optax.sgd(0.1)
    trainer = tr.Trainer(loss, optimizer)
    result = trainer.fit(linear(), [batch] * 2, num_epochs=2, progress=False)
    calls = [{"batch": batch, "beta": jnp.float32(i // 2)} for i in range(4)]
    close(result.model, by_hand(penalized, optimizer, linear(), calls)[0])
    close(result.model, [0.575237, 0.506557, 0.722222])
    assert (result.compiles, len(traces), len(more)) == (1, 1, 1)


class Gaussian(eqx.Module):
    mean: jax.Array
    logvar: jax.Array


def reconstruction(model, batch):
    return (model.mean - 2.0) ** 2


def divergence(model, batch):
    return 0.5 * (model.mean**2 + jnp.exp(model.logvar) - model.logvar - 1.0)


@pytest.mark.parametrize(
    ("warmup", "weights", "trained"),
    [
        (4, [0.0, 0.25, 0.5, 0.75, 1.0, 1.0], [1.372462, 0.746181]),
        (1, [0.0, 1.0, 1.0, 1.0, 1.0, 1.0], [1.310924, 0.663004]),
    ],
)
def test_case_06_a_warmup_starts_at_0_and_is_over_at_its_length(
    warmup, weights, trained
):
    (recon, traces), (kl, more) = counted(reconstruction), counted(divergence)
    loss = tr.WeightedSum(recon=recon, kl=(optax.linear_schedule(0.0, 1.0, warmup), kl))
    model, trainer = (
        Gaussian(jnp.ones(()), jnp.ones(())),
        tr.Trainer(loss, optax.sgd(0.1)),
    )
    result = trainer.fit(model, None, num_steps=6, progress=False)

    def weighted(model, weight):
        return reconstruction(model, None) + weight * divergence(model, None)

    calls = [{"weight": jnp.float32(w)} for w in weights]
    close(result.model, by_hand(weighted, optax.sgd(0.1), model, calls)[0])
    close(result.model, trained)
    history = result.history
    assert history["weight/kl"].tolist() == weights
    used = (history["loss"] - history["recon"])[1:] / history["kl"][1:]
    np.testing.assert_allclose(used, weights[1:], atol=1e-6)
    assert (result.compiles, len(traces), len(more)) == (1, 1, 1)


def test_case_06_no_warmup_is_an_error_and_not_nan():
    with pytest.raises(ValueError, match=r"`kl` .* 0 at every step.*transition_steps"):
        tr.WeightedSum(
            recon=reconstruction, kl=(optax.linear_schedule(0.0, 1.0, 0), divergence)
        )


class Point(eqx.Module):
    w: jax.Array


def bowl(model, batch):
    return jnp.sum((model.w - 1) ** 2)


def root(model, batch):
    """Has an infinite derivative at 0."""
    return jnp.sum(jnp.sqrt(model.w))


def test_case_08_the_loss_that_does_not_run_puts_no_nan_into_the_gradient():
    (first, traces), (second, more) = counted(bowl), counted(root)
    trainer = tr.Trainer(tr.piecewise([first, second], [3]), optax.sgd(0.25))
    result = trainer.fit(Point(jnp.zeros(2)), None, num_steps=5, progress=False)
    model = Point(jnp.zeros(2))
    for loss, count in ((bowl, 3), (root, 2)):
        model = by_hand(loss, optax.sgd(0.25), model, [{"batch": None}] * count)[0]
    close(result.model, model)
    close(result.model, [0.596194, 0.596194])
    assert result.history["branch"].tolist() == [0, 0, 0, 1, 1]
    assert (result.compiles, len(traces), len(more)) == (1, 1, 1)


def test_case_08_the_gradient_is_finite_under_vmap_over_steps():
    loss = tr.piecewise([bowl, root], [3])

    def total(w):
        at = lambda step: loss(Point(w), None, step=step)[0]
        return jnp.sum(jax.vmap(at)(jnp.array([0, 1])))

    assert jax.grad(total)(jnp.zeros(2)).tolist() == [-4.0, -4.0]


def test_case_08_an_ensemble_trains_with_finite_gradients():
    switch = tr.piecewise([bowl, root], [3])

    def ensemble(model, batch, *, step):
        each = eqx.filter_vmap(lambda member: switch(member, batch, step=step)[0])
        return jnp.sum(each(model))

    model = Point(jnp.zeros((3, 2)))
    result = fit(ensemble, optax.sgd(0.25), model, None, num_steps=5)
    close(result.model, [0.596194] * 6)


def dropped(model, batch, *, key):
    """Reports which of 16 numbers each of four examples keeps, as the bits of one."""
    keep = jax.vmap(eqx.nn.Dropout(0.5))(jnp.ones((4, 16)), key=jr.split(key, 4)) > 0
    code = jnp.sum(keep * 2 ** jnp.arange(16), axis=1)
    return model**2, {f"row{i}": code[i] for i in range(4)}


def masks(history):
    """One tuple of four masks for each step."""
    return list(zip(*(history[f"row{i}"].tolist() for i in range(4)), strict=True))


def test_case_17_every_step_and_example_has_its_own_dropout_mask():
    run = lambda seed: masks(
        fit(
            dropped, optax.sgd(0.1), jnp.ones(()), None, num_steps=5, key=jr.key(seed)
        ).history
    )
    zero, again, one = run(0), run(0), run(1)
    assert len({mask for step in zero for mask in step}) == 20
    assert zero == again
    assert not set(zero) & set(one)
    for step, found in enumerate(zero):
        _, metrics = dropped(jnp.ones(()), None, key=jr.fold_in(jr.key(0), step))
        assert found == tuple(int(metrics[f"row{i}"]) for i in range(4))


def test_case_17_a_resumed_run_repeats_the_masks():
    trainer = tr.Trainer(dropped, optax.sgd(0.1))
    run = lambda model, end: trainer.fit(model, None, num_steps=end, progress=False)
    whole, begun = run(jnp.ones(()), 5), run(jnp.ones(()), 3)
    resumed = run(begun.state, 5)
    assert masks(resumed.history) == masks(whole.history)[3:]
    assert resumed.compiles == 1


class Normalized(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        one, two = jr.split(key)
        self.first = eqx.nn.Linear(2, 3, key=one)
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")
        self.last = eqx.nn.Linear(3, "scalar", key=two)

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(jnp.tanh(x)), state


def normalized_mse(model, batch, *, state):
    x, y = batch
    forward = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    found, state = forward(x, state)
    return jnp.mean((found - y) ** 2), state


def test_case_18_running_statistics_are_those_of_the_threaded_state():
    x, y = rows(16)
    batches = [(x[:8], y[:8]), (x[8:], y[8:])]
    make = lambda: eqx.nn.make_with_state(Normalized)(jr.PRNGKey(0))
    result = fit(normalized_mse, optax.sgd(0.05), make(), batches, num_epochs=2)

    model, state = make()

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def differentiate(model, state, batch):
        return normalized_mse(model, batch, state=state)

    for batch in batches * 2:
        (_, state), gradient = differentiate(model, state, batch)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.05 * g, gradient))
    close(result.model, model)
    close(result.model_state, state)
    count, mean, variance = jax.tree.leaves(result.model_state)
    assert count == 4
    close(mean, [-0.01745, -0.00473, -0.01778], atol=1e-5)
    close(variance, [0.96352, 0.96486, 0.97430], atol=1e-5)
    assert result.history["loss"][-1] == pytest.approx(2.32982, abs=1e-5)


class Dropping(eqx.Module):
    drop: eqx.nn.Dropout
    linear: Linear

    def __call__(self, x, key=None):
        return self.linear(self.drop(x, key=key))


def dropping_mse(model, batch, *, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x, jr.split(key, len(x))) - y) ** 2)


@pytest.mark.parametrize("keyless", [False, True])
def test_case_19_validation_leaves_no_trace_in_training(keyless):
    batch, model = rows(8), Dropping(eqx.nn.Dropout(0.5), linear())
    (loss, traces), (other, evaluations) = counted(dropping_mse), counted(mse)
    trainer, other = tr.Trainer(loss, optax.sgd(0.1)), other if keyless else None
    evaluate = tr.Evaluate([batch], every=2, loss=other)
    run = lambda callbacks: trainer.fit(
        model, [batch], num_steps=6, callbacks=callbacks, progress=False
    )
    with_it, plain = run([evaluate]), run([])
    same(with_it.model, plain.model)
    assert with_it.history["loss"].tolist() == plain.history["loss"].tolist()

    calls = [{"batch": batch, "key": jr.fold_in(jr.key(0), i)} for i in range(6)]
    close(with_it.model, by_hand(dropping_mse, optax.sgd(0.1), model, calls)[0])
    close(with_it.model, [0.513223, 0.72279, 0.342227])
    validation = with_it.history["validation/loss"]
    assert with_it.history.steps("validation/loss").tolist() == [2, 4, 6]
    np.testing.assert_allclose(validation, [1.671639, 1.504799, 1.405353], atol=1e-6)
    for held in (with_it.state, with_it.model):
        assert trainer.evaluate(held, [batch], loss=other)["loss"] == validation[-1]
    # The training loss is traced for the step, and what is evaluated once more.
    assert (len(traces), len(evaluations)) == ((1, 1) if keyless else (2, 0))
    assert plain.compiles == 1
