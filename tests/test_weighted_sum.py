"""WeightedSum: weights, terms that are left out, metrics, state."""

from collections import Counter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Counting, doubles
from hypothesis import given, settings, strategies as st

import trainer as tr
from trainer._composed import evaluate_loss
from trainer._grad import value_and_grad
from trainer._losses import Given


ZERO = Given(jnp.int32(0), jnp.int32(0))


def fit(model, batch):
    return jnp.sum((model - 1.0) ** 2)


def size(model, batch):
    return jnp.sum(model**2)


def broken(model, batch):
    return jnp.sum(jnp.sqrt(model - 100.0))


def counted(model, batch, *, step, epoch):
    return jnp.sum(model), {"step": step, "epoch": epoch}


def at(step, epoch=0):
    return Given(jnp.int32(step), jnp.int32(epoch))


def value_of(loss, given=ZERO, model=2.0):
    return float(evaluate_loss(loss, jnp.float32(model), None, given).value)


def train(loss, num_steps=4, model=None, learning_rate=0.0):
    trainer = tr.Trainer(loss, optax.sgd(learning_rate))
    model = jnp.ones(2) if model is None else model
    return trainer.fit(model, None, num_steps=num_steps, progress=False)


@settings(max_examples=10)
@given(
    weights=st.tuples(*[st.floats(-4, 4, width=16).filter(bool)] * 3),
    as_array=st.booleans(),
)
def test_a_sum_is_linear_in_its_weights(weights, as_array):
    model, losses = jnp.asarray([0.5, -2.0]), (fit, size, lambda m, b: jnp.prod(m))
    given = [jnp.float32(w) for w in weights] if as_array else weights
    terms: Any = {
        f"t{n}": pair for n, pair in enumerate(zip(given, losses, strict=True))
    }
    value, grad = value_and_grad(tr.WeightedSum(**terms), model, None, ZERO).value
    single = [jax.value_and_grad(loss)(model, None) for loss in losses]
    expected = sum(w * float(v) for w, (v, _) in zip(weights, single, strict=True))
    slope = sum(w * np.float64(g) for w, (_, g) in zip(weights, single, strict=True))
    assert float(value) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(grad, slope, rtol=1e-5, atol=1e-5)


def test_a_term_without_a_weight_counts_once():
    assert value_of(tr.WeightedSum(a=fit, b=(3, size))) == 1.0 + 3 * 4.0


@pytest.mark.parametrize("weight", [np.float64(0.5), np.array(0.5), jnp.array(0.5)])
def test_a_weight_may_be_any_number(weight):
    assert value_of(tr.WeightedSum(a=(weight, size))) == 2.0


def test_a_schedule_sees_the_step():
    loss = tr.WeightedSum(a=fit, b=(optax.linear_schedule(0.0, 1.0, 4), size))
    assert [value_of(loss, at(s)) for s in range(6)] == [1, 2, 3, 4, 5, 5]


def test_a_schedule_by_epoch_sees_the_epoch():
    loss = tr.WeightedSum(by="epoch", a=(lambda epoch: epoch + 1, size))
    assert value_of(loss, at(7, 2)) == 12.0
    inside = tr.Switch(tr.Every(2), [loss, fit], by="epoch")
    assert value_of(inside, at(7, 5)) == 16.0  # the branch's fourth epoch
    data = [jnp.zeros(1)] * 2
    trainer = tr.Trainer(loss, optax.sgd(0.0))
    result = trainer.fit(jnp.ones(1), data, num_epochs=3, progress=False)
    assert result.history["weight/a"].tolist() == [1, 1, 2, 2, 3, 3]


def test_a_schedule_in_a_switch_counts_the_steps_of_its_branch():
    ramp = tr.WeightedSum(a=(lambda step: step + 1.0, counted))
    loss = tr.switch_every(2, ramp, size)
    history = train(loss, 6).history
    assert history["weight/a"].tolist() == [1, 2, None, None, 3, 4]
    assert history["a/step"].tolist() == [0, 1, None, None, 2, 3]


