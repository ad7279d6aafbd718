"""Updates made of updates: one of them at a time, or all of them."""

from collections.abc import Mapping, Sequence
from typing import Any, final, Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from trainer._composed import check_unit, Unit
from trainer._losses import Given
from trainer._memory import own_of, part_of, renewed
from trainer._metrics import check_carried, do_if, Metric, under
from trainer._pick import check_selector, init_picked, pick, picked
from trainer._selectors import AbstractSelector, Outcome
from trainer._several import AbstractSeveral, named_updates, Updates
from trainer._types import Batch, Model
from trainer._update import AbstractUpdate, Updated


@final
class SwitchUpdate(AbstractSeveral):
    """Make one of several updates at each step, as a selector says.

    What an update owns, and its optimizer's state, do not change by a bit while another
    one is made, and nothing of it is computed. Inside an update, `step` is the number
    of steps that update has had; `state.step` counts all.

    The updates own different parts of the model, by their `where`: a critic and a
    generator, say. Those that follow each other, as with `tr.At`, may own the same:
    Adam first, and then L-BFGS, which starts from where Adam ended.

    Reports `branch`, the index of the update made; its metrics under its name, such as
    `critic/loss`; and its `loss` under that name, too.

    Attributes:
        selector: Picks the update.
        names: Names of the updates: the dict's keys, or their places in a list.
        updates: The updates. None is a step in which nothing happens.
        by: What the selector counts: `"step"` or `"epoch"`; see `tr.Switch`.
        overlap: Whether updates may own the same arrays although the selector comes
            back to them. Each has an optimizer of its own for them then.

    Raises:
        TypeError: One of the updates is not an update.
        ValueError: The selector cannot drive this many.

    Example:
        >>> import jax, optax
        >>> from trainer import Cycle, Minimize
        >>> critic = lambda model, batch: model["critic"] ** 2
        >>> generator = lambda model, batch: -model["generator"]
        >>> update = SwitchUpdate(Cycle((5, 1)), {
        ...     "critic": Minimize(critic, optax.sgd(0.1), where=lambda m: m["critic"]),
        ...     "generator": Minimize(
        ...         generator, optax.sgd(0.1), where=lambda m: m["generator"]),
        ... })
        >>> update.names
        ('critic', 'generator')

    Source:
        Five critic steps per generator step: Arjovsky, Chintala and Bottou,
        "Wasserstein GAN", 2017, arXiv:1701.07875, Algorithm 1.
    """

    selector: AbstractSelector
    names: tuple[str, ...]
    updates: Updates
    by: Unit
    overlap: bool

    def __init__(
        self,
        selector: AbstractSelector,
        updates: Mapping[str, AbstractUpdate | None] | Sequence[AbstractUpdate | None],
        *,
        by: Unit = "step",
        overlap: bool = False,
    ):
        self.names, self.updates = named_updates(updates, "SwitchUpdate", idle=True)
        self.selector, self.by = selector, check_unit(by)
        self.overlap = overlap
        check_selector(selector, len(self.updates), by)

    def may_share(self) -> bool:
        """Whether two of them may own the same array."""
        return self.overlap or self.selector.in_phases

    def branches(self) -> dict[str, tuple[str, ...]]:
        """Names of the branches, here and below."""
        return {"branch": self.names, **super().branches()}

    def losses(self) -> tuple[str, ...]:
        """Names of the metrics that are minimized."""
        return ("loss", *super().losses())

    def own_memory(self) -> PyTree:
        """What the selector remembers."""
        return init_picked(self.selector, len(self.names))

    def run(
        self, model: Model, opt_state: PyTree, batch: Batch, given: Given
    ) -> Updated:
        """Make the update that is picked.

        One choice for each update, of only what that update owns: a switch between all
        of them would copy the states of those that rest.
        """
        own = own_of(given.memory)
        count = getattr(given, self.by)
        index, local = pick(self.selector, len(self.names), count, given, own, True)
        inner = given._replace(**{self.by: local})
        states, memories, metrics, losses = dict(opt_state), {}, {}, []
        certain = 0
        for number, name in enumerate(self.names):
            update = self.updates[number]
            if update is None:
                continue
            live = (index == number).astype(jnp.int32)
            part = inner._replace(memory=part_of(given.memory, name))
            found, reported, always = _made(
                update, live, model, states[name], batch, part
            )
            model, states[name], state, memories[name] = found
            inner = inner._replace(state=state)
            metrics |= under(name, reported)
            losses += [reported["loss"]] if "loss" in reported else []
            certain += "loss" in always
        metrics["branch"] = Metric(index)
        if losses:
            metrics["loss"] = _whichever(losses, always=certain == len(self.names))
        if own is not None:
            seen = Outcome(count, len(self.names), index, metrics, given.reports)
            own = picked(self.selector, own, seen, local)
        memory = renewed(given.memory, own, memories)
        return Updated(model, states, metrics, inner.state, memory)


