"""Losses of which one runs at a time, as a selector says."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import jax.tree_util as jtu
from jaxtyping import PyTree

from trainer._composed import (
    AbstractComposed,
    branches_of,
    check_unit,
    Evaluation,
    named_losses,
    Unit,
)
from trainer._losses import Given, name_of, Output
from trainer._memory import own_of, part_of, renewed
from trainer._metrics import Metric, switch
from trainer._pick import check_selector, init_picked, pick, picked
from trainer._selectors import AbstractSelector, At, Cycle, Every, Outcome


@final
class Switch(AbstractComposed):
    """Use one of several losses, as a selector says.

    Only the selected loss is computed, and its gradient is taken inside its branch: a
    loss that is not active costs nothing and cannot put a NaN into the gradient. Inside
    a branch, `step` is the number of steps that branch has had.

    Reports `branch`, the index of the loss used. A Switch anywhere inside a branch
    named `b` reports its own under `b/`, such as `b/branch`. The losses may report
    different metrics: one that the active loss did not report is masked in the history
    of that step.

    Attributes:
        selector: Picks the loss.
        names: Names of the losses: the dict's keys, or the functions' own names.
        losses: The losses, in order. Given as a list, or as a dict that names them.
        by: What the selector counts: `"step"` or `"epoch"`. With `"epoch"` it is the
            branch's `epoch` that counts from the boundary, and `step` is left alone.

    Raises:
        TypeError: One of the losses is not a loss.
        ValueError: The selector cannot drive this many losses.

    Example:
        >>> import jax.numpy as jnp
        >>> def near(model, batch): return jnp.abs(model)
        >>> def far(model, batch): return model**2
        >>> loss = Switch(Every(10), [near, far])
        >>> value, metrics = loss(jnp.float32(3.0), None, step=12)
        >>> float(value), int(metrics["branch"].value)
        (9.0, 1)
    """

    selector: AbstractSelector
    names: tuple[str, ...]
    losses: tuple[Any, ...]
    by: Unit

    def __init__(
        self,
        selector: AbstractSelector,
        losses: Mapping[str, Any] | Sequence[Any],
        *,
        by: Unit = "step",
    ):
        self.names, self.losses = named_losses(losses, "Switch")
        self.selector, self.by = selector, check_unit(by)
        check_selector(selector, len(self.losses), by)

    def branches(self) -> dict[str, tuple[str, ...]]:
        """Names of the branches, here and below."""
        found = {"branch": self.names}
        for name, loss in self.parts().items():
            found |= {_inner(name, k): v for k, v in branches_of(loss).items()}
        return found

    def own_memory(self) -> PyTree:
        """What the selector remembers."""
        return init_picked(self.selector, len(self.names))

    def combine(self, evaluate: Evaluation, given: Given) -> Output:
        """Evaluate the selected loss; see `AbstractComposed.combine`."""
        memory, names = given.memory, self.names
        count = getattr(given, self.by)
        own = own_of(memory)
        index, local = pick(
            self.selector, len(names), count, given, own, evaluate.trains
        )
        inner = given._replace(**{self.by: local})

        def branch(name: str, loss: Any) -> Any:
            def run(given: Given) -> Any:
                memory, part = given.memory, part_of(given.memory, name)
                found = evaluate(loss, given._replace(memory=part))
                renamed = {_inner(name, k): v for k, v in found.metrics.items()}
                memory = renewed(memory, own_of(memory), {name: found.memory})
                return (found.value, found.state, memory), renamed

            return run

        functions = [branch(name, loss) for name, loss in self.parts().items()]
        (value, state, memory), metrics = switch(index, functions, inner)
        metrics = {**metrics, "branch": Metric(index)}
        if own is not None and evaluate.trains:
            seen = {**metrics, "loss": Metric(jtu.tree_leaves(value)[0])}
            outcome = Outcome(count, len(names), index, seen, given.reports)
            memory = renewed(memory, picked(self.selector, own, outcome, local), {})
        return Output(value, metrics, state, memory)


def _inner(branch: str, metric: str) -> str:
    """A Switch inside a branch may not report under the outer one's name."""
    return f"{branch}/{metric}" if metric.split("/")[-1] == "branch" else metric


def switch_every(every: int, *losses: Any, by: Unit = "step") -> Switch:
    """Move on to the next loss every N steps, and start again after the last.

    Args:
        every: Steps (or epochs) per turn, at least 1.
        *losses: The losses, in order.
        by: What is counted: `"step"` or `"epoch"`.

    Example:
        >>> import jax.numpy as jnp
        >>> def data_loss(model, batch): return model
        >>> def physics_loss(model, batch): return -model
        >>> loss = switch_every(100, data_loss, physics_loss)
        >>> [int(loss(jnp.float32(1.0), None, step=s)[0]) for s in (0, 99, 100, 200)]
        [1, 1, -1, 1]
    """
    if callable(every):
        raise TypeError(
            f"`switch_every` was given `{name_of(every)}` in the place of a period. "
            "Write `switch_every(100, loss_a, loss_b)`."
        )
    return Switch(Every(every), losses, by=by)


def alternate(*losses: Any, counts: Sequence[int] | None = None) -> Switch:
    """Take turns: one step each, or `counts` steps each.

    Args:
        *losses: The losses, in order.
        counts: Steps per turn, one per loss; one each if not given.

    Example:
        >>> import jax.numpy as jnp
        >>> def a(model, batch): return model
        >>> def b(model, batch): return -model
        >>> loss = alternate(a, b, counts=(2, 1))
        >>> [int(loss(jnp.float32(1.0), None, step=s)[0]) for s in range(4)]
        [1, 1, -1, 1]
    """
    return Switch(Cycle((1,) * len(losses) if counts is None else counts), losses)


def piecewise(
    losses: Mapping[str, Any] | Sequence[Any],
    boundaries: Sequence[int | float],
    *,
    by: Unit = "step",
) -> Switch:
    """Use one loss after another, each from its boundary on.

    Args:
        losses: The losses, in order; a dict names them.
        boundaries: First step (or epoch) of every loss but the first. That loss sees it
            as its own step 0. A float is a fraction of the run: `0.5` is half of it.
        by: What is counted: `"step"` or `"epoch"`.

    Example:
        >>> import jax.numpy as jnp
        >>> def pretrain(model, batch, *, step): return model + step
        >>> def finetune(model, batch, *, step): return model - step
        >>> loss = piecewise([pretrain, finetune], boundaries=[10])
        >>> [int(loss(jnp.float32(0.0), None, step=s)[0]) for s in (9, 10, 11)]
        [9, 0, -1]
    """
    return Switch(At(boundaries), losses, by=by)
