"""The step run op by op, with values, for a look inside; see `Trainer`'s `debug`."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from trainer._abstract_step import AbstractStep
from trainer._flat_state import FlatState
from trainer._metric_rows import as_rows
from trainer._program import AbstractProgram
from trainer._state import TrainState
from trainer._traced_step import check_carry, one_step
from trainer._tree import canonical
from trainer.data import AbstractSource, Chunk, Layout
from trainer.recompiles._baked import Baked
from trainer.recompiles._report import CompileReport


_REPORT = CompileReport(0, 0, 0, {}, None, None, None, 1, "debug: nothing is compiled")
_NO_VALUE = (
    "This is `debug`, where `x.item()` is the value of a scalar under a gradient, and "
    "`jax.lax.stop_gradient(x)` that of any array. What `jax.vmap` maps over has one "
    "value for each example: `jax.debug.print('{x}', x=x)` shows them."
)


def values_if(debug: bool) -> contextlib.AbstractContextManager[Any]:
    """A context in which code runs op by op, with values, if that is asked for."""
    return jax.disable_jit() if debug else contextlib.nullcontext()


class EagerSteps:
    """The steps of one fit that is not compiled, as `Steps` has those of a Trainer.

    Nothing is kept from one fit to the next, and so there is nothing not to fit.

    Args:
        program: What a step does.
    """

    def __init__(self, program: AbstractProgram):
        self._program = program
        self.report, self.seconds = _REPORT, 0.0

    def begin(self, state: TrainState, source: AbstractSource) -> None:
        """Refuse nothing."""

    def find(
        self,
        state: TrainState,
        source: AbstractSource,
        content: PyTree,
        period: int | None,
    ) -> AbstractStep:
        """Make the step for the content of an item."""
        del period
        return EagerStep(self._program, state, source, content)


class EagerStep(AbstractStep):
    """The step of one Trainer, run by Python at each call.

    Nothing is donated: when a step raises, the state before it is still there.

    Args:
        program: What the step does.
        state: A canonical state.
        source: Where the batches come from.
        content: The content of an item.
    """

    def __init__(
        self,
        program: AbstractProgram,
        state: TrainState,
        source: AbstractSource,
        content: PyTree,
    ):
        self._source, self._home = source, state.step.sharding
        self._program = canonical(program, copy=False, home=self._home)
        self.flat, self.layout = FlatState(state), Layout(content, 1)
        self.baked = Baked(())
        self.steps_per_call = self.most = self.rows = 1
        self.pace, self.seconds = 1e-3, 0.0
        self._names: set[str] = set()

    @property
    def metric_names(self) -> frozenset[str]:
        """Names of what was reported so far."""
        return frozenset(self._names)

    @property
    def report(self) -> CompileReport:
        """That nothing was compiled."""
        return _REPORT

    def empty(self) -> dict[str, Any]:
        """No metrics."""
        return {}

    def resident(self, source: AbstractSource) -> list[jax.Array]:
        """See `AbstractStep.resident`."""
        placed = canonical(source.resident, copy=False, home=self._home)
        return jtu.tree_leaves(placed)

    def read(self, buffers: Any, rows: int) -> dict[str, np.ndarray]:
        """The metrics of the one step since the last report."""
        del rows
        found: dict[str, np.ndarray] = {}
        for name, (value, present) in buffers.items():
            values = np.array(jax.device_get(value))[None]
            is_there = None
            if present is not True:
                is_there = np.broadcast_to(jax.device_get(present), values.shape)
            found |= as_rows(name, values, is_there)
        self._names |= found.keys()
        return found

    def __call__(
        self,
        leaves: list[jax.Array],
        buffers: dict[str, Any],
        row: int,
        resident: list[jax.Array],
        chunk: Chunk,
    ) -> tuple[list[jax.Array], dict[str, Any], jax.Array]:
        """Run the step for the one item in the chunk; see `AbstractStep`."""
        del buffers, row
        state = self.flat.unflatten(leaves)
        kept = jtu.tree_structure(self._source.resident)
        # A copy, because the chunk's memory is written to again.
        own = canonical(chunk.leaves(), home=self._home)
        content = jtu.tree_unflatten(self.layout.treedef, own)
        epoch = jnp.int32(chunk.epochs[0])
        given = jtu.tree_unflatten(kept, resident), content, epoch
        with values_if(True), _explained():
            new, metrics = one_step(self._program, state, self._source, *given)
        check_carry(state, new)
        new = canonical(new, copy=False, home=self._home)
        return self.flat.flatten(new), metrics, new.step


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Add to JAX's error where a value has to be read in another way."""
    try:
        yield
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.NonConcreteBooleanIndexError,
    ) as error:
        error.add_note(_NO_VALUE)
        raise
