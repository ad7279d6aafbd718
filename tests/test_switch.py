"""Switch and its short forms."""

from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Counting, doubles

import trainer as tr
from trainer._composed import evaluate_loss
from trainer._grad import value_and_grad
from trainer._losses import Given


def near(model, batch):
    return jnp.sum(jnp.abs(model))


def far(model, batch):
    return jnp.sum(model**2)


def counted(model, batch, *, step, epoch):
    return jnp.sum(model) * 0 + step, {"step": step, "epoch": epoch}


def sweep(loss, steps, epochs=None, model=1.0):
    """Value and metrics at each step, absent ones left out."""
    places = np.asarray(steps, np.int32), np.asarray(epochs or steps, np.int32)

    def one(place):
        output = evaluate_loss(loss, jnp.float32(model), None, Given(*place))
        return output.value, dict(output.metrics)

    values, metrics = jax.device_get(jax.jit(lambda p: jax.lax.map(one, p))(places))
    names = {
        name: [
            value if here else None
            for value, here in zip(
                m.value.tolist(), np.broadcast_to(m.present, len(steps)), strict=True
            )
        ]
        for name, m in metrics.items()
    }
    return values.tolist(), names


def test_switch_every_goes_round():
    first, second = (lambda m, b: m), (lambda m, b: -m)
    values, metrics = sweep(tr.switch_every(2, first, second), range(6))
    assert values == [1, 1, -1, -1, 1, 1]
    assert metrics == {"branch": [0, 0, 1, 1, 0, 0]}


def test_alternate_takes_turns():
    losses = [lambda m, b, k=k: m * k for k in (1, 2, 3)]
    assert sweep(tr.alternate(*losses), range(5))[0] == [1, 2, 3, 1, 2]
    turns = tr.alternate(*losses, counts=(2, 1, 1))
    assert sweep(turns, range(6))[0] == [1, 1, 2, 3, 1, 1]


def test_piecewise_changes_at_its_boundaries():
    losses = {"one": lambda m, b: m, "two": lambda m, b: m * 2, "three": counted}
    values, metrics = sweep(tr.piecewise(losses, [2, 3]), range(6))
    assert values == [1, 1, 2, 0, 1, 2]
    assert metrics["step"] == [None] * 3 + [0, 1, 2]


def test_a_branch_counts_its_own_steps():
    _, metrics = sweep(tr.switch_every(2, counted, counted), range(9), [7] * 9)
    assert metrics["step"] == [0, 1, 0, 1, 2, 3, 2, 3, 4]
    assert metrics["epoch"] == [7] * 9


def test_by_epoch_counts_epochs_and_leaves_the_step_alone():
    loss = tr.switch_every(2, counted, counted, by="epoch")
    steps, epochs = range(10, 18), [0, 0, 1, 2, 3, 3, 4, 5]
    _, metrics = sweep(loss, steps, epochs)
    assert metrics["branch"] == [0, 0, 0, 1, 1, 1, 0, 0]
    assert metrics["epoch"] == [0, 0, 1, 0, 1, 1, 2, 3]
    assert metrics["step"] == list(steps)
    late = tr.piecewise([far, counted], [2], by="epoch")
    assert sweep(late, steps, epochs)[1]["epoch"] == [None] * 3 + [0, 1, 1, 2, 3]


def test_by_epoch_in_a_run():
    loss = tr.piecewise([far, counted], [1], by="epoch")
    trainer = tr.Trainer(loss, optax.sgd(0.0))
    data = [jnp.zeros(2), jnp.zeros(2)]
    result = trainer.fit(jnp.ones(3), data, num_epochs=3, progress=False)
    assert result.history["branch"].tolist() == [0, 0, 1, 1, 1, 1]
    assert result.history["epoch"].tolist() == [None, None, 0, 0, 1, 1]
    assert result.history["step"].tolist() == [None, None, 2, 3, 4, 5]


def test_metrics_are_the_union_of_the_branches():
    def a(model, batch):
        return model, {"x": 1, "both": jnp.int32(3)}

    def b(model, batch):
        return model, {"y": jnp.bfloat16(2.0), "both": 0.5}

    _, metrics = sweep(tr.switch_every(1, a, b, far), range(3))
    assert metrics == {
        "x": [1, None, None],
        "y": [None, 2.0, None],
        "both": [3.0, 0.5, None],
        "branch": [0, 1, 2],
    }


def test_a_metric_that_is_always_there_may_come_before_one_that_is_not():
    a = lambda model, batch: (model, {"both": 1, "x": 5})
    b = lambda model, batch: (model, {"both": 2, "y": 6})
    _, metrics = sweep(tr.alternate(a, b), range(2))
    assert metrics == {"both": [1, 2], "x": [5, None], "y": [None, 6], "branch": [0, 1]}


def test_a_metric_of_every_branch_is_known_to_be_there():
    at = Given(jnp.int32(0), jnp.int32(0))
    output = evaluate_loss(tr.alternate(counted, counted), jnp.float32(1), None, at)
    assert output.metrics["step"].present is True
    assert output.metrics["branch"].present is True
    output = evaluate_loss(tr.alternate(counted, far), jnp.float32(1), None, at)
    assert output.metrics["step"].present is not True


