"""The mean of squared residuals, as a loss that lets its residuals be seen."""

from typing import Any, final

import jax.numpy as jnp
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
    which it needs and a scalar does not show. Rows of a batch that are padding are left
    out, if there is one row of residuals for each example.

    Attributes:
        residuals: A function `(model, batch)` that returns an array of real numbers,
            and may ask for `step`, `epoch`, `key` and `mask` by name.

    Raises:
        TypeError: It is not such a function.

    Example:
        >>> loss = MeanSquare(lambda model, batch: model * batch - 1.0)
        >>> float(loss(jnp.float32(2.0), jnp.array([0.0, 1.0])))
        1.0
    """

    residuals: Any

    def __init__(self, residuals: Any):
        names = asked_for(residuals, LOSS_ARGUMENTS, "loss")
        if "state" in names:
            raise TypeError(
                f"`{name_of(residuals)}` asks for `state`, which the residuals of "
                "`MeanSquare` do not take. Write a loss of your own."
            )
        self.residuals = residuals

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
        if not _has_rows(self, squares, mask):
            return jnp.mean(squares)
        rows = mask.reshape(mask.shape + (1,) * (squares.ndim - 1))
        return jnp.mean(squares, where=jnp.broadcast_to(rows, squares.shape))


def _has_rows(loss: MeanSquare, found: Array, mask: Any) -> bool:
    """Whether the mask says which rows are padding.

    Residuals that are not one row an example have nothing to do with the batch, as
    those of an initial condition at points of its own.
    """
    if mask is None or "mask" in asked_for(loss.residuals, LOSS_ARGUMENTS, "loss"):
        return False
    if found.shape[:1] == mask.shape:
        return True
    if found.ndim and found.shape[0] > mask.size and found.shape[0] % mask.size == 0:
        raise ValueError(
            f"`{name_of(loss.residuals)}` returned {describe(found)} for a batch of "
            f"{mask.size} examples, some of which may be padding. Return one row an "
            "example, or ask for `mask` and leave padding out."
        )
    return False


def unpadded(loss: MeanSquare, model: Model, batch: Batch, given: Given) -> Array:
    """The residuals of one batch, 0 for rows that are padding."""
    found = residuals_of(loss, model, batch, given)
    if not _has_rows(loss, found, given.mask):
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
