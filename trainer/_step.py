"""The compiled step: traced once, compiled once, called for many steps."""

import time
from collections.abc import Sequence
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
from trainer._convolutions import channels_last
from trainer._cost import choose_steps_per_call, seconds_per_step
from trainer._executable import Executable
from trainer._explain import explain_trace
from trainer._flat_state import FlatState
from trainer._metrics import MetricBuffer
from trainer._program import AbstractProgram
from trainer._state import TrainState
from trainer._tree import canonical, first_difference, strong, struct
from trainer._turns import in_turns
from trainer._types import RecompileError
from trainer.data import AbstractSource, Chunk, does_not_fit, Layout


# How many calls fit into the metric buffer. In a step of small arrays that are called
# one by one, a buffer of more than 512 bytes alone makes XLA:CPU hand the work to other
# threads, which takes 100 us.
_CALLS = 82
_SMALL = 1024
# Seconds, as estimated, of a step that is worth to be compiled for each branch.
_SMALL_STEP = 1e-4


class CompiledStep:
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
        self._counter = CompileCounter()
        self._source = jtu.tree_map(struct, source.resident), source.static
        self.flat = FlatState(state)
        self._home = state.step.sharding
        arrays_of, rest = eqx.partition(self._placed(program), eqx.is_array)
        self.baked = Baked((program, source.static))
        closed, treedef, (state_out, metrics) = self._traced(
            _one_step(self.flat.static, rest, source), arrays_of, content
        )
        _check_carry(self.flat.like, state_out)
        platform = next(iter(state.step.devices())).platform
        self.pace = seconds_per_step(closed.jaxpr, platform)
        if steps_per_call == "auto":
            steps_per_call = choose_steps_per_call(self.pace, content, period, platform)
        self.steps_per_call, self.most = steps_per_call, 1
        self.layout = Layout(content, steps_per_call)
        self.rows = _CALLS * steps_per_call
        self._buffer = MetricBuffer(metrics, self.rows)
        if platform == "cpu":
            closed = channels_last(closed)
            if self.pace < _SMALL_STEP:
                closed = in_turns(closed, len(jtu.tree_leaves(self.flat.arrays)))
        # Large arrays that a loss closed over are arguments, not part of the program:
        # XLA would copy them into it, and try to fold what is computed from them.
        large = [i for i, c in enumerate(closed.consts) if np.size(c) > _SMALL]
        constants = self._placed([closed.consts[i] for i in large])
        function = self._function(_hoisted(closed, large), treedef)
        self._kept = jtu.tree_leaves((constants, arrays_of))
        chunk = Chunk(self.layout)
        chunk.add(jtu.tree_leaves(content), 0)
        own = (constants, jtu.tree_leaves(arrays_of), self.resident(source))
        kept = (*own, chunk.leaves(), self._control(0, [0]))
        donated = (self.flat.flatten(state), self._placed(self.empty()))
        self._call = Executable(function, kept, donated)
        self.seconds = time.perf_counter() - began

    def _traced(self, one_step: Any, program: PyTree, content: PyTree) -> Any:
        """Trace one step; return its jaxpr, and the form of what it returns."""
        like = Layout(content, 1).like
        epoch = jax.ShapeDtypeStruct((), jnp.int32)
        with explain_trace():
            closed, arrays, static = eqx.filter_make_jaxpr(one_step)(
                self.flat.arrays, program, self._source[0], like, epoch
            )
        self.baked.traced()
        return closed, jtu.tree_structure(arrays), eqx.combine(arrays, static)

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

            return *jax.lax.fori_loop(0, control[0], body, donated), ticket

        function.__name__ = function.__qualname__ = self._counter.name
        return function

    @property
    def metric_names(self) -> frozenset[str]:
        """Names of everything that a step may report."""
        return self._buffer.names

    @property
    def compiles(self) -> int:
        """How often XLA compiled this step."""
        return self._counter.count

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

    def check_state(self, state: TrainState, source: AbstractSource) -> None:
        """Raise RecompileError if the state or what the step has read do not fit."""
        self.baked.check()
        difference = first_difference("", self.flat.like, state)
        if difference:
            raise RecompileError(
                f"{difference}, for which this Trainer's step would compile again. "
                "Make a new Trainer for it."
            )
        given = (source.resident, source.static)
        pairs = zip(self._source, given, strict=True)
        found = (first_difference("data", was, now) for was, now in pairs)
        difference = next(filter(None, found), None)
        if difference:
            raise RecompileError(
                f"{difference}, for which this Trainer's step would compile again: "
                "arrays on the device and samplers are a part of it. Use data of the "
                "same kind and size, or a loader of batches, or make a new Trainer."
            )

    def check_content(self, content: PyTree) -> None:
        """Raise RecompileError if batches are not like those it was compiled for."""
        if self.layout.leaves(content) is None:
            raise does_not_fit(self.layout.like, content)

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
        kept = [
            *self._kept,
            *resident,
            *chunk.leaves(),
            self._control(row, chunk.epochs),
        ]
        return self._call(kept, [*leaves, *jtu.tree_leaves(buffers)])

    def _control(self, row: int, epochs: Sequence[int]) -> np.ndarray:
        """Number of steps, first row, epoch of each step: one array to hand over."""
        control = np.zeros(2 + self.steps_per_call, np.int32)
        control[:2] = len(epochs), row
        control[2 : 2 + len(epochs)] = epochs
        return control


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
        whole: AbstractProgram = eqx.combine(program, rest)
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
