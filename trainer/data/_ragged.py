"""Batches of one shape, though the last of an epoch may be short."""

import warnings
from typing import Any, Literal

import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from trainer._types import Batch, RecompileError
from trainer.data._chunk import does_not_fit, Layout
from trainer.data._source import host_batch, num_examples, pad_batch, Wanted


Ragged = Literal["pad", "drop", "error"]


class Form:
    """What a batch looks like, and the mask of one that is not short, or None."""

    def __init__(self, batch: Batch, masked: bool):
        self.layout = Layout(batch, 1)
        self.full: np.ndarray | None = None
        if masked:
            sizes = {
                np.shape(leaf)[0] for leaf in jtu.tree_leaves(batch) if np.ndim(leaf)
            }
            if len(sizes) > 1:
                raise ValueError(
                    f"The arrays of a batch have {sorted(sizes)} examples, and the "
                    "loss takes a `mask` with one value an example. Give all the same."
                )
            self.full = np.ones(num_examples(batch), np.bool_)

    def leaves(self, batch: Batch) -> list[Any] | None:
        """The arrays of a batch that looks like this, and its mask; else None."""
        leaves = self.layout.leaves(batch)
        return leaves if leaves is None or self.full is None else [*leaves, self.full]

    def content(self, leaves: list[Any]) -> PyTree:
        """The batch and its mask, which may be None, as a step takes them."""
        mask = None if self.full is None else leaves[-1]
        batch = leaves[: self.layout.treedef.num_leaves]
        return jtu.tree_unflatten(self.layout.treedef, batch), mask


class Shaping:
    """Brings every batch to the form of the first, or says why that cannot be.

    Where the run has steps for other forms, a batch that is not brought to a known one
    has a form of its own.

    Attributes:
        forms: What batches looked like so far, the first one first.
        short: The last batch that was left out, or None.
    """

    def __init__(self, ragged: Ragged | None, wanted: Wanted):
        self.wanted = wanted
        self.said = ragged is not None
        self.ragged = ragged or ("pad" if wanted.may_pad else "drop")
        self.forms: list[Form] = []
        self.short: Batch = None
        self._last: Form | None = None
        if wanted.like is not None:
            self._learn(wanted.like[0])

    def __call__(self, batch: Any) -> tuple[list[Any], Form] | None:
        """Return the arrays of the batch and its form, or None to leave it out."""
        # Most batches are as they should be, and nothing need be done to them.
        form = self._last
        leaves = None if form is None else form.leaves(batch)
        if form is None or leaves is None:
            batch = host_batch(batch)
            return self._known(batch) or self._other(batch)
        return leaves, form

    def _learn(self, batch: Batch) -> Form:
        self.forms.append(Form(batch, self.wanted.mask))
        self._last = self._last or self.forms[0]
        return self.forms[-1]

    def _known(self, batch: Batch) -> tuple[list[Any], Form] | None:
        if not self.forms:
            self._learn(batch)
        for form in self.forms:
            leaves = form.leaves(batch)
            if leaves is not None:
                self._last = form
                return leaves, form
        return None

    def _other(self, batch: Batch) -> tuple[list[Any], Form] | None:
        """Bring a batch to a known form, if it is only shorter, or learn a new one."""
        for form in self.forms:
            like = form.layout.like
            may_shorten = self.said or self.wanted.may_pad or not self.wanted.others
            if _only_shorter(like, batch) and may_shorten:
                leaves = self._short(batch, like)
                return None if leaves is None else (leaves, form)
        if not self.wanted.others:
            like = self.forms[0].layout.like
            raise RecompileError(does_not_fit("batch", like, batch))
        form = self._last = self._learn(batch)
        leaves = form.leaves(batch)
        assert leaves is not None
        return leaves, form

    def _short(self, batch: Batch, like: Batch) -> list[Any] | None:
        count, size = num_examples(batch), num_examples(like)
        if self.ragged == "error":
            raise ValueError(
                f"A batch has {count} examples and the first had {size}. "
                "`ragged='error'` was asked for; `'pad'` and `'drop'` go on."
            )
        if not self.said:
            self.said = True
            done = "padded and masked" if self.ragged == "pad" else "left out"
            why = "every loss takes" if self.ragged == "pad" else "not every loss takes"
            warnings.warn(
                f"A batch of {count} examples, where the first had {size}, is {done}, "
                f"because {why} `mask`. Write `tr.Loader(batches, ragged=...)` to "
                "choose.",
                stacklevel=2,
            )
        if self.ragged == "drop":
            self.short = batch
            return None
        batch, mask = pad_batch(batch, size)
        return jtu.tree_leaves((batch, mask if self.wanted.mask else None))


def _only_shorter(like: Batch, batch: Batch) -> bool:
    """Whether `batch` is `like` with fewer examples in every leaf."""
    if jtu.tree_structure(like) != jtu.tree_structure(batch):
        return False
    size, count = num_examples(like), num_examples(batch)
    pairs = zip(jtu.tree_leaves(like), jtu.tree_leaves(batch), strict=True)
    return 0 < count < size and all(
        a.dtype == b.dtype
        and (a.shape == b.shape == () or (size, *a.shape[1:]) == a.shape)
        and b.shape == (() if a.shape == () else (count, *a.shape[1:]))
        for a, b in pairs
    )
