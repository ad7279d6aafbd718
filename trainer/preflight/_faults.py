"""What is wrong with a program at its first step, in words."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trainer._state import TrainState
from trainer.mistakes._user_code import defined_at
from trainer.preflight._first_look import first_bad, FirstLook
from trainer.preflight._pieces import Leaf
from trainer.preflight._table import some


_MOST_PATHS = 3


def zero_gradients(seen: FirstLook) -> Iterator[str]:
    """Arrays that are trained, and that no loss moves on this batch."""
    gradients = [loss.gradient for loss in seen.losses.values()]
    moved = {
        path
        for gradient in gradients
        for path, one in gradient.items()
        if one.bad or one.most or one.least
    }
    paths = dict.fromkeys(path for gradient in gradients for path in gradient)
    return (path for path in paths if path not in moved)


def nonfinite(seen: FirstLook) -> Iterator[str]:
    """What is not finite: paths in model and batch, losses, and gradients."""
    yield from (path for path, one in {**seen.model, **seen.batch}.items() if one.bad)
    for name, loss in seen.losses.items():
        if not math.isfinite(loss.value):
            yield name
        bad = [path for path, one in loss.gradient.items() if one.bad]
        yield from (f"gradient of {name} by {path}" for path in bad)


def faults_in(seen: FirstLook, leaves: Mapping[str, Leaf]) -> Iterator[str]:
    """What is not finite before the first step, each with what to do."""
    for path, one in seen.model.items():
        if one.bad:
            yield (
                f"`{path}` has {one.bad:,} of {one.size:,} numbers that are not "
                "finite. Look at how it is made, or at the file that it was read from."
            )
    spoiled = any(
        not math.isfinite(loss.value) or any(g.bad for g in loss.gradient.values())
        for loss in seen.losses.values()
    )
    for path, one in seen.batch.items():
        # A loss may know of gaps in the data, and leave them out.
        if one.bad and (spoiled or not seen.losses):
            yield (
                f"`{path}` has {one.bad:,} of {one.size:,} numbers that are not finite "
                "in the first batch. Leave such examples out, or put numbers in their "
                "place."
            )
    for name, loss in seen.losses.items():
        place = defined_at(leaves[name].loss)
        bad = [path for path, one in loss.gradient.items() if one.bad]
        if not math.isfinite(loss.value):
            how = "infs" if math.isinf(loss.value) else "nans"
            yield (
                f"The loss `{name}`{place} is {loss.value} on the first batch. Call it "
                f"by itself under `with jax.debug_{how}(True):`, which raises where "
                "the first such number is made."
            )
        elif bad:
            paths = some([f"`{path}`" for path in bad], _MOST_PATHS)
            yield (
                f"The gradient of `{name}`{place} by {paths} is not finite, "
                f"where the loss is {loss.value:.4g}. A root or a norm at 0, or "
                "`jnp.where` around what is infinite, does this: put `jnp.where` "
                "inside, as in `jnp.sqrt(jnp.where(x > 0, x, 1.0))`."
            )


def faults_after(found: Any, after: TrainState) -> Iterator[str]:
    """What the first step makes not finite, out of what was."""
    path = first_bad(after)
    if found is not None:
        yield f"{found}. Look at the update, and at the optimizer's learning rate."
    elif path is not None:
        yield (
            f"The first step makes `{path}` not finite, though the loss is finite. "
            "Look at the update, the optimizer's learning rate, and the transforms."
        )
