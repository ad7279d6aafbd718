"""What updates made of updates have in common."""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from trainer._composed import check_name
from trainer._memory import Node, node
from trainer._metrics import under
from trainer._parts import union
from trainer._tree import describe
from trainer._types import Model
from trainer._update import AbstractOwnUpdate, AbstractUpdate, check_update


Updates = tuple[AbstractUpdate | None, ...]


def named_updates(
    updates: Any, owner: str, idle: bool
) -> tuple[tuple[str, ...], Updates]:
    """Names and updates; those of a list are named by their places."""
    if not isinstance(updates, Mapping | Sequence):
        raise TypeError(
            f"`{owner}` was given `{describe(updates)}` in the place of its updates. "
            "Give a dict that names them."
        )
    if not isinstance(updates, Mapping):
        names = [_place(place, update) for place, update in enumerate(updates)]
        updates = dict(zip(names, updates, strict=True))
    for name, update in updates.items():
        check_name(name, f"An update of `{owner}`")
        if update is not None or not idle:
            check_update(update)
    if all(update is None for update in updates.values()):
        raise ValueError(f"`{owner}` was given no updates.")
    return tuple(updates), tuple(updates.values())


def _place(place: int, update: Any) -> str:
    return str(place) if update is not None else f"nothing_{place}"


class AbstractSeveral(AbstractOwnUpdate):
    """An update made of updates, each with a name."""

    names: eqx.AbstractVar[tuple[str, ...]]
    updates: eqx.AbstractVar[Updates]

    def parts(self) -> dict[str, AbstractUpdate]:
        """The updates by name, without the places where nothing happens."""
        named = zip(self.names, self.updates, strict=True)
        return {name: update for name, update in named if update is not None}

    def init(self, model: Model) -> PyTree:
        """Make a dict of the updates' states, by name.

        Raises:
            ValueError: Two updates own the same array.
        """
        self.owned(model)
        return {name: update.init(model) for name, update in self.parts().items()}

    def owned(self, model: Model) -> PyTree:
        """Mark what any of them owns; see `AbstractUpdate.owned`."""
        parts = self.parts()
        specs = [update.owned(model) for update in parts.values()]
        return union(tuple(parts), specs, self.may_share())

    def may_share(self) -> bool:
        """Whether two of them may own the same array."""
        return False

    def takes(self, name: str) -> list[bool]:
        """Whether each loss in them asks for `name`."""
        return [asks for update in self.parts().values() for asks in update.takes(name)]

    def branches(self) -> dict[str, tuple[str, ...]]:
        """Names of the branches of every Switch in them."""
        found = {}
        for name, update in self.parts().items():
            found |= under(name, update.branches())
        return found

    def losses(self) -> tuple[str, ...]:
        """Names of the metrics that are minimized."""
        found = [
            f"{name}/{loss}"
            for name, update in self.parts().items()
            for loss in update.losses()
        ]
        return tuple(found)

    def own_memory(self) -> PyTree:
        """What it remembers itself."""
        return None

    def memory(self) -> Node | None:
        """What it and the updates remember."""
        parts = {name: update.memory() for name, update in self.parts().items()}
        return node(self.own_memory(), parts)

    def evaluated(self, model: Model, opt_state: PyTree) -> Model:
        """With what each of the optimizers means to be evaluated, in order."""
        for name, update in self.parts().items():
            model = update.evaluated(model, opt_state[name])
        return model
