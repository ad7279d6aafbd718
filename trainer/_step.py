"""The compiled step: traced once, compiled once, called for many steps."""

import time
from typing import Any, Literal

import equinox as eqx
import jax
import jax.extend
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from trainer._baked import Baked
from trainer._compiles import CompileCounter
from trainer._cost import choose_steps_per_call
from trainer._explain import explain_trace
from trainer._metrics import MetricBuffer
from trainer._program import Program
from trainer._state import TrainState
from trainer._tree import canonical, first_difference, strong, struct
from trainer._types import RecompileError
from trainer.data import AbstractSource, Chunk, Layout


_ROWS = 8192
_SMALL = 1024


class CompiledStep:
    """The step of one Trainer, compiled for one kind of state and batch.

    The state is kept as a flat list of arrays between calls, because taking a model
    apart and putting it together costs more than a small step does. Every call donates
    the state it is given.

    Attributes:
        steps_per_call: The most steps that one call runs.
        layout: What an item's content looks like.
        baked: The Python values that the step has read.
        rows: How many steps the metric buffer holds.
        pace: Seconds per step as last measured, or None.
        seconds: Seconds from the first trace until it was compiled.
    """

    def __init__(
        self,
        program: Program,
        state: TrainState,
        source: AbstractSource,
        content: PyTree,
        steps_per_call: int | Literal["auto"],
        period: int | None,
    ):
        began = time.perf_counter()
        self._counter = CompileCounter()
        like = Layout(content, 1).like
        self._resident = jtu.tree_map(struct, source.resident)
        self._source_static = source.static
        arrays, static = eqx.partition(state, eqx.is_array)
        self._arrays, self._static = jtu.tree_map(struct, arrays), static
        self._treedef = jtu.tree_structure(arrays)
        self._home = state.step.sharding
        arrays_of, rest = eqx.partition(self._placed(program), eqx.is_array)
        one_step = _one_step(static, rest, source)
        epoch = jax.ShapeDtypeStruct((), jnp.int32)
        self.baked = Baked((program, source.static))
        with explain_trace():
            closed, found, found_static = eqx.filter_make_jaxpr(one_step)(
                self._arrays, arrays_of, self._resident, like, epoch
            )
        self.baked.traced()
        out_state, metrics = eqx.combine(found, found_static)
        _check_carry(eqx.combine(self._arrays, static), out_state)
        jaxpr = closed.jaxpr
        if steps_per_call == "auto":
            steps_per_call = choose_steps_per_call(jaxpr, content, period)
        self.steps_per_call = steps_per_call
        self.layout = Layout(content, steps_per_call)
        self.rows = -(-_ROWS // steps_per_call) * steps_per_call
        self.pace: float | None = None
        self._buffer = MetricBuffer(metrics, self.rows)
        # Large arrays that a loss closed over are arguments, not part of the program:
        # XLA would copy them into it, and try to fold what is computed from them.
        large = [i for i, c in enumerate(closed.consts) if np.size(c) > _SMALL]
        self._constants = self._placed([closed.consts[i] for i in large])
        self._program = jtu.tree_leaves(arrays_of)
        function = self._function(_hoisted(closed, large), jtu.tree_structure(found))
        jitted: Any = eqx.filter_jit(function, donate="all-except-first")
        chunk = Chunk(self.layout)
        chunk.add(content)
        control = np.zeros(2 + steps_per_call, np.int32)
        resident = self.resident(source)
        kept = (self._constants, self._program, resident, chunk.content(), control)
        donated = (self.flatten(state), self.empty())
        self._compiled = jitted.lower(kept, donated).compile()
        _forget(jitted)
        self.seconds = time.perf_counter() - began

    def _function(self, program_of_one: Any, out_treedef: Any) -> Any:
        """Write the function that is compiled: up to `steps_per_call` steps."""
        buffer, most = self._buffer, self.steps_per_call
        shardings = [leaf.sharding for leaf in jtu.tree_leaves(self._arrays)]
        run_one = jax.extend.core.jaxpr_as_fun(program_of_one)

        def one(kept: Any, content: PyTree, k: Any, carry: Any) -> Any:
            constants, program, resident, _, control = kept
            leaves, buffers = carry
            row, epoch = control[1] + k, control[2 + k]
            flat = (*leaves, *program, *resident, *jtu.tree_leaves(content), epoch)
            found = run_one(*constants, *flat)
            state, metrics = jtu.tree_unflatten(out_treedef, found)
            buffers = buffer.write(buffers, row, _complete(metrics))
            return [*map(_pin, jtu.tree_leaves(state), shardings)], buffers

        def function(kept: Any, donated: Any) -> Any:
            _, _, _, chunk, control = kept
            if most == 1:
                return one(kept, chunk, 0, donated)

            def body(k: Any, carry: Any) -> Any:
                take = lambda a: jax.lax.dynamic_index_in_dim(a, k, keepdims=False)
                return one(kept, jtu.tree_map(take, chunk), k, carry)

            return jax.lax.fori_loop(0, control[0], body, donated)

        function.__name__ = function.__qualname__ = self._counter.name
        return function

    @property
    def metric_names(self) -> frozenset[str]:
        """Names of everything that a step may report."""
        return frozenset(n for names in self._buffer.columns.values() for n in names)

    @property
    def compiles(self) -> int:
        """How often XLA compiled this step."""
        return self._counter.count

    def empty(self) -> dict[str, jax.Array]:
        """Metric buffers with no row written, on the device."""
        return canonical(self._buffer.empty(), home=self._home)

    def resident(self, source: AbstractSource) -> list[jax.Array]:
        """The arrays that the source keeps on the device, as a call takes them."""
        return jtu.tree_leaves(self._placed(source.resident))

    def _placed(self, tree: PyTree) -> PyTree:
        return canonical(tree, copy=False, home=self._home)

    def read(self, buffers: Any, rows: int) -> dict[str, np.ndarray]:
        """Bring the first `rows` rows to the host. Waits for the device."""
        return self._buffer.read(jax.device_get(buffers), rows)

    def check_state(self, state: TrainState, source: AbstractSource) -> None:
        """Raise RecompileError if the state or what the step has read do not fit."""
        self.baked.check()
        old = eqx.combine(self._arrays, self._static)
        difference = first_difference("", old, state)
        if difference:
            raise RecompileError(
                f"{difference}, for which this Trainer's step would compile again. "
                "Make a new Trainer for it."
            )
        difference = first_difference("data", self._resident, source.resident)
        difference = difference or first_difference(
            "data", self._source_static, source.static
        )
        if difference:
            raise RecompileError(
                f"{difference}, for which this Trainer's step would compile again: "
                "arrays on the device and samplers are a part of it. Use data of the "
                "same kind and size, or a loader of batches, or make a new Trainer."
            )

    def flatten(self, state: TrainState) -> list[jax.Array]:
        """Take a canonical state apart into the arrays that a call takes."""
        return jtu.tree_leaves(eqx.filter(state, eqx.is_array))

    def unflatten(self, leaves: list[jax.Array]) -> TrainState:
        """Put a state together again."""
        return eqx.combine(jtu.tree_unflatten(self._treedef, leaves), self._static)

    def __call__(
        self,
        leaves: list[jax.Array],
        buffers: dict[str, jax.Array],
        row: int,
        resident: list[jax.Array],
        chunk: Chunk,
        epochs: list[int],
    ) -> tuple[list[jax.Array], dict[str, jax.Array]]:
        """Run one step an item of the chunk, and write metrics from `row` on.

        Does not wait for the device.
        """
        # Number of steps, first row, epoch of each step: one array to hand over.
        control = np.zeros(2 + self.steps_per_call, np.int32)
        control[:2] = len(epochs), row
        control[2 : 2 + len(epochs)] = epochs
        content = chunk.content()
        kept = (self._constants, self._program, resident, content, control)
        return self._compiled(kept, (leaves, buffers))


def _hoisted(closed: Any, large: list[int]) -> Any:
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


def _forget(jitted: Any) -> None:
    """Drop what Equinox keeps of a function that is compiled ahead of time.

    Its cache would keep the executable for as long as the process runs, and one more
    for every Trainer. There is no public way to it. Without it nothing but memory is
    lost.
    """
    clear = getattr(getattr(jitted, "_cached", None), "clear_cache", None)
    if clear is not None:
        clear()


def _pin(leaf: jax.Array, sharding: Any) -> jax.Array:
    """Keep a leaf where it came from; XLA is free to move what it returns."""
    if isinstance(sharding, NamedSharding):
        return jax.lax.with_sharding_constraint(leaf, sharding)
    return leaf


def _complete(metrics: Any) -> Any:
    """Give back the True that a presence known while tracing lost in the jaxpr."""
    return {
        n: m if m.present is not None else m._replace(present=True)
        for n, m in metrics.items()
    }


def _one_step(static: Any, rest: Any, source: AbstractSource) -> Any:
    """Write one step as a function of arrays: state to state, and metrics."""

    def one_step(
        arrays: Any, program: Any, resident: Any, content: Any, epoch: Any
    ) -> Any:
        state: TrainState = eqx.combine(arrays, static)
        whole: Program = eqx.combine(program, rest)
        key = jr.fold_in(state.key, state.step)
        at = {"step": state.step, "key": key, "num_steps": state.memory.num_steps}
        batch, mask, carry = source.fetch(
            resident, content, state.source, state.model, **at
        )
        state, metrics = whole.step(state, batch, mask, epoch, carry)
        return jtu.tree_map(strong, state), metrics

    return one_step


def _check_carry(before: TrainState, after: TrainState) -> None:
    """Raise TypeError unless the state that comes out of a step can go into it."""
    difference = first_difference("", before, after)
    if difference:
        raise TypeError(
            f"The update changes the state: {difference}, so that the second step "
            "would compile again. An update keeps the structure, shapes, dtypes and "
            "non-array values of the model and `opt_state`."
        )
