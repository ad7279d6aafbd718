"""One batch in several parts, so that a large batch needs the memory of a small one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, PyTree

from trainer._losses import Given, Output
from trainer._metrics import Metric
from trainer._tree import describe, is_eager, path_name, trace_once
from trainer._types import Batch


def in_micro_batches(
    one: Callable[[Batch, Given], Output], count: int, batch: Batch, given: Given
) -> Output:
    """Evaluate a loss and its gradient part by part, and average by examples.

    The result is that of the whole batch, for a loss that is a mean over examples. If
    the batch does not divide, the last part is smaller and weighs less. Examples that
    the mask leaves out weigh nothing. The model's state goes from part to part, and
    each part has a key of its own.

    Args:
        one: Evaluates one part.
        count: How many parts, at most.
        batch: The whole batch.
        given: What is known at this step, with the whole mask.
    """
    if count == 1:
        return one(batch, given)
    size = _size(batch, count)
    each = -(-size // count)
    whole, rest = divmod(size, each)
    # A mask is one more column.
    columns, rebuild = _columns((batch, given.mask))

    def part(rows: list[Array], number: Any, state: Any) -> Any:
        key = None if given.key is None else jr.fold_in(given.key, number)
        batch, mask = rebuild(rows)
        found = one(batch, given._replace(key=key, mask=mask, state=state))
        examples = rows[0].shape[0] if mask is None else jnp.sum(mask)
        metrics = {
            n: (m.value, jnp.asarray(m.present)) for n, m in found.metrics.items()
        }
        always = {n: m.present is True for n, m in found.metrics.items()}
        return (found.value, found.state, metrics, jnp.float32(examples)), always

    stacked = [c[: whole * each].reshape(whole, each, *c.shape[1:]) for c in columns]
    go_through = _one_by_one if is_eager(given.step) else _in_a_loop
    (like, always), (total, state), found = go_through(part, stacked, given.state)
    if rest:
        rows = [column[whole * each :] for column in columns]
        (value, state, *last), _ = part(rows, jnp.int32(whole), state)
        total = _add(total, value, last[1])
        found = jtu.tree_map(
            lambda a, b: jnp.append(a, b.astype(a.dtype)), found, tuple(last)
        )
    metrics, examples = found
    share = 1 / jnp.maximum(jnp.sum(examples), 1)
    value = jtu.tree_map(lambda x, y: (x * share).astype(y.dtype), total, like)
    averaged = {
        name: _averaged(values, present, examples, always[name])
        for name, (values, present) in metrics.items()
    }
    return Output(value, averaged, state)


def _in_a_loop(part: Any, stacked: list[Array], state: Any) -> Any:
    """Go through the parts of one size in a loop that is compiled."""
    numbers = jnp.arange(len(stacked[0]), dtype=jnp.int32)
    first = [column[0] for column in stacked]
    replay, ((like, *_), always) = trace_once(part, first, numbers[0], state)

    def body(carry: Any, xs: Any) -> Any:
        total, state = carry
        (value, state, *reported), _ = replay(*xs, state)
        return (_add(total, value, reported[1]), state), tuple(reported)

    carry = _zeros(like), state
    return (like, always), *jax.lax.scan(body, carry, (stacked, numbers))


def _one_by_one(part: Any, stacked: list[Array], state: Any) -> Any:
    """The same where nothing is compiled: each part is known when it has run."""
    like, total, found, always = None, None, [], {}
    for number in range(len(stacked[0])):
        rows = [column[number] for column in stacked]
        (value, state, *reported), always = part(rows, jnp.int32(number), state)
        like, total = value, _zeros(value) if total is None else total
        total = _add(total, value, reported[1])
        found.append(tuple(reported))
    together = jtu.tree_map(lambda *values: jnp.stack(values), *found)
    return (like, always), (total, state), together


def _zeros(like: PyTree) -> PyTree:
    """Zeros to add to, in a type that is wide enough for the number of examples."""
    wide = lambda leaf: jnp.promote_types(leaf.dtype, jnp.float32)
    return jtu.tree_map(lambda leaf: jnp.zeros(leaf.shape, wide(leaf)), like)


def _columns(tree: PyTree) -> tuple[list[Array], Callable[[list[Array]], PyTree]]:
    """The leaves that have examples, and how to put others into their places."""
    leaves, treedef = jtu.tree_flatten(tree)
    flags = [np.ndim(leaf) > 0 for leaf in leaves]

    def rebuild(rows: list[Array]) -> PyTree:
        given = iter(rows)
        return jtu.tree_unflatten(
            treedef,
            [next(given) if f else x for f, x in zip(flags, leaves, strict=True)],
        )

    return [x for f, x in zip(flags, leaves, strict=True) if f], rebuild


def _size(batch: Batch, count: int) -> int:
    """Number of examples, the same in every column."""
    size = None
    for path, leaf in jtu.tree_leaves_with_path(batch):
        if not np.ndim(leaf):
            continue
        size = leaf.shape[0] if size is None else size
        if leaf.shape[0] != size:
            raise ValueError(
                f"`micro_batches={count}` splits the first axis of the batch, but "
                f"`{path_name('batch', path)}` is {describe(leaf)} where an earlier "
                f"column has {size} examples."
            )
    if size is None or size < count:
        raise ValueError(
            f"`micro_batches={count}` splits a batch of {size or 'no'} examples. Use "
            "larger batches, or fewer parts."
        )
    return size


def _add(total: PyTree, value: PyTree, examples: Array) -> PyTree:
    """Add `examples * value`; a part without examples may be NaN and adds nothing."""
    some = examples > 0
    return jtu.tree_map(
        lambda a, b: a + jnp.where(some, examples * b.astype(a.dtype), 0), total, value
    )


def _averaged(values: Array, present: Array, examples: Array, always: bool) -> Metric:
    """The mean of a metric by examples; of one that counts, its last value."""
    if not jnp.issubdtype(values.dtype, jnp.floating):
        return Metric(values[-1], True if always else present[-1])
    weights = jnp.where(present, examples, 0)
    total = jnp.sum(jnp.where(weights > 0, weights * values, 0))
    mean = total / jnp.maximum(jnp.sum(weights), 1)
    return Metric(mean.astype(values.dtype), True if always else jnp.any(present))
