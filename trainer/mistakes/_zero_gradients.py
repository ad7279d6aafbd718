"""Gradients that are zero whatever the numbers are, seen where they are taken.

JAX knows of each value whether it depends on what is differentiated by, and of each
gradient whether anything was added to it. It tells functions with derivatives of their
own. An identity that is told so leaves no trace in the program.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.tree_util as jtu
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, PyTree

from trainer._cost import inner_jaxprs


# What hands on the numbers of an array as they are.
_LAYOUT = {
    "broadcast_in_dim",
    "convert_element_type",
    "reshape",
    "squeeze",
    "transpose",
}


class Look:
    """One gradient, and what was seen of it.

    Attributes:
        losses: The losses that were differentiated together.
        owned: Paths of the arrays that they were differentiated by.
        reached: Paths of those that got a gradient.
        depending: Which of the losses depend on any of them, by `id`.
    """

    def __init__(self, losses: Sequence[Any], owned: PyTree):
        self.losses = losses
        self.owned = [path for path, _ in jtu.tree_leaves_with_path(owned)]
        self.reached: set[Any] = set()
        self.depending: set[int] = set()


_looks: ContextVar[list[Look] | None] = ContextVar("looks", default=None)
_current: ContextVar[Look | None] = ContextVar("current", default=None)


@contextlib.contextmanager
def gradients_seen() -> Iterator[list[Look]]:
    """See all gradients that are taken while the context lasts."""
    looks: list[Look] = []
    token = _looks.set(looks)
    try:
        yield looks
    finally:
        _looks.reset(token)


@contextlib.contextmanager
def looked_at(losses: Sequence[Any], owned: PyTree) -> Iterator[PyTree]:
    """Look at one gradient: give what it is taken by, to be used in its place."""
    looks = _looks.get()
    if looks is None:
        yield owned
        return
    look = Look(losses, owned)
    looks.append(look)
    token = _current.set(look)

    def told(reached: list[bool]) -> None:
        pairs = zip(look.owned, reached, strict=True)
        look.reached |= {path for path, is_reached in pairs if is_reached}

    leaves, treedef = jtu.tree_flatten(owned)
    try:
        yield jtu.tree_unflatten(treedef, _telling_of_gradients(told)(leaves))
    finally:
        _current.reset(token)


def seen(loss: Any, value: Array) -> Array:
    """Look at the value of a loss, if its gradient is looked at."""
    look = _current.get()
    if look is None or all(loss is not each for each in look.losses):
        return value
    return _telling_of_dependence(lambda: look.depending.add(id(loss)))(value)


def _telling_of_gradients(told: Callable[[list[bool]], None]) -> Any:
    """The identity of a list of arrays. Told is which of them get a gradient."""

    @jax.custom_vjp
    def same(leaves: list[Array]) -> list[Array]:
        return leaves

    def forward(leaves: list[Any]) -> tuple[list[Array], None]:
        return [leaf.value for leaf in leaves], None

    def backward(_: None, gradients: list[Any]) -> tuple[list[Array | None]]:
        zero = [isinstance(gradient, SymbolicZero) for gradient in gradients]
        told([not is_zero for is_zero in zero])
        return ([None if z else g for z, g in zip(zero, gradients, strict=True)],)

    same.defvjp(forward, backward, symbolic_zeros=True)
    return same


def _telling_of_dependence(told: Callable[[], None]) -> Any:
    """The identity of a scalar. Told is that it depends on what is trained."""

    @jax.custom_vjp
    def same(value: Array) -> Array:
        return value

    def forward(value: Any) -> tuple[Array, None]:
        if value.perturbed:
            told()
        return value.value, None

    def backward(_: None, gradient: Any) -> tuple[Array | None]:
        return (None if isinstance(gradient, SymbolicZero) else gradient,)

    same.defvjp(forward, backward, symbolic_zeros=True)
    return same


def stopped(jaxpr: Any, given: dict[Any, Any]) -> set[Any]:
    """Which of the inputs of a jaxpr are handed to `stop_gradient` as they are.

    That is how a model keeps a constant: it is not meant to get a gradient.

    Args:
        jaxpr: The jaxpr.
        given: From some of its variables to what they stand for.
    """
    known, found = dict(given), set()
    for eqn in jaxpr.eqns:
        # Variables can be looked up; literals cannot.
        read = [None if hasattr(v, "val") else known.get(v) for v in eqn.invars]
        if all(each is None for each in read):
            continue
        for inner in inner_jaxprs(eqn):
            # What comes first is the index of a branch, or of the test of a loop.
            pairs = zip(reversed(inner.invars), reversed(read), strict=False)
            found |= stopped(inner, {v: r for v, r in pairs if r is not None})
        if eqn.primitive.name == "stop_gradient":
            found |= {each for each in read if each is not None}
        elif eqn.primitive.name in _LAYOUT and read[0] is not None:
            known[eqn.outvars[0]] = read[0]
    return found
