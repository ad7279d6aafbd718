"""Whole fits by `tr.Trainer`, of two losses that take turns."""

import collections
import itertools
from collections.abc import Callable
from typing import Any

import jax
import optax

import trainer as tr

from .works import (
    make_batches,
    make_data,
    make_losses,
    make_model,
    RATE,
    SWITCH_EVERY,
    Work,
)


def make(work: Work, data: str, steps_per_call: Any = "auto") -> Callable[[int], int]:
    """A fit with its defaults: progress bar, history, every check."""
    trainer = tr.Trainer(
        tr.switch_every(SWITCH_EVERY, *make_losses(work)),
        optax.adam(RATE),
        steps_per_call=steps_per_call,
    )
    model, source = make_model(work), _SOURCES[data](work)

    def run(steps: int) -> int:
        result = trainer.fit(model, source, num_steps=steps)
        jax.block_until_ready(result.state.step)
        assert result.compiles == 1
        assert len(result.history["loss"]) == steps
        return steps

    return run


def make_iteration(work: Work) -> Callable[[int], int]:
    """What jax-dataloader costs by itself."""
    loader = _loader(work)

    def run(steps: int) -> int:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        collections.deque(itertools.islice(batches, steps), maxlen=0)
        return steps

    return run


def _arrays(work: Work) -> tr.Arrays:
    return tr.Arrays(*make_data(work), batch_size=work.batch_size)


def _loader(work: Work) -> Any:
    # Imports PyTorch where it is installed, which the other loops do not need.
    import jax_dataloader as jdl

    dataset = jdl.ArrayDataset(*map(jax.numpy.asarray, make_data(work)))
    return jdl.DataLoader(dataset, "jax", batch_size=work.batch_size, shuffle=True)


_SOURCES = {"arrays": _arrays, "batches": make_batches, "jdl": _loader}
