"""What a program is made of, seen at one step: choices, weights, losses, owners."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import PyTree

from trainer._adaptive_sum import AdaptiveSum
from trainer._composed import AbstractComposed
from trainer._counts import call_schedule
from trainer._grad import How
from trainer._losses import Given
from trainer._memory import own_of, part_of
from trainer._minimize import Minimize
from trainer._optax import learning_rate
from trainer._parts import Part, Parts
from trainer._pick import pick
from trainer._several import AbstractSeveral
from trainer._switch import Switch
from trainer._switch_update import SwitchUpdate
from trainer._types import Model
from trainer._update import AbstractUpdate
from trainer._weighted_sum import WeightedSum
from trainer._where import owned
from trainer.mistakes._user_code import name_of


_LONGEST = 200


class Choice(NamedTuple):
    """A Switch, of losses or of updates.

    Attributes:
        names: Names of its branches.
        selector: What picks one, in words.
        active: The branch at this step; None if the Switch itself rests.
    """

    names: tuple[str, ...]
    selector: str
    active: str | None


class Weight(NamedTuple):
    """The weight of a term of a sum.

    Attributes:
        value: What it is at this step.
        by: What changes it: `"a schedule"`, or the name of a rule; None if it is fixed.
    """

    value: float
    by: str | None


class Owner(NamedTuple):
    """An optimizer, or an update of the user's own.

    Attributes:
        optimizer: What its state is made of, in words.
        spec: A tree like the model, True for the arrays that it may change.
        acts: When it acts, in words; None for an update of the user's own.
    """

    optimizer: str
    spec: PyTree
    acts: str | None


class Leaf(NamedTuple):
    """A loss that is not composed of others.

    Attributes:
        loss: The loss.
        given: What it is given at this step, but for the mask.
        how: How its gradient is taken.
        active: Whether it is a part of this step.
    """

    loss: Any
    given: Given
    how: How
    active: bool


class Pieces:
    """Takes the program of an update apart, as it is at one step.

    A branch that rests is seen at its own step 0. Everything is named by its place in
    the program: `critic/loss` is the loss of the update `critic`.

    Args:
        update: The update.
        model: The model that it would act on.
        opt_state: What its optimizers remember.
        given: What is known at this step, but for the mask.

    Attributes:
        choices: By name, such as `critic/branch`.
        weights: By name, such as `weight/kl`.
        owners: By name, such as `critic/optimizer`.
        leaves: The losses, by name. Those of an update of the user's own are not known.
    """

    def __init__(
        self, update: AbstractUpdate, model: Model, opt_state: PyTree, given: Given
    ):
        self.choices: dict[str, Choice] = {}
        self.weights: dict[str, Weight] = {}
        self.owners: dict[str, Owner] = {}
        self.leaves: dict[str, Leaf] = {}
        self._model = model
        self._add_update("", update, opt_state, given, True)

    def _add_update(
        self, at: str, update: Any, opt_state: PyTree, given: Given, active: bool
    ) -> None:
        if isinstance(update, Minimize):
            self._add_minimize(at, update, opt_state, given, active)
        elif isinstance(update, AbstractSeveral):
            parts = self._branches(at, update, given, active)
            for name, (part, live) in parts.items():
                below = update.parts().get(name)
                if below is not None:
                    inner = f"{at}{name}/"
                    self._add_update(inner, below, opt_state[name], part, live)
        else:
            own = f"`{name_of(update.asker())}`, an update of your own"
            spec = update.owned(self._model)
            self.owners[f"{at}update"] = Owner(own, spec, None)

    def _add_minimize(
        self, at: str, update: Minimize, opt_state: PyTree, given: Given, active: bool
    ) -> None:
        scale = own_of(given.memory)
        how = How(
            update.owned(self._model),
            update.micro_batches,
            update.compute,
            None if scale is None else scale.scale,
        )
        for name, part, state in _optimizers(update, opt_state):
            spec = owned(self._model, part.where, name or "Minimize")
            self.owners[f"{at}{name or 'optimizer'}"] = Owner(
                optimizer_text(state), spec, _acts(part)
            )
        inner = given._replace(memory=part_of(given.memory, "loss"))
        self._add_loss(at, None, update.loss, inner, how, active)

    def _add_loss(
        self,
        at: str,
        name: str | None,
        loss: Any,
        given: Given,
        how: How,
        active: bool,
    ) -> None:
        if not isinstance(loss, AbstractComposed):
            self.leaves[f"{at}{name or 'loss'}"] = Leaf(loss, given, how, active)
            return
        at = f"{at}{name}/" if name else at
        weights = _weights(loss, given)
        self.weights |= {f"{at}weight/{term}": w for term, w in weights.items()}
        for part, (inner, live) in self._branches(at, loss, given, active).items():
            # What weighs nothing is not computed.
            live = live and (part not in weights or weights[part].value != 0)
            self._add_loss(at, part, loss.parts()[part], inner, how, live)

    def _branches(
        self, at: str, composed: Any, given: Given, active: bool
    ) -> dict[str, tuple[Given, bool]]:
        """What each part is given, and whether it runs."""
        inside = {
            name: given._replace(memory=part_of(given.memory, name))
            for name in composed.names
        }
        if not isinstance(composed, Switch | SwitchUpdate):
            return {name: (part, active) for name, part in inside.items()}
        names, count = composed.names, getattr(given, composed.by)
        own = own_of(given.memory)
        picked = pick(composed.selector, len(names), count, given, own, True)
        index, local = map(int, picked)
        self.choices[f"{at}branch"] = Choice(
            names, in_words(composed.selector), names[index] if active else None
        )
        found = {}
        for place, (name, part) in enumerate(inside.items()):
            now = jnp.int32(local if place == index and active else 0)
            part = part._replace(**{composed.by: now})
            found[name] = (part, active and place == index)
        return found


def _optimizers(
    update: Minimize, opt_state: PyTree
) -> Iterator[tuple[str, Part, PyTree]]:
    """Name, part and state of each; a single optimizer has no name."""
    if not isinstance(update.optimizer, Parts):
        yield "", Part(update.optimizer, update.where), opt_state
        return
    named = zip(update.optimizer.names, update.optimizer.parts, strict=True)
    yield from ((name, part, opt_state[name]) for name, part in named)


def _acts(part: Part) -> str:
    """When the optimizer of a part acts, in words."""
    if part.always:
        return "at every step"

    def when(end: int | float) -> str:
        is_share = isinstance(end, float)
        return f"{end:g} of the run" if is_share else f"{part.by} {end:,}"

    until = "" if part.stop is None else f" to {when(part.stop)}"
    return f"from {when(part.start)}{until}"


def _weights(total: AbstractComposed, given: Given) -> dict[str, Weight]:
    """The weight of each term, if it is a sum."""
    if isinstance(total, AdaptiveSum):
        own = own_of(given.memory) or total.own_memory()
        rule = type(total.rule).__name__
        named = zip(total.names, own["weights"], strict=True)
        return {name: Weight(float(weight), rule) for name, weight in named}
    if not isinstance(total, WeightedSum):
        return {}
    count, found = getattr(given, total.by), {}
    for name, weight in zip(total.names, total.weights, strict=True):
        is_schedule = callable(weight)
        if is_schedule:
            weight = call_schedule(weight, count, given.num_steps)
        found[name] = Weight(float(weight), "a schedule" if is_schedule else None)
    return found


def in_words(module: Any) -> str:
    """A selector or a transform, in one line."""
    text = " ".join(repr(module).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def optimizer_text(state: PyTree) -> str:
    """What an optimizer remembers, in words. Optax's optimizers have no names."""
    names = ", ".join(dict.fromkeys(_names_in(state))) or "keeps nothing"
    rate = learning_rate(state)
    return names if rate is None else f"{names}, learning rate {float(rate):.3g}"


def _names_in(state: PyTree) -> Iterator[str]:
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        name = type(state).__name__.removesuffix("State")
        if name != "Empty":
            yield name
    if isinstance(state, dict):
        state = tuple(state.values())
    if isinstance(state, tuple | list):
        for part in state:
            yield from _names_in(part)
