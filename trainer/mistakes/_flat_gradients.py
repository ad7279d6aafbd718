"""Losses and parameters whose gradient is zero whatever the numbers are."""

import types
from collections.abc import Iterable
from typing import Any

import jax.tree_util as jtu
import optax

from trainer._mean_square import MeanSquare
from trainer._tree import path_name
from trainer._types import Model
from trainer.mistakes._silent import Mistake, Place, place_in
from trainer.mistakes._user_code import code_of, defined_at, name_of
from trainer.mistakes._zero_gradients import Look, stopped


_MOST_NAMED = 5
_SLOW = jtu.GetAttrKey("slow")


def flat_losses(looks: list[Look]) -> list[Mistake]:
    """The losses that depend on nothing that they are differentiated by.

    One that several updates share may be flat for some of them, if another loss is not
    flat there.
    """
    used = {_key(x) for look in looks for x in look.losses if id(x) in look.depending}
    trained = {tuple(look.owned) for look in looks if look.depending}
    flat = [
        loss
        for look in looks
        for loss in look.losses
        if id(loss) not in look.depending
        and not (_key(loss) in used and tuple(look.owned) in trained)
    ]
    return [
        Mistake(
            f"The gradient of {_named(loss)} is 0 at every step: it does not depend on "
            "what is trained, or only through `stop_gradient`, `argmax`, rounding, a "
            "comparison or a whole number. Return a smooth function of the model, and "
            "report such a number as a metric.",
            _place(loss),
        )
        for loss in flat
    ]


def without_gradient(
    looks: list[Look], model: Model, jaxpr: Any, inputs: dict[Any, Any]
) -> list[Mistake]:
    """The parameters that no loss has a gradient for.

    Args:
        looks: All gradients that the step takes.
        model: The model.
        jaxpr: The step.
        inputs: The path in the model of each input that is an array of the model.
    """
    # A loss that has no gradient at all is told of by itself.
    looks = [look for look in looks if look.depending]
    reached = {path for look in looks for path in look.reached}
    owned = dict.fromkeys(path for look in looks for path in look.owned)
    left = [p for p in owned if p not in reached and not _is_slow(p, model)]
    if left:
        constant = stopped(jaxpr, inputs)
        left = [path for path in left if path not in constant]
    if not left:
        return []
    losses = list({id(x): x for look in looks for x in look.losses}.values())
    names = [f"`{path_name('model', path)}`" for path in left]
    gets, stays, it = "gets", "stays as it is", "it"
    if len(names) > 1:
        gets, stays, it = "get", "stay as they are", "them"
    return [
        Mistake(
            f"{_listed(names)} {gets} no gradient from {_listed(map(_named, losses))}, "
            f"and {stays} but for weight decay. Check that the loss uses {it}, or "
            f"freeze {it}: `tr.Minimize(loss, optimizer, where=...)` picks what is "
            "trained.",
            _place(losses[0]),
        )
    ]


def _is_slow(path: tuple[Any, ...], model: Model) -> bool:
    """Whether it is one of the parameters that Optax's lookahead moves by itself."""
    is_pair = lambda node: isinstance(node, optax.LookaheadParams)
    nodes = jtu.tree_leaves_with_path(model, is_leaf=is_pair)
    slow = [(*where, _SLOW) for where, node in nodes if is_pair(node)]
    return any(path[: len(where)] == where for where in slow)


def _listed(names: Iterable[str]) -> str:
    """The first few names, and how many there are beside them."""
    names = list(names)
    left = len(names) - _MOST_NAMED
    shown = [*names[:_MOST_NAMED], *([f"{left} more"] if left > 0 else [])]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _key(loss: Any) -> int:
    """What identifies a loss. A module is put together anew wherever it is used."""
    return id(loss) if isinstance(loss, types.FunctionType) else id(type(loss))


def _function(loss: Any) -> Any:
    return loss.residuals if isinstance(loss, MeanSquare) else loss


def _named(loss: Any) -> str:
    return f"`{name_of(_function(loss))}`{defined_at(_function(loss))}"


def _place(loss: Any) -> Place | None:
    code = code_of(_function(loss))
    return place_in(code, None) if code else None
