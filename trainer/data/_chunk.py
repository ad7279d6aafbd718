"""The batches of one call, put behind one another."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from trainer._tree import first_difference
from trainer._types import RecompileError


def _empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Make an array that JAX takes over on the CPU without copying it once more.

    It does that where the memory starts at a multiple of 64 bytes.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def does_not_fit(like: PyTree, content: PyTree) -> RecompileError:
    """Make the error for a batch that is not like the first."""
    return RecompileError(
        f"{first_difference('batch', like, content)}, for which the step would compile "
        "again. Give every batch the structure, shapes and dtypes of the first; for "
        "other data, make a new Trainer."
    )


class Layout:
    """Structure, shapes and dtypes of an item's content, and how many fit in a call."""

    def __init__(self, content: PyTree, capacity: int):
        leaves, self.treedef = jtu.tree_flatten(content)
        self.shapes = [(np.shape(leaf), np.dtype(leaf.dtype)) for leaf in leaves]
        self.capacity = capacity

    def fits(self, content: PyTree) -> bool:
        """Whether content looks the same, so that the compiled step takes it."""
        leaves, treedef = jtu.tree_flatten(content)
        if treedef != self.treedef:
            return False
        shapes = [(np.shape(x), getattr(x, "dtype", None)) for x in leaves]
        return shapes == self.shapes

    @property
    def like(self) -> PyTree:
        """The content, as `jax.ShapeDtypeStruct`s."""
        structs = [jax.ShapeDtypeStruct(*shape) for shape in self.shapes]
        return jtu.tree_unflatten(self.treedef, structs)


class Chunk:
    """The contents of up to `capacity` items, on a new leading axis if that is over 1.

    An item is copied when it is added: a loader may write its next batch over the last
    one, and the device reads a chunk while the host is filling the one after it. What
    lies past the last item is never read, so it is left as it is.
    """

    def __init__(self, layout: Layout):
        self._layout = layout
        self._columns: list[Any] = [None] * len(layout.shapes)
        self._count = 0

    def add(self, content: PyTree) -> None:
        """Add one item. Raises RecompileError if it does not fit the layout."""
        if not self._layout.fits(content):
            raise does_not_fit(self._layout.like, content)
        for place, leaf in enumerate(jtu.tree_leaves(content)):
            self._put(place, leaf)
        self._count += 1

    def _put(self, place: int, leaf: Any) -> None:
        column, capacity = self._columns[place], self._layout.capacity
        if column is None and isinstance(leaf, jax.Array):
            column = []
        elif column is None:
            lead = (capacity,) if capacity > 1 else ()
            column = _empty((*lead, *leaf.shape), leaf.dtype)
        self._columns[place] = column
        if isinstance(column, list):
            column.append(leaf if isinstance(leaf, jax.Array) else np.array(leaf))
        else:
            column[self._count if capacity > 1 else ...] = leaf

    def content(self) -> PyTree:
        """What a call of the compiled step takes."""
        capacity = self._layout.capacity
        leaves = []
        for column in self._columns:
            if isinstance(column, list) and capacity > 1:
                rest = [column[-1]] * (capacity - len(column))
                column = jnp.stack([*column, *rest])
            leaves.append(column[0] if isinstance(column, list) else column)
        return jtu.tree_unflatten(self._layout.treedef, leaves)
