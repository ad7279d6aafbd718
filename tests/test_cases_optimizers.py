"""Cases of optimizers: two in a row, frozen parts, line searches, accumulation."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from test_cases import by_hand, close, counted, fit, linear, mse, parameters, rows, same

import trainer as tr


def train(update, model, data, num_steps, steps_per_call="auto", **kwargs):
    """Fit by an update, whose step is compiled once."""
    trainer = tr.Trainer(update=update, steps_per_call=steps_per_call)
    result = trainer.fit(model, data, num_steps=num_steps, progress=False, **kwargs)
    assert result.compiles == 1
    return result


def first_adam(optimizer=None):
    adam = tr.Minimize(mse, optimizer or optax.adam(0.05))
    second = tr.Minimize(mse, optax.lbfgs())
    return tr.SwitchUpdate(tr.At((20,)), {"adam": adam, "lbfgs": second})


@pytest.mark.parametrize("steps_per_call", [1, 7])
def test_case_11_lbfgs_takes_over_where_adam_ended(steps_per_call, step_compiles):
    batch = rows(16)
    result = train(first_adam(), linear(), [batch], 30, steps_per_call)
    loss, final = result.history["loss"], mse(result.model, batch)
    _, by_adam, _ = by_hand(mse, optax.adam(0.05), linear(), [{"batch": batch}] * 20)
    close(loss[:20], by_adam)
    close(loss[20:21], [0.331160])
    assert (np.diff(loss[20:]) <= 1e-9).all()
    assert final < 1e-8
    close(result.model, [1.0, 2.0, 0.5], atol=1e-3)
    assert result.history["branch"].tolist() == [0] * 20 + [1] * 10
    assert result.history.steps("loss").tolist() == list(range(30))
    assert int(result.state.step) == 30
    assert step_compiles() == 1


def test_case_11_lbfgs_starts_afresh_and_goes_on_after_a_stop():
    data, trainer = [rows(16)], tr.Trainer(update=first_adam())
    run = lambda start, end: trainer.fit(start, data, num_steps=end, progress=False)
    whole, half, more = run(linear(), 30), run(linear(), 20), run(linear(), 23)
    for begun in (half, more):
        same(run(begun.state, 30).model, whole.model)
    fresh = first_adam().init(linear())["lbfgs"]
    assert eqx.tree_equal(half.state.opt_state["lbfgs"], fresh)
    alone = train(tr.Minimize(mse, optax.lbfgs()), half.model, data, 10)
    close(whole.model, alone.model)
    assert whole.compiles == 1


def pairs():
    x, _ = rows(8)
    return x, np.stack([x[:, 0], x[:, 1] ** 2], 1)


def net():
    return eqx.nn.MLP(2, 2, 4, 1, key=jr.PRNGKey(0))


def last_weight_frozen():
    labels = jax.tree.map(lambda _: "train", eqx.filter(net(), eqx.is_inexact_array))
    return eqx.tree_at(lambda tree: tree.layers[-1].weight, labels, "freeze")


def by_labels(labels):
    transforms = {"train": optax.adam(0.1), "freeze": optax.set_to_zero()}
    return optax.multi_transform(transforms, labels)


@pytest.mark.parametrize("way", ["labels", "where", "parts"])
def test_case_12_the_last_weight_is_frozen_to_the_bit(way):
    trained = lambda m: [m.layers[0], m.layers[-1].bias]
    adam = optax.adam(0.1)
    if way == "labels":
        update = tr.Minimize(mse, by_labels(lambda _: last_weight_frozen()))
    elif way == "where":
        update = tr.Minimize(mse, adam, where=trained)
    else:
        update = tr.Minimize(mse, tr.Parts(rest=tr.Part(adam, trained)))
    model = train(update, net(), [pairs()], 3).model
    assert (model.layers[-1].weight == net().layers[-1].weight).all()
    close(model.layers[0].bias, [-0.778418, -0.28255, -0.230683, 0.705419])
    close(model.layers[-1].bias, [-0.112825, 0.134822])


def test_case_12_a_tree_of_labels_for_a_model_that_can_be_called_says_what_to_write():
    with pytest.raises(TypeError, match=r"lambda _: labels.*tr\.Parts"):
        fit(mse, by_labels(last_weight_frozen()), net(), [pairs()], num_steps=3)


Z = jnp.linspace(-1, 2, 8)
REAL = jnp.linspace(2, 3, 8)


def critic(model, batch):
    fake = model["g"][0] * Z + model["g"][1]
    d = model["d"]
    return jnp.mean(d * fake) - jnp.mean(d * REAL) + 0.1 * d**2


def generator(model, batch):
    return -jnp.mean(model["d"] * (model["g"][0] * Z + model["g"][1]))


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_case_14_a_generator_is_updated_half_as_often_as_its_critic(steps_per_call):
    (d_loss, traces), (g_loss, more) = counted(critic), counted(generator)
    rate = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.1, 9))
    d = tr.Minimize(d_loss, optax.adam(0.1), where=lambda m: m["d"])
    g = tr.Minimize(g_loss, rate, where=lambda m: m["g"])
    every_other = tr.SwitchUpdate(tr.Cycle((1, 1)), {"rest": None, "turn": g})
    update = tr.JointUpdate({"d": d, "g": every_other}, order="sequential")
    model = {"d": jnp.ones(()), "g": jnp.array([1.0, 0.0])}
    result = train(update, model, None, 6, steps_per_call)
    close(result.model["d"], [1.59499], atol=1e-5)
    close(result.model["g"], [1.30042, 0.30042], atol=1e-5)
    counts = [result.state.opt_state["d"][0].count]
    counts += [result.state.opt_state["g"]["turn"].count]
    assert counts == [6, 3]
    assert result.history.steps("g/turn/loss").tolist() == list(range(6))
    losses = result.history["g/turn/loss"]
    assert losses.mask.tolist() == [True, False] * 3
    assert (len(traces), len(more)) == (1, 1)


def only_bias(model):
    return model.b


FREEZING = {
    "where": lambda adamw: tr.Minimize(mse, adamw, where=only_bias),
    "parts": lambda adamw: tr.Minimize(mse, tr.Parts(b=tr.Part(adamw, only_bias))),
}


@pytest.mark.parametrize("way", FREEZING)
def test_case_16_what_is_frozen_does_not_decay_and_has_no_moments(way):
    update = FREEZING[way](optax.adamw(0.1, weight_decay=0.1))
    result = train(update, linear(), [rows(8)], 5)
    assert (result.model.w == linear().w).all()
    close(result.model.b, [-0.058157])
    moments = eqx.filter(result.state.opt_state, eqx.is_inexact_array)
    assert sum(leaf.size for leaf in jax.tree.leaves(moments)) == 2


def test_case_16_momentum_from_before_does_not_move_what_is_frozen_later():
    part = lambda where, **at: tr.Part(optax.adamw(0.1, weight_decay=0.1), where, **at)
    parts = tr.Parts(w=part(lambda m: m.w, stop=3), b=part(only_bias))
    run = lambda n: fit(mse, parts, linear(), [rows(8)], num_steps=n)
    frozen, after = run(3), run(8)
    assert (frozen.model.w == after.model.w).all()
    assert (frozen.model.w != linear().w).all()
    assert frozen.model.b != after.model.b
    assert eqx.tree_equal(frozen.state.opt_state["w"], after.state.opt_state["w"])
    assert after.history["w/acts"].tolist() == [1] * 3 + [0] * 5


def curve():
    x = np.linspace(-2, 2, 32).astype(np.float32).reshape(-1, 1)
    return x, np.sin(2 * x[:, 0]).astype(np.float32)


def lbfgs_by_hand(model, batch, num_steps):
    optimizer, losses = optax.lbfgs(), []
    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss = lambda params: mse(eqx.combine(params, static), batch)

    @jax.jit
    def step(params, state):
        value, grad = jax.value_and_grad(loss)(params)
        more = {"value": value, "grad": grad, "value_fn": loss}
        updates, state = optimizer.update(grad, state, params, **more)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    for _ in range(num_steps):
        params, state, value = step(params, state)
        losses.append(value)
    return eqx.combine(params, static), losses


@pytest.mark.parametrize("steps_per_call", [1, 7])
def test_case_24_lbfgs_is_given_like_any_optimizer(steps_per_call, step_compiles):
    activation, key = jnp.tanh, jr.PRNGKey(0)
    model = eqx.nn.MLP(1, "scalar", 8, 1, activation, key=key)
    update = tr.Minimize(mse, optax.lbfgs())
    result = train(update, model, [curve()], 15, steps_per_call)
    losses = result.history["loss"]
    _, by_loop = lbfgs_by_hand(model, curve(), 15)
    close(losses, by_loop, atol=1e-4)
    assert losses[0] == pytest.approx(0.58518, abs=1e-5)
    assert (np.diff(losses) <= 1e-6).all()
    assert mse(result.model, curve()) < 0.05
    assert step_compiles() == 1


class Scale(tr.AbstractCallback):
    """Records the factor that `reduce_on_plateau` has come to."""

    def __call__(self, info):
        return {"scale": info.state.opt_state[1].scale}


@pytest.mark.parametrize(
    ("constant", "scales"), [(1.0, [1, 1, 0.5, 0.5, 0.25, 0.25]), (-1.0, [1] * 6)]
)
def test_case_25_a_rate_that_falls_on_a_plateau_is_told_the_loss(constant, scales):
    def flat(model, batch):
        """A loss that does not change, with a gradient of 1."""
        total = jnp.sum(model.w) + model.b
        return constant + total - jax.lax.stop_gradient(total)

    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=2)
    optimizer = optax.chain(optax.sgd(0.1), plateau)
    watch = {"num_steps": 6, "callbacks": [Scale(1)]}
    result = fit(flat, optimizer, linear(), None, **watch)
    assert result.history["scale"].tolist() == scales
    close(result.model, parameters(linear()) - 0.1 * sum(scales))
    if constant > 0:
        close(result.model, [-0.25, -0.15, -0.35])


def small():
    return eqx.nn.MLP(2, "scalar", 4, 1, key=jr.PRNGKey(0))


BIG_BATCH = [-0.291511, 0.425345, -0.161906, 0.579459, -0.30034, -0.668577]
BIG_BATCH += [-0.453944, 0.098229, -0.565671, -0.24054, -0.503235, 0.441679]
BIG_BATCH += [0.071223, -0.260717, -0.414177, -0.167223, -0.389893]


def cut(size):
    x, y = rows(16)
    return [(x[i : i + size], y[i : i + size]) for i in range(0, 16, size)]


class Models(tr.AbstractCallback):
    def __init__(self):
        super().__init__(1)
        self.models = []

    def __call__(self, info):
        self.models.append(info.model)


@pytest.mark.parametrize("form", ["itself", "transformation"])
def test_case_59_two_small_batches_are_one_big_one(form):
    steps, seen = optax.MultiSteps(optax.adamw(0.01), 2), Models()
    optimizer = steps if form == "itself" else steps.gradient_transformation()
    watch = {"num_steps": 4, "callbacks": [seen]}
    result = fit(mse, optimizer, small(), cut(4), **watch)
    big = fit(mse, optax.adamw(0.01), small(), cut(8), num_steps=2)
    close(result.model, big.model)
    close(result.model, BIG_BATCH)
    one, two, three, four = seen.models
    same(one, small())
    same(two, three)
    assert (parameters(two) != parameters(one)).any()
    assert (parameters(four) != parameters(three)).any()


def test_case_59_a_batch_in_parts_is_one_big_one():
    update = tr.Minimize(mse, optax.adamw(0.01), micro_batches=2)
    close(train(update, small(), cut(8), 2).model, BIG_BATCH)


def test_case_60_the_rate_counts_updates_and_a_schedule_of_losses_steps():
    rate = optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.1, 0.0, 4))
    down = lambda model, batch, *, step: (model, {"seen": step})
    same_down = lambda model, batch: model
    loss, seen = tr.piecewise([down, same_down], [5]), Models()
    optimizer = optax.MultiSteps(rate, 2)
    watch = {"num_steps": 8, "callbacks": [seen], "progress": False}
    result = tr.Trainer(loss, optimizer).fit(jnp.zeros(()), None, **watch)
    close(seen.models, [0.0, -0.1, -0.1, -0.175, -0.175, -0.225, -0.225, -0.25])
    history = result.history
    assert history["branch"].tolist() == [0] * 5 + [1] * 3
    assert history["seen"].compressed().tolist() == [0, 1, 2, 3, 4]
    close(history["learning_rate"][1::2], [0.1, 0.075, 0.05, 0.025])
    state = result.state
    assert (state.step, state.opt_state.gradient_step) == (8, 4)
    assert result.compiles == 1
