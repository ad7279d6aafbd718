"""Updates: from the gradient of a loss to the next model."""

import abc
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from trainer._losses import asked_for, Given, value_of
from trainer._memory import Node
from trainer._metrics import as_metrics, Metric
from trainer._tree import describe
from trainer._types import Batch, Model
from trainer.mistakes._trace_errors import noted
from trainer.mistakes._user_code import defined_at, name_of


UPDATE_ARGUMENTS = ("model", "opt_state", "batch")


class Updated(NamedTuple):
    """What one update returns, taken apart and checked."""

    model: Model
    opt_state: PyTree
    metrics: dict[str, Metric]
    state: Any
    memory: Any = None


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

    def owned(self, model: Model) -> PyTree:
        """Mark the arrays that this update may change: a tree of bools like the model.

        All of them by default. Override it to take turns with other updates in a
        `tr.SwitchUpdate` or a `tr.JointUpdate`, whose parts share no array.
        """
        return jtu.tree_map(eqx.is_array, model)

    def takes(self, name: str) -> list[bool]:
        """Whether each loss in it asks for `name`; by default, whether it does."""
        return [name in asked_for(self.asker(), UPDATE_ARGUMENTS, "update")]

    def asker(self) -> Any:
        """The function whose signature says what the update asks for."""
        return self

    def branches(self) -> dict[str, tuple[str, ...]]:
        """For every metric that is a branch's index: the names of the branches."""
        return {}

    def losses(self) -> tuple[str, ...]:
        """Names of the metrics that are minimized."""
        return ("loss",)

    def memory(self) -> Node | None:
        """What it remembers before the first step; None for nothing."""
        return None

    def evaluated(self, model: Model, opt_state: PyTree) -> Model:
        """The model that the optimizer means to be evaluated; by default, as it is."""
        del opt_state
        return model

    def run(
        self, model: Model, opt_state: PyTree, batch: Batch, given: Given
    ) -> Updated:
        """Call it with what it asks for, and check what it returns."""
        asker = self.asker()
        names = asked_for(asker, UPDATE_ARGUMENTS, "update")
        arguments = {name: value_of(name, given, asker) for name in names}
        with noted("update", asker, batch):
            returned = self(model, opt_state, batch, **arguments)
        expected = 4 if "state" in names else 3
        if not isinstance(returned, tuple) or len(returned) != expected:
            raise TypeError(
                f"`{name_of(asker)}`{defined_at(asker)} must return "
                "`(model, opt_state, metrics)`, and the new state last if it asks for "
                "`state`."
            )
        model, opt_state, metrics, *state = returned
        metrics = as_metrics(metrics, name_of(asker), defined_at(asker))
        return Updated(model, opt_state, metrics, state[0] if state else given.state)


class AbstractOwnUpdate(AbstractUpdate):
    """An update of this package: it is told everything, and may remember something."""

    @abc.abstractmethod
    def run(
        self, model: Model, opt_state: PyTree, batch: Batch, given: Given
    ) -> Updated:
        """Update the model once."""

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
        """Update the model once; see `AbstractUpdate`. Returns the state as well."""
        if self.memory() is not None:
            raise TypeError(
                f"`{type(self).__name__}` remembers what was before, and is called by "
                "itself. Give it to a Trainer, which keeps what it remembers."
            )
        given = Given(step, epoch, key, mask, state)
        updated = self.run(model, opt_state, batch, given)
        return updated[:4]


def check_update(update: Any) -> None:
    """Raise TypeError unless `update` can be used as one."""
    if not isinstance(update, AbstractUpdate):
        raise TypeError(
            f"`{describe(update)}` is not an update. Use `tr.Minimize(loss, "
            "optimizer)`, or a subclass of `tr.AbstractUpdate`."
        )
    if not isinstance(update, AbstractOwnUpdate):
        asked_for(update.asker(), UPDATE_ARGUMENTS, "update")
