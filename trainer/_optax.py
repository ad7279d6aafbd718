"""What Optax's optimizers are given, and what can be read from their states."""

import inspect
import traceback
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import Array, PyTree

from trainer._tree import describe


def check_optimizer(optimizer: Any) -> optax.GradientTransformation:
    """Raise TypeError unless it is one of Optax's; return it."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"`{describe(optimizer)}` is not an optimizer. Use one of Optax's, "
            "such as `optax.adam(1e-3)`."
        )
    return optimizer


def init_optimizer(optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Make an optimizer's state."""
    try:
        return optimizer.init(params)
    except Exception as error:
        if not _was_called(params, error):
            raise
        raise TypeError(
            f"The optimizer cannot start on this model: {error}. If it was made with a "
            "tree of labels shaped like the model, Optax takes that tree for a "
            "function, because the model can be called. Write `lambda _: labels` in "
            "its place, or use `tr.Parts`."
        ) from error


def _was_called(params: PyTree, error: Exception) -> bool:
    """Whether an error came about by calling a tree of the model's class."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    owners = (f.f_locals.get("self") for f in frames if f.f_code.co_name == "__call__")
    return any(type(owner) is type(params) for owner in owners)


def optimize(
    optimizer: optax.GradientTransformation,
    params: PyTree,
    state: PyTree,
    grad: PyTree,
    value: Array,
    value_of: Callable[[PyTree], Array],
    grad_of: Callable[[PyTree], PyTree],
) -> tuple[PyTree, PyTree]:
    """One step of an optimizer, with everything that any of them asks for.

    Args:
        optimizer: Optax's.
        params: What it owns.
        state: What it remembers.
        grad: The gradient as JAX has it.
        value: The loss.
        value_of: The loss as a function of the parameters.
        grad_of: Its gradient as JAX has it.
    """

    def value_fn(params: PyTree, *, obj_fn: Any = None, grad_fn: Any = None) -> Array:
        # Optax's line searches refuse what they are given unless this takes it.
        del obj_fn, grad_fn
        return value_of(params)

    def grad_fn(params: PyTree, *_: Any) -> PyTree:
        return _ascent(grad_of(params))

    grad = _ascent(grad)
    extra = {
        "value": value,
        "grad": grad,
        "value_fn": value_fn,
        "obj_fn": value_fn,
        "grad_fn": grad_fn,
    }
    taken = {name: extra[name] for name in _taken_by(optimizer.update, extra)}
    updates, state = optimizer.update(grad, state, params, **taken)
    # It keeps the parameters' dtypes, whatever that of the learning rate is.
    return optax.apply_updates(params, updates), state


def _ascent(grad: PyTree) -> PyTree:
    """The direction of steepest ascent: JAX gives its conjugate where it is complex."""
    return jtu.tree_map(jnp.conj, grad)


def _taken_by(update: Any, names: Any) -> list[str]:
    """Which keywords an optimizer takes.

    Its type does not say it: `optax.contrib.sam` is of the type that takes any, and
    takes one; `optax.MultiSteps` is of the other, and takes any.
    """
    parameters = list(inspect.signature(update).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return list(names)
    # The first three are the gradient, the state and the parameters, whatever called.
    later = [p for p in parameters[3:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    taken = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    taken |= {p.name for p in later}
    return [name for name in names if name in taken]


def learning_rate(state: PyTree) -> Array | None:
    """The learning rate of the update just made, if the state shows one."""
    is_one = lambda node: isinstance(node, optax.InjectStatefulHyperparamsState)
    found = [
        node.hyperparams["learning_rate"]
        for node in jtu.tree_leaves(state, is_leaf=is_one)
        if is_one(node) and "learning_rate" in node.hyperparams
    ]
    return found[0] if len(found) == 1 and jnp.shape(found[0]) == () else None


def left_over(state: PyTree) -> int:
    """How many micro-batches `optax.MultiSteps` has taken in and not used yet."""
    is_one = lambda node: isinstance(node, optax.MultiStepsState)
    found = filter(is_one, jtu.tree_leaves(state, is_leaf=is_one))
    # The members of an ensemble may differ, as an accumulation may skip a gradient.
    return max((int(jnp.max(node.mini_step)) for node in found), default=0)


def evaluated(state: PyTree, params: PyTree) -> PyTree:
    """The parameters that schedule-free optimizers mean to be evaluated."""
    is_one = lambda node: isinstance(node, optax.contrib.ScheduleFreeState)
    is_masked = lambda node: isinstance(node, optax.MaskedNode)
    for found in filter(is_one, jtu.tree_leaves(state, is_leaf=is_one)):

        def one(z: Any, y: Any, found: Any = found) -> Any:
            if is_masked(z):
                return y  # another part of a partition owns it
            at = optax.contrib.schedule_free_eval_params(found._replace(z=z), y)
            return at.astype(y.dtype)

        params = jtu.tree_map(one, found.z, params, is_leaf=is_masked)
    return params
