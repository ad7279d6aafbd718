"""PyTrees of arrays: names for paths, canonical leaves, tracing once."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.extend
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import PyTree


def path_name(root: str, path: tuple[Any, ...]) -> str:
    """Write a leaf's path as the Python that reaches it: `batch['x']`, `model.w[0]`."""
    return (root + jtu.keystr(path)).lstrip(".")


def is_array_like(leaf: Any) -> bool:
    """Whether it has a shape and a dtype. `numpy.float32`, a class, has neither."""
    has_both = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return has_both and not isinstance(leaf, type)


def describe(leaf: Any) -> str:
    """Describe a leaf in a few characters: dtype and shape, or the `repr`.

    Example:
        >>> describe(jnp.zeros((4, 2)))
        'float32[4,2]'
    """
    if is_array_like(leaf):
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    text = repr(leaf)
    return text if len(text) <= 60 else text[:57] + "..."


def parameters(model: PyTree) -> PyTree:
    """Keep the leaves an optimizer may change: the inexact arrays. The rest is None."""
    return eqx.filter(model, eqx.is_inexact_array)


def struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, never weakly typed."""
    sharding = _sharding_on_mesh(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _sharding_on_mesh(leaf: Any) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    is_on_mesh = isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1
    return sharding if is_on_mesh else None


def _home(leaves: list[Any]) -> Sharding:
    """Where leaves go that were not put anywhere on purpose.

    One leaf spread over a mesh pulls the others onto the same mesh (replicated): a
    step counter left on one device is a second compile.
    """
    for leaf in leaves:
        sharding = _sharding_on_mesh(leaf)
        if sharding is not None:
            return NamedSharding(sharding.mesh, PartitionSpec())
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and leaf.committed:
            return SingleDeviceSharding(next(iter(leaf.devices())))
    return SingleDeviceSharding(jnp.zeros(()).devices().pop())


def canonical(
    tree: PyTree, *, copy: bool = True, home: Sharding | None = None
) -> PyTree:
    """Give every array leaf the one form under which a step compiles once.

    A leaf becomes a strongly typed JAX array, committed to one sharding. With `copy`
    it is in a buffer of its own as well: the caller's arrays survive donation, and two
    leaves that were one array are no longer donated twice. Values do not change.
    Leaves that are not on a mesh go to `home`, by default to where the others are.

    Example:
        >>> weak = jnp.asarray(1.0)
        >>> weak.weak_type, canonical(weak).weak_type
        (True, False)
    """
    arrays, static = eqx.partition(tree, eqx.is_array)
    leaves, treedef = jtu.tree_flatten(arrays)
    home = home or _home(leaves)
    leaves = [strong(leaf) for leaf in leaves]
    if copy:
        # Placing a NumPy array may hand its memory on, whatever it is asked for.
        leaves = [x if isinstance(x, jax.Array) else np.array(x) for x in leaves]
    shardings = [_sharding_on_mesh(leaf) or home for leaf in leaves]
    there = [
        not copy and isinstance(x, jax.Array) and x.committed and x.sharding == sharding
        for x, sharding in zip(leaves, shardings, strict=True)
    ]
    away = [i for i, is_there in enumerate(there) if not is_there]
    placed = jax.device_put(
        [leaves[i] for i in away],
        [shardings[i] for i in away],
        may_alias=False if copy else None,
    )
    for i, leaf in zip(away, placed, strict=True):
        leaves[i] = leaf
    return eqx.combine(jtu.tree_unflatten(treedef, leaves), static)


def strong(leaf: Any) -> Any:
    """The leaf, strongly typed if it is an array."""
    weak = eqx.is_array(leaf) and getattr(leaf, "weak_type", False)
    return jax.lax.convert_element_type(leaf, leaf.dtype) if weak else leaf


def is_eager(*values: Any) -> bool:
    """Whether code runs op by op: nothing is compiled, and these have their values."""
    is_off = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    return bool(is_off) and not any(isinstance(value, Tracer) for value in values)


def modules_in(tree: PyTree) -> Iterator[Any]:
    """Every module and function in a tree, the tree itself included."""
    if isinstance(tree, eqx.Module) or callable(tree):
        yield tree
    for child in jtu.tree_leaves(tree, is_leaf=lambda node: node is not tree):
        if child is not tree:
            yield from modules_in(child)


def trace_once(fn: Callable[..., Any], *args: PyTree) -> tuple[Callable[..., Any], Any]:
    """Run the Python body of `fn` once; return a replay of it, and its output.

    The output holds a `jax.ShapeDtypeStruct` for every array. Replaying never runs the
    body again, so one user function is traced once however often it is used, and what
    it returns is known before it is placed inside a `lax.switch`.
    """
    closed, out_struct, out_static = eqx.filter_make_jaxpr(fn)(*args)
    run = jax.extend.core.jaxpr_as_fun(closed)
    treedef = jtu.tree_structure(out_struct)

    def replay(*args: PyTree) -> Any:
        leaves = jtu.tree_leaves(eqx.filter(args, eqx.is_array))
        return eqx.combine(jtu.tree_unflatten(treedef, run(*leaves)), out_static)

    return replay, eqx.combine(out_struct, out_static)
