"""One step, traced: the Python code of the program runs here, and then no more."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from trainer._metrics import Metric
from trainer._program import AbstractProgram
from trainer._state import TrainState
from trainer._tree import strong
from trainer.data import AbstractSource, Layout
from trainer.mistakes._trace_errors import check_constants, explain_trace
from trainer.mistakes._watched_trace import watched_trace
from trainer.recompiles._baked import Baked
from trainer.recompiles._differences import first_difference


class TracedStep(NamedTuple):
    """A step from state to state as a jaxpr.

    Attributes:
        closed: The jaxpr, with the constants that the program's functions brought.
        treedef: The structure of what it returns: the state, and metrics by name.
        metrics: The metrics, as structs.
        traces: How often the program's Python code ran.
    """

    closed: Any
    treedef: Any
    metrics: Any
    traces: int


def trace_step(
    program: AbstractProgram,
    like: TrainState,
    source: AbstractSource,
    resident: PyTree,
    content: PyTree,
    baked: Baked,
) -> TracedStep:
    """Trace one step of a program.

    Args:
        program: What the step does.
        like: The state, with structs in the place of arrays.
        source: Where the batch comes from.
        resident: The arrays that it keeps on the device, or structs.
        content: The content of an item.
        baked: Is told which Python values have been read.

    Raises:
        TypeError: The state that comes out of the step cannot go into it.
        TraceError: The program does what cannot be compiled.
    """
    is_array = lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
    arrays, static = eqx.partition(like, is_array)
    arrays_of, rest = eqx.partition(program, eqx.is_array)
    content = Layout(content, 1).like
    epoch = jax.ShapeDtypeStruct((), jnp.int32)
    runs = []

    def counted(arrays: Any, arrays_of: Any, *given: Any) -> Any:
        runs.append(None)
        whole = eqx.combine(arrays_of, rest)
        return one_step(whole, eqx.combine(arrays, static), source, *given)

    with explain_trace(), watched_trace(program, like) as told:
        closed, out, static_out = eqx.filter_make_jaxpr(counted)(
            arrays, arrays_of, resident, content, epoch
        )
        check_constants(closed)
    baked.traced()
    state, metrics = eqx.combine(out, static_out)
    check_carry(like, state)
    told(closed.jaxpr)
    return TracedStep(closed, jtu.tree_structure(out), metrics, len(runs))


def one_step(
    program: AbstractProgram,
    state: TrainState,
    source: AbstractSource,
    resident: PyTree,
    content: PyTree,
    epoch: Any,
) -> tuple[TrainState, dict[str, Metric]]:
    """Make one step, from state to state, with the metrics that it reports."""
    batch, mask, carry = fetched(state, source, resident, content)
    state, metrics = program.step(state, batch, mask, epoch, carry)
    return jtu.tree_map(strong, state), metrics


def fetched(
    state: TrainState, source: AbstractSource, resident: PyTree, content: PyTree
) -> tuple[PyTree, Any, PyTree]:
    """The batch that a step of a state sees, its mask, and the source's next carry."""
    key = jr.fold_in(state.key, state.step)
    at = {"step": state.step, "key": key, "num_steps": state.memory.num_steps}
    return source.fetch(resident, content, state.source, state.model, **at)


def check_carry(before: TrainState, after: TrainState) -> None:
    """Raise TypeError unless the state that comes out of a step can go into it."""
    difference = first_difference("", before, after)
    if difference:
        # Gradients are of the floating arrays alone, and so is what is made of them.
        too_much = difference.startswith("`opt_state") and "is now gone" in difference
        raise TypeError(
            f"The update changes the state: {difference}, so that the second step "
            "would compile again. "
            + (
                "Make it for what has a gradient alone: "
                "`opt.init(eqx.filter(model, eqx.is_inexact_array))`."
                if too_much
                else "An update keeps the structure, shapes, dtypes and non-array "
                "values of the model and `opt_state`."
            )
        )


def hoisted(closed: Any, large: list[int]) -> Any:
    """The same jaxpr with some of its constants as its first arguments.

    It is made anew, because a jaxpr keeps its constants alive for as long as it lives.
    """
    small = [None if i in large else c for i, c in enumerate(closed.consts)]
    jaxpr = closed.jaxpr

    def run(*flat: Any) -> Any:
        given = iter(flat[: len(large)])
        consts = [next(given) if c is None else c for c in small]
        whole = jax.extend.core.ClosedJaxpr(jaxpr, consts)
        return jax.extend.core.jaxpr_as_fun(whole)(*flat[len(large) :])

    arguments = [*(closed.consts[i] for i in large), *closed.in_avals]
    structs = [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in arguments]
    return jax.make_jaxpr(run)(*structs)
