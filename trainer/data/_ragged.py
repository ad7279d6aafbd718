"""Batches of one shape, though the last of an epoch may be short."""

import warnings
from typing import Any, Literal

import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from trainer._types import Batch
from trainer.data._chunk import does_not_fit, Layout
from trainer.data._source import host_batch, num_examples, pad_batch, Wanted


Ragged = Literal["pad", "drop", "error"]


class Shaping:
    """Brings every batch to the shape of the first, or says why that cannot be.

    Attributes:
        layout: What the first batch looks like; None before there was one.
        full: The mask of a batch that is not short, or None.
        short: The last batch that was left out, or None.
    """

    def __init__(self, ragged: Ragged | None, wanted: Wanted):
        self.wanted = wanted
        self.said = ragged is not None
        self.ragged = ragged or ("pad" if wanted.may_pad else "drop")
        self.layout: Layout | None = None
        self.full: np.ndarray | None = None
        self.short: Batch = None
        if wanted.like is not None:
            self._learn(wanted.like[0])

    def __call__(self, batch: Any) -> list[Any] | None:
        """Return the arrays of the batch and its mask, or None to leave it out."""
        # Most batches are as they should be, and nothing need be done to them.
        leaves = None if self.layout is None else self.layout.leaves(batch)
        if leaves is None:
            batch = host_batch(batch)
            layout = self.layout or self._learn(batch)
            leaves = layout.leaves(batch)
            if leaves is None:
                return self._short(batch, layout.like)
        return leaves if self.full is None else [*leaves, self.full]

    def content(self, leaves: list[Any]) -> PyTree:
        """The batch and its mask, which may be None, as a step takes them."""
        assert self.layout is not None
        mask = None if self.full is None else leaves[-1]
        batch = leaves[: self.layout.treedef.num_leaves]
        return jtu.tree_unflatten(self.layout.treedef, batch), mask

    def _learn(self, batch: Batch) -> Layout:
        """Take a batch for the one that all others must be like."""
        self.layout = Layout(batch, 1)
        if self.wanted.mask:
            sizes = {
                np.shape(leaf)[0] for leaf in jtu.tree_leaves(batch) if np.ndim(leaf)
            }
            if len(sizes) > 1:
                raise ValueError(
                    f"The arrays of a batch have {sorted(sizes)} examples, and the "
                    "loss takes a `mask` with one value an example. Give all the same."
                )
            self.full = np.ones(num_examples(batch), np.bool_)
        return self.layout

    def _short(self, batch: Batch, like: Batch) -> list[Any] | None:
        if not _only_shorter(like, batch):
            raise does_not_fit(like, batch)
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
