"""Batches from any loader: jax-dataloader, PyTorch, a list, a generator."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

from jaxtyping import PyTree

from trainer._counts import positive_int
from trainer._types import Batch, Model, RecompileError
from trainer.data._aside import check_aside, Column, put_aside
from trainer.data._chunk import does_not_fit
from trainer.data._ragged import Form, Ragged, Shaping
from trainer.data._source import (
    AbstractSource,
    Feed,
    host_batch,
    Item,
    num_examples,
    pad_batch,
    Wanted,
)
from trainer.data.sampler import AbstractSampler, Sampled


class Loader(AbstractSource):
    """Batches from anything that yields them, used as it is.

    `fit` wraps what it is given in a Loader; write it out to set an option. A batch is
    any PyTree of arrays with a leading axis of examples. A tuple or list of one array,
    as jax-dataloader yields for one data set, reaches the loss as that array.

    All batches have one shape, or the step would compile again. For a shorter one:

    * `"pad"`: it is filled up with copies of its last example, and the `mask` that the
      losses take is False there. The default where every loss takes `mask`.
    * `"drop"`: it is left out. The default otherwise.
    * `"error"`: it is a ValueError.

    Args:
        batches: A re-iterable of batches; a function without arguments that returns an
            iterable, called once an epoch; or an iterator, which is used up.
        ragged: What to do with a batch shorter than the first; see above. With the
            default, the first one met gives a warning that says what is done.
        steps_per_epoch: Where an epoch ends, for batches that never do. A re-iterable
            starts anew there. By default an epoch ends when the batches do.
        aside: Columns that are not given to the step, such as text: keys of a dict,
            positions in a tuple, or a tuple of these for a column deeper down. A dict
            or tuple is then without them; a named tuple has None there.

    Raises:
        TypeError: `batches` is arrays and not batches of them, or `aside` is no tuple.
        ValueError: An option is not one of its values.

    Example:
        >>> import numpy as np
        >>> batches = [(np.ones((4, 2)), np.ones(4)), (np.ones((3, 2)), np.ones(3))]
        >>> [count for _, _, count in Loader(batches).batches(pad=False)]
        [4, 3]
        >>> data = Loader([{"x": np.ones(2), "name": ["a", "b"]}], aside=("name",))
        >>> [sorted(batch) for batch, _, _ in data.batches(pad=False)], data.aside
        ([['x']], {'name': ['a', 'b']})
    """

    aside: Mapping[Column, Any]
    """What was kept aside of the batch that was read last, by the names given.

    In a callback, that is the batch of the last step.
    """

    def __init__(
        self,
        batches: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        ragged: Ragged | None = None,
        steps_per_epoch: int | None = None,
        aside: Sequence[Column] = (),
    ):
        _check_batches(batches)
        if ragged not in ("pad", "drop", "error", None):
            raise ValueError(
                f"`ragged` is `{ragged!r}`; it is `'pad'`, `'drop'` or `'error'`."
            )
        if steps_per_epoch is not None:
            steps_per_epoch = positive_int(steps_per_epoch, "`steps_per_epoch`")
        self._source = batches
        self._ragged: Ragged | None = ragged
        self._steps_per_epoch = steps_per_epoch
        self._aside, self.aside = check_aside(aside), {}

    def fetch(
        self, resident: PyTree, content: PyTree, carry: PyTree, model: Model, **at: Any
    ) -> tuple[Batch, Any, PyTree]:
        """The batch and its mask are the content."""
        del resident, model, at
        return (*content, carry)

    @property
    def is_used_up(self) -> bool:
        """Whether a batch that is read is gone, as from a generator."""
        return isinstance(self._source, Iterator) and _only_once(self._source)

    def num_steps(self, num_epochs: int) -> int | None:
        """Number of batches, if the loader knows its length."""
        if self._steps_per_epoch is not None:
            return num_epochs * self._steps_per_epoch
        try:
            return num_epochs * len(self._source)  # pyright: ignore[reportArgumentType]
        except TypeError:
            return None

    def feed(self, wanted: Wanted) -> Feed:
        """One batch a step. Those before the first step wanted are read and skipped."""
        if self._ragged == "pad" and not wanted.may_pad:
            raise TypeError(
                "`ragged='pad'` needs every loss to take `mask`, and one does not. "
                "Take `mask` and average over the examples where it is True."
            )
        fit = Shaping(self._ragged, wanted)
        as_content = lambda item: item.form.content(item.leaves)
        return Feed(self._items(wanted, fit), as_content)

    def _items(self, wanted: Wanted, fit: Shaping) -> Iterator[Item]:
        length, iterator = self._steps_per_epoch, self._open()
        # An iterator goes on from where it stands: nothing is there to be skipped.
        once = iterator is self._source
        epoch, count = divmod(wanted.start, length) if once and length else (0, 0)
        done = wanted.start if once else 0
        while wanted.num_epochs is None or epoch < wanted.num_epochs:
            for leaves, form in _fitting(
                self._kept(iterator), fit, length and length - count
            ):
                count += 1
                if done >= wanted.start:
                    yield Item(leaves, epoch, form)
                done += 1
            self._check_epoch(epoch, count, done if once else None, fit)
            epoch += 1
            if done < wanted.start:
                whole = (wanted.start - done) // count
                epoch, done = epoch + whole, done + whole * count
            count = 0
            if epoch != wanted.num_epochs and not (once and _only_once(iterator)):
                iterator = self._open()

    def _open(self) -> Iterator[Any]:
        # Once an epoch and not more: jax-dataloader draws an order each time.
        source: Any = self._source
        return iter(source if _can_be_iterated(source) else source())

    def _kept(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, without what is kept aside."""
        if not self._aside:
            return batches
        return map(self._put_aside, batches)

    def _put_aside(self, batch: Any) -> Batch:
        batch, self.aside = put_aside(batch, self._aside)
        return batch

    def _check_epoch(
        self, epoch: int, count: int, done: int | None, fit: "Shaping"
    ) -> None:
        if done is not None and count == 0:
            raise ValueError(
                f"The iterator of batches is used up: {done} steps are done, and epoch "
                f"{epoch} has no batch. `last_state` of the Trainer is kept. Pass a "
                "list, a loader, or a function that makes a new iterator: "
                "`lambda: batches()`."
            )
        if self._steps_per_epoch is not None and 0 < count < self._steps_per_epoch:
            raise ValueError(
                f"The batches end after {count} of the {self._steps_per_epoch} that "
                "`steps_per_epoch` asks for. Leave it out for an epoch to end there."
            )
        if count == 0 and fit.forms and fit.short is not None:
            like = fit.forms[0].layout.like
            raise RecompileError(does_not_fit("batch", like, fit.short))
        if count == 0:
            raise ValueError(
                f"Epoch {epoch} has no batches. A loader with fewer examples than its "
                "batch size, and `drop_last=True`, yields none: make the batch smaller."
            )

    def batches(self, pad: bool) -> Iterator[tuple[Batch, Any, int]]:
        """One epoch as it comes; with `pad`, short batches get the first's size."""
        size = 0
        opened = self._kept(self._open())
        for raw in itertools.islice(opened, self._steps_per_epoch):
            batch = host_batch(raw)
            count = num_examples(batch)
            size = max(count, size)
            if pad:
                yield *pad_batch(batch, size), count
            else:
                yield batch, None, count


