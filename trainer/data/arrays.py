"""Arrays in memory, kept on the device."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from trainer._counts import positive_int
from trainer._tree import canonical, describe, path_name
from trainer._types import Batch, Model
from trainer.data._chunk import Chunk
from trainer.data._source import (
    AbstractSource,
    Feed,
    host_batch,
    is_list,
    pad_batch,
    Wanted,
)
from trainer.mistakes._deleted import check_alive


class Arrays(AbstractSource):
    """A data set in memory: kept on the device, its batches gathered inside the step.

    Every batch is full. The examples that are left at the end of an epoch are carried
    into the first batch of the next, so nothing is dropped and nothing repeated: step
    `s` sees the examples `s * batch_size` to `(s + 1) * batch_size` of one endless
    stream of epochs. With `num_epochs` the last batch is filled from the epoch after.

    The order of an epoch depends on the key given to `fit` and the epoch's number
    alone, so that a run continued at any step sees the batches it would have seen.

    Args:
        *arrays: Arrays, or PyTrees of them, with one leading axis of equal length. One
            is the batch by itself; several make it a tuple.
        batch_size: Examples per step, from 1 to the number of examples.
        shuffle: Draw a new order for every epoch. Evaluation never shuffles.

    Raises:
        TypeError: There is no array, or one does not hold numbers.
        ValueError: Lengths differ, or `batch_size` is out of its bounds.

    Example:
        >>> data = Arrays(np.arange(10.0), np.arange(10), batch_size=4, shuffle=False)
        >>> data.num_examples, data.num_steps(num_epochs=2)
        (10, 5)
    """

    def __init__(self, *arrays: Any, batch_size: int, shuffle: bool = True):
        stacked = lambda a: np.asarray(a) if type(a) is list and not is_list(a) else a
        # A copy, because the device may take a NumPy array's memory over as it is.
        self.arrays = jtu.tree_map(
            lambda a: a if isinstance(a, jax.Array) else a.copy(),
            host_batch(tuple(map(stacked, arrays)), "arrays"),
        )
        leaves = jtu.tree_leaves_with_path(self.arrays)
        if not leaves:
            raise TypeError("`Arrays` was given no arrays.")
        lengths = {path_name("arrays", p): leaf.shape[:1] for p, leaf in leaves}
        if len(set(lengths.values())) > 1 or () in lengths.values():
            given = ", ".join(
                f"`{n}` has {s[0] if s else 'none'}" for n, s in lengths.items()
            )
            raise ValueError(
                f"The arrays of `Arrays` differ in their number of examples: {given}. "
                "The leading axis counts the examples."
            )
        self.num_examples: int = leaves[0][1].shape[0]
        self.batch_size = positive_int(batch_size, "`batch_size` of `Arrays`")
        if self.batch_size > self.num_examples:
            raise ValueError(
                f"`batch_size` is `{batch_size}`, but there are {self.num_examples} "
                "examples, so that no batch can be filled."
            )
        self.shuffle = shuffle
        self._resident: PyTree = None

    def __repr__(self) -> str:
        """Show the arrays by dtype and shape."""
        shapes = ", ".join(describe(leaf) for leaf in jtu.tree_leaves(self.arrays))
        return f"Arrays({shapes}, batch_size={self.batch_size}, shuffle={self.shuffle})"

    @property
    def resident(self) -> PyTree:
        """The arrays on the device; put there at first use."""
        if self._resident is None:
            check_alive("arrays", self.arrays)
            self._resident = canonical(self.arrays, copy=False)
        return self._resident

    def fetch(
        self, resident: PyTree, content: PyTree, carry: PyTree, model: Model, **at: Any
    ) -> tuple[Batch, Any, PyTree]:
        """Gather the rows. They are in bounds, so nothing is clamped or checked."""
        del model, at
        rows, mask = content
        take = lambda a: a.at[rows].get(mode="promise_in_bounds")
        full = None if mask is None else jnp.ones(rows.shape, jnp.bool_)
        return jax.tree.map(take, resident), full, carry

    def num_steps(self, num_epochs: int) -> int:
        """Steps until every example was seen `num_epochs` times."""
        return -(-num_epochs * self.num_examples // self.batch_size)

    def feed(self, wanted: Wanted) -> Feed:
        """The row numbers of one batch a step."""
        seed = []
        if self.shuffle:
            seed = np.asarray(jax.random.key_data(wanted.key)).ravel().tolist()
        return _Rows(self, seed, wanted)

    def order(self, seed: list[int], epoch: int) -> np.ndarray:
        """The rows in the order of one epoch."""
        if not self.shuffle:
            return np.arange(self.num_examples, dtype=np.int32)
        order = np.random.default_rng([*seed, epoch]).permutation(self.num_examples)
        return order.astype(np.int32)

    def batches(self, pad: bool) -> Iterator[tuple[Batch, Any, int]]:
        """Consecutive rows; the last batch is short, or padded."""
        check_alive("arrays", self.arrays)
        for start in range(0, self.num_examples, self.batch_size):
            end = min(start + self.batch_size, self.num_examples)
            batch = jtu.tree_map(lambda a: a[start:end], self.arrays)  # noqa: B023
            if pad:
                yield *pad_batch(batch, self.batch_size), end - start
            else:
                yield batch, None, end - start


class _Rows(Feed):
    """Numbers of the rows of each batch, cut from the orders of the epochs."""

    def __init__(self, data: Arrays, seed: list[int], wanted: Wanted):
        self._data, self._seed, self._step = data, seed, wanted.start
        epochs = wanted.num_epochs
        self._end = None if epochs is None else data.num_steps(epochs)
        ended = self._end is not None and self._step >= self._end
        # A scalar stands for the mask of a batch that is always full.
        mask = np.True_ if wanted.mask else None
        rows = np.empty(data.batch_size, np.int32)
        self._content = None if ended else (rows, mask)
        self._orders: dict[int, np.ndarray] = {}

    @property
    def content(self) -> PyTree:
        """Rows and mask of a batch, or None if the epochs are over."""
        return self._content

    def fill(self, chunk: Chunk, most: int) -> None:
        """Add the rows of `most` batches, or of those that are left."""
        size, total = self._data.batch_size, self._data.num_examples
        count = most if self._end is None else min(most, self._end - self._step)
        start, end = self._step * size, (self._step + count) * size
        if count:
            rows, *masks = chunk.room((np.arange(start, end, size) // total).tolist())
            rows[...] = self._stretch(start, end).reshape(count, size)
            for mask in masks:
                mask[...] = True
        self._step += count
        if count < most:
            raise StopIteration

    def _stretch(self, start: int, end: int) -> np.ndarray:
        """The examples `start` to `end` of the endless stream of epochs."""
        total, pieces = self._data.num_examples, [np.empty(0, np.int32)]
        epochs = range(start // total, -(-end // total))
        self._orders = {e: self._order(e) for e in epochs}
        for epoch, order in self._orders.items():
            first = epoch * total
            pieces.append(order[max(start - first, 0) : end - first])
        return np.concatenate(pieces)

    def _order(self, epoch: int) -> np.ndarray:
        known = self._orders.get(epoch)
        return self._data.order(self._seed, epoch) if known is None else known
