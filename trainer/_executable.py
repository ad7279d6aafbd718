"""One function, compiled ahead of time and called with flat lists of arrays."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import PyTree


class Executable:
    """A function `(kept, donated) -> out` that is compiled once, and before its use.

    It is an `eqx.filter_jit` function. Calling that one waits for its result each time,
    and calling what Equinox compiles from it looks through every argument: for a small
    step that is most of the time (at 10 arrays 62 us a call against 22). So the arrays
    go to the compiled object of JAX itself, which checks their shapes and dtypes.

    Attributes:
        seconds: What lowering and compiling took.
        flops: Operations of a call, each loop counted as one turn, or None.
        bytes_accessed: Bytes that it reads and writes, counted likewise, or None.
        peak_memory: Bytes that it needs on the device, arguments included, or None.
    """

    def __init__(
        self, function: Callable[..., Any], kept: PyTree, donated: PyTree
    ) -> None:
        jitted: Any = eqx.filter_jit(function, donate="all-except-first")
        began = time.perf_counter()
        lowered = jitted.lower(kept, donated)
        self.seconds = {"lower": time.perf_counter() - began}
        began = time.perf_counter()
        whole = lowered.compile()
        self.seconds["compile"] = time.perf_counter() - began
        _forget(jitted)
        self._kept, self._donated = map(jtu.tree_structure, (kept, donated))
        self._whole = whole
        counts = [self._donated.num_leaves, self._kept.num_leaves]
        self._inner = _inner(whole, *counts)
        self.flops, self.bytes_accessed, self.peak_memory = _analyzed(whole)

    def __call__(self, kept: Sequence[Any], donated: Sequence[Any]) -> Any:
        """Call it with the leaves of both arguments. Does not wait for the device."""
        if self._inner is not None:
            leaves = (*donated, *kept)
            args, kwargs = jtu.tree_unflatten(self._inner.in_tree, leaves)
            return self._inner(*args, **kwargs)[1]
        trees = zip((self._kept, self._donated), (kept, donated), strict=True)
        return self._whole(
            *(jtu.tree_unflatten(tree, list(own)) for tree, own in trees)
        )


def _analyzed(whole: Any) -> tuple[float | None, float | None, float | None]:
    """Operations, bytes and peak memory, as XLA counts them. Not all backends do."""
    inner = getattr(whole, "compiled", whole)
    try:
        cost, memory = inner.cost_analysis() or {}, inner.memory_analysis()
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None, None, None
    peak = getattr(memory, "peak_memory_in_bytes", 0)
    # What is donated is an argument and a result in one.
    held = sum(
        getattr(memory, f"{part}_size_in_bytes", 0)
        for part in ("argument", "output", "temp")
    ) - getattr(memory, "alias_size_in_bytes", 0)
    return cost.get("flops"), cost.get("bytes accessed"), max(peak, held) or None


def _inner(whole: Any, num_donated: int, num_kept: int) -> jax.stages.Compiled | None:
    """What JAX compiled, if it takes what is donated and then what is kept.

    That order is Equinox's own affair. Where it is another, None: `whole` is called.
    """
    inner = getattr(whole, "compiled", None)
    if not isinstance(inner, jax.stages.Compiled):
        return None
    donated = [info.donated for info in jtu.tree_leaves(inner.args_info)]
    return inner if donated == [True] * num_donated + [False] * num_kept else None


def _forget(jitted: Any) -> None:
    """Drop what Equinox keeps of a function that is compiled ahead of time.

    Its cache would keep the executable for as long as the process runs, and one more
    for every Trainer. There is no public way to it. Without it nothing but memory is
    lost.
    """
    clear = getattr(getattr(jitted, "_cached", None), "clear_cache", None)
    if clear is not None:
        clear()