def test_nested_branches_have_the_names_on_the_way():
    inner = tr.Switch(tr.Every(1), {"p": far, "q": near})
    middle = tr.Switch(tr.Every(1), {"u": inner, "v": near})
    loss = tr.Switch(tr.Every(1), {"a": middle, "b": far})
    _, metrics = sweep(loss, range(9))
    assert metrics == {
        "branch": [0, 1, 0, 1, 0, 1, 0, 1, 0],
        "a/branch": [0, None, 1, None, 0, None, 1, None, 0],
        "a/u/branch": [0, None, None, None, 1, None, None, None, 0],
    }
    assert loss.branches() == {
        "branch": ("a", "b"),
        "a/branch": ("u", "v"),
        "a/u/branch": ("p", "q"),
    }


def test_branches_of_a_switch_in_a_sum_in_a_switch():
    inner = tr.Switch(tr.Every(1), {"p": far, "q": near})
    loss = tr.Switch(tr.Every(1), {"a": tr.WeightedSum(t=inner, u=far), "b": far})
    _, metrics = sweep(loss, range(3), model=3.0)
    assert metrics["a/t/branch"] == [0, None, 1]
    assert metrics["t"] == [9.0, None, 3.0]
    assert loss.branches() == {"branch": ("a", "b"), "a/t/branch": ("p", "q")}


def test_values_of_different_precision_are_joined():
    half = lambda model, batch: jnp.sum(model.astype(jnp.bfloat16))
    output = evaluate_loss(
        tr.alternate(half, far), jnp.ones(3), None, Given(jnp.int32(0), jnp.int32(0))
    )
    assert output.value.dtype == jnp.float32
    assert output.value == 3.0


@pytest.mark.parametrize("how", ["step by step", "in one call"])
def test_a_branch_that_is_not_active_is_not_executed(how):
    ran = Counter()

    def watched(name, loss):
        def wrapped(model, batch):
            jax.debug.callback(lambda: ran.update([name]))
            return loss(model, batch)

        return wrapped

    losses = {name: watched(name, far) for name in "abc"}
    loss = tr.Switch(tr.Cycle((2, 1, 4)), losses)
    calls = 1 if how == "step by step" else 5
    trainer = tr.Trainer(loss, optax.sgd(0.1), steps_per_call=calls)
    trainer.fit(jnp.ones(3), None, num_steps=10, progress=False)
    jax.effects_barrier()
    assert ran == {"a": 4, "b": 2, "c": 4}


def test_each_loss_is_traced_once_in_a_whole_run():
    traced = []

    def noted(name):
        def loss(model, batch):
            traced.append(name)
            return jnp.sum(model**2)

        return loss

    a, b, c = map(noted, "abc")
    loss = tr.switch_every(
        2, a, tr.WeightedSum(b=b, c=(optax.linear_schedule(0, 1, 3), c))
    )
    trainer = tr.Trainer(loss, optax.adam(0.1))
    result = trainer.fit(jnp.ones(3), None, num_steps=9, progress=False)
    trainer.fit(result.state, None, num_steps=12, progress=False)
    assert sorted(traced) == ["a", "b", "c"]
    assert result.compiles == 1


def plain(model, batch):
    return model.w**2


def test_state_passes_a_branch_that_does_not_ask_for_it():
    loss = tr.alternate(doubles, plain)
    trainer = tr.Trainer(loss, optax.sgd(0.0))
    model = eqx.nn.make_with_state(Counting)()
    result = trainer.fit(model, None, num_steps=5, progress=False)
    assert result.compiles == 1
    assert result.history["seen"].tolist() == [1, None, 2, None, 4]
    assert result.model_state.get(result.model.index) == 8
    assert result.history["loss"].tolist() == [2, 4, 4, 4, 8]


def test_state_can_be_updated_in_several_branches():
    def adds(model, batch, *, state):
        seen = state.get(model.index)
        return model.w * seen, state.set(model.index, seen + 1)

    model, state = eqx.nn.make_with_state(Counting)()
    loss = tr.switch_every(1, doubles, adds, tr.alternate(plain, doubles))
    for step, expected in enumerate([2, 2, 1, 2, 2, 2]):
        at = Given(jnp.int32(step), jnp.int32(0), state=state)
        output = value_and_grad(loss, model, None, at)
        assert output.state.get(model.index) == expected
    assert state.get(model.index) == 1


def test_a_composed_loss_can_be_called_in_a_loss():
    schedule = tr.switch_every(2, near, far)

    def both(model, batch, *, step, key):
        value, metrics = schedule(model, batch, step=step, key=key)
        return value / 2, {"which": metrics["branch"].value}

    trainer = tr.Trainer(both, optax.sgd(0.0))
    history = trainer.fit(-3 * jnp.ones(2), None, num_steps=4, progress=False).history
    assert history["loss"].tolist() == [3, 3, 9, 9]
    assert history["which"].tolist() == [0, 0, 1, 1]


def test_names():
    lambdas = tr.Switch(tr.Every(1), [near, far, lambda m, b: m, near])
    assert lambdas.names == ("near", "far", "lambda_2", "near_3")
    named = tr.Switch(tr.Every(1), {"z": near, "a": far})
    assert named.names == ("z", "a")
    assert list(named.parts()) == ["z", "a"]
    assert sweep(named, [0, 1], model=3.0)[0] == [3, 9]
