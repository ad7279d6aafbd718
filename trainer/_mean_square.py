"""The mean of squared residuals, as a loss that lets its residuals be seen."""

from typing import Any, final

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array

from trainer._losses import (
    AbstractLoss,
    asked_for,
    Given,
    LOSS_ARGUMENTS,
    name_of,
    value_of,
)
from trainer._tree import describe
from trainer._types import Batch, Model


@final
class MeanSquare(AbstractLoss):
    """The mean of the squares of what a function returns.

    An ordinary loss, but for one thing: `tr.NTKTrace` can look at the single residuals,
    which it needs and a scalar does not show.

    Attributes:
        residuals: A function `(model, batch)` that returns an array of real numbers,
            and may ask for `step`, `epoch`, `key` and `mask` by name.
        per_example: Whether it returns one row for each example of the batch. Rows that
            are padding are left out then. Residuals at points of their own, as those of
            an initial condition, are not.

    Raises:
        TypeError: It is not such a function.
        ValueError: While tracing: the residuals have another number of rows than the
            batch.

    Example:
        >>> loss = MeanSquare(lambda model, batch: model * batch - 1.0)
        >>> float(loss(jnp.float32(2.0), jnp.array([0.0, 1.0])))
        1.0
    """

    residuals: Any
    per_example: bool

    def __init__(self, residuals: Any, *, per_example: bool = True):
        names = asked_for(residuals, LOSS_ARGUMENTS, "loss")
        if "state" in names:
            raise TypeError(
                f"`{name_of(residuals)}` asks for `state`, which the residuals of "
                "`MeanSquare` do not take. Write a loss of your own."
            )
        self.residuals, self.per_example = residuals, per_example

    def __call__(
        self,
        model: Model,
        batch: Batch,
        *,
        step: Any = None,
        epoch: Any = None,
        key: Any = None,
        mask: Any = None,
    ) -> Array:
        """Compute the loss of one batch."""
        given = Given(step, epoch, key, mask)
        squares = residuals_of(self, model, batch, given) ** 2
        if not _has_rows(self, squares, batch, mask):
            return jnp.mean(squares)
        rows = mask.reshape(mask.shape + (1,) * (squares.ndim - 1))
        return jnp.mean(squares, where=jnp.broadcast_to(rows, squares.shape))


def _has_rows(loss: MeanSquare, found: Array, batch: Batch, mask: Any) -> bool:
    """Whether the mask says which rows are padding."""
    is_empty = not any(jnp.ndim(leaf) for leaf in jtu.tree_leaves(batch))
    if mask is None or is_empty or not loss.per_example:
        return False
    if found.shape[:1] != mask.shape:
        raise ValueError(
            f"`{name_of(loss.residuals)}` returned {describe(found)} for a batch of "
            f"{mask.size} examples, some of which may be padding. Return one row an "
            "example; or write `tr.MeanSquare(residuals, per_example=False)`, if the "
            "residuals have nothing to do with the batch."
        )
    return True


def unpadded(loss: MeanSquare, model: Model, batch: Batch, given: Given) -> Array:
    """The residuals of one batch, 0 for rows that are padding."""
    found = residuals_of(loss, model, batch, given)
    if not _has_rows(loss, found, batch, given.mask):
        return found
    rows = given.mask.reshape(given.mask.shape + (1,) * (found.ndim - 1))
    return jnp.where(rows, found, 0)


def residuals_of(loss: MeanSquare, model: Model, batch: Batch, given: Given) -> Array:
    """The residuals of one batch."""
    names = asked_for(loss.residuals, LOSS_ARGUMENTS, "loss")
    asked = {name: value_of(name, given, loss.residuals) for name in names}
    found = loss.residuals(model, batch, **asked)
    if not (hasattr(found, "dtype") and jnp.issubdtype(found.dtype, jnp.floating)):
        raise TypeError(
            f"`{name_of(loss.residuals)}` returned {describe(found)}. The residuals of "
            "`MeanSquare` are an array of real floating numbers."
        )
    return found
