"""Mixed precision: computing in a narrow type, and scaling the loss for float16."""

from typing import Any, final, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float32, Int32, PyTree


_FIRST_SCALE = 2.0**15
_GROWS_AFTER = 2_000
_FACTOR = 2.0
_LARGEST_SCALE = 2.0**24

Compute = Literal["bfloat16", "float16"]


def check_compute(compute: Any) -> Compute | None:
    """Check the name of the type that is computed in, or None; return it."""
    if compute is None:
        return None
    try:
        name = jnp.dtype(compute).name
    except TypeError:
        name = None
    if name not in ("bfloat16", "float16"):
        raise ValueError(
            f"`compute` is `{compute!r}`. It is `'bfloat16'`, `'float16'`, or None to "
            "compute in the types that the model has."
        )
    return name


def narrowed(tree: PyTree, compute: Compute | None) -> PyTree:
    """The tree with its real floating arrays in the type that is computed in."""
    if compute is None:
        return tree

    def one(leaf: Any) -> Any:
        if eqx.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf.astype(compute)
        return leaf

    return jtu.tree_map(one, tree)


@final
class LossScale(eqx.Module):
    """The number that a float16 loss is multiplied with, so that gradients are not 0.

    It is halved when a gradient is not finite, and that step is left out. After 2,000
    finite steps in a row it is doubled, up to 2**24.

    Attributes:
        scale: The factor; it begins at 2**15.
        finite: How many steps in a row were finite.

    Source:
        Micikevicius et al., "Mixed Precision Training", 2018, arXiv:1710.03740,
        section 3.2.
    """

    scale: Float32[Array, ""]
    finite: Int32[Array, ""]

    def renewed(self, is_finite: Array) -> "LossScale":
        """The scale for the next step."""
        finite = jnp.where(is_finite, self.finite + 1, 0)
        grows = finite >= _GROWS_AFTER
        larger = jnp.minimum(self.scale * _FACTOR, _LARGEST_SCALE)
        kept = jnp.where(grows, larger, self.scale)
        smaller = jnp.maximum(self.scale / _FACTOR, 1.0)
        return LossScale(
            jnp.where(is_finite, kept, smaller), jnp.where(grows, 0, finite)
        )


def first_scale(compute: Compute | None) -> LossScale | None:
    """The scale before the first step; None where none is needed."""
    if compute != "float16":
        return None
    return LossScale(jnp.float32(_FIRST_SCALE), jnp.int32(0))


def all_finite(tree: PyTree) -> Array:
    """Whether every number in a tree is finite."""
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves)) if leaves else jnp.asarray(True)


def choose(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    """The arrays of `new` where the condition is True, else those of `old`.

    For whole results that are finished: both are computed, and no gradient passes.
    """
    return jtu.tree_map(
        lambda a, b: jnp.where(condition, a, b) if eqx.is_array(a) else a, new, old
    )
