"""Losses and parameters without a gradient are told at the first trace."""

import inspect
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import pull, Twins

import trainer as tr


sgd = optax.sgd(0.1)
FILE = "test_silent_gradients.py"


def twins():
    return Twins(jnp.ones(2), jnp.ones(2))


def only_a(model, batch):
    return jnp.sum(model.a**2)


def only_b(model, batch):
    return jnp.sum(model.b**2)


def constant(model, batch):
    return jnp.float32(1.0)


def stopped(model, batch):
    return jnp.sum(jax.lax.stop_gradient(model.a) * jax.lax.stop_gradient(model.b))


def rounded(model, batch):
    return jnp.sum(jnp.round(model.a) + jnp.sign(model.b))


def chosen(model, batch):
    return jnp.argmax(model.a) + 0.0


def cast(model, batch):
    return jnp.mean((model.a > 0).astype(jnp.int32).astype(float))


def fit(program, model=None, data=None, **kwargs):
    program = program if isinstance(program, tr.Trainer) else tr.Trainer(**program)
    model = twins() if model is None else model
    return program.fit(model, data, num_steps=1, progress=False, **kwargs)


def told(program, *given):
    with pytest.raises(tr.LossWarning) as caught:
        fit(program, *given)
    return str(caught.value)


def clean(program, *given):
    with warnings.catch_warnings(action="error"):
        fit(program, *given)


def loss(*given, **kwargs):
    return {"update": tr.Minimize(*given, sgd, **kwargs)}


@pytest.mark.parametrize("flat", [constant, stopped, rounded, chosen, cast])
@pytest.mark.parametrize(
    "within",
    [
        lambda flat: flat,
        lambda flat: tr.alternate(pull, flat),
        lambda flat: tr.WeightedSum(pull=pull, flat=(0.5, flat)),
    ],
    ids=["alone", "switch", "sum"],
)
def test_a_loss_without_a_gradient_is_told(flat, within):
    text = told(loss(within(flat)))
    first = inspect.getsourcelines(flat)[1]
    name = f"`{flat.__name__}` at {FILE}:{first}"
    assert text.startswith(f"The gradient of {name} is 0 at every step: it does not")
    assert "Return a smooth function of the model" in text


def residuals(model, batch):
    return jnp.round(model.a)


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (loss(tr.WeightedSum(p=pull, c=(optax.constant_schedule(0.5), cast))), "cast"),
        (loss(tr.MeanSquare(residuals)), "residuals"),
        (loss(tr.AdaptiveSum(tr.SoftAdapt(), p=pull, c=cast)), "cast"),
        (loss(tr.AdaptiveSum(tr.GradNorm(), p=pull, c=cast)), "cast"),
        (loss(only_b, where=lambda m: m.a), "only_b"),
        (loss(cast, compute="float16"), "cast"),
        (
            {
                "update": tr.JointUpdate(
                    {
                        "a": tr.Minimize(only_b, sgd, where=lambda m: m.a),
                        "b": tr.Minimize(only_b, sgd, where=lambda m: m.b),
                    }
                )
            },
            "only_b",
        ),
    ],
    ids=["schedule", "residuals", "soft", "norm", "where", "float16", "joint"],
)
def test_a_loss_of_any_program_is_told(program, name):
    assert f"The gradient of `{name}` at {FILE}" in told(program)


def rows(model, batch):
    return jnp.sum(model.a) * jnp.mean(batch)


def ensemble(loss):
    make = lambda rate: tr.Trainer(loss, optax.sgd(rate))
    return tr.ensemble(make, rate=[0.1, 0.2])


def stacked():
    return Twins(jnp.ones((2, 3)), jnp.ones((2, 3)))


fast = lambda model, batch: pull(model.fast, batch)
a = lambda m: m.a
b = lambda m: m.b
every = tr.Minimize(only_a, sgd)
only = tr.Minimize(only_a, sgd, where=a)


@pytest.mark.parametrize(
    ("program", "given"),
    [
        (loss(only_a), ()),
        (loss(tr.alternate(only_a, lambda m, b: 2 * only_a(m, b))), ()),
        (loss(tr.WeightedSum(x=only_a, y=(lambda s: 1.0 / (s + 1), only_a))), ()),
        (loss(tr.AdaptiveSum(tr.LearningRateAnnealing(), x=only_a, y=only_a)), ()),
        ({"update": tr.SwitchUpdate(tr.Cycle((1, 1)), [every, None])}, ()),
        ({"update": tr.SwitchUpdate(tr.At([5]), [every, every])}, ()),
        (
            {
                "loss": only_a,
                "optimizer": tr.Parts(x=tr.Part(sgd, where=a), y=tr.Part(sgd, where=b)),
            },
            (),
        ),
        (loss(rows, micro_batches=2), (None, [np.ones((3, 2), np.float32)])),
        (loss(only_a, compute="bfloat16"), ()),
        (ensemble(only_a), (stacked(),)),
    ],
    ids=[
        *("plain", "switch", "sum", "adaptive", "updates", "phases", "parts"),
        *("micro", "narrow", "ensemble"),
    ],
)
def test_a_parameter_without_a_gradient_is_told(program, given):
    text = told(program, *given)
    assert text.startswith("`model.b` gets no gradient from `")
    assert re.search(rf" at {FILE}:\d+.*, and stays as it is but for weight", text)
    assert "freeze it: `tr.Minimize(loss, optimizer, where=...)`" in text


