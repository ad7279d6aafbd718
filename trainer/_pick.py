"""How a Switch of losses or of updates has its branch picked."""

import inspect
from typing import Any

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import PyTree

from trainer._counts import check_unit_of
from trainer._losses import Given
from trainer._memory import check_arrays, same_form, unsalted
from trainer._metrics import Metric
from trainer._selectors import AbstractSelector
from trainer._tree import describe, is_eager
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
    """What is remembered for a selector: its own memory, and what it picked last.

    None for one that neither remembers nor draws by chance.
    """
    memory = check_arrays(selector.init(num), selector)
    asks = inspect.signature(selector).parameters
    if memory is None and "memory" in asks:
        raise TypeError(
            f"`{type(selector).__name__}` asks for `memory` and makes none. Define "
            "`init(self, num)`, which returns its arrays before the first step."
        )
    if memory is None and "key" not in asks:
        return None
    zero = jnp.int32(0)
    return {"selector": memory, "index": zero, "local": zero, "salt": unsalted()}


def pick(
    selector: AbstractSelector,
    num: int,
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
        num: How many branches there are.
        count: What the selector counts: steps or epochs.
        given: What is known at this step.
        own: As `init_picked` makes it.
        trains: Whether this is a step of training.
    """
    if own is not None and not trains:
        return own["index"], own["local"]
    if own is None and init_picked(selector, num) is not None:
        return jnp.int32(0), jnp.int32(0)
    known: dict[str, Any] = {"num_steps": given.num_steps, "reports": given.reports}
    if own is not None:
        known["memory"] = own["selector"]
        salt = own["salt"].number
        known["key"] = None if given.key is None else jr.fold_in(given.key, salt)
    asked = inspect.signature(selector).parameters
    picked = selector(count, num, **{k: known[k] for k in known if k in asked})
    if not (isinstance(picked, tuple) and len(picked) == 2):
        raise _not_picked(selector, picked)
    index, local = (jnp.asarray(x) for x in picked)
    whole = [
        x.dtype == bool or jnp.issubdtype(x.dtype, jnp.integer) for x in (index, local)
    ]
    if not all(whole) or index.shape != () or local.shape != ():
        raise _not_picked(selector, (index, local))
    # What is recorded is what runs: `lax.switch` takes the nearest branch there is.
    index = jnp.clip(index.astype(jnp.int32), 0, num - 1)
    return index, local.astype(jnp.int32)


def _not_picked(selector: AbstractSelector, picked: Any) -> TypeError:
    many = isinstance(picked, tuple)
    what = ", ".join(map(describe, picked)) if many else describe(picked)
    return TypeError(
        f"`{type(selector).__name__}` returned `{what}`. A selector returns the "
        "branch's index and how many steps it has had, two whole numbers."
    )


class _OfOneBranch(dict[str, Metric]):
    """What a branch has reported, where no other was traced: the rest is absent."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Metric:
        return Metric(jnp.float32(jnp.nan), False)


def picked(selector: AbstractSelector, own: PyTree, outcome: Any, local: Step) -> Any:
    """The memory after a step, of one that has any; see `init_picked`."""
    memory = own["selector"]
    if is_eager(outcome.branch):
        outcome = outcome._replace(metrics=_OfOneBranch(outcome.metrics))
    if memory is not None:
        memory = same_form(memory, selector.after(memory, outcome), selector, "after")
    return {**own, "selector": memory, "index": outcome.branch, "local": local}
