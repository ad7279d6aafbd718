"""Which leaves of a model something owns."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from trainer._tree import describe, path_name
from trainer._types import Model


Where = Callable[[Any], Any]


def check_where(where: Any, owner: str) -> Any:
    """Raise TypeError unless it is None or a function; return it."""
    return where if where is None else check_picks(where, f"`where` of `{owner}`")


def check_picks(value: Any, what: str) -> Any:
    """Raise TypeError unless it is a function; return it."""
    # A part of the model can often be called as well.
    if not callable(value) or isinstance(value, eqx.Module):
        raise TypeError(
            f"{what} is `{describe(value)}`. Give a function that picks a part of the "
            "model, such as `lambda m: m.critic`."
        )
    return value


def marked(model: Model, where: Where | None, owner: str) -> PyTree:
    """Mark with True every leaf in what `where` picks, and the rest with False.

    Args:
        model: A model.
        where: Picks a sub-tree, or a list or tuple of several. It may look at shapes
            and dtypes, but not at values. None picks all.
        owner: Whose `where` it is, for messages.

    Raises:
        TypeError: `where` picks something that is not part of the model.
    """
    if where is None:
        return jtu.tree_map(lambda _: True, model)
    arrays, static = eqx.partition(model, eqx.is_array)
    found: list[PyTree] = []

    def run(arrays: PyTree) -> None:
        # Each array is an object of its own here, also where two were one.
        whole = eqx.combine(arrays, static)
        picked = {id(leaf) for leaf in jtu.tree_leaves(where(whole))}
        if not picked <= {id(leaf) for leaf in jtu.tree_leaves(whole)}:
            raise TypeError("it returns something else")
        found.append(jtu.tree_map(lambda leaf: id(leaf) in picked, whole))

    try:
        jax.eval_shape(run, arrays)
    except Exception as error:
        lines = str(error).splitlines()
        raise TypeError(
            f"`where` of `{owner}` does not pick a part of the model "
            f"`{type(model).__name__}` ({type(error).__name__}: "
            f"{lines[0] if lines else ''}). It returns nodes of the model as they are, "
            "one or a list of them."
        ) from error
    return found[0]


def owned(model: Model, where: Where | None, owner: str) -> PyTree:
    """Mark with True the inexact arrays in what `where` picks; see `marked`.

    Raises:
        TypeError: `where` picks something that is not part of the model.
        ValueError: There is no inexact array in what it picks.
    """
    spec = jtu.tree_map(
        lambda flag, leaf: flag and eqx.is_inexact_array(leaf),
        marked(model, where, owner),
        model,
    )
    if not any(jtu.tree_leaves(spec)):
        what = "The model has" if where is None else "What `where` picks has"
        raise ValueError(
            f"{what} no floating array, so `{owner}` has nothing to work on. Pick a "
            "part of the model that has parameters."
        )
    return spec


def shared_leaf(first: PyTree, second: PyTree) -> str | None:
    """The path of a leaf that both own, or None."""
    for (path, a), b in zip(
        jtu.tree_leaves_with_path(first), jtu.tree_leaves(second), strict=True
    ):
        if a and b:
            return path_name("model", path)
    return None
