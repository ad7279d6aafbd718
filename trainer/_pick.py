"""How a Switch of losses or of updates has its branch picked."""

import inspect
import zlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import PyTree

from trainer._counts import check_unit_of
from trainer._losses import Given
from trainer._memory import SALT
from trainer._selectors import AbstractSelector
from trainer._tree import describe
from trainer._types import Step


def check_selector(selector: Any, num: int, by: str) -> None:
    """Raise TypeError or ValueError unless it can drive `num` branches."""
    if not isinstance(selector, AbstractSelector):
        raise TypeError(
            f"`{describe(selector)}` is not a selector. Use `tr.Every`, `tr.Cycle`, "
            "`tr.At`, or a subclass of `tr.AbstractSelector`."
        )
    selector.check(num)
    check_unit_of(selector, by, type(selector).__name__)
    if by == "epoch" and selector.init(num) is not None:
        raise ValueError(
            f"`{type(selector).__name__}` remembers how many steps a branch has had, "
            "and cannot count epochs. Leave `by` out."
        )


def init_picked(selector: AbstractSelector, num: int) -> PyTree:
    """The memory of a selector, and what it picked last; None if it has no memory."""
    memory = selector.init(num)
    if memory is None:
        return None
    zero = jnp.int32(0)
    return {"selector": memory, "index": zero, "local": zero, SALT: jnp.uint32(0)}


def pick(
    selector: AbstractSelector,
    names: Sequence[str],
    count: Step,
    given: Given,
    own: PyTree,
    trains: bool,
) -> tuple[Step, Step]:
    """The branch's index, and how many steps it has had.

    A selector that remembers is asked while training alone. Otherwise, in a line search
    or an evaluation, the branch is the one of the step that has just been made.

    Args:
        selector: Picks.
        names: The branches' names.
        count: What the selector counts: steps or epochs.
        given: What is known at this step.
        own: As `init_picked` makes it.
        trains: Whether this is a step of training.
    """
    if own is not None and not trains:
        return own["index"], own["local"]
    if own is None and selector.init(len(names)) is not None:
        return jnp.int32(0), jnp.int32(0)
    asked = inspect.signature(selector).parameters
    known: dict[str, Any] = {"num_steps": given.num_steps}
    if own is not None:
        known["memory"] = own["selector"]
    if "key" in asked:
        # Two selectors at one step are to draw apart from each other and from the loss.
        salt = zlib.crc32("/".join(names).encode()) if own is None else own[SALT]
        known["key"] = None if given.key is None else jr.fold_in(given.key, salt)
    picked = selector(count, len(names), **{k: known[k] for k in known if k in asked})
    if not (isinstance(picked, tuple) and len(picked) == 2):
        raise TypeError(
            f"`{type(selector).__name__}` returned `{describe(picked)}`. A "
            "selector returns the branch's index and how many steps it has had."
        )
    index, local = (jnp.asarray(x, jnp.int32) for x in picked)
    # What is recorded is what runs: `lax.switch` takes the nearest branch there is.
    return jnp.clip(index, 0, len(names) - 1), local


def picked(selector: AbstractSelector, own: PyTree, outcome: Any, local: Step) -> Any:
    """The memory after a step; see `init_picked`."""
    if own is None:
        return None
    memory = selector.after(own["selector"], outcome)
    return {**own, "selector": memory, "index": outcome.branch, "local": local}
