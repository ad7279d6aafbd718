"""Updates: from the gradient of a loss to the next model."""

import abc
from typing import Any, final, NamedTuple

import equinox as eqx
import optax
from jaxtyping import PyTree

from trainer._composed import branches_of, check_loss, evaluate_loss, takes
from trainer._grad import value_and_grad
from trainer._losses import asked_for, Given, name_of, value_of
from trainer._metrics import as_metrics, Metric
from trainer._tree import parameters
from trainer._types import Batch, Model


UPDATE_ARGUMENTS = ("model", "opt_state", "batch")


class Updated(NamedTuple):
    """What one update returns, taken apart and checked."""

    model: Model
    opt_state: PyTree
    metrics: dict[str, Metric]
    state: Any


class AbstractUpdate(eqx.Module):
    """One update of the model: losses, optimizers, and which of them act now.

    `__call__` takes `(model, opt_state, batch)` and, asked for by name, any of `step`,
    `epoch`, `key`, `mask` and `state`. It returns `(model, opt_state, metrics)`; one
    that asked for `state` returns the new state last. It is pure and traced.
    """

    @abc.abstractmethod
    def init(self, model: Model) -> PyTree:
        """Make the `opt_state` that the first update sees."""

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Update the model once; see the class."""

    def takes(self, name: str) -> list[bool]:
        """Whether each loss in it asks for `name`; by default, whether it does."""
        return [name in asked_for(self.asker(), UPDATE_ARGUMENTS, "update")]

    def asker(self) -> Any:
        """The function whose signature says what the update asks for."""
        return self

    def branches(self) -> dict[str, tuple[str, ...]]:
        """For every metric that is a branch's index: the names of the branches."""
        return {}


@final
class Minimize(AbstractUpdate):
    """Follow the gradient of one loss with one Optax optimizer.

    The optimizer sees the model's inexact arrays as its parameters: functions, integer
    tables and keys in the model are left alone. An optimizer that takes `value`,
    `grad` or `value_fn` is given them, as L-BFGS and `reduce_on_plateau` need.

    Reports `loss`: the loss at the parameters the step started from.

    Attributes:
        loss: A function `(model, batch)`, a `tr.AbstractLoss`, or a schedule of them.
        optimizer: An `optax.GradientTransformation`.

    Raises:
        TypeError: One of the two is something else.

    Example:
        >>> import jax.numpy as jnp
        >>> def square(model, batch): return model**2
        >>> update = Minimize(square, optax.sgd(0.25))
        >>> model = jnp.float32(1.0)
        >>> step, epoch = jnp.int32(0), jnp.int32(0)
        >>> model, _, metrics, _ = update(
        ...     model, update.init(model), None, step=step, epoch=epoch
        ... )
        >>> float(model), float(metrics["loss"].value)
        (0.5, 1.0)
    """

    loss: Any
    optimizer: optax.GradientTransformation

    def __init__(self, loss: Any, optimizer: optax.GradientTransformation):
        check_loss(loss)
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise TypeError(
                f"`{optimizer!r}` is not an optimizer. Use one of Optax's, "
                "such as `optax.adam(1e-3)`."
            )
        self.loss, self.optimizer = loss, optimizer

    def init(self, model: Model) -> PyTree:
        """Make the optimizer's state for the model's inexact arrays."""
        return self.optimizer.init(parameters(model))

    def takes(self, name: str) -> list[bool]:
        """Whether each loss that is not composed of others asks for `name`."""
        return takes(self.loss, name)

    def branches(self) -> dict[str, tuple[str, ...]]:
        """Names of the branches of every Switch in the loss."""
        return branches_of(self.loss)

    def __call__(
        self,
        model: Model,
        opt_state: PyTree,
        batch: Batch,
        *,
        step: Any,
        epoch: Any,
        key: Any = None,
        mask: Any = None,
        state: Any = None,
    ) -> Any:
        """Update the model once; see `AbstractUpdate`."""
        given = Given(step, epoch, key, mask, state)
        (value, grad), metrics, state = value_and_grad(self.loss, model, batch, given)
        params, rest = eqx.partition(model, eqx.is_inexact_array)

        def value_fn(params: PyTree) -> Any:
            model = eqx.combine(params, rest)
            return evaluate_loss(self.loss, model, batch, given).value

        optimizer = optax.with_extra_args_support(self.optimizer)
        updates, opt_state = optimizer.update(
            grad, opt_state, params, value=value, grad=grad, value_fn=value_fn
        )
        model = eqx.apply_updates(model, updates)
        return model, opt_state, {"loss": Metric(value), **metrics}, state


def check_update(update: Any) -> None:
    """Raise TypeError unless `update` can be used as one."""
    if not isinstance(update, AbstractUpdate):
        raise TypeError(
            f"`{update!r}` is not an update. Use `tr.Minimize(loss, optimizer)`, or a "
            "subclass of `tr.AbstractUpdate`."
        )
    if not isinstance(update, Minimize):
        asked_for(update, UPDATE_ARGUMENTS, "update")


def call_update(
    update: Any, model: Model, opt_state: PyTree, batch: Batch, given: Given
) -> Updated:
    """Call an update with what it asks for, and check what it returns."""
    if isinstance(update, Minimize):
        return Updated(*update(model, opt_state, batch, **given._asdict()))
    asker = update.asker()
    names = asked_for(asker, UPDATE_ARGUMENTS, "update")
    arguments = {name: value_of(name, given, asker) for name in names}
    returned = update(model, opt_state, batch, **arguments)
    expected = 4 if "state" in names else 3
    if not isinstance(returned, tuple) or len(returned) != expected:
        raise TypeError(
            f"`{name_of(asker)}` must return `(model, opt_state, metrics)`, and the "
            "new state last if it asks for `state`."
        )
    model, opt_state, metrics, *state = returned
    metrics = as_metrics(metrics, name_of(asker))
    return Updated(model, opt_state, metrics, state[0] if state else given.state)
