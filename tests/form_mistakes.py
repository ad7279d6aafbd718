"""Losses whose branches differ, that change arrays, and that take odd gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from mistakes import Layer, MODEL, row


KEPT = []


# Branches and loops.

TYPES = ("The branches of a `jax.lax.cond` return different types", "`jnp.float32(0)`")


@row(TypeError, *TYPES)
def python_int_from_a_branch(model, batch, *, step):
    return jax.lax.cond(step > 1, lambda: jnp.sum(model), lambda: 0)  # here


@row(TypeError, *TYPES)
def shapes_of_branches(model, batch, *, step):
    both = [lambda: jnp.sum(model), lambda: model]
    return jnp.sum(jax.lax.cond(step > 1, *both))  # here


@row(TypeError, "return different structures", "as many values, and the same keys")
def structures_of_branches(model, batch, *, step):
    both = [lambda: jnp.sum(model), lambda: (jnp.sum(model), {})]
    return jax.lax.switch(step, both)  # here


@row(TypeError, "The carry of a `jax.lax.scan` changes its form", "Start with the form")
def carry(model, batch):
    add = lambda total, x: ((total, x), None)
    return jax.lax.scan(add, 0.0, model)[0]  # here


TURNS = ("number of turns is not fixed", "Use `jax.lax.scan`, or `jax.lax.fori_loop`")


@row(ValueError, *TURNS, when_evaluated=False)
def while_loop(model, batch):
    start = jnp.sum(model)
    return jax.lax.while_loop(lambda x: x < 9, lambda x: x * 2, start)  # here


@row(ValueError, *TURNS, when_evaluated=False)
def fori_loop_to_value(model, batch, *, step):
    start = jnp.sum(model)
    return jax.lax.fori_loop(0, step, lambda _, x: x * 2, start)  # here


# Arrays and modules never change.

CHANGED = ("A JAX array is changed in place", "Write `x = x.at[0].set(value)`")


@row(TypeError, *CHANGED)
def item_assigned(model, batch):
    model[0] = 0.0  # here
    return jnp.sum(model)


@row(TypeError, *CHANGED)
def item_added_to(model, batch):
    model[:2] += 1.0  # here
    return jnp.sum(model)


@row(ValueError, "A view of a JAX array is changed in place", "`np.array(x)`")
def view_added_to(model, batch):
    view = np.asarray(MODEL)
    view += 1.0  # here
    return jnp.sum(model * view)


@row(
    dataclasses.FrozenInstanceError,
    "The field `w` of a `Layer` is assigned",
    "`m = eqx.tree_at(lambda m: m.w, m, value)`",
    model=Layer(),
)
def field_assigned(model, batch):
    model.w = 2 * model.w  # here
    return jnp.sum(model.w)


@row(
    dataclasses.FrozenInstanceError,
    "The field `mean` of a `Layer` is assigned",
    "a metric: `return loss, {'mean': value}`",
    model=Layer(),
)
def field_made(model, batch):
    model.mean = jnp.mean(model.w)  # here
    return jnp.sum(model.w)


# Names.


@row(AttributeError, "`jax.numpy` has no `softmax`", "Did you mean `jax.nn.softmax`?")
def softmax(model, batch):
    return jnp.sum(jnp.softmax(model))  # here  # pyright: ignore


@row(AttributeError, "`jax` has no `relu`", "Did you mean `jax.nn.relu`?")
def relu(model, batch):
    return jnp.sum(jax.relu(model))  # here  # pyright: ignore


@row(AttributeError, "`jax.numpy` has no `scan`", "Did you mean `jax.lax.scan`?")
def scan(model, batch):
    return jnp.scan(lambda c, x: (c + x, None), 0.0, model)[0]  # here  # pyright: ignore


@row(AttributeError, "has no `erf`", "Did you mean `jax.scipy.special.erf`?")
def erf(model, batch):
    return jnp.sum(jax.nn.erf(model))  # here  # pyright: ignore


@row(AttributeError, "`jax.numpy` has no `random`", "Did you mean `jax.random`?")
def random(model, batch, *, key):
    return jnp.sum(model * jnp.random.normal(key, (3,)))  # here  # pyright: ignore


@row(AttributeError, "`numpy` has no `logsumexp`", "mean `jax.nn.logsumexp`?")
def logsumexp(model, batch):
    return np.logsumexp(model)  # here  # pyright: ignore


@row(AttributeError, "An array has no `exp`", "Did you mean `jnp.exp(x)`?")
def method(model, batch):
    return jnp.sum(model.exp())  # here


# Gradients that a loss or an update takes itself.


@row(TypeError, "A gradient is taken of an array of shape (3,)", "with `jnp.mean`")
def gradient_of_vector(model, batch):
    return jnp.sum(jax.grad(lambda m: m**2)(model))  # here


@row(TypeError, "A gradient is taken of `(", "write `has_aux=True`")
def gradient_with_metrics(model, batch):
    return jnp.sum(jax.grad(lambda m: (jnp.sum(m), {}))(model))  # here


@row(TypeError, "A gradient is taken of `None`", "a gradient is that of one number")
def gradient_of_none(model, batch):
    return jnp.sum(jax.grad(lambda m: None)(model))  # here


@row(TypeError, "of a number of dtype int32", "Compute it from floating arrays")
def gradient_of_int(model, batch):
    return jnp.sum(jax.grad(lambda m: jnp.sum(m > 0))(model))  # here


@row(TypeError, "of a number of dtype complex64", "take `jnp.real`")
def gradient_of_complex(model, batch):
    return jnp.sum(jax.grad(lambda m: 1j * jnp.sum(m))(model))  # here


@row(
    TypeError,
    "`jax.grad` is given a tree with an array of dtype int32",
    "Write `eqx.filter_grad` and `eqx.apply_updates`",
    model=Layer(),
)
def gradient_by_int(model, batch):
    return jnp.sum(jax.grad(lambda m: jnp.sum(m.w))(model).w)  # here


NO_ARRAY = ("A function of JAX's is given a `", "same name, such as `eqx.filter_grad`")


@row(TypeError, *NO_ARRAY, model=Layer())
def jitted(model, batch):
    return jax.jit(lambda m: jnp.sum(m.w))(model)  # here


@row(TypeError, *NO_ARRAY, model=Layer())
def rematerialized(model, batch):
    return jax.checkpoint(lambda m: jnp.sum(m.w))(model)  # here


@row(TypeError, *NO_ARRAY, model=Layer())
def mapped(model, batch):
    return jnp.sum(jax.lax.map(lambda m: jnp.sum(m.w), model))  # here


# Values that are over.


@row(
    jax.errors.UnexpectedTracerError,
    "A traced value is used that was kept in a list",
    "Return it as a metric",
)
def kept_in_a_list(model, batch):
    KEPT.clear()

    def kept(x):
        KEPT.append(2 * x)
        return jnp.sum(x)

    gradient = jax.grad(kept)(model)
    return jnp.sum(gradient) + jnp.sum(KEPT[0])  # here
