"""The compiled step: traced once, compiled once, called for many steps."""

import time
from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.extend
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from trainer._abstract_step import AbstractStep
from trainer._convolutions import channels_last
from trainer._cost import choose_steps_per_call, seconds_per_step
from trainer._executable import Executable
from trainer._flat_state import FlatState
from trainer._metric_rows import MetricBuffer
from trainer._program import AbstractProgram
from trainer._state import TrainState
from trainer._traced_step import hoisted, trace_step, TracedStep
from trainer._tree import canonical, struct
from trainer._turns import in_turns
from trainer.data import AbstractSource, Chunk, does_not_fit, Layout
from trainer.mistakes._deleted import check_alive
from trainer.recompiles._baked import Baked
from trainer.recompiles._compiles import CompileCounter
from trainer.recompiles._context import Context
from trainer.recompiles._differences import first_difference
from trainer.recompiles._report import CompileReport


# How many calls fit into the metric buffer. In a step of small arrays that are called
# one by one, a buffer of more than 512 bytes alone makes XLA:CPU hand the work to other
# threads, which takes 100 us.
_CALLS = 82
_SMALL = 1024
# Seconds, as estimated, of a step that is worth to be compiled for each branch.
_SMALL_STEP = 1e-4


class CompiledStep(AbstractStep):
    """The step of one Trainer, compiled for one kind of state and batch.

    The state is kept as a flat list of arrays between calls, because taking a model
    apart and putting it together costs more than a small step does. Every call donates
    the state it is given.

    Attributes:
        steps_per_call: The most steps that one call runs.
        flat: Takes states apart and puts them together.
        layout: What an item's content looks like.
        baked: The Python values that the step has read.
        rows: How many steps the metric buffer holds.
        pace: Seconds per step, as last measured or, at first, as estimated.
        most: How many steps are put into one call for now.
        seconds: Seconds from the first trace until it was compiled.
    """

    def __init__(
        self,
        program: AbstractProgram,
        state: TrainState,
        source: AbstractSource,
        content: PyTree,
        steps_per_call: int | Literal["auto"],
        period: int | None,
    ):
        began = time.perf_counter()
        self._counter, self._context = CompileCounter(), Context()
        self._source = jtu.tree_map(struct, source.resident), source.static
        self.flat = FlatState(state)
        self._home = state.step.sharding
        self.baked = Baked((program, source.static), self.flat.static.model)
        check_alive("", program)
        program = self._placed(program)
        like = self.flat.like
        traced = trace_step(program, like, source, self._source[0], content, self.baked)
        seconds = {"trace": time.perf_counter() - began}
        platform = next(iter(state.step.devices())).platform
        self.pace = seconds_per_step(traced.closed.jaxpr, platform)
        why = "as given"
        if steps_per_call == "auto":
            chosen = choose_steps_per_call(self.pace, content, period, platform)
            steps_per_call, why = chosen
        self.steps_per_call, self.most = steps_per_call, 1
        self.layout = Layout(content, steps_per_call)
        self.rows = _CALLS * steps_per_call
        self._buffer = MetricBuffer(traced.metrics, self.rows)
        closed = traced.closed
        if platform == "cpu":
            closed = channels_last(closed)
            if self.pace < _SMALL_STEP:
                closed = in_turns(closed, len(jtu.tree_leaves(self.flat.arrays)))
        self._call = self._compiled(
            traced._replace(closed=closed), program, state, source, content
        )
        self._seconds, self._why = {**seconds, **self._call.seconds}, why
        self._traces = traced.traces
        self.seconds = time.perf_counter() - began

    def _compiled(
        self,
        traced: TracedStep,
        program: PyTree,
        state: TrainState,
        source: AbstractSource,
        content: PyTree,
    ) -> Executable:
        # Large arrays that a loss closed over are arguments, not part of the program:
        # XLA would copy them into it, and try to fold what is computed from them.
        consts = traced.closed.consts
        large = [i for i, c in enumerate(consts) if np.size(c) > _SMALL]
        constants = self._placed([consts[i] for i in large])
        function = self._function(hoisted(traced.closed, large), traced.treedef)
        arrays_of = jtu.tree_leaves(eqx.filter(program, eqx.is_array))
        self._kept = jtu.tree_leaves((constants, arrays_of))
        chunk = Chunk(self.layout)
        chunk.add(jtu.tree_leaves(content), 0)
        own = (constants, arrays_of, self.resident(source))
        kept = (*own, chunk.leaves(), self._control(0, [0]))
        return Executable(
            function, kept, (self.flat.flatten(state), self._placed(self.empty()))
        )

    def _function(self, program_of_one: Any, out_treedef: Any) -> Any:
        """Write the function that is compiled: up to `steps_per_call` steps."""
        buffer, most, flat = self._buffer, self.steps_per_call, self.flat
        shardings = [leaf.sharding for leaf in jtu.tree_leaves(flat.arrays)]
        run_one = jax.extend.core.jaxpr_as_fun(program_of_one)

        def one(kept: Any, content: PyTree, k: Any, carry: Any) -> Any:
            constants, program, resident, _, control = kept
            leaves, buffers = carry
            row, epoch = control[1] + k, control[2 + k]
            inputs = (*program, *resident, *content, epoch)
            found = run_one(*constants, *flat.typed(leaves), *inputs)
            state, metrics = jtu.tree_unflatten(out_treedef, found)
            buffers = buffer.write(buffers, row, _complete(metrics))
            return flat.raw([*map(_pin, jtu.tree_leaves(state), shardings)]), buffers

        def function(kept: Any, donated: Any) -> Any:
            _, _, _, chunk, control = kept
            # Not donated, so that it can be waited for when the next call has begun.
            ticket = control[0] + 1
            if most == 1:
                return *one(kept, chunk, 0, donated), ticket

            def body(k: Any, carry: Any) -> Any:
                take = lambda a: jax.lax.dynamic_index_in_dim(a, k, keepdims=False)
                return one(kept, [take(a) for a in chunk], k, carry)

            leaves, buffers = jax.lax.fori_loop(0, control[0], body, donated)
            # XLA may move once more what leaves the loop.
            return [*map(_pin, leaves, shardings)], buffers, ticket

        function.__name__ = function.__qualname__ = self._counter.name
        return function

    @property
    def metric_names(self) -> frozenset[str]:
        """Names of everything that a step may report."""
        return self._buffer.names

    @property
    def report(self) -> CompileReport:
        """What compiling it took, and what came of it."""
        return CompileReport(
            self._traces,
            self._counter.count,
            self._counter.hits,
            self._seconds,
            self._call.flops,
            self._call.bytes_accessed,
            self._call.peak_memory,
            self.steps_per_call,
            self._why,
        )

    def empty(self) -> dict[str, Any]:
        """Metric buffers with no row written, as the next call takes them."""
        return self._buffer.empty()

    def resident(self, source: AbstractSource) -> list[jax.Array]:
        """The arrays that the source keeps on the device, as a call takes them."""
        return jtu.tree_leaves(self._placed(source.resident))

    def _placed(self, tree: PyTree) -> PyTree:
        return canonical(tree, copy=False, home=self._home)

    def read(self, buffers: Any, rows: int) -> dict[str, np.ndarray]:
        """Bring the first `rows` rows to the host. Waits for the device."""
        return self._buffer.read(jax.device_get(buffers), rows)

    def mismatch(self, state: TrainState, source: AbstractSource) -> str | None:
        """Why a canonical state or a source needs another compile, or None."""
        for changed in self._context.differences(Context()):
            return f"This Trainer's step would compile again, as {changed}"
        difference = self.flat.difference(state)
        if difference:
            return (
                f"{difference}, for which this Trainer's step would compile again. "
                "Make a new Trainer for it."
            )
        given = (source.resident, source.static)
        pairs = zip(self._source, given, strict=True)
        found = (first_difference("data", was, now) for was, now in pairs)
        difference = next(filter(None, found), None)
        if difference:
            return (
                f"{difference}, for which this Trainer's step would compile again: "
                "arrays on the device and samplers are a part of it. Use data of the "
                "same kind and size, or a loader of batches, or make a new Trainer."
            )
        return None

    def refusal(self, content: PyTree) -> str | None:
        """Why the content of an item needs another compile, or None."""
        if self.layout.leaves(content) is not None:
            return None
        # Of `Arrays`, what is handed over are the numbers of the rows.
        pairs = zip(("batch", "mask"), self.layout.like, content, strict=False)
        found = (does_not_fit(*pair) for pair in pairs)
        return next(filter(None, found), "The data is of another kind.")

    def __call__(
        self,
        leaves: list[jax.Array],
        buffers: dict[str, Any],
        row: int,
        resident: list[jax.Array],
        chunk: Chunk,
    ) -> tuple[list[jax.Array], dict[str, jax.Array], jax.Array]:
        """Run one step an item of the chunk, and write metrics from `row` on.

        Does not wait for the device. The third of what is returned is there when the
        call is over, and can be waited for.
        """
        control = self._control(row, chunk.epochs)
        try:
            kept = [*self._kept, *resident, *chunk.leaves(), control]
            return self._call(kept, [*leaves, *jtu.tree_leaves(buffers)])
        except RuntimeError as error:
            chunk.check_alive(error)
            raise

    def _control(self, row: int, epochs: Sequence[int]) -> np.ndarray:
        """Number of steps, first row, epoch of each step: one array to hand over."""
        control = np.zeros(2 + self.steps_per_call, np.int32)
        control[:2] = len(epochs), row
        control[2 : 2 + len(epochs)] = epochs
        return control


def _pin(leaf: jax.Array, sharding: Any) -> jax.Array:
    """Keep a leaf where it came from; XLA is free to move what it returns."""
    if not isinstance(sharding, NamedSharding):
        return leaf
    if jax.sharding.AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(leaf, sharding)
    return jax.lax.with_sharding_constraint(leaf, sharding)


def _complete(metrics: Any) -> Any:
    """Give back the True that a presence known while tracing lost in the jaxpr."""
    return {
        n: m if m.present is not None else m._replace(present=True)
        for n, m in metrics.items()
    }
