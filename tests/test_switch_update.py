"""Updates that take turns or go together, against the loops that one would write."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import batches, equal, flat, mlp, Net, predict, Twins

import trainer as tr


SGD = optax.sgd(0.1)
of_a, of_b = (lambda m: m.a), (lambda m: m.b)


class Pair(eqx.Module):
    critic: eqx.nn.MLP
    generator: eqx.nn.MLP


class Stateful(eqx.Module):
    """Two networks with BatchNorm and Dropout."""

    critic: Net
    generator: Net

    def __init__(self):
        self.critic, self.generator = Net(jr.key(1)), Net(jr.key(2))


of_critic, of_generator = (lambda m: m.critic), (lambda m: m.generator)


def critic_loss(model, batch, *, key):
    x, y = batch
    seen = jax.vmap(model.critic)(x + 0.1 * jr.normal(key, x.shape))
    return jnp.mean((seen - y) ** 2)


def generator_loss(model, batch, *, key):
    made = jax.vmap(model.generator)(batch[0])[:, None] * batch[0]
    return jnp.mean((jax.vmap(model.critic)(made) - 1) ** 2)


ADAM, RMS = optax.adam(1e-2), optax.rmsprop(1e-2)


def fit(update, model, data=None, num_steps=6, **options):
    trainer = tr.Trainer(update=update, steps_per_call=options.pop("k", 7))
    return trainer.fit(model, data, num_steps=num_steps, progress=False, **options)


def twins():
    return Twins(jnp.float32(5.0), jnp.arange(1.0, 4.0))


def pull_a(model, batch):
    return (model.a - 1) ** 2 + 0 * jnp.sum(model.b)


def pull_b(model, batch, *, step):
    return jnp.sum((model.b - model.a) ** 2), {"step": step}


a, b = tr.Minimize(pull_a, SGD, where=of_a), tr.Minimize(pull_b, SGD, where=of_b)


def by_hand(model, num_steps):
    """Five critic steps, then one of the generator: a cond between two optimizers."""
    static = eqx.filter(model, eqx.is_array, inverse=True)
    params = lambda part: eqx.filter(part, eqx.is_inexact_array)
    states = [ADAM.init(params(model.critic)), RMS.init(params(model.generator))]

    @jax.jit
    def step(arrays, states, batch, i):
        key = jr.fold_in(jr.key(0), i)

        def turn(k, where, loss, optimizer):
            def make(arrays, states):
                model = eqx.combine(arrays, static)
                whole = lambda part: eqx.tree_at(where, model, part)
                value = lambda part: loss(whole(part), batch, key=key)
                value, grad = eqx.filter_value_and_grad(value)(where(model))
                now = params(where(model))
                updates, new = optimizer.update(grad, states[k], now)
                model = whole(eqx.apply_updates(where(model), updates))
                states = [new if n == k else old for n, old in enumerate(states)]
                return eqx.filter(model, eqx.is_array), states, value

            return make

        critic = turn(0, of_critic, critic_loss, ADAM)
        generator = turn(1, of_generator, generator_loss, RMS)
        return jax.lax.cond(i % 6 < 5, critic, generator, arrays, states)

    arrays, values = eqx.filter(model, eqx.is_array), []
    for i in range(num_steps):
        batch = batches()[i % 4]
        arrays, states, value = step(arrays, states, batch, jnp.int32(i))
        values.append(float(value))
    return arrays, states, values


def five_to_one(critic, generator):
    one = tr.Minimize(critic, ADAM, where=of_critic)
    other = tr.Minimize(generator, RMS, where=of_generator)
    cycle = tr.Cycle((5, 1))
    return tr.SwitchUpdate(cycle, {"critic": one, "generator": other})


def test_five_to_one_is_two_optimizers_in_a_loop():
    model = Pair(mlp(1), mlp(2))
    arrays, (adam, rms), values = by_hand(model, 13)
    update = five_to_one(critic_loss, generator_loss)
    for k in (1, 7):
        result = fit(update, model, batches(), 13, k=k, key=jr.key(0))
        assert equal(result.model, arrays)
        assert equal(result.state.opt_state["critic"], adam)
        assert equal(result.state.opt_state["generator"], rms)
        assert result.history["loss"].tolist() == values
        assert result.history["branch"].tolist() == [int(i % 6 > 4) for i in range(13)]
        assert result.history["generator/loss"].count() == 2
        assert (result.compiles, int(result.state.step)) == (1, 13)
        assert result.state.opt_state["critic"][0].count == 11


def test_what_is_idle_does_not_change_by_a_bit():
    def loss_of(where):
        def loss(model, batch, *, state, key):
            prediction, state = predict(where(model), batch[0], state, key)
            return jnp.mean((prediction - batch[1]) ** 2), state

        return loss

    trainer = tr.Trainer(update=five_to_one(loss_of(of_critic), loss_of(of_generator)))
    run = lambda model, to: trainer.fit(model, batches(), num_steps=to, progress=False)
    start = trainer.init(eqx.nn.make_with_state(Stateful)())
    five = run(start, 5).state
    six = run(five, 6).state

    def same(name, old, new):
        was, now = getattr(old.model, name), getattr(new.model, name)
        return [
            equal(was, now),
            equal(old.opt_state[name], new.opt_state[name]),
            equal(old.model_state.substate(was), new.model_state.substate(now)),
        ]

    assert same("generator", start, five) == [True] * 3
    assert same("critic", start, five) == [False] * 3
    assert same("critic", five, six) == [True] * 3
    assert same("generator", five, six) == [False] * 3


def valley(w, batch):
    return (1 - w[0]) ** 2 + 10 * (w[1] - w[0] ** 2) ** 2


def test_adam_and_then_lbfgs_is_a_loop():
    adam, lbfgs, w = optax.adam(0.1), optax.lbfgs(), jnp.array([-1.0, 1.5])
    first, second = tr.Minimize(valley, adam), tr.Minimize(valley, lbfgs)
    update = tr.SwitchUpdate(tr.At([8]), {"adam": first, "lbfgs": second})
    result = fit(update, w, num_steps=30)
    loss = lambda w: valley(w, None)
    state, values = (adam.init(w), lbfgs.init(w)), []

    @jax.jit
    def step(w, state, i):
        value, grad = jax.value_and_grad(loss)(w)

        def with_adam(w, state):
            updates, new = adam.update(grad, state[0], w)
            return optax.apply_updates(w, updates), (new, state[1])

        def with_lbfgs(w, state):
            more = {"value": value, "grad": grad, "value_fn": loss}
            updates, new = lbfgs.update(grad, state[1], w, **more)
            return optax.apply_updates(w, updates), (state[0], new)

        return value, *jax.lax.cond(i < 8, with_adam, with_lbfgs, w, state)

    for i in range(30):
        value, w, state = step(w, state, jnp.int32(i))
        values.append(float(value))
    np.testing.assert_allclose(result.history["loss"][:16], values[:16], rtol=1e-4)
    found = flat(result.state.opt_state["adam"])
    np.testing.assert_allclose(found, flat(state[0]), rtol=1e-5)
    assert result.state.opt_state["adam"][0].count == 8
    assert result.history["loss"][-1] < 1e-4 * result.history["loss"][8]


def test_three_updates_each_count_their_own_steps():
    def loss(model, batch, *, step, epoch):
        return jnp.sum(model["w"] ** 2), {"step": step, "epoch": epoch}

    schedule = lambda count: 0.1 / (1 + count)
    scheduled = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    one = tr.Minimize(loss, scheduled)
    cycle = tr.Cycle((2, 1, 3))
    update = tr.SwitchUpdate(cycle, {"x": one, "y": one, "z": one}, overlap=True)
    result = fit(update, {"w": jnp.ones(2)}, [jnp.zeros(1)] * 4, 14)
    history, expected = result.history, {"x": [], "y": [], "z": []}
    for i in range(14):
        expected["xxyzzz"[i % 6]].append(i)
    for name, steps in expected.items():
        local = list(range(len(steps)))
        assert history[f"{name}/step"].compressed().tolist() == local
        assert history[f"{name}/epoch"].compressed().tolist() == [s // 4 for s in steps]
        assert np.flatnonzero(~history[f"{name}/loss"].mask).tolist() == steps
        rates = history[f"{name}/learning_rate"].compressed()
        np.testing.assert_allclose(rates, [schedule(s) for s in local], rtol=1e-6)
    assert not np.ma.is_masked(history["loss"])
    assert int(result.state.step) == 14


def test_nothing_happens_in_a_step_without_an_update():
    update = tr.SwitchUpdate(tr.Cycle((1, 2)), {"a": a, "rest": None})
    result = fit(update, twins(), num_steps=7)
    assert result.history["loss"].mask.tolist() == [i % 3 > 0 for i in range(7)]
    one = fit(a, twins(), num_steps=3)
    assert equal(result.model, one.model)
    assert result.history["loss"].compressed().tolist() == one.history["loss"].tolist()
    assert list(result.state.opt_state) == ["a"]
    assert result.history.branches == {"branch": ("a", "rest")}


def test_a_nested_step_without_an_update_reports_no_loss():
    inner = tr.SwitchUpdate(tr.Cycle((1, 1)), [None, b])
    result = fit(tr.SwitchUpdate(tr.Every(1), {"a": a, "in": inner}), twins(), None, 8)
    assert result.history["in/branch"].compressed().tolist() == [0, 1, 0, 1]
    assert result.history["in/1/loss"].mask.tolist() == [i % 4 != 3 for i in range(8)]
    assert np.ma.getmaskarray(result.history["loss"]).tolist() == [
        i % 4 == 1 for i in range(8)
    ]


def test_a_switch_by_epochs_counts_epochs():
    def loss(model, batch, *, step, epoch):
        return model.a**2, {"step": step, "epoch": epoch}

    one = tr.Minimize(loss, SGD, where=of_a)
    update = tr.SwitchUpdate(tr.At([2]), {"x": None, "y": one}, by="epoch")
    result = fit(update, twins(), [jnp.zeros(1)] * 2, 8)
    assert result.history["branch"].tolist() == [0] * 4 + [1] * 4
    assert result.history["y/epoch"].compressed().tolist() == [0, 0, 1, 1]
    assert result.history["y/step"].compressed().tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("order", ["simultaneous", "sequential"])
def test_joint_updates_are_a_loop(order):
    update = tr.JointUpdate({"a": a, "b": b}, order=order)
    result = fit(update, twins(), num_steps=5)
    x, y = np.float32(5), np.arange(1, 4, dtype=np.float32)
    rate, two = np.float32(0.1), np.float32(2)
    for i in range(5):
        new = x - rate * (two * (x - 1))
        seen = x if order == "simultaneous" else new
        np.testing.assert_allclose(result.history["a/loss"][i], (x - 1) ** 2, rtol=1e-5)
        found = result.history["b/loss"][i]
        np.testing.assert_allclose(found, ((y - seen) ** 2).sum(), rtol=1e-5)
        x, y = new, y - rate * (two * (y - seen))
    np.testing.assert_allclose(result.model.b, y, rtol=1e-5)
    assert result.history["b/step"].tolist() == list(range(5))
    assert "branch" not in result.history


def test_a_switch_in_joint_updates_rests_alone():
    every_other = tr.SwitchUpdate(tr.Cycle((1, 1)), [None, b])
    result = fit(tr.JointUpdate({"a": a, "b": every_other}), twins(), num_steps=6)
    assert result.history["b/1/step"].compressed().tolist() == [0, 1, 2]
    assert result.history["a/loss"].tolist() == fit(a, twins()).history["loss"].tolist()
    assert result.history.branches == {"b/branch": ("nothing_0", "1")}
    assert list(result.state.opt_state["b"]) == ["1"]


def test_a_plateau_hands_over_to_lbfgs():
    adam, lbfgs = (
        tr.Minimize(valley, optax.adam(0.9)),
        tr.Minimize(valley, optax.lbfgs()),
    )
    update = tr.SwitchUpdate(tr.Plateau(patience=2), {"adam": adam, "lbfgs": lbfgs})
    result = fit(update, jnp.array([-1.0, 1.5]), num_steps=40)
    loss, best, bad, move = result.history["loss"], np.inf, 0, 0
    while bad < 2:
        best, bad = (loss[move], 0) if loss[move] < best else (best, bad + 1)
        move += 1
    assert result.history["branch"].tolist() == [0] * move + [1] * (40 - move)
    assert result.state.opt_state["adam"][0].count == move
    assert loss[-1] < 1e-3 < loss[move]