@pytest.mark.parametrize(
    ("program", "given"),
    [
        (loss(pull), ()),
        (loss(tr.alternate(only_a, only_b)), ()),
        (loss(tr.WeightedSum(x=only_a, y=only_b)), ()),
        (loss(tr.AdaptiveSum(tr.GradNorm(), x=only_a, y=only_b)), ()),
        (loss(only_a, where=a), ()),
        (
            {
                "update": tr.SwitchUpdate(
                    tr.Cycle((1, 1)),
                    [only, tr.Minimize(only_b, sgd, where=b)],
                )
            },
            (),
        ),
        (ensemble(pull), (stacked(),)),
        (loss(fast), (optax.LookaheadParams.init_synced(twins()),)),
    ],
    ids=[
        *("plain", "switch", "sum", "adaptive", "where", "updates", "ensemble"),
        "lookahead",
    ],
)
def test_what_some_loss_trains_is_not_told(program, given):
    clean(program, *given)


class Frozen(eqx.Module):
    weight: jax.Array
    table: jax.Array
    mean: jax.Array

    def __call__(self, x):
        table = jax.lax.stop_gradient(self.table)
        return (x - jax.lax.stop_gradient(self.mean)) * self.weight + table


def mse(model, batch):
    return jnp.mean((jax.vmap(model)(batch) - batch) ** 2)


@pytest.mark.parametrize(
    "of",
    [
        lambda loss: loss,
        lambda loss: tr.alternate(loss, loss),
        lambda loss: tr.Minimize(loss, sgd, micro_batches=2),
        lambda loss: tr.Minimize(loss, sgd, compute="bfloat16"),
        lambda loss: lambda m, b: eqx.filter_jit(loss)(m, b),
    ],
    ids=["plain", "switch", "micro", "narrow", "jit"],
)
def test_a_constant_of_the_model_is_not_told(of):
    made = of(mse)
    made = made if isinstance(made, tr.Minimize) else tr.Minimize(made, sgd)
    model = Frozen(jnp.ones(3), jnp.ones(3), jnp.zeros(()))
    clean({"update": made}, model, [jnp.ones((4, 3))])


class Wide(eqx.Module):
    layers: list

    def __call__(self):
        return jnp.sum(self.layers[0] ** 2)


def test_of_many_parameters_a_few_are_named():
    model = Wide([jnp.ones(1)] * 9)
    text = told(loss(lambda model, batch: model()), model)
    names = ", ".join(f"`model.layers[{place}]`" for place in range(1, 6))
    assert text.startswith(f"{names} and 3 more get no gradient from `<lambda>`")


class Own(tr.AbstractUpdate):
    def init(self, model):
        return None

    def __call__(self, model, opt_state, batch):
        value, grad = eqx.filter_value_and_grad(only_a)(model, batch)
        return eqx.apply_updates(model, grad), opt_state, {"loss": value}


def test_what_an_update_of_ones_own_may_train_is_not_told():
    parts = [tr.Minimize(only_a, sgd), Own()]
    clean({"update": tr.SwitchUpdate(tr.At([5]), parts)})


class Copy(tr.AbstractTransform):
    def init(self, model):
        return None

    def __call__(self, model, kept, *, step):
        return eqx.tree_at(lambda m: m.b, model, model.a), kept


def test_what_a_transform_of_ones_own_may_change_is_not_told():
    clean({**loss(only_a), "transforms": {"copy": Copy()}})


def test_a_loss_that_several_updates_share_is_not_told():
    total = tr.WeightedSum(x=only_a, y=(optax.constant_schedule(0.5), only_b))
    parts = [tr.Minimize(total, sgd, where=where) for where in (a, b)]
    clean({"update": tr.SwitchUpdate(tr.Cycle((1, 1)), parts)})


def test_a_loss_called_inside_of_a_loss_is_left_alone():
    inner = tr.WeightedSum(c=constant)

    def outer(model, batch, *, step):
        return pull(model, batch) + inner(model, batch, step=step)[0]

    clean(loss(outer))
