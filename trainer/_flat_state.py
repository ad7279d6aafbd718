"""The state of a run as the flat list of arrays that a call takes."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import PyTree

from trainer._state import TrainState
from trainer._tree import path_name, struct
from trainer.recompiles._differences import first_difference
from trainer.recompiles._forms import describe_place


class FlatState:
    """Takes states of one form apart, and puts them together again.

    Typed random keys are handed over as the integers that they hold: a call with a
    typed key takes JAX's slow way in, and 200 us in the place of 30.

    Attributes:
        arrays: The state's arrays, as structs; anything else is None.
        static: Anything else.
    """

    def __init__(self, state: TrainState):
        arrays, self.static = eqx.partition(state, eqx.is_array)
        self.arrays: PyTree = jtu.tree_map(struct, arrays)
        leaves, self._treedef = jtu.tree_flatten(arrays)
        self._impls = [_impl(leaf) for leaf in leaves]
        self._shardings = [leaf.sharding for leaf in leaves]

    @property
    def like(self) -> TrainState:
        """The state, with structs in the place of arrays."""
        return eqx.combine(self.arrays, self.static)

    def difference(self, state: TrainState) -> str | None:
        """Where a canonical state is of another form, or elsewhere; or None."""
        difference = first_difference("", self.like, state)
        if difference:
            return difference
        found = jtu.tree_leaves_with_path(eqx.filter(state, eqx.is_array))
        moved = [
            f"`{path_name('', path)}` was on {describe_place(was)} and is now on "
            f"{describe_place(leaf.sharding)}"
            for (path, leaf), was in zip(found, self._shardings, strict=True)
            if not leaf.sharding.is_equivalent_to(was, leaf.ndim)
        ]
        # The rest of the state follows the model.
        of_model = (text for text in moved if text.startswith("`model"))
        return next(of_model, next(iter(moved), None))

    def flatten(self, state: TrainState) -> list[jax.Array]:
        """Take a canonical state apart into the arrays that a call takes."""
        return self.raw(jtu.tree_leaves(eqx.filter(state, eqx.is_array)))

    def unflatten(self, leaves: list[jax.Array]) -> TrainState:
        """Put a state together again."""
        arrays = jtu.tree_unflatten(self._treedef, self.typed(leaves))
        return eqx.combine(arrays, self.static)

    def raw(self, leaves: list[Any]) -> list[Any]:
        """The arrays as a call takes them."""
        pairs = zip(leaves, self._impls, strict=True)
        return [x if impl is None else jr.key_data(x) for x, impl in pairs]

    def typed(self, leaves: list[Any]) -> list[Any]:
        """The arrays as the state has them."""
        pairs = zip(leaves, self._impls, strict=True)
        return [x if i is None else jr.wrap_key_data(x, impl=i) for x, i in pairs]


def _impl(leaf: Any) -> Any:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jr.key_impl(leaf) if is_key else None
