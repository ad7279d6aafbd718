"""Why a function compiles again: what differs between two calls, in words."""

import contextlib
import functools
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import jax.tree_util as jtu

from trainer._tree import describe, is_array_like
from trainer.recompiles._call import as_call, Call, Called, called
from trainer.recompiles._differences import Difference, differences, equal
from trainer.recompiles._forms import form_of, traced_form_of


_MOST = 20


@final
@dataclass(frozen=True, repr=False)
class Explanation(Sequence[Difference]):
    """Why a function compiles again: a sequence of `tr.Difference`, perhaps empty.

    Its `str` is for people: a line for each difference, with the remedy.

    Attributes:
        subject: What compiles again, such as "`step`".
        differences: All that makes it do so.
        hints: What else may, if there are none.
    """

    subject: str
    differences: tuple[Difference, ...]
    hints: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.differences)

    def __getitem__(self, index: Any) -> Any:
        return self.differences[index]

    def __str__(self) -> str:
        """Say what differs, a line each, and what to do about it."""
        if not self.differences:
            hints = "".join(f"\n* {hint}" for hint in self.hints)
            tail = f" What else may, and no argument shows:{hints}" if hints else ""
            return f"No argument makes {self.subject} compile again.{tail}"
        lines = [f"\n* {found}" for found in self.differences[:_MOST]]
        more = len(self.differences) - _MOST
        rest = f"\n* and {more} more" if more > 0 else ""
        return f"{self.subject} compiles again:{''.join(lines)}{rest}"

    __repr__ = __str__


def explain(fn: Any, args_before: Any, args_after: Any) -> Explanation:
    """Say why the second of two calls of a function compiles it again.

    It is for functions of your own: of `eqx.filter_jit`, to which a Python number is a
    part of the program, or of `jax.jit`, to which it is an array. No array is read, so
    it works after they were donated. What JAX does not do twice is not named: a NumPy
    array in the place of a JAX array, or the same function wrapped once more.

    An array that the function does not use is named as well, though JAX does not
    compile again if such a one is only put elsewhere. What a function reads from
    outside is a constant of the compiled program: a change there compiles nothing, and
    is not seen.

    Args:
        fn: The function; or, if it is made anew for each call, a pair of it as it was
            at the first call and at the second. One that is not compiled is taken for
            what `eqx.filter_jit` would compile.
        args_before: The positional arguments of the first call, as a tuple, or a
            `tr.Call` of all of them.
        args_after: Those of the second.

    Returns:
        What differs: all of it, and not the first alone.

    Raises:
        TypeError: `fn` is no function, or does not take these arguments.

    Example:
        >>> import equinox as eqx
        >>> import jax.numpy as jnp
        >>> import trainer as tr
        >>> step = eqx.filter_jit(lambda x, rate: x - rate * x)
        >>> first = tr.Call(jnp.ones(3), rate=0.1)
        >>> print(tr.explain(step, first, tr.Call(jnp.ones(3), rate=0.2)))
        `<lambda>` compiles again:
        * `rate` was 0.1 and is now 0.2. Give it as an array, ...
    """
    pair = fn if isinstance(fn, tuple) and len(fn) == 2 else (fn, fn)
    was, now = map(called, pair)
    before = as_call("args_before", args_before)
    after = as_call("args_after", args_after)
    of_arguments = _as_jax if was.by == now.by == "jax.jit" else _as_equinox
    found = [
        *_of_functions(was, now),
        *of_arguments(was, now, before, after),
        *before.context.differences(after.context),
    ]
    return Explanation(f"`{now.name}`", tuple(found), tuple(_hints(fn, args_before)))


def _hints(fn: Any, args_before: Any) -> Iterator[str]:
    if not isinstance(fn, tuple):
        yield (
            "the function itself was made anew, as a `lambda` or a method of a new "
            "object is: give the pair of both, `tr.explain((before, after), ...)`"
        )
    if not isinstance(args_before, Call):
        yield (
            "JAX's settings or the mesh were others: record each call when it is made, "
            "with `tr.Call`"
        )
    yield "`jax.clear_caches()` was called, or the cache was full"


def _as_equinox(
    was: Called, now: Called, before: Call, after: Call
) -> Iterator[Difference]:
    """Compare arguments by name, however they were given; a default is left out."""
    pairs = [(was, before), (now, after)]
    bound: list[dict[str, Any]] = []
    for each, call in pairs:
        args, kwargs = each.arguments(call)
        whole = each.signature.bind(*args, **kwargs).arguments
        bound.append({**_variadic(each.signature), **whole})
    old, new = bound
    defaults = {**was.signature.parameters, **now.signature.parameters}
    for name in [*old, *(name for name in new if name not in old)]:
        if name in old and name in new:
            yield from differences(name, old[name], new[name])
            continue
        default = defaults[name].default
        left = f"left to its default `{describe(default)}`"
        if default is inspect.Parameter.empty:
            left = "not an argument"
        texts = (
            f"given as {describe(x[name])}" if name in x else left for x in (old, new)
        )
        remedy = "Give it at every call, or at none, though the value is the same."
        yield Difference(name, "call", *texts, remedy=remedy)