def _fitting(
    iterator: Iterator[Any], fit: Shaping, most: int | None
) -> Iterator[tuple[list[Any], Form]]:
    """The arrays of up to `most` batches that are not left out, and their form."""
    found = map(fit, iterator)
    return itertools.islice((x for x in found if x is not None), most)


def _only_once(iterator: Iterator[Any]) -> bool:
    """Whether `iter` cannot start it anew, as it can a loader that is its iterator."""
    return not isinstance(getattr(type(iterator), "__iter__", None), FunctionType)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _can_be_iterated(value: Any) -> bool:
    return isinstance(value, Iterable) or hasattr(value, "__getitem__")


def _check_batches(batches: Any) -> None:
    arrays = isinstance(batches, tuple) and any(_is_array(b) for b in batches)
    if _is_array(batches) or arrays or isinstance(batches, dict):
        raise TypeError(
            f"The data is a {type(batches).__name__} of arrays, and not batches of "
            "them. Use `tr.Arrays(x, y, batch_size=...)`, or `[batch]` for one batch "
            "that every step sees."
        )
    if not (_can_be_iterated(batches) or callable(batches)):
        raise TypeError(
            f"The data is `{batches!r}`, which cannot be iterated. Use `tr.Arrays`, an "
            "iterable of batches, or a function that returns one."
        )


def as_source(data: Any) -> AbstractSource:
    """Wrap what the user gave as data. None is a batch of None, and an epoch a step."""
    if isinstance(data, AbstractSource):
        return data
    if isinstance(data, AbstractSampler):
        return Sampled(data)
    if isinstance(data, type):
        raise TypeError(
            f"`{data.__name__}` is a class, and data are an instance of one. Write "
            f"`{data.__name__}(...)`."
        )
    if data is None:
        return Loader(lambda: itertools.repeat(None), steps_per_epoch=1)
    return Loader(data)
