"""A trace, watched for mistakes in the user's code that raise nothing."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.tree_util as jtu

from trainer._program import AbstractProgram
from trainer._state import TrainState
from trainer._transforms import AbstractTransform
from trainer._tree import is_array_like, modules_in
from trainer._update import AbstractOwnUpdate, AbstractUpdate
from trainer.mistakes._flat_gradients import flat_losses, without_gradient
from trainer.mistakes._frozen_draws import frozen_draws
from trainer.mistakes._kept_outside import kept_outside
from trainer.mistakes._own_code import is_of_library
from trainer.mistakes._printed import traced_prints
from trainer.mistakes._python_floats import python_floats
from trainer.mistakes._reached import reached
from trainer.mistakes._silent import tell
from trainer.mistakes._wide_broadcasts import wide_broadcasts
from trainer.mistakes._zero_gradients import gradients_seen


_MODEL = jtu.GetAttrKey("model")


@contextlib.contextmanager
def watched_trace(
    program: AbstractProgram, like: TrainState
) -> Iterator[Callable[[Any], None]]:
    """Watch what is done while the context lasts.

    Args:
        program: What is traced.
        like: The state, with structs in the place of arrays.

    Yields:
        A function to be called when the context is over, which warns of all that was
        found. It is given the jaxpr, whose first inputs are the arrays of the state.
    """
    functions = reached((program, like.model))
    with (
        traced_prints() as prints,
        gradients_seen() as looks,
        frozen_draws(functions) as draws,
    ):

        def told(jaxpr: Any) -> None:
            inputs = _inputs(like, jaxpr)
            found = [*prints, *draws, *kept_outside(functions)]
            found += [*wide_broadcasts(jaxpr, inputs), *flat_losses(looks)]
            if _is_whole(program):
                found += without_gradient(looks, like.model, jaxpr, inputs)
            tell([*found, *python_floats(like.model)])

        yield told


def _is_whole(program: AbstractProgram) -> bool:
    """Whether all that changes the model is seen, and not code of the user's own.

    An update may take gradients of its own, and a transform may change what has none.
    """
    for node in modules_in(program):
        if isinstance(node, AbstractUpdate) and not isinstance(node, AbstractOwnUpdate):
            return False
        if isinstance(node, AbstractTransform) and not is_of_library(type(node)):
            return False
    return True


def _inputs(like: TrainState, jaxpr: Any) -> dict[Any, Any]:
    """For each input that is an array of the model: its path in there."""
    leaves = jtu.tree_leaves_with_path(like)
    paths = [path for path, leaf in leaves if is_array_like(leaf)]
    pairs = zip(jaxpr.invars, paths, strict=False)
    return {v: path[1:] for v, path in pairs if path[0] == _MODEL}
