"""The update that a Trainer makes, from the one way in which it was given."""

from typing import Any, final

import optax
from jaxtyping import PyTree

from trainer._composed import check_loss
from trainer._losses import asked_for
from trainer._minimize import Minimize
from trainer._optax import init_optimizer
from trainer._parts import Parts
from trainer._tree import parameters
from trainer._types import Batch, Model
from trainer._update import AbstractUpdate, check_update, UPDATE_ARGUMENTS


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
        return self.optimizer and init_optimizer(self.optimizer, parameters(model))

    def asker(self) -> Any:
        """The method."""
        return self.method

    def __call__(
        self, model: Model, opt_state: PyTree, batch: Batch, **given: Any
    ) -> Any:
        """Call the method."""
        return self.method(model, opt_state, batch, **given)


def make_update(
    name: str,
    loss: Any,
    optimizer: optax.GradientTransformation | Parts | None,
    update: AbstractUpdate | None,
    own_loss: Any,
    own_update: Any,
) -> AbstractUpdate:
    """Make the update of a Trainer from the one way in which it was given.

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
    if isinstance(loss, AbstractUpdate):
        raise TypeError(
            f"`{type(loss).__name__}` is an update and not a loss. Write "
            f"`{name}(update=...)`."
        )
    if own_update is not None:
        asked_for(own_update, UPDATE_ARGUMENTS, "update")
        if isinstance(optimizer, Parts):
            raise TypeError(
                f"`{name}` overrides `update`, and was given `tr.Parts`, which "
                "`tr.Minimize` takes. Give an optimizer of Optax's."
            )
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
