"""Mistakes in code that is traced: how an error shows one, and what is said of it."""

import dataclasses
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.scipy.special


class Said(NamedTuple):
    """What is said of a mistake: what was done, why it cannot work, what to write."""

    did: str
    why: str
    instead: str


class KnownError(NamedTuple):
    """How a mistake is recognised, and what is said of it.

    Attributes:
        kind: Class of the error. One of Python's own has to be just that; of JAX's,
            subclasses are meant as well.
        text: Found in the error's message. What is said may name its groups.
        said: What is said.
        line: Found in the user's line.
    """

    kind: type[BaseException]
    text: str
    said: Said
    line: str

    def find(self, error: BaseException, line: str) -> Said | None:
        """What is said of an error that was raised in this line, if it is this one."""
        exact = self.kind.__module__ == "builtins"
        fits = type(error) is self.kind if exact else isinstance(error, self.kind)
        found = re.search(self.text, str(error)) if fits else None
        if found is None or not re.search(self.line, line):
            return None
        return Said(*(_in_words(found.expand(text)) for text in self.said))


def _in_words(text: str) -> str:
    """Without the names that JAX's own classes have."""
    text = re.sub(r"an? <class '[\w.]*?(\w+)'>", r"a `\1`", text)
    return text.replace("a pytree leaf", "one array").replace(
        "a `ShapedArray`", "one array"
    )


def known(
    kind: type[BaseException],
    text: str,
    did: str,
    why: str,
    instead: str,
    line: str = "",
) -> KnownError:
    """Make a KnownError; see there."""
    return KnownError(kind, text, Said(did, why, instead), line)


def of_assignment(error: BaseException) -> Said | None:
    """What is said of a field of a Module that was assigned."""
    trace = error.__traceback__
    if type(error) is not dataclasses.FrozenInstanceError or trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    module: Any = trace.tb_frame.f_locals.get("self")
    found = re.search(r"field '(\w+)'", str(error))
    if found is None or not isinstance(module, eqx.Module):
        return None
    name = found[1]
    if hasattr(module, name):
        instead = f"Make a new one: `m = eqx.tree_at(lambda m: m.{name}, m, value)`"
    else:
        instead = f"Report it as a metric: `return loss, {{'{name}': value}}`"
    did = f"The field `{name}` of a `{type(module).__name__}` is assigned"
    return Said(did, "a Module never changes", instead)


def of_item(error: BaseException) -> Said | None:
    """What is said of a traced value that was put into a NumPy array."""
    cause = error.__cause__
    is_item = type(error) is ValueError and isinstance(cause, jax.errors.JAXTypeError)
    if not is_item or "setting an array element" not in str(error):
        return None
    return Said(
        "A traced value is put into a NumPy array",
        "it has no value while the step is compiled, and NumPy holds values alone",
        "Put values together with `jnp.stack`, or write `x = x.at[i].set(value)`",
    )


# Where a name is looked for, and how the module is written.
_MODULES: dict[str, ModuleType] = {
    "jnp": jnp,
    "jax.nn": jax.nn,
    "jax.scipy.special": jax.scipy.special,
    "jax.lax": jax.lax,
    "jax.random": jax.random,
    "jnp.linalg": jnp.linalg,
    "jnp.fft": jnp.fft,
    "jax": jax,
}


def of_name(error: BaseException) -> Said | None:
    """What is said of a name that one module has not, and another has.

    Also of a function that is written as a method of an array, as in `x.exp()`.
    """
    if type(error) is not AttributeError:
        return None
    text = str(error)
    found = re.search(r"^module '(jax|numpy)([\w.]*)' has no attribute '(\w+)'$", text)
    if found:
        name = found[3]
        did, given = f"`{found[1]}{found[2]}` has no `{name}`", ""
        if isinstance(vars(jax).get(name), ModuleType):
            return Said(did, "it is elsewhere", f"Did you mean `jax.{name}`?")
    else:
        found = re.search(r"^\w+Tracer has no attribute (\w+)$", text)
        name = found[1] if found else "_"
        did, given = f"An array has no `{name}`", "(x)"
    written = next(_elsewhere(name), None)
    if written is None:
        return None
    return Said(did, "it is elsewhere", f"Did you mean `{written}{given}`?")


def _elsewhere(name: str) -> Iterator[str]:
    """All that has this name, as one writes it."""
    for written, module in _MODULES.items():
        # Not `hasattr`: it warns of names that are about to go.
        if callable(vars(module).get(name)) and not name.startswith("_"):
            yield f"{written}.{name}"
