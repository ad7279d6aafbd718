"""What is given to a Trainer, checked: its program, a model, a key, an end."""

from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from trainer._composed import check_loss
from trainer._losses import asked_for
from trainer._result import FitResult
from trainer._selectors import positive_int
from trainer._state import TrainState
from trainer._tree import describe, parameters
from trainer._types import Batch, Model
from trainer._update import AbstractUpdate, check_update, Minimize, UPDATE_ARGUMENTS


@final
class Overridden(AbstractUpdate):
    """The `update` method of a Trainer's subclass, with the Trainer's optimizer.

    Attributes:
        method: The bound method.
        optimizer: Makes the first `opt_state`, or None for an `opt_state` of None.
    """

    method: Any
    optimizer: optax.GradientTransformation | None

    def init(self, model: Model) -> PyTree:
        """Make the optimizer's state, if there is one, for the inexact arrays."""
        return self.optimizer and self.optimizer.init(parameters(model))

    def asker(self) -> Any:
        """The method."""
        return self.method

    def __call__(
        self, model: Model, opt_state: PyTree, batch: Batch, **given: Any
    ) -> Any:
        """Call the method."""
        return self.method(model, opt_state, batch, **given)


def make_program(
    name: str,
    loss: Any,
    optimizer: optax.GradientTransformation | None,
    update: AbstractUpdate | None,
    own_loss: Any,
    own_update: Any,
) -> AbstractUpdate:
    """Make the update that a Trainer runs from the one way in which it was given.

    Args:
        name: The Trainer's class, for messages.
        loss: What was passed, or None.
        optimizer: What was passed, or None.
        update: What was passed, or None.
        own_loss: The `loss` method, if a subclass overrides it, or None.
        own_update: The `update` method, if a subclass overrides it, or None.
    """
    given = {
        "`loss` is passed": loss,
        "`update=` is passed": update,
        "`update` is overridden": own_update,
        # An update of one's own may call a loss of one's own.
        "`loss` is overridden": own_loss if own_update is None else None,
    }
    ways = [way for way, what in given.items() if what is not None]
    if len(ways) != 1:
        raise TypeError(
            f"`{name}` is given {len(ways) or 'no'} losses"
            f"{': ' if ways else ''}{' and '.join(ways)}. Pass `loss`, or pass "
            "`update=`, or override `loss` or `update` in a subclass: one of them."
        )
    if own_update is not None:
        asked_for(own_update, UPDATE_ARGUMENTS, "update")
        return Overridden(own_update, optimizer)
    if update is not None:
        if optimizer is not None:
            raise TypeError(
                "`update=` and an optimizer are both given. The optimizer belongs "
                "into the update: `tr.Minimize(loss, optimizer)`."
            )
        check_update(update)
        return update
    loss = own_loss if loss is None else loss
    check_loss(loss)
    if optimizer is None:
        raise TypeError(
            f"`{name}` has a loss but no optimizer. Pass one of Optax's, such as "
            "`optax.adam(1e-3)`, as `optimizer`."
        )
    return Minimize(loss, optimizer)


def split_model(model: Any) -> tuple[Any, eqx.nn.State | None]:
    """Take apart `(model, state)`; a model alone has no state."""
    if isinstance(model, FitResult):
        raise TypeError(
            "A FitResult is given in the place of a model. Give `result.state` to go "
            "on, or `result.model` to start anew."
        )
    if isinstance(model, TrainState):
        raise TypeError("A TrainState is given where a model starts a run.")
    if isinstance(model, tuple) and len(model) == 2:
        first, second = model
        if isinstance(second, eqx.nn.State):
            return first, second
    return model, None


def check_model(model: Any, model_state: Any, program: AbstractUpdate) -> None:
    """Raise TypeError unless the program can train the model."""
    if isinstance(program, Minimize) and not jax.tree.leaves(parameters(model)):
        raise TypeError(
            f"The model is `{describe(model)}`, which has no floating array to train. "
            "`fit` takes the model first and the data second."
        )
    if model_state is None and any(program.takes("state")):
        raise TypeError(
            "A loss or an update asks for `state`, but the model was given without "
            "one. Give what `eqx.nn.make_with_state` returned, `(model, state)`."
        )


def check_key(key: Any) -> None:
    typed = eqx.is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    raw = eqx.is_array(key) and key.dtype == jnp.uint32 and key.ndim == 1
    if not (raw or (typed and key.shape == ())):
        raise TypeError(
            f"`key` is `{describe(key)}`, which is not one random key. "
            "Use `jax.random.key(0)`."
        )


def check_ends(
    num_steps: int | None, num_epochs: int | None
) -> tuple[int | None, int | None]:
    if (num_steps is None) == (num_epochs is None):
        raise TypeError(
            f"`num_steps` is `{num_steps}` and `num_epochs` is `{num_epochs}`; give "
            "one of them. It is the total at which `fit` stops."
        )
    if num_steps is not None:
        return positive_int(num_steps, "`num_steps`"), None
    return None, positive_int(num_epochs, "`num_epochs`")