def _made(
    update: AbstractUpdate,
    live: Array,
    model: Model,
    opt_state: PyTree,
    batch: Batch,
    given: Given,
) -> tuple[Any, dict[str, Metric], set[str]]:
    """Make an update, or leave all that it owns as it is.

    The names of the metrics that it always reports, when it is made, come third.
    """
    spec = update.owned(model)
    mine, rest = eqx.partition(model, spec)
    arrays, static = eqx.partition(opt_state, eqx.is_array)
    always: set[str] = set()

    def do(mine: PyTree, arrays: PyTree, state: Any, memory: PyTree) -> Any:
        whole, opt_state = eqx.combine(mine, rest), eqx.combine(arrays, static)
        now = given._replace(state=state, memory=memory)
        new = update.run(whole, opt_state, batch, now)
        check_carried("opt_state", opt_state, new.opt_state)
        always.update(n for n, m in new.metrics.items() if m.present is True)
        kept = eqx.filter(new.model, spec), eqx.filter(new.opt_state, eqx.is_array)
        return (*kept, new.state, new.memory), new.metrics

    kept, metrics = do_if(live, do, mine, arrays, given.state, given.memory)
    mine, arrays, state, memory = kept
    model, opt_state = eqx.combine(mine, rest), eqx.combine(arrays, static)
    return (model, opt_state, state, memory), metrics, always


def _whichever(metrics: list[Metric], always: bool) -> Metric:
    """The value of the one that is present."""
    dtype = jnp.result_type(*(m.value for m in metrics))
    value, present = metrics[0].value.astype(dtype), metrics[0].present
    for other in metrics[1:]:
        value = jnp.where(other.present, other.value.astype(dtype), value)
        present = jnp.logical_or(present, other.present)
    return Metric(value, True if always else present)


@final
class JointUpdate(AbstractSeveral):
    """Make several updates at every step, each of a part of the model of its own.

    One that is not to act at every step is a `tr.SwitchUpdate` with None for the steps
    in which it rests. If all parts follow the gradient of one loss, `tr.Parts` does
    with one gradient what this does with one for each.

    Reports the metrics of each update under its name, such as `critic/loss`.

    Attributes:
        names: Names of the updates: the dict's keys, or their places in a list.
        updates: The updates.
        order: `"simultaneous"`: every update sees the model as the step found it.
            `"sequential"`: each sees what those before it have changed.

    Raises:
        TypeError: One of the updates is not an update.
        ValueError: There are none, or `order` is unknown.

    Example:
        >>> import jax, optax
        >>> from trainer import Cycle, Minimize
        >>> a = Minimize(lambda m, _: m[0] ** 2, optax.sgd(0.1), where=lambda m: m[0])
        >>> b = Minimize(lambda m, _: m[1] ** 2, optax.sgd(0.1), where=lambda m: m[1])
        >>> every_other = SwitchUpdate(Cycle((1, 1)), [None, b])
        >>> JointUpdate({"a": a, "b": every_other}).names
        ('a', 'b')
    """

    names: tuple[str, ...]
    updates: Updates
    order: Literal["simultaneous", "sequential"]

    def __init__(
        self,
        updates: Mapping[str, AbstractUpdate] | Sequence[AbstractUpdate],
        *,
        order: Literal["simultaneous", "sequential"] = "simultaneous",
    ):
        self.names, self.updates = named_updates(updates, "JointUpdate", idle=False)
        if order not in ("simultaneous", "sequential"):
            raise ValueError(
                f"`order` is `{order!r}`; it is `'simultaneous'` or `'sequential'`."
            )
        self.order = order

    def run(
        self, model: Model, opt_state: PyTree, batch: Batch, given: Given
    ) -> Updated:
        """Make all updates."""
        states, memories, metrics, new = {}, {}, {}, model
        inner = given
        for name, update in self.parts().items():
            part = inner._replace(memory=part_of(given.memory, name))
            seen = model if self.order == "simultaneous" else new
            found = update.run(seen, opt_state[name], batch, part)
            mine = eqx.filter(found.model, update.owned(model))
            new = eqx.combine(mine, new)
            states[name], memories[name] = found.opt_state, found.memory
            inner = inner._replace(state=found.state)
            metrics |= under(name, found.metrics)
        memory = renewed(given.memory, None, memories)
        return Updated(new, states, metrics, inner.state, memory)
