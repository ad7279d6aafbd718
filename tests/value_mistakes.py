"""Losses that look at values there are none of while a step is compiled."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from mistakes import row


ERRORS = jax.errors


# Python that looks at a value.

BOOLEAN = ("A Python `if`, `while`, `and`", "`tr.piecewise` or `tr.Switch`, and")
NO_BOOLEAN = ERRORS.TracerBoolConversionError


@row(NO_BOOLEAN, *BOOLEAN)
def python_if(model, batch, *, step):
    if step > 10:  # here
        return jnp.sum(model)
    return jnp.sum(model**2)


@row(NO_BOOLEAN, "A Python `while` looks at", "`jax.lax.fori_loop` with a fixed number")
def python_while(model, batch):
    total = jnp.sum(model)
    while total > 1:  # here
        total = total / 2
    return total


@row(NO_BOOLEAN, *BOOLEAN)
def python_and(model, batch, *, step):
    late = step > 1 and step < 3  # here
    return jnp.sum(model) * late


@row(NO_BOOLEAN, *BOOLEAN)
def python_not(model, batch, *, step):
    return jnp.sum(model) * (not step)  # here


@row(NO_BOOLEAN, "An `assert` looks at a traced value", "eqx.error_if(x, wrong, ")
def python_assert(model, batch):
    assert jnp.all(jnp.isfinite(model))  # here
    return jnp.sum(model)


@row(NO_BOOLEAN, "A builtin of Python's compares traced values", "Use `jnp.maximum`")
def python_max(model, batch):
    return max(model[0], model[1])  # here


@row(ValueError, "looks at a whole array", "with `jnp.where`, or reduce them with")
def python_if_of_several(model, batch):
    if model > 0:  # here
        return jnp.sum(model)
    return jnp.sum(model**2)


# NumPy.

ARRAY = ("A NumPy function is given a traced value", "same name in `jax.numpy`")


@row(ERRORS.TracerArrayConversionError, *ARRAY)
def numpy_sin(model, batch):
    return jnp.sum(np.sin(model))  # here


@row(ERRORS.TracerArrayConversionError, *ARRAY)
def numpy_asarray(model, batch):
    return jnp.sum(np.asarray(model))  # here


@row(ERRORS.TracerArrayConversionError, *ARRAY)
def numpy_norm(model, batch):
    return jnp.asarray(np.linalg.norm(model))  # here


@row(ERRORS.TracerArrayConversionError, *ARRAY)
def numpy_stack(model, batch):
    return jnp.sum(np.stack([model, model]))  # here


@row(ValueError, "A traced value is put into a NumPy array", "with `jnp.stack`")
def numpy_item(model, batch):
    found = np.zeros(3)
    found[0] = model[0]  # here
    return jnp.sum(found)


# A value where there is none.

NUMBER = ("A traced value is turned into a Python number", "report it as a metric")
NO_NUMBER = ERRORS.ConcretizationTypeError


@row(NO_NUMBER, *NUMBER)
def python_float(model, batch):
    value = jnp.sum(model)
    return value, {"value": float(value)}  # here


@row(NO_NUMBER, *NUMBER)
def python_int(model, batch):
    return jnp.sum(model[: int(model[0])])  # here


@row(NO_NUMBER, *NUMBER)
def python_item(model, batch):
    value = jnp.sum(model)
    return value, {"value": value.item()}  # here


@row(NO_NUMBER, *NUMBER)
def python_list(model, batch):
    return sum(model.tolist())  # here


@row(NO_NUMBER, *NUMBER)
def math_exp(model, batch):
    return jnp.sum(model) * math.exp(model[0])  # here


@row(TypeError, "A traced value is formatted as a number", "jax.debug.print('{x:.3f}'")
def formatted(model, batch):
    text = f"{jnp.sum(model):.3f}"  # here
    return jnp.sum(model) * len(text)


@row(TypeError, "A traced value is formatted as a number", "or report it as a metric")
def formatted_with_percent(model, batch, *, step):
    return jnp.sum(model) * len("%d" % step)  # here  # noqa: UP031


@row(ERRORS.TracerIntegerConversionError, "as a Python index", "Index a `jnp` array")
def list_index(model, batch, *, step):
    return jnp.sum(model) * [1.0, 2.0][step]  # here


@row(ERRORS.TracerIntegerConversionError, "or in `range`", "use `jax.lax.fori_loop`")
def python_range(model, batch, *, step):
    return sum(jnp.sum(model) for _ in range(step))  # here


HASHED = ("A traced value is hashed, as a key of a dict", "or choose with `jax.lax.sw")


@row(TypeError, *HASHED)
def python_hash(model, batch, *, step):
    return jnp.sum(model) * hash(step)  # here


@row(TypeError, *HASHED)
def dict_key(model, batch, *, step):
    return jnp.sum(model) * {0: 1.0}[step]  # here


@row(TypeError, *HASHED)
def set_member(model, batch, *, step):
    return jnp.sum(model) * (step in {1, 2})  # here


# Shapes that would depend on values.

LENGTH = ("A traced value is used as a length", "Take a fixed length and leave out")


@row(NO_NUMBER, *LENGTH)
def arange(model, batch, *, step):
    return jnp.sum(model) + jnp.arange(step).sum()  # here


@row(NO_NUMBER, *LENGTH)
def linspace(model, batch, *, step):
    return jnp.sum(model) + jnp.linspace(0, 1, step).sum()  # here


@row(TypeError, "A traced value is used in a shape", "such as `x.shape[0]`")
def zeros(model, batch, *, step):
    return jnp.sum(model) + jnp.zeros((2, step)).sum()  # here


@row(IndexError, "A slice has a traced bound", "jax.lax.dynamic_slice_in_dim(x, start,")
def slice_to_value(model, batch, *, step):
    return jnp.sum(model[:step])  # here


@row(ERRORS.NonConcreteBooleanIndexError, "indexed by a traced mask", "jnp.where(mask,")
def mask_index(model, batch):
    return jnp.sum(model[model > 0])  # here


ROWS_FOUND = ("How many rows a result has", "as in `jnp.nonzero(x, size=10)`")


@row(NO_NUMBER, *ROWS_FOUND)
def nonzero(model, batch):
    return jnp.sum(model[jnp.nonzero(model > 0)])  # here


@row(NO_NUMBER, *ROWS_FOUND)
def unique(model, batch):
    return jnp.sum(jnp.unique(model))  # here


@row(NO_NUMBER, *ROWS_FOUND)
def repeat(model, batch, *, step):
    return jnp.sum(jnp.repeat(model, step))  # here
