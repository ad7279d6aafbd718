"""Gradients, taken inside the branches of a composed loss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from trainer._composed import Evaluation
from trainer._losses import AbstractJoint, call_leaf, Given, Output
from trainer._mean_square import MeanSquare, unpadded
from trainer._micro import in_micro_batches
from trainer._precision import Compute, narrowed
from trainer._types import Batch, Model
from trainer.mistakes._trace_errors import noted
from trainer.mistakes._zero_gradients import looked_at


_ROWS_AT_ONCE = 32


class How(NamedTuple):
    """How a gradient is computed.

    Attributes:
        owned: A tree like the model, True for the leaves to differentiate by. None for
            all inexact arrays.
        micro_batches: In how many parts the batch is gone through.
        compute: The type that is computed in, or None for that of the model.
        scale: What the loss is multiplied with meanwhile, or None.
    """

    owned: PyTree = None
    micro_batches: int = 1
    compute: Compute | None = None
    scale: Array | None = None


_PLAIN = How()


def value_only(
    loss: Any, model: Model, batch: Batch, given: Given, how: How = _PLAIN
) -> Array:
    """Compute a loss as `value_and_grad` does, without its gradient.

    Nothing is remembered of it. A line search asks for it, at other parameters.
    """
    return Evaluation(_plain(model, batch, how))(loss, given).value


def _plain(model: Model, batch: Batch, how: How) -> Callable[[Any, Given], Output]:
    """Evaluate a loss that is not composed, without its gradient."""

    def leaf(leaf: Any, given: Given) -> Output:
        def one(batch: Batch, given: Given) -> Output:
            whole, part = narrowed((model, batch), how.compute)
            return call_leaf(leaf, whole, part, given)

        return in_micro_batches(one, how.micro_batches, batch, given)

    return leaf


def value_and_grad(
    loss: Any,
    model: Model,
    batch: Batch,
    given: Given,
    how: How = _PLAIN,
    trains: bool = True,
) -> Output:
    """Compute a loss and its gradient by the arrays of the model that are owned.

    Every loss that is not composed is differentiated where it stands. The gradient OF a
    switch would keep room for what every branch remembers; a switch between gradients
    does not, and the gradient of a branch that was not taken is never computed.

    Returns:
        The pair `(loss, gradient)` as the value, the metrics, the model's state, and
        what the loss remembers.
    """
    spec = eqx.is_inexact_array if how.owned is None else how.owned
    owned, rest = eqx.partition(model, spec)

    def whole(owned: PyTree) -> Model:
        return narrowed(eqx.combine(owned, rest), how.compute)

    def differentiate(leaf: Any, batch: Batch, given: Given) -> Output:
        terms = leaf.losses if isinstance(leaf, AbstractJoint) else (leaf,)

        def run(owned: PyTree) -> Any:
            with looked_at(terms, owned) as seen:
                found = call_leaf(
                    leaf, whole(seen), narrowed(batch, how.compute), given
                )
            value = found.value
            scaled = value if how.scale is None else value * how.scale
            return scaled, (value, found.metrics, found.state)

        with noted("loss", leaf, batch):
            found, gradient = eqx.filter_value_and_grad(run, has_aux=True)(owned)
        value, metrics, state = found[1]
        if how.scale is not None:
            gradient = jtu.tree_map(lambda g: g / how.scale, gradient)
        return Output((value, gradient), metrics, state)

    def in_parts(leaf: Any, given: Given) -> Output:
        one = lambda batch, given: differentiate(leaf, batch, given)
        return in_micro_batches(one, how.micro_batches, batch, given)

    def trace(leaf: MeanSquare, given: Given) -> Array:
        return _trace(lambda owned: unpadded(leaf, whole(owned), batch, given), owned)

    def zero() -> PyTree:
        return jnp.float32(0.0), jtu.tree_map(jnp.zeros_like, owned)

    plain = _plain(model, batch, how)
    return Evaluation(in_parts, trains, plain, trace, zero)(loss, given)


def _trace(residuals: Callable[[PyTree], Array], owned: PyTree) -> Array:
    """The sum of the squared gradients of all residuals, taken some rows at a time."""
    found, pull = jax.vjp(residuals, owned)

    def row(number: Array) -> Array:
        one = (jnp.arange(found.size) == number).astype(found.dtype)
        (gradient,) = pull(one.reshape(found.shape))
        squares = [jnp.sum(jnp.abs(leaf) ** 2) for leaf in jax.tree.leaves(gradient)]
        return jnp.sum(jnp.stack(squares))

    rows = jnp.arange(found.size)
    return jnp.sum(jax.lax.map(row, rows, batch_size=_ROWS_AT_ONCE))
