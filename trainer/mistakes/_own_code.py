"""Which code is the user's own, and not a library's."""

import functools
import sys
import types
from collections.abc import Iterable
from typing import Any

from trainer.mistakes._user_code import is_of_user


_LIBRARIES = frozenset(
    ("jax", "jaxlib", "equinox", "optax", "numpy", "jaxtyping", "trainer")
)


def top_of(value: Any) -> str:
    """Name of the package or module that a function, class or module belongs to."""
    if type(value) is types.FunctionType:
        # `functools.wraps` copies `__module__` to a function of another module.
        name = value.__globals__.get("__name__")
    elif type(value) is types.ModuleType:
        name = value.__name__
    else:
        name = getattr(value, "__module__", None)
    return str(name or "").split(".")[0]


def is_of_library(value: Any, own: Iterable[str] = ()) -> bool:
    """Whether a function, class or module was installed, and not written by the user.

    Args:
        value: The function, class or module.
        own: Names of packages that count as the user's, though they are installed.
    """
    top = top_of(value)
    return top in _LIBRARIES or (top not in own and _is_installed(top))


@functools.lru_cache(maxsize=1024)
def _is_installed(top: str) -> bool:
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None) or next(
        iter(getattr(module, "__path__", ())), None
    )
    if file is None:
        return top in sys.stdlib_module_names
    return not is_of_user(file)
