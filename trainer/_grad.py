"""Gradients, taken inside the branches of a composed loss."""

from typing import Any

import equinox as eqx

from trainer._composed import combine
from trainer._losses import call_leaf, Given, Output
from trainer._types import Batch, Model


def value_and_grad(loss: Any, model: Model, batch: Batch, given: Given) -> Output:
    """Compute a loss and its gradient by the model's inexact arrays.

    Every loss that is not composed is differentiated where it stands. The gradient OF a
    switch would keep room for what every branch remembers; a switch between gradients
    does not, and the gradient of a branch that was not taken is never computed.

    Returns:
        The pair `(loss, gradient)` as the value, the metrics, and the model's state.
    """

    def differentiate(leaf: Any, given: Given) -> Output:
        def run(model: Model) -> Any:
            value, metrics, state = call_leaf(leaf, model, batch, given)
            return value, (metrics, state)

        (value, (metrics, state)), gradient = eqx.filter_value_and_grad(
            run, has_aux=True
        )(model)
        return Output((value, gradient), metrics, state)

    return combine(loss, differentiate, given)
