"""What nothing around the steps can beat: loops that do nothing but the steps.

Each is compiled once by `jax.jit` over flat lists of arrays, donates its state, checks
and reports nothing, and is written for one work.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .works import (
    make_batches,
    make_data,
    make_losses,
    make_model,
    RATE,
    rows_of_steps,
    SWITCH_EVERY,
    Work,
)


def make(work: Work, kind: str, switched: bool, chunk: int = 100) -> Any:
    """The loop of a kind, with one loss or with two that take turns."""
    one, start = _one_step(work, switched)
    return _KINDS[kind](work, one, start, chunk)


def _one_step(work: Work, switched: bool) -> tuple[Callable[..., Any], Any]:
    """A step from leaves to leaves, and a function that makes the first leaves."""
    first, second = (eqx.filter_value_and_grad(f) for f in make_losses(work))
    optimizer = optax.adam(RATE)
    params, static = eqx.partition(make_model(work), eqx.is_array)
    whole = params, optimizer.init(params), jnp.int32(0)
    leaves, treedef = jax.tree.flatten(whole)

    def one(leaves: list[Any], batch: Any) -> list[Any]:
        params, opt_state, number = jax.tree.unflatten(treedef, leaves)
        model = eqx.combine(params, static)
        if switched:
            # Inside the branches, so that only one of them is differentiated.
            branches = (lambda: first(model, batch)), (lambda: second(model, batch))
            _, grads = jax.lax.cond(number // SWITCH_EVERY % 2 == 0, *branches)
        else:
            _, grads = first(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return jax.tree.leaves((params, opt_state, number + 1))

    return one, lambda: [jnp.copy(leaf) for leaf in leaves]


def _looped(step: Callable[..., Any], start: Any, inputs: Any, chunk: int) -> Any:
    """Call `step` with one input after another, each of which is `chunk` steps."""
    compiled = jax.jit(step, donate_argnums=0)

    def run(steps: int) -> int:
        leaves, calls = start(), -(-steps // chunk)
        for given in itertools.islice(inputs(), calls):
            leaves = compiled(leaves, *given)
        jax.block_until_ready(leaves)
        return calls * chunk

    return run


def _scan(one: Callable[..., Any]) -> Callable[..., Any]:
    def scanned(leaves: list[Any], batches: Any) -> list[Any]:
        body = lambda leaves, batch: (one(leaves, batch), None)
        return jax.lax.scan(body, leaves, batches)[0]

    return scanned


def _stack(batches: Iterator[Any], chunk: int) -> Any:
    columns = zip(*itertools.islice(batches, chunk), strict=True)
    return tuple(np.stack(column) for column in columns)


def _resident_loop(work: Work, one: Any, start: Any, chunk: int) -> Any:
    batches = itertools.cycle(make_batches(work))
    given = jax.device_put(_stack(batches, chunk))
    return _looped(_scan(one), start, lambda: itertools.repeat((given,)), chunk)


def _resident_call(work: Work, one: Any, start: Any, chunk: int) -> Any:
    del chunk
    given = [(jax.device_put(batch),) for batch in make_batches(work)]
    return _looped(one, start, lambda: itertools.cycle(given), 1)


def _gather_each(work: Work, one: Any, start: Any, chunk: int) -> Any:
    def step(leaves: list[Any], rows: Any, whole: Any) -> list[Any]:
        body = lambda leaves, rows: (one(leaves, _take(whole, rows)), None)
        return jax.lax.scan(body, leaves, rows)[0]

    return _looped(step, start, _rows_and_data(work, chunk), chunk)


def _gather_first(work: Work, one: Any, start: Any, chunk: int) -> Any:
    def step(leaves: list[Any], rows: Any, whole: Any) -> list[Any]:
        return _scan(one)(leaves, _take(whole, rows))

    return _looped(step, start, _rows_and_data(work, chunk), chunk)


def _gather_call(work: Work, one: Any, start: Any, chunk: int) -> Any:
    del chunk

    def step(leaves: list[Any], rows: Any, whole: Any) -> list[Any]:
        return one(leaves, _take(whole, rows[0]))

    return _looped(step, start, _rows_and_data(work, 1), 1)


def _rows_and_data(work: Work, chunk: int) -> Callable[[], Iterator[Any]]:
    whole = jax.device_put(make_data(work))

    def inputs() -> Iterator[Any]:
        rows = rows_of_steps(work)
        while True:
            yield np.stack([next(rows) for _ in range(chunk)]), whole

    return inputs


def _take(whole: Any, rows: Any) -> Any:
    return jax.tree.map(lambda a: a.at[rows].get(mode="promise_in_bounds"), whole)


def _stacked(work: Work, one: Any, start: Any, chunk: int) -> Any:
    batches = make_batches(work)

    def inputs() -> Iterator[Any]:
        endless = itertools.cycle(batches)
        while True:
            yield (_stack(endless, chunk),)

    return _looped(_scan(one), start, inputs, chunk)


def _host_call(work: Work, one: Any, start: Any, chunk: int) -> Any:
    del chunk
    batches = [(batch,) for batch in make_batches(work)]
    return _looped(one, start, lambda: itertools.cycle(batches), 1)


_KINDS = {
    "resident loop": _resident_loop,
    "resident call": _resident_call,
    "gather each": _gather_each,
    "gather first": _gather_first,
    "gather call": _gather_call,
    "stacked": _stacked,
    "host call": _host_call,
}
