"""The form of an array: what of it JAX's cache sees. Its numbers are no part of it."""

from collections.abc import Iterator
from typing import Any, final, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, Sharding

from trainer._tree import describe, is_array_like


@final
class Form:
    """What of an array decides whether a compiled function can be used again.

    It holds no numbers, so it can be kept while the array is donated. It is a leaf of a
    PyTree, and `describe` says of it what it says of the array.

    Attributes:
        shape: The array's shape.
        dtype: Its dtype; of a NumPy array, the one that JAX turns it into.
        weak_type: Whether the dtype gives way to others in arithmetic.
        committed: Whether it was put where it is on purpose. None if nothing is known.
        sharding: Where it is. None if nothing is known.
    """

    def __init__(self, leaf: Any, *, dtype: Any = None, weak_type: bool | None = None):
        self.shape: tuple[int, ...] = tuple(leaf.shape)
        self.dtype: Any = leaf.dtype if dtype is None else dtype
        # Keys have no weak type, and say so by not having the attribute.
        weak = bool(getattr(leaf, "weak_type", False))
        self.weak_type = weak if weak_type is None else weak_type
        self.committed, self.sharding = _place(leaf)

    def __repr__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class _Place(NamedTuple):
    committed: bool | None
    sharding: Sharding | None


def _place(leaf: Any) -> _Place:
    """Where an array is. Of one that is donated or deleted, it can still be asked."""
    if isinstance(leaf, Form):
        return _Place(leaf.committed, leaf.sharding)
    if isinstance(leaf, Tracer):
        return _Place(None, None)
    if isinstance(leaf, jax.Array):
        return _Place(leaf.committed, leaf.sharding)
    # A NumPy array is put where JAX likes. A struct says nothing of its place.
    is_host = not isinstance(leaf, jax.ShapeDtypeStruct)
    return _Place(False if is_host else None, None)


def form_of(leaf: Any) -> Any:
    """The form of an array, as `filter_jit` sees it; any other leaf as it is."""
    if not is_array_like(leaf) or isinstance(leaf, Form):
        return leaf
    try:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    except TypeError:
        # An array of text or of objects, which JAX does not take.
        dtype = leaf.dtype
    return Form(leaf, dtype=dtype)


def traced_form_of(leaf: Any) -> Any:
    """The form of a leaf as `jax.jit` sees it, to which numbers are arrays as well."""
    if not isinstance(leaf, bool | int | float | complex):
        return form_of(leaf)
    dtype = jax.dtypes.canonicalize_dtype(type(leaf))
    # A bool has the lowest dtype that there is, and nothing to give way to.
    return Form(_Scalar((), dtype), weak_type=not isinstance(leaf, bool))


class _Scalar(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any


def same_place(was: Form, now: Form) -> bool:
    """Whether two committed arrays are in the same place, as JAX's cache has it.

    One device is another place than a mesh of that device alone, and a mesh with other
    names for its axes is another mesh.
    """
    one, other, ndim = was.sharding, now.sharding, len(was.shape)
    if one is None or other is None or one == other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, NamedSharding) and isinstance(other, NamedSharding):
        if one.mesh != other.mesh:
            return False
        if ndim != len(now.shape):
            return one.spec == other.spec
    return one.is_equivalent_to(other, ndim)


def describe_place(sharding: Sharding | None) -> str:
    """Say where an array is: `cpu:0`, or `P('data', None) on the mesh (data=4)`."""
    if isinstance(sharding, NamedSharding):
        spec = ", ".join(map(repr, sharding.spec))
        return f"P({spec}) on {describe_mesh(sharding.mesh)}"
    devices = sorted(sharding.device_set, key=lambda d: d.id) if sharding else ()
    if len(devices) == 1:
        return f"{devices[0].platform}:{devices[0].id}"
    return repr(sharding)


def describe_mesh(mesh: Any) -> str:
    """Say what a mesh is, such as `the mesh (data=4, model=2)`."""
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    is_auto = all(kind == AxisType.Auto for kind in mesh.axis_types)
    return f"the mesh ({axes})" if is_auto else f"the explicit mesh ({axes})"


class Found(NamedTuple):
    """What differs between two arrays: what it is, what it was, is now, a remedy."""

    what: str
    was: str
    now: str
    remedy: str


def array_differences(was: Any, now: Any, forms_only: bool) -> Iterator[Found]:
    """Find what of two arrays, structs or forms makes a function compile again."""
    other_shape = tuple(was.shape) != tuple(now.shape)
    if other_shape or was.dtype != now.dtype:
        what, remedy = _other_form(was, now, other_shape)
        yield Found(what, describe(was), describe(now), remedy)
    if forms_only:
        return
    old, new = (x if isinstance(x, Form) else Form(x) for x in (was, now))
    if was.dtype == now.dtype and old.weak_type != new.weak_type:
        remedy = f"Give it a dtype where it is made, with {strong_like(now.dtype)}."
        yield Found("weak type", _describe_type(old), _describe_type(new), remedy)
    yield from _place_differences(old, new)


def _other_form(was: Any, now: Any, other_shape: bool) -> tuple[str, str]:
    if was.dtype != now.dtype and (_is_key(was) or _is_key(now)):
        return "key", "Make all keys with `jax.random.key`, of one implementation."
    if not other_shape:
        return "dtype", f"Convert it to `{was.dtype}` before the call."
    if was.dtype != now.dtype:
        return "shape", "Give every call one shape and one dtype."
    return "shape", "Give every call one shape: pad what is short, and mask the rest."


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def strong_like(dtype: Any) -> str:
    """Write the code that makes an array with a dtype of its own."""
    return f"`jnp.asarray(..., '{dtype}')`"


def _describe_type(form: Form) -> str:
    return f"weakly typed {form!r}" if form.weak_type else repr(form)


def _place_differences(was: Form, now: Form) -> Iterator[Found]:
    if was.committed is None or now.committed is None:
        return
    kinds = [x.sharding and x.sharding.memory_kind for x in (was, now)]
    if was.committed != now.committed:
        what = "committed"
        remedy = "Put it in one place before the first call, with `jax.device_put`."
    elif all(kinds) and kinds[0] != kinds[1]:
        texts = (f"in {kinds[0]} memory", f"in {kinds[1]} memory")
        yield Found("memory kind", *texts, "Keep it in one kind of memory.")
        return
    elif was.committed and not same_place(was, now):
        what = "sharding"
        remedy = (
            "Put it in one place with `jax.device_put`, and keep what a function "
            "returns there, with `jax.lax.with_sharding_constraint`."
        )
    else:
        return
    yield Found(what, _describe_commitment(was), _describe_commitment(now), remedy)


def _describe_commitment(form: Form) -> str:
    where = describe_place(form.sharding)
    return f"committed to {where}" if form.committed else "uncommitted"