def _variadic(signature: inspect.Signature) -> dict[str, Any]:
    """What `*args` and `**kwargs` are if nothing is given for them."""
    empty: dict[Any, Any] = {
        inspect.Parameter.VAR_POSITIONAL: (),
        inspect.Parameter.VAR_KEYWORD: {},
    }
    parameters = signature.parameters.values()
    return {p.name: empty[p.kind] for p in parameters if p.kind in empty}


def _as_jax(
    was: Called, now: Called, before: Call, after: Call
) -> Iterator[Difference]:
    """Compare arguments as they were given: to `jax.jit`, by name is another call."""
    old, new = _given(was, before), _given(now, after)
    for name in [*old, *(name for name in new if name not in old)]:
        ways = [x[name][0] if name in x else "not given" for x in (old, new)]
        if ways[0] != ways[1]:
            remedy = "Give it in the same way at every call."
            yield Difference(name, "call", *ways, remedy=remedy)
            continue
        (_, one, is_static), (_, other, _) = old[name], new[name]
        if not is_static:
            trees = (jtu.tree_map(traced_form_of, x) for x in (one, other))
            yield from differences(name, *trees)
        elif type(one) is type(other):
            yield from differences(name, one, other)
        else:
            # A static 1 is another one than 1.0 or True, which are equal.
            remedy = "Give a static argument of one type at every call."
            texts = (describe(one), describe(other))
            yield Difference(name, "static value", *texts, remedy=remedy)


def _given(which: Called, call: Call) -> dict[str, tuple[str, Any, bool]]:
    """How each argument is given, what it is, and whether it is static, by name."""
    args, kwargs = which.arguments(call)
    names, rest = [], "args"
    for p in which.signature.parameters.values():
        if p.kind is inspect.Parameter.VAR_POSITIONAL:
            rest = p.name
        elif p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
    names += [f"{rest}[{i}]" for i in range(len(args) - len(names))]
    static, found = {*which.static}, {}
    for i, (name, value) in enumerate(zip(names, args, strict=False)):
        found[name] = ("given by position", value, bool({i, name} & static))
    for name, value in kwargs.items():
        found[name] = ("given by name", value, name in static)
    return found


def _of_functions(was: Called, now: Called) -> Iterator[Difference]:
    once = "Wrap the function once, and call that one."
    if was.by != now.by:
        texts = (f"compiled by `{x.by}`" for x in (was, now))
        yield Difference(now.name, "function", *texts, remedy=once)
    elif was.options and now.options and was.options != now.options:
        words = [
            ", ".join(f"{k}={v}" for k, v in x.options.items() if v != y.options.get(k))
            for x, y in ((was, now), (now, was))
        ]
        texts = (f"compiled with {text or 'no options'}" for text in words)
        yield Difference(now.name, "function", *texts, remedy=once)
    one, other = was.function, now.function
    if now.by != "jax.jit" and not jtu.all_leaves([one]):
        # A module that can be called is an argument, with its arrays traced.
        yield from differences(now.name, *jtu.tree_map(form_of, (one, other)))
    elif not equal(one, other):
        remedy = _made_once(other)
        yield Difference(now.name, "function", _origin(one), _origin(other), remedy)
        yield from _inside(now.name, one, other)


def _origin(function: Any) -> str:
    if isinstance(function, types.FunctionType):
        code = function.__code__
        return f"made at {Path(code.co_filename).name}:{code.co_firstlineno}"
    if isinstance(function, types.MethodType):
        return f"a method of an object of class `{type(function.__self__).__name__}`"
    return f"an object of class `{type(function).__name__}`"


def _made_once(function: Any) -> str:
    if isinstance(function, types.MethodType):
        return "Keep the object for all calls, or make its class an `eqx.Module`."
    if isinstance(function, functools.partial):
        return "Make it once, or use `eqx.Partial`, whose arrays are arguments."
    return "Make it once, outside of the loop, and give what changes as an argument."


def _inside(name: str, was: Any, now: Any) -> Iterator[Difference]:
    """What two functions that were made in one place hold, where that differs."""
    codes = [getattr(function, "__code__", None) for function in (was, now)]
    old, new = (_held(was), _held(now)) if codes[0] == codes[1] else ({}, {})
    for key in [key for key in old if key in new]:
        one, other = old[key], new[key]
        below = f"{name}.{key}"
        remedy = "Give it to the function as an argument."
        if is_array_like(one) and is_array_like(other):
            if one is not other:
                texts = (describe(one), describe(other))
                yield Difference(below, "function", *texts, remedy=remedy)
            continue
        for found in differences(below, one, other, forms_only=True):
            yield replace(found, what="function", remedy=remedy)


def _held(function: Any) -> dict[str, Any]:
    """What a function holds, besides its code, by name."""
    if isinstance(function, functools.partial):
        named = {f"keywords[{k!r}]": v for k, v in function.keywords.items()}
        return {f"args[{i}]": v for i, v in enumerate(function.args)} | named
    if not isinstance(function, types.FunctionType):
        return {}
    variables: dict[str, Any] = {}
    # A variable that has no value yet makes this raise.
    with contextlib.suppress(ValueError):
        variables = dict(inspect.getclosurevars(function).nonlocals)
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return {f"<closure>.{k}": v for k, v in variables.items()} | {
        f"<default>.{k}": v for k, v in defaults.items()
    }
