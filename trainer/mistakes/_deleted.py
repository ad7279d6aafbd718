"""Arrays whose memory was given away, found before anything is done with them."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jaxtyping import PyTree

from trainer._tree import describe, path_name


def is_deleted(leaf: Any) -> bool:
    """Whether it is an array that was donated or deleted."""
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    return is_array and leaf.is_deleted()


def check_alive(root: str, tree: PyTree, error: Exception | None = None) -> None:
    """Raise ValueError if an array of a tree was donated or deleted.

    Args:
        root: What the tree is called in front of an array's path.
        tree: A model, a state or a batch.
        error: What JAX has said of it, if it was used already.
    """
    if any(map(is_deleted, jtu.tree_leaves(tree))):
        first, *rest = _deleted(root, tree)
        more = f" (and {len(rest)} more)" if rest else ""
        raise ValueError(
            f"{first} was deleted{more}: a function with `donate_argnums` or "
            "`donate='all'` took its memory. Give what that function returned, or a "
            "copy made before: `jax.tree.map(jnp.copy, ...)`."
        ) from error


def _deleted(root: str, tree: PyTree) -> Iterator[str]:
    """Path and form of each."""
    for path, leaf in jtu.tree_leaves_with_path(tree):
        if is_deleted(leaf):
            yield f"`{path_name(root, path)}`, {describe(leaf)},"
