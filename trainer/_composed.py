"""What losses made of other losses have in common."""

import abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast, Literal, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import PyTree

from trainer._losses import (
    AbstractLoss,
    asked_for,
    call_leaf,
    Given,
    LOSS_ARGUMENTS,
    name_of,
    Output,
)
from trainer._memory import Node, node
from trainer._tree import describe
from trainer._types import Batch, Model


class Evaluation(NamedTuple):
    """How the parts of a composed loss are evaluated.

    Attributes:
        leaf: Called with a part that is not itself composed, and what it may ask for.
            The value it returns is a PyTree of arrays, with the loss first.
        trains: Whether this is a step of training, which is remembered.
        plain: Like `leaf`, without a gradient. None if `leaf` is that already.
        trace: Called like `leaf` with a `tr.MeanSquare`; returns the trace of its
            neural tangent kernel. None where there is no gradient.
        zero: Makes what stands for a loss that is not evaluated, where what it would
            return is not known: 0, and a gradient of zeros where `leaf` takes one.
    """

    leaf: Callable[[Any, Given], Output]
    trains: bool = False
    plain: Callable[[Any, Given], Output] | None = None
    trace: Callable[[Any, Given], Any] | None = None
    zero: Callable[[], PyTree] = lambda: jnp.float32(0.0)

    def __call__(self, loss: Any, given: Given) -> Output:
        """Evaluate a loss, composed or not."""
        if isinstance(loss, AbstractComposed):
            return loss.combine(self, given)
        return self.leaf(loss, given)

    def without_gradient(self) -> "Evaluation":
        """The same for the values alone."""
        return Evaluation(self.plain or self.leaf, self.trains)


class AbstractComposed(AbstractLoss):
    """A loss made of losses. What happens to each of them is left to the caller.

    `combine` does not evaluate its parts itself. It is handed a function that does, so
    that the caller may differentiate each part where it stands, inside the branch.
    """

    names: eqx.AbstractVar[tuple[str, ...]]
    losses: eqx.AbstractVar[tuple[Any, ...]]

    @abc.abstractmethod
    def combine(self, evaluate: Evaluation, given: Given) -> Output:
        """Evaluate the parts that are active now, and put them together."""

    def parts(self) -> dict[str, Any]:
        """The losses this one is made of, by name."""
        return dict(zip(self.names, self.losses, strict=True))

    def own_memory(self) -> PyTree:
        """What it remembers itself before the first step; None for nothing."""
        return None

    @abc.abstractmethod
    def branches(self) -> dict[str, tuple[str, ...]]:
        """For every metric that is a branch's index: the names of the branches."""

    def __call__(
        self,
        model: Model,
        batch: Batch,
        *,
        step: Any,
        epoch: Any = 0,
        key: Any = None,
        mask: Any = None,
        state: Any = None,
    ) -> Any:
        """Compute the loss of one batch. Returns `(value, metrics)`, and the state."""
        if memory_of(self) is not None:
            raise TypeError(
                f"`{type(self).__name__}` remembers what was before, and is called by "
                "itself. Give it to a Trainer, which keeps what it remembers."
            )
        given = Given(jnp.int32(step), jnp.int32(epoch), key, mask, state)
        value, metrics, state, _ = evaluate_loss(self, model, batch, given)
        return (value, metrics) if state is None else (value, metrics, state)


def check_loss(loss: Any) -> None:
    """Raise TypeError unless `loss` can be used as one."""
    if isinstance(loss, type):
        raise TypeError(
            f"`{loss.__name__}` is a class, and a loss is an instance of one. "
            f"Write `{loss.__name__}(...)`."
        )
    if isinstance(loss, list | tuple):
        raise TypeError(
            f"`{describe(loss)}` is not a loss. Give several one by one, as in "
            "`tr.alternate(a, b)`, or make a `tr.WeightedSum` of them."
        )
    if not callable(loss):
        raise TypeError(
            f"`{describe(loss)}` is not a loss. A loss is a function of "
            "`(model, batch)`, or a `tr.AbstractLoss`."
        )
    if not isinstance(loss, AbstractComposed):
        asked_for(loss, LOSS_ARGUMENTS, "loss")


def leaves_of(loss: Any) -> list[Any]:
    """All losses in `loss` that are not composed of others, in order."""
    if not isinstance(loss, AbstractComposed):
        return [loss]
    return [leaf for part in loss.parts().values() for leaf in leaves_of(part)]


def takes(loss: Any, name: str) -> list[bool]:
    """Whether each loss that is not composed of others asks for `name`."""
    leaves = leaves_of(loss)
    return [name in asked_for(leaf, LOSS_ARGUMENTS, "loss") for leaf in leaves]


def branches_of(loss: Any) -> dict[str, tuple[str, ...]]:
    """Names of the branches of every Switch in a loss, composed or not."""
    return loss.branches() if isinstance(loss, AbstractComposed) else {}


def memory_of(loss: Any) -> Node | None:
    """What a loss and its parts remember before the first step."""
    if not isinstance(loss, AbstractComposed):
        return None
    parts = {name: memory_of(part) for name, part in loss.parts().items()}
    return node(loss.own_memory(), parts)


def map_leaves(fn: Callable[[Any], Any], loss: Any) -> Any:
    """Put `fn(leaf)` in the place of every loss that is not composed of others."""
    if not isinstance(loss, AbstractComposed):
        return fn(loss)
    losses = tuple(map_leaves(fn, part) for part in loss.losses)
    return eqx.tree_at(lambda c: c.losses, loss, losses)


def evaluate_loss(loss: Any, model: Model, batch: Batch, given: Given) -> Output:
    """Evaluate a loss, composed or not, without a gradient."""
    return Evaluation(lambda leaf, g: call_leaf(leaf, model, batch, g))(loss, given)


def check_name(name: Any, what: str) -> None:
    """Raise an error unless it can be a part of a metric's name."""
    if not isinstance(name, str):
        raise TypeError(f"{what} is named `{name!r}`. A name is a str.")
    if "/" in name:
        raise ValueError(
            f"{what} is named `{name}`. The history puts a slash between names, so "
            "that one cannot hold a slash itself."
        )


Unit = Literal["step", "epoch"]


def check_unit(by: str) -> Unit:
    if by not in ("step", "epoch"):
        raise ValueError(f"`by` is `{by!r}`; it is `'step'` or `'epoch'`.")
    return cast(Unit, by)


def named_losses(losses: Any, owner: str) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Names and losses: the dict's own names, else the functions', numbered if equal.

    They are kept as tuples, because a dict in a PyTree comes back with its keys sorted.
    """
    if isinstance(losses, Mapping):
        named = dict(losses)
    else:
        if not isinstance(losses, Iterable):
            raise TypeError(
                f"`{owner}` was given `{describe(losses)}` in the place of its losses. "
                "Give a list of them, or a dict that names them."
            )
        named = {}
        for number, loss in enumerate(losses):
            name = base = name_of(loss).strip("<>")
            while name in named or name == "lambda":
                name, number = f"{base}_{number}", number + 1
            named[name] = loss
    if not named:
        raise ValueError(f"`{owner}` was given no losses.")
    for name, loss in named.items():
        check_name(name, f"A loss of `{owner}`")
        check_loss(loss)
    return tuple(named), tuple(named.values())
