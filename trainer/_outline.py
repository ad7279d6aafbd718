"""A program without its losses and models: what is left decides."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import optax

from trainer._adaptive_sum import AdaptiveSum
from trainer._composed import AbstractComposed
from trainer._minimize import Minimize
from trainer._optax import learning_rate
from trainer._parts import Part, Parts
from trainer._random import Random
from trainer._several import AbstractSeveral
from trainer._switch import Switch
from trainer._switch_update import SwitchUpdate
from trainer._update import AbstractUpdate


def _nothing(model: Any, batch: Any) -> Any:
    """A loss of 0 that has a gradient."""
    del batch
    return 0.0 * sum(model)


class Outline:
    """Makes the outline of a program: what decides in it, without losses and models.

    Attributes:
        open: What had to be left out.
        size: How many parameters the outline has; each optimizer has its own.
    """

    def __init__(self) -> None:
        self.open: list[str] = []
        self.size = 0

    def of_loss(self, loss: Any) -> Any:
        """The same with every leaf replaced by nothing."""
        if isinstance(loss, Switch) and _follows_data(loss):
            self.open.append(_says(loss))
            return _nothing
        if isinstance(loss, AdaptiveSum):
            names = ", ".join(f"`weight/{name}`" for name in loss.names)
            self.open.append(f"{names}, by `{type(loss.rule).__name__}`")
            return _nothing
        if not isinstance(loss, AbstractComposed):
            return _nothing
        parts = tuple(map(self.of_loss, loss.losses))
        return eqx.tree_at(lambda composed: composed.losses, loss, parts)

    def of_update(self, update: AbstractUpdate | None) -> AbstractUpdate | None:
        """The same, or None if nothing in it is known."""
        if update is None:
            return None
        if isinstance(update, Minimize):
            return self._of_minimize(update)
        if isinstance(update, SwitchUpdate) and _follows_data(update):
            self.open.append(_says(update))
            return None
        if isinstance(update, AbstractSeveral):
            parts = tuple(map(self.of_update, update.updates))
            is_leaf = lambda node: node is None
            return eqx.tree_at(lambda u: u.updates, update, parts, is_leaf=is_leaf)
        self.open.append(f"all that `{type(update).__name__}` does")
        return None

    def _of_minimize(self, update: Minimize) -> Minimize:
        loss = self.of_loss(update.loss)
        if not isinstance(update.optimizer, Parts):
            optimizer = _with_rate(update.optimizer)
            return Minimize(loss, optimizer, where=self._next())
        named = zip(update.optimizer.names, update.optimizer.parts, strict=True)
        parts = {
            name: Part(
                _with_rate(part.optimizer),
                self._next(),
                start=part.start,
                stop=part.stop,
                by=part.by,
            )
            for name, part in named
        }
        return Minimize(loss, Parts(**parts))

    def _next(self) -> Callable[[Any], Any]:
        place, self.size = self.size, self.size + 1
        return lambda model: model[place]


def _follows_data(switch: Switch | SwitchUpdate) -> bool:
    selector = switch.selector
    remembers = selector.init(len(switch.names)) is not None
    return remembers and not isinstance(selector, Random)


def _says(switch: Switch | SwitchUpdate) -> str:
    names = ", ".join(f"`{name}`" for name in switch.names)
    return f"which of {names}, by `{type(switch.selector).__name__}`"


def _with_rate(optimizer: optax.GradientTransformation) -> Any:
    """The optimizer, if its state shows a learning rate; else one that does nothing."""
    try:
        state = optimizer.init(jnp.zeros(()))
    except Exception:  # made for parameters of another kind; its rate is not known
        return optax.identity()
    return optax.identity() if learning_rate(state) is None else optimizer
