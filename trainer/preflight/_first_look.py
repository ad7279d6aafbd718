"""The numbers of a program before its first step: of the batch, model and losses."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from trainer._grad import value_and_grad
from trainer._state import TrainState
from trainer._step import CompiledStep
from trainer._traced_step import fetched
from trainer._tree import canonical, describe, parameters, path_name
from trainer.data import AbstractSource, Chunk
from trainer.data._source import num_examples
from trainer.mistakes._trace_errors import explain_trace
from trainer.preflight._pieces import Leaf


class Seen(NamedTuple):
    """What is seen of one array.

    Attributes:
        form: Its dtype and shape.
        size: How many numbers it has.
        bad: How many of them are not finite.
        least: The smallest that is finite; None if there is none.
        most: The largest; likewise.
        squares: The sum of the squares of all.
    """

    form: str
    size: int
    bad: int
    least: float | None
    most: float | None
    squares: float


class SeenLoss(NamedTuple):
    """What is seen of one loss: its value, its metrics, and its gradient by path."""

    value: float
    metrics: Mapping[str, float]
    gradient: Mapping[str, Seen]


class FirstLook(NamedTuple):
    """What is seen of a first step that is not made.

    Attributes:
        batch: The arrays of the batch, by path.
        model: The floating arrays of the model and its state, by path.
        losses: The losses, by name.
        num_examples: Examples in the batch.
        masked: Whether there is a mask.
    """

    batch: Mapping[str, Seen]
    model: Mapping[str, Seen]
    losses: Mapping[str, SeenLoss]
    num_examples: int
    masked: bool


def look(
    leaves: Mapping[str, Leaf], state: TrainState, source: AbstractSource, content: Any
) -> FirstLook:
    """Compute every loss and its gradient, one after another.

    Args:
        leaves: The losses, by name.
        state: The state before the step.
        source: Where the batch comes from.
        content: The content of its item.

    Raises:
        TraceError: A loss does what cannot be compiled.
    """
    home = state.step.sharding
    placed = lambda tree: canonical(tree, copy=False, home=home)

    def fetch(resident: PyTree, content: PyTree, state: TrainState) -> Any:
        return fetched(state, source, resident, content)[:2]

    def differentiate(leaf: Leaf, model: PyTree, batch: PyTree, mask: Any) -> Any:
        now = leaf.given._replace(mask=mask)
        found = value_and_grad(leaf.loss, model, batch, now, leaf.how)
        return found.value, {n: m.value for n, m in found.metrics.items()}

    resident = placed(source.resident)
    batch, mask = _run_once(fetch, resident, placed(content), state)
    losses = {}
    for name, leaf in leaves.items():
        found = _run_once(differentiate, placed(leaf), state.model, batch, mask)
        (value, gradient), metrics = found
        metrics = jtu.tree_map(float, metrics)
        losses[name] = SeenLoss(float(value), metrics, _seen("model", gradient))
    model = _seen("model", parameters(state.model))
    model |= _seen("model_state", parameters(state.model_state))
    examples = num_examples(batch)
    return FirstLook(_seen("batch", batch), model, losses, examples, mask is not None)


def _run_once(function: Callable[..., Any], *given: PyTree) -> Any:
    """Compile a function, and call it once."""
    with explain_trace():
        closed, out, static = eqx.filter_make_jaxpr(function)(*given)

    def run(consts: list[Any], leaves: list[Any]) -> list[Any]:
        # What it closed over is an argument: XLA would try to fold it.
        whole = jax.extend.core.ClosedJaxpr(closed.jaxpr, consts)
        return jax.extend.core.jaxpr_as_fun(whole)(*leaves)

    arrays = jtu.tree_leaves(eqx.filter(given, eqx.is_array))
    # On a CPU that takes a quarter of the time, of which compiling is the most.
    is_cpu = jax.default_backend() == "cpu"
    quickly = {"xla_backend_optimization_level": 0} if is_cpu else None
    found = jax.jit(run, compiler_options=quickly)(closed.consts, arrays)
    return eqx.combine(jtu.tree_unflatten(jtu.tree_structure(out), found), static)


def _seen(root: str, tree: PyTree) -> dict[str, Seen]:
    """What is seen of each array in a tree, by path."""
    leaves = [x for x in jtu.tree_leaves_with_path(tree) if eqx.is_array_like(x[1])]
    return {path_name(root, path): _seen_one(leaf) for path, leaf in leaves}


def _seen_one(leaf: Any) -> Seen:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if is_key or not leaf.size:
        return Seen(describe(leaf), leaf.size, 0, None, None, 0.0)
    values = np.asarray(leaf)
    values = np.abs(values) if np.iscomplexobj(values) else values
    if values.dtype != np.float64:
        # Narrow types are not NumPy's own.
        is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
        values = values.astype(np.float32 if is_float else np.int64)
    is_finite = np.isfinite(values)
    bad = int(values.size - np.count_nonzero(is_finite))
    good = values[is_finite] if bad else values
    some = good.size > 0
    return Seen(
        describe(leaf),
        leaf.size,
        bad,
        good.min().item() if some else None,
        good.max().item() if some else None,
        float(np.vdot(values, values)),
    )


def run_once(
    compiled: CompiledStep,
    state: TrainState,
    source: AbstractSource,
    content: PyTree,
    epoch: int,
) -> tuple[dict[str, np.ndarray], TrainState]:
    """Make one step of a state, whose memory is given away.

    Returns:
        What the step reports, one row, and the state after it.
    """
    chunk = Chunk(compiled.layout)
    chunk.add(jtu.tree_leaves(content), epoch)
    leaves, buffers, _ = compiled(
        compiled.flat.flatten(state),
        compiled.empty(),
        0,
        compiled.resident(source),
        chunk,
    )
    return compiled.read(buffers, 1), compiled.flat.unflatten(leaves)


def first_bad(state: TrainState) -> str | None:
    """Path of the first array of the model that is not finite, or None."""
    for path, leaf in jtu.tree_leaves_with_path(parameters(state.model)):
        if not np.isfinite(np.asarray(leaf)).all():
            return path_name("model", path)
    return None
