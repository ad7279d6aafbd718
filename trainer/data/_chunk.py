"""The batches of one call, put behind one another."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from trainer.mistakes._deleted import check_alive
from trainer.recompiles._differences import first_difference


def _empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Make an array that JAX takes over on the CPU without copying it once more.

    It does that where the memory starts at a multiple of 64 bytes.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def does_not_fit(name: str, like: PyTree, given: PyTree) -> str | None:
    """Say why a batch that is not like the first does not fit, or None if it does."""
    difference = first_difference(name, like, given)
    return difference and (
        f"{difference}, for which the step would compile again. Give every batch the "
        "structure, shapes and dtypes of the first, or give the Trainer "
        "`on_recompile='allow'` to compile once for each form."
    )


class Layout:
    """Structure, shapes and dtypes of an item's content, and how many fit in a call."""

    def __init__(self, content: PyTree, capacity: int):
        leaves, self.treedef = jtu.tree_flatten(content)
        self.shapes = [(np.shape(leaf), np.dtype(leaf.dtype)) for leaf in leaves]
        self.capacity = capacity

    def leaves(self, content: PyTree) -> list[Any] | None:
        """The arrays of content that looks the same, so that the step takes it.

        None if it does not. Every batch is looked at, so this has to be quick.
        """
        leaves, treedef = jtu.tree_flatten(content)
        if treedef != self.treedef:
            return None
        for leaf, (shape, dtype) in zip(leaves, self.shapes, strict=True):
            if getattr(leaf, "dtype", None) != dtype or leaf.shape != shape:
                return None
        return leaves

    @property
    def like(self) -> PyTree:
        """The content, as `jax.ShapeDtypeStruct`s."""
        structs = [jax.ShapeDtypeStruct(*shape) for shape in self.shapes]
        return jtu.tree_unflatten(self.treedef, structs)


class Chunk:
    """The contents of up to `capacity` items, on a new leading axis if that is over 1.

    An item is copied when it is added: a loader may write its next batch over the last
    one, and the device reads a chunk while the host is filling the one after it. What
    lies past the last item is never used, and left as it is.

    Attributes:
        epochs: The epoch of each item.
    """

    def __init__(self, layout: Layout):
        self._layout = layout
        self._columns: list[Any] = [None] * len(layout.shapes)
        self.epochs: list[int] = []

    def __len__(self) -> int:
        """How many items were added."""
        return len(self.epochs)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the host."""
        return sum(getattr(column, "nbytes", 0) for column in self._columns)

    def emptied(self) -> "Chunk":
        """The same without items, to be filled again when no call reads it any more.

        Its memory is kept: new memory of some MB is slow to write to for the first
        time, and has left the caches of the processor when it is read.
        """
        is_memory = lambda column: isinstance(column, np.ndarray)
        self._columns = [c if is_memory(c) else None for c in self._columns]
        self.epochs = []
        return self

    def add(self, leaves: Sequence[Any], epoch: int) -> None:
        """Add the arrays of one item, which fit the layout."""
        place = len(self.epochs) if self._layout.capacity > 1 else ...
        for number, leaf in enumerate(leaves):
            column = self._column(number, leaf)
            if isinstance(column, list):
                column.append(leaf if isinstance(leaf, jax.Array) else np.array(leaf))
            else:
                column[place] = leaf
        self.epochs.append(epoch)

    def room(self, epochs: Sequence[int]) -> list[np.ndarray]:
        """Arrays for several items, on a leading axis, which the caller fills."""
        start, end = len(self.epochs), len(self.epochs) + len(epochs)
        self.epochs.extend(epochs)
        columns = [self._column(i, None) for i in range(len(self._columns))]
        if self._layout.capacity > 1:
            return [column[start:end] for column in columns]
        return [column.reshape(1, *column.shape) for column in columns]

    def _column(self, number: int, leaf: Any) -> Any:
        column = self._columns[number]
        if column is None:
            shape, dtype = self._layout.shapes[number]
            lead = (self._layout.capacity,) if self._layout.capacity > 1 else ()
            is_on_device = isinstance(leaf, jax.Array)
            column = [] if is_on_device else _empty((*lead, *shape), dtype)
            self._columns[number] = column
        return column

    def check_alive(self, error: Exception) -> None:
        """Raise ValueError if an array of a batch was deleted, as JAX has said."""
        for item in range(len(self)):
            arrays = [c[item] if isinstance(c, list) else None for c in self._columns]
            content = jtu.tree_unflatten(self._layout.treedef, arrays)
            # A batch has its mask beside it.
            check_alive("batch", content[0] if content else (), error)

    def leaves(self) -> list[Any]:
        """What a call of the compiled step takes."""
        capacity = self._layout.capacity
        leaves = []
        for column in self._columns:
            if isinstance(column, list) and capacity > 1:
                rest = [column[-1]] * (capacity - len(column))
                column = jnp.stack([*column, *rest])
            leaves.append(column[0] if isinstance(column, list) else column)
        return leaves
