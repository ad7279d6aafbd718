"""Convolutions in the form that XLA computes fast on a CPU, wherever they stand.

XLA hands a convolution to Eigen if its dimensions are in one order: the batch first and
the features last, and a kernel with its outputs last. It brings them into this order
itself, but only outside of loops and branches. Inside, a convolution that comes
channels first, as Equinox writes it, runs as plain loops, and so do the two of its
gradient. One layer of 3 by 3 from 8 to 16 channels, its value and gradient for 128
images of 26 by 26: 3.9 ms alone, 88 ms in a `lax.cond`, 3.8 ms in a `lax.cond` with
the dimensions in order. So they are put in order here, as transposes around each
convolution. XLA would add the same ones, and merges those of them that meet.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np


# Eigen first copies what each output sees, which pays off from so many input features
# times output features on, by the number of spatial dimensions. Below, and where
# `is_worth` says so, the plain loops are up to 10 times faster. Measured on 2 cores,
# over features, strides and paddings, for layers and both of their gradients.
_WORTH = {1: 128, 2: 32, 3: 64}
# What Eigen's convolutions compute; bfloat16 as float32.
_TYPES = (jnp.float32, jnp.float16, jnp.bfloat16)


def channels_last(
    closed: jax.extend.core.ClosedJaxpr,
) -> jax.extend.core.ClosedJaxpr:
    """Put the dimensions of a program's convolutions in the order that is fast on CPUs.

    At any depth: in jit, cond, switch, scan, while, checkpoint and custom derivatives.
    Nothing else is changed: arguments, results, constants, effects and the order of
    equations stay. The values of a convolution are to the bit those that XLA computes
    for it outside of loops and branches.

    Convolutions for which `is_worth` is false stay as they are, and so do those in a
    `jax.shard_map`.

    It is meant for a program that has its gradients already. One that is differentiated
    later stays right, but the rules of a `jax.custom_vjp` or `jax.custom_jvp` in it
    keep the convolutions that they have.

    Args:
        closed: The program, of `jax.make_jaxpr`.

    Returns:
        The program with its convolutions in order, or the very same object if there is
        none to change.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from trainer._convolutions import channels_last
        >>> layer = lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME")
        >>> x, w = jnp.ones((2, 8, 5, 5)), jnp.ones((16, 8, 3, 3))
        >>> program = channels_last(jax.make_jaxpr(layer)(x, w))
        >>> [eqn.primitive.name for eqn in program.eqns]
        ['transpose', 'transpose', 'conv_general_dilated', 'transpose']
    """
    return _rewritten(closed, {})


def ordered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays that computes the same, by `channels_last`.

    It is traced where it is called: use it below `jax.jit`.

    Example:
        >>> import jax.numpy as jnp
        >>> from trainer._convolutions import ordered
        >>> float(ordered(lambda x: jnp.sum(x["a"]))({"a": jnp.ones(3)}))
        3.0
    """

    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
        run = jax.extend.core.jaxpr_as_fun(channels_last(closed))
        found = run(*jtu.tree_leaves(args))
        return jtu.tree_unflatten(jtu.tree_structure(out), found)

    return inner


def is_worth(eqn: Any) -> bool:
    """Whether an equation is a convolution that is faster with its dimensions in order.

    It is not where Eigen has none: with no or more than 3 spatial dimensions, and of
    integers, complex numbers or float64. It is not where XLA's plain loops are faster:
    in groups of features (0.2 ms for 16 groups of 1, where Eigen needs 15 ms) or of the
    batch, with few features, for the kernel's gradient of a transposed convolution, and
    for all that dilates an input of 3 dimensions.

    Args:
        eqn: An equation of a jaxpr.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from trainer._convolutions import is_worth
        >>> layer = lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME")
        >>> x, w = jnp.ones((2, 1, 5, 5)), jnp.ones((4, 1, 3, 3))
        >>> [is_worth(eqn) for eqn in jax.make_jaxpr(layer)(x, w).eqns]
        [False]
    """
    if eqn.primitive.name != "conv_general_dilated":
        return False
    params = eqn.params
    numbers = params["dimension_numbers"]
    shape, spatial = eqn.invars[1].aval.shape, len(numbers.rhs_spec) - 2
    outputs, inputs, *window = (shape[d] for d in numbers.rhs_spec)
    found = [eqn.outvars[0].aval.shape[d] for d in numbers.out_spec[2:]]
    wide = spatial == 3 or math.prod(window) > math.prod(found)
    return (
        numbers != _in_order(spatial)
        and inputs * outputs >= _WORTH.get(spatial, math.inf)
        and params["feature_group_count"] == params["batch_group_count"] == 1
        and all(v.aval.dtype in _TYPES for v in eqn.invars)
        and not (wide and math.prod(params["lhs_dilation"]) > 1)
        and params.get("out_sharding") is None
    )