def test_what_is_reported():
    loss = tr.WeightedSum(
        a=(2.0, counted), b=(lambda step: 0.5 * (step >= 2), size), c=(0.0, fit)
    )
    history = train(loss).history
    assert history["a"].tolist() == [2, 2, 2, 2]
    assert history["a/step"].tolist() == [0, 1, 2, 3]
    assert history["b"].tolist() == [None, None, 2, 2]
    assert history["weight/b"].tolist() == [0, 0, 0.5, 0.5]
    assert history["c"].tolist() == [None] * 4
    assert history["loss"].tolist() == [4, 4, 5, 5]
    assert not {"weight/a", "weight/c"} & set(history)


def test_the_weight_reported_is_the_one_used():
    schedule: Any = optax.cosine_decay_schedule(1.0, 10)
    history = train(tr.WeightedSum(a=(schedule, size)), 10).history
    np.testing.assert_array_equal(history["loss"], history["weight/a"] * 2)
    expected = [schedule(step) for step in range(10)]
    np.testing.assert_allclose(history["weight/a"], expected, rtol=1e-5)


def test_sums_in_sums_have_the_names_on_the_way():
    inner = tr.WeightedSum(x=fit, y=(lambda step: step, tr.alternate(size, counted)))
    loss = tr.WeightedSum(outer=(2.0, inner))
    history = train(loss, 3).history
    assert history["outer/weight/y"].tolist() == [0, 1, 2]
    assert history["outer/y/branch"].tolist() == [None, 1, 0]
    assert history["outer/y/step"].tolist() == [None, 0, None]
    assert history["outer/x"].tolist() == [0, 0, 0]
    assert history.branches == {"outer/y/branch": ("size", "counted")}
    assert history["loss"].tolist() == [0, 4, 8]


@pytest.mark.parametrize("weight", [0.0, 0, jnp.float32(0), lambda step: step * 0.0])
def test_a_term_of_weight_0_does_not_poison(weight):
    loss = tr.WeightedSum(a=fit, b=(weight, broken))
    value, grad = value_and_grad(loss, jnp.zeros(2), None, ZERO).value
    assert value == 2.0
    np.testing.assert_array_equal(grad, [-2.0, -2.0])
    with_it = tr.WeightedSum(a=fit, b=(1e-3, broken))
    value, grad = value_and_grad(with_it, jnp.zeros(2), None, ZERO).value
    assert np.isnan(value)
    assert np.isnan(grad).all()


def test_a_term_of_weight_0_is_not_computed():
    ran = Counter()

    def watched(name):
        def loss(model, batch):
            jax.debug.callback(lambda: ran.update([name]))
            return jnp.sum(model**2)

        return loss

    loss = tr.WeightedSum(
        always=watched("always"),
        never=(0.0, watched("never")),
        late=(lambda step: step >= 3, watched("late")),
        once=(lambda step: step == 1, tr.switch_every(1, watched("once"))),
    )
    train(loss, 5, learning_rate=0.1)
    jax.effects_barrier()
    assert ran == {"always": 5, "late": 2, "once": 1}


def test_terms_that_always_run_share_one_gradient():
    runs = []

    def evaluate(leaf, given):
        runs.append(leaf)
        return evaluate_loss(leaf, jnp.ones(3), None, given)

    loss = tr.WeightedSum(a=fit, b=(lambda s: s + 1, fit), c=(2.0, size), d=size)
    assert loss.combine(evaluate, ZERO).value == 9.0
    assert len(runs) == 2
    run = lambda s: tr.WeightedSum(a=fit, b=(2.0, size))(jnp.ones(3), None, step=s)[0]
    jaxpr = jax.make_jaxpr(run)(jnp.int32(0)).jaxpr
    assert all(eqn.primitive.name != "cond" for eqn in jaxpr.eqns)


def test_metrics_of_a_called_sum_can_be_passed_on():
    schedule = tr.WeightedSum(a=(lambda step: step + 1.0, size))

    def wrapped(model, batch, *, step):
        return schedule(model, batch, step=step)

    assert train(wrapped, 2).history["weight/a"].tolist() == [1.0, 2.0]


def adds(model, batch, *, state):
    seen = state.get(model.index)
    return model.w * seen, {"seen": seen}, state.set(model.index, seen + 1)


def weight_decay(model, batch):
    return model.w**2


