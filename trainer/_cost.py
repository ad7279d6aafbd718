"""How many steps go into one call, judged before compiling."""

import math
from typing import Any

import jax
import jax.tree_util as jtu
from jaxtyping import PyTree


# Rough rates: they only have to tell a step of 20 us from one of 20 ms.
_FLOPS_PER_SECOND = {"cpu": 1e11}
_FLOPS_PER_SECOND_ELSEWHERE = 1e13
_SECONDS_PER_CALL = 0.1
_BYTES_PER_CALL = 2**24
_MOST_STEPS = 100


def _inner(eqn: Any) -> list[Any]:
    """The jaxprs inside an equation: of a jit, a scan, the branches of a cond."""
    leaves = jtu.tree_leaves(
        list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
    )
    return [getattr(x, "jaxpr", x) for x in leaves if hasattr(x, "eqns")]


def flops(jaxpr: Any) -> float:
    """Count the floating-point operations of a jaxpr, roughly."""
    total = 0.0
    for eqn in jaxpr.eqns:
        inner = [flops(j) for j in _inner(eqn)]
        if inner:
            total += max(inner) * eqn.params.get("length", 1)
            continue
        size = sum(
            math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape")
        )
        if eqn.primitive.name == "dot_general":
            contracted = eqn.params["dimension_numbers"][0][0]
            size *= 2 * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
        elif eqn.primitive.name == "conv_general_dilated":
            size *= 2 * math.prod(eqn.invars[1].aval.shape[1:])
        total += size
    return total


def has_convolution(jaxpr: Any) -> bool:
    """Whether a convolution is in the jaxpr, at any depth."""
    return any(
        eqn.primitive.name == "conv_general_dilated"
        or any(map(has_convolution, _inner(eqn)))
        for eqn in jaxpr.eqns
    )


def _seconds_per_step(jaxpr: Any) -> float:
    """A rough estimate of how long one step takes."""
    rate = _FLOPS_PER_SECOND.get(jax.default_backend(), _FLOPS_PER_SECOND_ELSEWHERE)
    return max(flops(jaxpr) / rate, 1e-6)


def choose_steps_per_call(jaxpr: Any, content: PyTree, period: int | None) -> int:
    """Choose how many steps one call holds at most.

    Enough that the cost of a call does not show; few enough that a call is over in a
    moment, that its batches fit into a few MB, and that it does not reach past a
    callback's period. On the CPU it is 1 for a step with convolutions, because XLA
    computes those several times slower inside a loop.
    """
    if jax.default_backend() == "cpu" and has_convolution(jaxpr):
        return 1
    size = sum(leaf.nbytes for leaf in jtu.tree_leaves(content))
    most = min(
        _SECONDS_PER_CALL / _seconds_per_step(jaxpr), _BYTES_PER_CALL / max(size, 1)
    )
    return max(1, int(min(most, _MOST_STEPS, period or _MOST_STEPS)))