def _in_order(spatial: int) -> jax.lax.ConvDimensionNumbers:
    """The order of dimensions that XLA gives to Eigen."""
    images = (0, spatial + 1, *range(1, spatial + 1))
    kernel = (spatial + 1, spatial, *range(spatial))
    return jax.lax.ConvDimensionNumbers(images, kernel, images)


def _rewritten(program: Any, seen: dict[int, Any]) -> Any:
    """Rewrite a jaxpr, closed or open.

    One that stands in several places stays one object, so that it is lowered once.
    """
    if id(program) not in seen:
        seen[id(program)] = _anew(program, seen)
    return seen[id(program)]


def _anew(program: Any, seen: dict[int, Any]) -> Any:
    jaxpr = getattr(program, "jaxpr", program)
    if jaxpr is not program:
        found = _rewritten(jaxpr, seen)
        return program if found is jaxpr else program.replace(jaxpr=found)
    parts = [_equations(eqn, seen) for eqn in jaxpr.eqns]
    eqns = [eqn for part in parts for eqn in part]
    return jaxpr if _same(eqns, jaxpr.eqns) else jaxpr.replace(eqns=eqns)


def _equations(eqn: Any, seen: dict[int, Any]) -> list[Any]:
    """Rewrite an equation, and the jaxprs in its parameters."""
    if is_worth(eqn):
        return _in_place(eqn)
    # In a `shard_map` types say along which axes of the mesh an array varies.
    if eqn.primitive.name == "shard_map":
        return [eqn]
    is_jaxpr = lambda x: hasattr(x, "eqns")
    leaves, treedef = jtu.tree_flatten([*eqn.params.values()], is_leaf=is_jaxpr)
    found = [_rewritten(x, seen) if is_jaxpr(x) else x for x in leaves]
    if _same(found, leaves):
        return [eqn]
    values = jtu.tree_unflatten(treedef, found)
    return [eqn.replace(params=dict(zip(eqn.params, values, strict=True)))]


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _in_place(eqn: Any) -> list[Any]:
    """Write a convolution with its dimensions in order, between transposes."""
    lhs_spec, rhs_spec, out_spec = eqn.params["dimension_numbers"]
    last = lambda spec: (spec[0], *spec[2:], spec[1])
    numbers = _in_order(len(lhs_spec) - 2)

    def ordered(lhs: Any, rhs: Any) -> Any:
        lhs = jax.lax.transpose(lhs, last(lhs_spec))
        rhs = jax.lax.transpose(rhs, (*rhs_spec[2:], rhs_spec[1], rhs_spec[0]))
        params = {**eqn.params, "dimension_numbers": numbers}
        out = eqn.primitive.bind(lhs, rhs, **params)
        return jax.lax.transpose(out, np.argsort(last(out_spec)))

    inner = jax.make_jaxpr(ordered)(*(v.aval for v in eqn.invars)).jaxpr
    # Types may hold a sharding, which has to come out the same.
    if [v.aval for v in inner.outvars] != [v.aval for v in eqn.outvars]:
        return [eqn]
    # The equations move in with the variables that the convolution had.
    outer = dict(zip(inner.invars, eqn.invars, strict=True))
    outer |= zip(inner.outvars, eqn.outvars, strict=True)
    rename = lambda variables: [outer.get(v, v) for v in variables]
    return [
        part.replace(
            invars=rename(part.invars),
            outvars=rename(part.outvars),
            source_info=eqn.source_info,
            ctx=eqn.ctx,
        )
        for part in inner.eqns
    ]
