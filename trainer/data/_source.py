"""What the Trainer needs from data, wherever it comes from."""

import abc
import datetime
import numbers
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
from trainer.mistakes._deleted import check_alive, is_deleted


# A loader that is slow hands over what it has after this long. The device is kept busy,
# and an interrupt or a report does not wait for a whole chunk.
_SECONDS_PER_CHUNK = 0.02
# What a list of numbers may hold, or a list of text, which is told from one.
_VALUES = (numbers.Number, np.generic, str, bytes, datetime.date)


class Item(NamedTuple):
    """The arrays that the host hands to one step, and the epoch that they belong to.

    Attributes:
        leaves: The arrays.
        epoch: The epoch.
        form: What they look like; one object for all that look the same.
    """

    leaves: list[Any]
    epoch: int
    form: Any = None


class OtherForm(Exception):
    """The next item has another form than those before it, and was not added."""


class Wanted(NamedTuple):
    """What the run asks of its data.

    Attributes:
        start: Completed steps; the first item is for this step.
        num_epochs: Where the items end, or None for never.
        key: The run's key, for the order of a shuffle.
        mask: Whether a mask goes with every batch.
        may_pad: Whether every loss takes the mask, so that a short batch can be padded.
        like: Structure, shapes and dtypes of the items of the compiled step, or None.
        others: Whether items of other forms are used as well, by a step of their own.
    """

    start: int
    num_epochs: int | None
    key: Key
    mask: bool
    may_pad: bool
    like: PyTree
    others: bool = False


class Feed:
    """Fills chunks with items that come one by one."""

    def __init__(self, items: Iterator[Item], as_content: Callable[[Item], PyTree]):
        self._items, self._as_content = items, as_content
        # It is needed before there is a chunk, to see what an item looks like.
        self._next = next(items, None)
        self._form = None if self._next is None else self._next.form

    @property
    def content(self) -> PyTree:
        """The content of the item that comes next, or None if there is none."""
        return None if self._next is None else self._as_content(self._next)

    def turn(self) -> None:
        """Go on with items of the next one's form."""
        assert self._next is not None
        self._form = self._next.form

    def fill(self, chunk: Chunk, most: int) -> None:
        """Add items until there are `most`, or, if they are slow, at least one.

        Raises:
            StopIteration: There are no more; those before have been added.
            OtherForm: The next is of another form; likewise.
        """
        until = time.perf_counter() + _SECONDS_PER_CHUNK
        while len(chunk) < most:
            item = self._next or next(self._items)
            if item.form is not self._form:
                self._next = item
                raise OtherForm
            self._next = None
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


def host_batch(batch: Any, root: str = "batch") -> Batch:
    """Bring one batch into the form that a step takes.

    A tuple or list of one array, as loaders yield for one data set, becomes that array.
    Numbers and lists of numbers become arrays, and dtypes the ones that JAX computes
    with.

    Args:
        batch: The batch.
        root: What messages call it.

    Raises:
        TypeError: A column holds text, objects or anything else that is not numbers.
        ValueError: An array was deleted.
    """
    if type(batch) in (tuple, list) and len(batch) == 1 and not is_list(batch):
        batch = batch[0]
    try:
        return jtu.tree_map(_column, batch, is_leaf=is_list)
    except _NotNumbers:
        check_alive(root, batch)
        # The path is looked up for the message only: it costs more than the rest.
        for path, leaf in jtu.tree_leaves_with_path(batch, is_leaf=is_list):
            _named_column(root, path, leaf)
        raise


class _NotNumbers(TypeError):
    pass


def is_list(node: Any) -> bool:
    """Whether it is a list of values, or of lists of them, and not of columns."""
    if type(node) is not list or all(value is None for value in node):
        return False
    is_value = lambda v: v is None or isinstance(v, _VALUES) or is_list(v)
    return all(map(is_value, node))


def _column(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        if is_deleted(leaf):
            raise _NotNumbers("was deleted")
        return leaf
    try:
        array = np.asarray(leaf)
    except ValueError:
        raise _NotNumbers("has rows of different lengths") from None
    number = array.dtype.kind in "biufc" or jnp.issubdtype(array.dtype, np.floating)
    if not number:
        raise _NotNumbers(f"has dtype `{array.dtype}`")
    return np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))


def _named_column(root: str, path: tuple[Any, ...], leaf: Any) -> None:
    if hasattr(leaf, "columns") and hasattr(leaf, "items"):
        # A table, as of pandas, is one leaf of many columns.
        for name, column in leaf.items():
            _named_column(root, (*path, jtu.DictKey(name)), column)
    try:
        _column(leaf)
    except _NotNumbers as error:
        raise TypeError(
            f"Column `{path_name(root, path)}` {error}, and a compiled step takes "
            f"numbers only; its first value is {_first(leaf)}. Encode it as numbers, "
            f"or leave it out{_or_keep_aside(root, path)}."
        ) from None


def _or_keep_aside(root: str, path: tuple[Any, ...]) -> str:
    if root != "batch" or not path:
        return ""
    names = ("key", "idx", "name")
    keys = [getattr(k, n) for k in path for n in names if hasattr(k, n)]
    name = keys[0] if len(keys) == 1 else tuple(keys)
    return f", or keep it aside: `tr.Loader(batches, aside=({name!r},))`"


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
