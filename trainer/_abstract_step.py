"""What the loop knows of a step: how it is called, and what comes back."""

import abc
from typing import Any

import jax
import numpy as np

from trainer._flat_state import FlatState
from trainer.data import AbstractSource, Chunk, Layout
from trainer.recompiles._baked import Baked
from trainer.recompiles._report import CompileReport


class AbstractStep(abc.ABC):
    """The step of one Trainer, for one form of state and batch.

    The state is handed over as the flat list of arrays that `flat` makes of it, and
    metrics as buffers that nobody else looks into.

    Attributes:
        flat: Takes states apart and puts them together.
        layout: What an item's content looks like.
        baked: The Python values that the step has read, and would not read again.
        steps_per_call: The most steps that one call runs.
        most: How many steps are put into one call for now.
        pace: Seconds per step, as last measured or, at first, as estimated.
        rows: How many steps there are at most from one report to the next.
        seconds: Seconds from the first trace until it was compiled.
    """

    flat: FlatState
    layout: Layout
    baked: Baked
    steps_per_call: int
    most: int
    pace: float
    rows: int
    seconds: float

    @property
    @abc.abstractmethod
    def metric_names(self) -> frozenset[str]:
        """Names of everything that a step may report, as far as that is known."""

    @property
    @abc.abstractmethod
    def report(self) -> CompileReport:
        """What compiling it took, and what came of it."""

    @abc.abstractmethod
    def empty(self) -> dict[str, Any]:
        """Metric buffers with no row written, as the next call takes them."""

    @abc.abstractmethod
    def resident(self, source: AbstractSource) -> list[jax.Array]:
        """The arrays that the source keeps on the device, as a call takes them."""

    @abc.abstractmethod
    def read(self, buffers: Any, rows: int) -> dict[str, np.ndarray]:
        """Bring the first `rows` rows to the host. Waits for the device."""

    @abc.abstractmethod
    def __call__(
        self,
        leaves: list[jax.Array],
        buffers: dict[str, Any],
        row: int,
        resident: list[jax.Array],
        chunk: Chunk,
    ) -> tuple[list[jax.Array], dict[str, Any], jax.Array]:
        """Run one step an item of the chunk, and write metrics from `row` on.

        Does not wait for the device. The third of what is returned is there when the
        call is over, and can be waited for.
        """
