"""Python floats in a model, which look like parameters and are constants."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from trainer.mistakes._own_code import is_of_library
from trainer.mistakes._silent import Mistake


_MOST_NAMED = 3
# Settings that nobody means to train.
_SETTING = re.compile(r"(^|_)(eps|epsilon|p|prob|dropout|tol|atol|rtol|momentum)(_|$)")


def python_floats(model: PyTree) -> list[Mistake]:
    """Floats in the user's own modules, and in lists and dicts, that are not static.

    A library's modules keep their settings as they like.
    """
    found = list(_floats(model, "model", True))
    if not found:
        return []
    (path, value), more = found[0], [f"`{path}`" for path, _ in found[1:_MOST_NAMED]]
    left = len(found) - 1 - len(more)
    more += [f"{left} more"] if left else []
    is_are = "is" if len(found) == 2 else "are"
    beside = f" (so {is_are} {', '.join(more)})" if more else ""
    setting = "`eqx.field(static=True)`"
    setting = "keep it out of the model" if path.endswith("]") else setting
    return [
        Mistake(
            f"`{path}` is the Python float {value}{beside}: a constant of the program, "
            f"which is not trained. Write `jnp.asarray({value})` to train it, or "
            f"{setting} if it is a setting."
        )
    ]


def _floats(node: Any, path: str, is_own: bool) -> Iterator[tuple[str, float]]:
    """Paths and values, of what belongs to the user's own modules or to none."""
    if isinstance(node, eqx.Module):
        is_own = not is_of_library(type(node))
    for name, value in _entries(node):
        below = path + name
        if type(value) is float and not _SETTING.search(name.strip(".[]'\"")):
            # A tuple of numbers is seldom a parameter.
            if is_own and type(node) is not tuple:
                yield below, value
        else:
            yield from _floats(value, below, is_own)


def _entries(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, eqx.Module):
        for field in dataclasses.fields(node):
            if not field.metadata.get("static", False):
                yield f".{field.name}", vars(node).get(field.name)
    elif isinstance(node, dict):
        yield from ((f"[{key!r}]", value) for key, value in node.items())
    elif isinstance(node, list | tuple):
        names = getattr(node, "_fields", None)
        for place, value in enumerate(node):
            yield f".{names[place]}" if names else f"[{place}]", value
