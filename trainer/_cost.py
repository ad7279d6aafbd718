"""How many steps go into one call, judged before compiling."""

import math
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree


# Rough rates: they only have to tell a step of 20 us from one of 20 ms.
_FLOPS_PER_SECOND = {"cpu": 1e11}
_FLOPS_PER_SECOND_ELSEWHERE = 1e13
_SECONDS_PER_CALL = 0.1
# On a CPU a few chunks have to stay in its caches. Elsewhere they are sent anyway.
_BYTES_PER_CALL = {"cpu": 2**23}
_BYTES_PER_CALL_ELSEWHERE = 2**24
_MOST_STEPS, _FEW_STEPS = 100, 8


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs inside an equation: of a jit, a scan, the branches of a cond."""
    leaves = jtu.tree_leaves(
        list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
    )
    return [getattr(x, "jaxpr", x) for x in leaves if hasattr(x, "eqns")]


def flops(jaxpr: Any) -> float:
    """Count the floating-point operations of a jaxpr, roughly."""
    total = 0.0
    for eqn in jaxpr.eqns:
        inner = [flops(j) for j in inner_jaxprs(eqn)]
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


def seconds_per_step(jaxpr: Any, platform: str) -> float:
    """A rough estimate of how long one step takes, on a kind of device."""
    rate = _FLOPS_PER_SECOND.get(platform, _FLOPS_PER_SECOND_ELSEWHERE)
    return max(flops(jaxpr) / rate, 1e-6)


def choose_steps_per_call(
    seconds: float, content: PyTree, period: int | None, platform: str
) -> tuple[int, str]:
    """Choose how many steps one call holds at most, and say why so many.

    Enough that the cost of a call does not show; few enough that a call is over in a
    moment, and that its batches fit into a few MB. A chunk never filled, because a
    callback comes before, is memory moved in vain; a later fit may have no such
    callback, so a few steps are always allowed.
    """
    size = sum(leaf.nbytes for leaf in jtu.tree_leaves(content))
    most_bytes = _BYTES_PER_CALL.get(platform, _BYTES_PER_CALL_ELSEWHERE)
    reasons = [
        (_MOST_STEPS, "more would not be faster"),
        (max(period or _MOST_STEPS, _FEW_STEPS), f"a callback every {period} steps"),
        (
            _SECONDS_PER_CALL / seconds,
            f"a step takes about {seconds:.2g} s, as estimated, and a call no longer "
            f"than {_SECONDS_PER_CALL} s",
        ),
        (
            most_bytes / max(size, 1),
            f"a batch has {size / 1e6:.2g} MB, and a call {most_bytes / 1e6:.2g} MB",
        ),
    ]
    most, why = min(reasons, key=lambda reason: reason[0])
    return max(1, int(most)), why