LATE = lambda step: step >= 1


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ({"a": doubles, "b": adds}, (1, 2, 3)),
        ({"a": adds, "b": doubles}, (1, 2, 4)),
        ({"a": doubles, "between": weight_decay, "b": adds}, (1, 2, 3)),
        ({"a": (LATE, doubles), "b": (LATE, adds)}, (1, 2, 3)),
        ({"a": doubles, "b": (LATE, adds)}, (1, 2, 3)),
        ({"a": (LATE, doubles), "b": adds}, (1, 2, 3)),
        ({"a": tr.alternate(weight_decay, doubles), "b": adds}, (1, 2, 3)),
        ({"a": doubles, "between": (LATE, adds), "b": adds}, (1, 3, 4)),
        ({"a": doubles, "zero": (0.0, adds), "b": adds}, (1, 2, 3)),
    ],
)
def test_state_goes_from_term_to_term_in_their_order(terms, expected):
    model, state = eqx.nn.make_with_state(Counting)()
    given = Given(jnp.int32(1), jnp.int32(0), state=state)
    output = value_and_grad(tr.WeightedSum(**terms), model, None, given)
    found = output.metrics["a/seen"].value, output.metrics["b/seen"].value
    assert (*found, output.state.get(model.index)) == expected


def test_a_term_that_is_left_out_leaves_the_state_alone():
    loss = tr.WeightedSum(a=(lambda step: step % 2, doubles), b=weight_decay)
    model = eqx.nn.make_with_state(Counting)()
    result = train(loss, 4, model)
    assert result.history["a/seen"].tolist() == [None, 1, None, 2]
    assert result.model_state.get(result.model.index) == 4
    assert result.compiles == 1


def test_a_loss_is_at_least_float32_and_its_gradient_as_the_parameters():
    half = lambda model, batch: jnp.sum(model)
    model = jnp.ones(3, jnp.bfloat16)
    loss = tr.WeightedSum(a=half, b=(lambda step: jnp.float32(0.5), half))
    value, grad = value_and_grad(loss, model, None, ZERO).value
    assert (value.dtype, grad.dtype) == (jnp.float32, jnp.bfloat16)
    assert value == 4.5


@pytest.mark.parametrize("name", ["loss", "weight", "branch", "a/b"])
def test_a_name_that_the_history_uses_is_refused(name):
    with pytest.raises(ValueError, match=f"is named `{name}`(, which t|. T)he history"):
        tr.WeightedSum(**{name: fit, "other": (3.0, size)})


@pytest.mark.parametrize(
    ("terms", "error", "text"),
    [
        ({}, ValueError, "`WeightedSum` was given no losses"),
        ({"a": 3.0}, TypeError, "`3.0` is not a loss"),
        ({"a": (fit, 2.0)}, TypeError, "`2.0` is not a loss"),
        ({"a": (2.0, fit, size)}, TypeError, "`a` of `WeightedSum` is a tuple of 3"),
        ({"a": ("2", fit)}, TypeError, "is `'2'`. A weight is a number or a sched"),
        ({"a": (True, fit)}, TypeError, "weight of `a` in `WeightedSum` is `True`"),
        ({"a": (np.ones(2), fit)}, TypeError, "A weight is a number or a schedule"),
        ({"a": (float("nan"), fit)}, ValueError, "is `nan`, which makes the sum"),
        ({"a": (float("inf"), fit)}, ValueError, "is `inf`, which makes the sum"),
        ({"a": (np.array(np.nan), fit)}, ValueError, "which makes the sum meaningless"),
        ({"a": (np.complex64(1), fit)}, TypeError, "A weight is a number or a sched"),
        ({"a": (lambda s: jnp.ones(2), fit)}, TypeError, r"shape \(2,\), not a scalar"),
        (
            {"a": (optax.linear_schedule(0.0, 1.0, 0), fit)},
            ValueError,
            "0 at every step.*`transition_steps` is 0",
        ),
        ({"a": fit, "by": "day"}, ValueError, "`by` is `'day'`; it is `'step'` or"),
    ],
)
def test_what_is_refused(terms, error, text):
    with pytest.raises(error, match=text):
        tr.WeightedSum(**terms)
