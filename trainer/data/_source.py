"""What the Trainer needs from data, wherever it comes from."""

import abc
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from trainer._tree import describe, path_name
from trainer._types import Batch, Key, Model
from trainer.data._chunk import Chunk


# A loader that is slow hands over what it has after this long. The device is kept busy,
# and an interrupt or a report does not wait for a whole chunk.
_SECONDS_PER_CHUNK = 0.02


class Item(NamedTuple):
    """The arrays that the host hands to one step, and the epoch that they belong to.

    All items of a source have the same form.
    """

    leaves: list[Any]
    epoch: int


class Wanted(NamedTuple):
    """What the run asks of its data.

    Attributes:
        start: Completed steps; the first item is for this step.
        num_epochs: Where the items end, or None for never.
        key: The run's key, for the order of a shuffle.
        mask: Whether a mask goes with every batch.
        may_pad: Whether every loss takes the mask, so that a short batch can be padded.
        like: Structure, shapes and dtypes of the items of the compiled step, or None.
    """

    start: int
    num_epochs: int | None
    key: Key
    mask: bool
    may_pad: bool
    like: PyTree


class Feed:
    """Fills chunks with items that come one by one.

    Attributes:
        content: The content of the first item, or None if there is none.
    """

    content: PyTree

    def __init__(
        self, items: Iterator[Item], as_content: Callable[[list[Any]], PyTree]
    ):
        self._items = items
        # It is needed before there is a chunk, to see what an item looks like.
        first = self._first = next(items, None)
        self.content = None if first is None else as_content(first.leaves)

    def fill(self, chunk: Chunk, most: int) -> None:
        """Add items until there are `most`, or, if they are slow, at least one.

        Raises:
            StopIteration: There are no more; those before have been added.
        """
        until = time.perf_counter() + _SECONDS_PER_CHUNK
        while len(chunk) < most:
            item = self._first or next(self._items)
            self._first = None
            chunk.add(item.leaves, item.epoch)
            if time.perf_counter() > until:
                return


class AbstractSource(abc.ABC):
    """Where batches come from."""

    resident: PyTree = ()
    """Arrays that stay on the device and are an argument of every step."""

    in_fractions: bool = False
    """Whether the step has to be told the run's total for it."""

    static: PyTree = ()
    """Whatever else the step reads of the source, and is compiled with."""

    @abc.abstractmethod
    def fetch(
        self, resident: PyTree, content: PyTree, carry: PyTree, model: Model, **at: Any
    ) -> tuple[Batch, Any, PyTree]:
        """Make the batch, its mask (or None), and the next carry. Traced.

        Args:
            resident: What `resident` is, as an argument of the step.
            content: An item's content.
            carry: What a sampler carries along; the rest hand it on.
            model: The model before the update.
            **at: The `step`, its `key`, and the run's `num_steps`, or None.
        """

    @abc.abstractmethod
    def feed(self, wanted: Wanted) -> Feed:
        """One item for each step from `wanted.start` on."""

    @abc.abstractmethod
    def num_steps(self, num_epochs: int) -> int | None:
        """How many steps that many epochs are, at most; None if not known."""

    @abc.abstractmethod
    def batches(self, pad: bool) -> Iterator[tuple[Batch, Any, int]]:
        """All examples once, in order: batch, mask (None unless `pad`), examples."""


def host_batch(batch: Any) -> Batch:
    """Bring one batch into the form that a step takes.

    A tuple or list of one array, as loaders yield for one data set, becomes that array.
    Numbers become arrays, and dtypes the ones that JAX computes with.

    Raises:
        TypeError: A column holds text, objects or anything else that is not numbers.
    """
    if type(batch) in (tuple, list) and len(batch) == 1:
        batch = batch[0]
    try:
        return jtu.tree_map(_column, batch)
    except _NotNumbers:
        # The path is looked up for the message only: it costs more than the rest.
        for path, leaf in jtu.tree_leaves_with_path(batch):
            _named_column(path, leaf)
        raise


class _NotNumbers(TypeError):
    pass


def _column(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        array = np.asarray(leaf)
    except ValueError:
        array = np.empty((), object)
    number = array.dtype.kind in "biufc" or jnp.issubdtype(array.dtype, np.floating)
    if not number:
        raise _NotNumbers(str(array.dtype))
    return np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))


def _named_column(path: tuple[Any, ...], leaf: Any) -> None:
    try:
        _column(leaf)
    except _NotNumbers as error:
        raise TypeError(
            f"Column `{path_name('batch', path)}` has dtype `{error}`, and a compiled "
            "step takes numbers only. Leave the column out, or encode it as numbers; "
            f"its first value is {_first(leaf)}."
        ) from None


def _first(leaf: Any) -> str:
    values = np.asarray(leaf, object).ravel()
    return f"`{describe(values[0])}`" if len(values) else "missing"


def num_examples(batch: Batch) -> int:
    """Length of the leading axis; 1 for a batch without one."""
    for leaf in jtu.tree_leaves(batch):
        if np.ndim(leaf):
            return leaf.shape[0]
    return 1


def pad_batch(batch: Batch, size: int) -> tuple[Batch, np.ndarray]:
    """Repeat the last example until there are `size`; the mask is False on the copies.

    Copies of a real example, and not zeros: a loss that takes a logarithm or divides
    stays finite on them, so that the mask can take them out of the gradient.
    """
    count = num_examples(batch)
    rows = np.minimum(np.arange(size), count - 1)
    padded = jtu.tree_map(lambda leaf: leaf[rows] if np.ndim(leaf) else leaf, batch)
    return padded, np.arange(size) < count
