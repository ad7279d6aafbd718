"""PyTrees of arrays: names for paths, canonical leaves, comparison, tracing once."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.extend
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import PyTree


def path_name(root: str, path: tuple[Any, ...]) -> str:
    """Write a leaf's path as the Python that reaches it: `batch['x']`, `model.w[0]`."""
    return (root + jtu.keystr(path)).lstrip(".")


def describe(leaf: Any) -> str:
    """Describe a leaf in a few characters: dtype and shape, or the `repr`.

    Example:
        >>> describe(jnp.zeros((4, 2)))
        'float32[4,2]'
    """
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
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


def first_difference(root: str, old: PyTree, new: PyTree) -> str | None:
    """Say where two trees differ in structure, shape, dtype or static value, or None.

    Array leaves are compared by shape and dtype alone, other leaves by identity and
    then by `==`.
    """
    old_leaves = jtu.tree_leaves_with_path(old)
    new_leaves = dict(jtu.tree_leaves_with_path(new))
    for path, was in old_leaves:
        name = path_name(root, path)
        if path not in new_leaves:
            return f"`{name}` was {describe(was)} and is now gone"
        now = new_leaves.pop(path)
        if not _same(was, now):
            return _was_is(name, was, now)
    for path, now in new_leaves.items():
        return f"`{path_name(root, path)}` is new: {describe(now)}"
    if jtu.tree_structure(old) != jtu.tree_structure(new):
        whole = f"`{root or 'state'}` has another structure, with the same leaves"
        return _structure_difference(root, old, new) or whole
    return None


def _was_is(name: str, was: Any, now: Any) -> str:
    texts = [
        f"of class `{x.__name__}`" if isinstance(x, type) else describe(x)
        for x in (was, now)
    ]
    other = ", another one" if texts[0] == texts[1] else ""
    return f"`{name.lstrip('.')}` was {texts[0]} and is now {texts[1]}{other}"


def _structure_difference(name: str, old: Any, new: Any) -> str | None:
    """Name the static field, or the node of another class, where two trees differ."""
    if type(old) is not type(new):
        return _was_is(name, type(old), type(new))
    if isinstance(old, eqx.Module):
        for field in dataclasses.fields(old):
            was, now = getattr(old, field.name, None), getattr(new, field.name, None)
            below = f"{name}.{field.name}"
            if field.metadata.get("static", False):
                found = None if _same(was, now) else _was_is(below, was, now)
            else:
                found = _structure_difference(below, was, now)
            if found:
                return found
    elif isinstance(old, list | tuple):
        pairs = enumerate(zip(old, new, strict=False))
        found = (_structure_difference(f"{name}[{i}]", *pair) for i, pair in pairs)
        return next(filter(None, found), None)
    elif isinstance(old, dict) and isinstance(new, dict):
        keys = [key for key in old if key in new]
        found = (_structure_difference(f"{name}[{k!r}]", old[k], new[k]) for k in keys)
        return next(filter(None, found), None)
    return None


def _same(was: Any, now: Any) -> bool:
    arrays = [hasattr(x, "shape") and hasattr(x, "dtype") for x in (was, now)]
    if all(arrays):
        return tuple(was.shape) == tuple(now.shape) and was.dtype == now.dtype
    return not any(arrays) and (was is now or bool(was == now))


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
