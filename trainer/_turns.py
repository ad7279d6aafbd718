"""A choice of branches as loops of one turn or none, on the CPU.

XLA:CPU runs what follows a conditional on several threads, and hands the work over for
each part of it. For a small step that is a quarter of its time: an MLP 10-64-64-1 with
two losses takes 46 us with a `lax.switch` between their gradients and Adam after it,
36 us with a loop of one turn or none for each that holds both, and 36 us with one loss.
"""

from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from trainer._cost import inner_jaxprs
from trainer._tree import strong


_MOST_BRANCHES = 4
# What follows is compiled once for each branch.
_MOST_EQUATIONS = 1000
# What takes long is not worth to be compiled again.
_HEAVY = {"cond", "while", "scan", "dot_general", "conv_general_dilated"}


def in_turns(closed: Any, num_state: int) -> Any:
    """The same step with its choice, and what follows it, as loops of one turn or none.

    It has to be a choice of few branches, the only one outside of them, followed by
    little. Any other step stays as it is.

    Args:
        closed: The jaxpr of a step. Its first `num_state` inputs are the state, and so
            are its first outputs, in the same order.
        num_state: How many arrays the state has.

    Returns:
        Another jaxpr that computes the same, or the very same object.
    """
    jaxpr = closed.jaxpr
    places = [i for i, e in enumerate(jaxpr.eqns) if e.primitive.name == "cond"]
    if len(places) != 1 or jaxpr.effects:
        return closed
    choice, after = jaxpr.eqns[places[0]], jaxpr.eqns[places[0] + 1 :]
    branches = choice.params["branches"]
    # An ensemble is left alone: it reports a metric of each member.
    is_ensemble = any(v.aval.shape for v in jaxpr.outvars[num_state:])
    if (
        is_ensemble
        or len(branches) > _MOST_BRANCHES
        or len(branches) * len(after) > _MOST_EQUATIONS
        or any(map(_is_heavy, after))
    ):
        return closed
    inputs, outputs = jaxpr.invars, jaxpr.outvars
    made = {v for eqn in jaxpr.eqns[: places[0]] for v in eqn.outvars}
    chosen = [v for v in choice.outvars if v in _free(after, outputs)]
    # What the choice and what follows it read of what was computed before.
    middle = [v for v in _free([choice, *after], outputs) if v in made]
    known = [*jaxpr.constvars, *inputs, *middle]
    compute = _function(jaxpr, jaxpr.eqns[: places[0]], jaxpr.constvars, inputs, middle)
    finish = _function(jaxpr, after, [], [*known, *chosen], outputs)

    def run(*flat: Any) -> list[Any]:
        values = [*closed.consts, *flat]
        values += compute(*values)
        place = dict(zip(known, values, strict=True))
        index = _read(choice.invars[0], place)
        first = len(closed.consts)

        def turn(branch: Any, carry: Any) -> Any:
            # The state is that of the loop, which XLA then changes in place.
            own = [*values]
            own[first : first + num_state] = carry[:num_state]
            found = dict(zip(known, own, strict=True))
            operands = [_read(v, found) for v in choice.invars[1:]]
            out = jax.extend.core.jaxpr_as_fun(branch)(*operands)
            out = [x for v, x in zip(choice.outvars, out, strict=True) if v in chosen]
            return [strong(jnp.asarray(x)) for x in finish(*own, *out)]

        rest = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in outputs[num_state:]]
        carry = [*flat[:num_state], *rest]
        for number, branch in enumerate(branches):
            is_live = (index == number).astype(jnp.int32)
            body = lambda _, carry, branch=branch: turn(branch, carry)
            carry = jax.lax.fori_loop(0, is_live, body, carry)
        return carry

    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inputs]
    return jax.make_jaxpr(run)(*structs)


def _free(eqns: list[Any], outputs: list[Any]) -> dict[Any, None]:
    """The variables that equations read, and those that are returned, in order."""
    read = [v for eqn in eqns for v in eqn.invars] + list(outputs)
    return dict.fromkeys(v for v in read if not _is_literal(v))


def _function(jaxpr: Any, eqns: list[Any], constvars: Any, inputs: Any, outputs: Any):
    """Some of the equations of a jaxpr as a function of what they read."""
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    part = jaxpr.replace(
        eqns=eqns,
        constvars=[],
        invars=[*constvars, *inputs],
        outvars=outputs,
        debug_info=names,
    )
    closed = jax.extend.core.ClosedJaxpr(part, [])
    return jax.extend.core.jaxpr_as_fun(closed)


def _is_heavy(eqn: Any) -> bool:
    inner = (e for jaxpr in inner_jaxprs(eqn) for e in jaxpr.eqns)
    return eqn.primitive.name in _HEAVY or any(map(_is_heavy, inner))


def _is_literal(variable: Any) -> bool:
    return isinstance(variable, jax.extend.core.Literal)


def _read(variable: Any, known: dict[Any, Any]) -> Any:
    return variable.val if _is_literal(variable) else known[variable]
