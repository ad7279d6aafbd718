"""A call as JAX's cache sees it, and what is called: which arguments are traced."""

import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any, final, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu

from trainer._tree import describe
from trainer.recompiles._context import Context
from trainer.recompiles._forms import form_of


@final
class Call:
    """A record of a call: the forms of its arguments, and JAX's settings at that time.

    It holds no arrays, so it can be kept while they are donated, and compared with a
    later call by `tr.explain`. What is no array is kept as it is.

    Attributes:
        args: The positional arguments, with a form in the place of each array.
        kwargs: The arguments given by name, likewise.
        context: JAX's settings and mesh when the record was made.

    Example:
        >>> import jax.numpy as jnp
        >>> import trainer as tr
        >>> tr.Call(jnp.zeros((4, 2)), train=True)
        Call(float32[4,2], train=True)
    """

    def __init__(self, /, *args: Any, **kwargs: Any):
        self.args: tuple[Any, ...] = jtu.tree_map(form_of, args)
        self.kwargs: dict[str, Any] = jtu.tree_map(form_of, kwargs)
        self.context = Context()

    def __repr__(self) -> str:
        named = [f"{name}={describe(value)}" for name, value in self.kwargs.items()]
        return f"Call({', '.join([*map(describe, self.args), *named])})"


def as_call(name: str, given: Any) -> Call:
    """Record arguments given as a tuple; a record stays as it is.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(given, Call):
        return given
    if type(given) is tuple:
        return Call(*given)
    text = describe(jtu.tree_map(form_of, given))
    raise TypeError(
        f"`{name}` is `{text}`, but is to be the positional arguments of a call, as a "
        "tuple such as `(model, batch)`. With arguments given by name, or to record a "
        "call before its arrays are donated, give a `tr.Call`."
    )


class Called(NamedTuple):
    """What is called.

    Attributes:
        name: The function's name.
        function: The Python function that is compiled.
        by: What compiles it: `"eqx.filter_jit"` or `"jax.jit"`.
        options: What it was told, as far as it makes another program.
        static: Numbers and names of the arguments that `jax.jit` does not trace.
        held: The call's first arguments, which came with the function: `self`.
        keywords: Arguments by name that came with it.
    """

    name: str
    function: Any
    by: str
    options: Mapping[str, Any]
    static: tuple[Any, ...]
    held: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @property
    def signature(self) -> inspect.Signature:
        """The function's signature; that of any arguments if it has none."""
        try:
            return inspect.signature(self.function)
        except (TypeError, ValueError):
            return inspect.signature(lambda *args, **kwargs: (args, kwargs))

    def arguments(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments of a call, with those that came with the function.

        Raises:
            TypeError: The function does not take them.
        """
        held, keywords = jtu.tree_map(form_of, (self.held, dict(self.keywords)))
        args, kwargs = (*held, *call.args), {**keywords, **call.kwargs}
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"`{self.name}` cannot be called as `{call}`: {error}. Give the "
                "arguments of one call as a tuple, or as a `tr.Call`."
            ) from error
        return args, kwargs


def called(fn: Any) -> Called:
    """Read what a function is, and how it is compiled.

    A function that is not compiled is taken for one that `eqx.filter_jit` will compile.

    Raises:
        TypeError: It cannot be called.
    """
    if not callable(fn):
        raise TypeError(
            f"`{describe(fn)}` is not a function. Give the function that compiles "
            "again, or a pair of it as it was and as it is now."
        )
    held: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    for inner, first, named in _layers(fn):
        held, keywords = (*first, *held), {**named, **keywords}
        if isinstance(inner, _compiled_by()):
            return _read(inner, held, keywords)
    return _read(fn, (), {})


def _layers(fn: Any) -> Iterator[tuple[Any, tuple[Any, ...], Mapping[str, Any]]]:
    """The function, and those inside of it, with the arguments that each layer adds."""
    yield fn, (), {}
    while True:
        if isinstance(fn, types.MethodType):
            fn, first, named = fn.__func__, (fn.__self__,), {}
        elif isinstance(fn, functools.partial | eqx.Partial):
            fn, first, named = fn.func, tuple(fn.args), fn.keywords
        else:
            return
        yield fn, first, named


@functools.cache
def _compiled_by() -> tuple[type, type]:
    """The classes of functions compiled by `jax.jit` and by `eqx.filter_jit`."""
    function = lambda: None
    return type(jax.jit(function)), type(eqx.filter_jit(function))


def _read(fn: Any, held: tuple[Any, ...], keywords: Mapping[str, Any]) -> Called:
    by_jax, by_equinox = _compiled_by()
    function = fn.__wrapped__ if isinstance(fn, (by_jax, by_equinox)) else fn
    name = _name(function)
    if not isinstance(fn, by_jax):
        options = _donation(fn) if isinstance(fn, by_equinox) else {}
        return Called(name, function, "eqx.filter_jit", options, (), held, keywords)
    options, static = _told_to_jax(fn)
    return Called(name, function, "jax.jit", options, static, held, keywords)


def _name(function: Any) -> str:
    while isinstance(function, functools.partial | eqx.Partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _donation(fn: Any) -> dict[str, Any]:
    """What Equinox donates, in the words that it was told so."""
    if not getattr(fn, "donate_rest", False):
        return {"donate": "none"}
    first = getattr(fn, "donate_first", False)
    return {"donate": "all" if first else "all-except-first"}


def _told_to_jax(fn: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """What `jax.jit` was told that makes another program, and the static arguments.

    It is read from what the function gives for pickling, as no public name has it.
    Without it, no argument is taken for static, and no option for a cause.
    """
    state = getattr(fn, "__getstate__", dict)()
    state = state if isinstance(state, dict) else {}
    static = (*state.get("static_argnums", ()), *state.get("static_argnames", ()))
    key = state.get("global_cache_key")
    options = {
        "donate_argnums": getattr(key, "donate_argnums", None),
        "out_shardings": getattr(key, "out_shardings_leaves", None),
        "compiler_options": getattr(key, "compiler_options_kvs", None),
    }
    return options, static
