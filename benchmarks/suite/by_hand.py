"""The loop that Equinox's documentation shows: a jitted step, called batch by batch."""

import itertools
import os
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax
from tqdm import tqdm

from .works import make_batches, make_losses, make_model, RATE, Work


def make(work: Work, reported: bool) -> Callable[[int], int]:
    """One loss; if `reported`, with its values, and a progress bar that shows them."""
    loss_of, optimizer = make_losses(work)[0], optax.adam(RATE)
    first, batches = make_model(work), make_batches(work)

    @eqx.filter_jit
    def step(model: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    def start(steps: int) -> Any:
        opt_state = optimizer.init(eqx.filter(first, eqx.is_inexact_array))
        return first, opt_state, itertools.islice(itertools.cycle(batches), steps)

    def run(steps: int) -> int:
        model, opt_state, few = start(steps)
        for batch in few:
            model, opt_state, _ = step(model, opt_state, batch)
        jax.block_until_ready(eqx.filter(model, eqx.is_array))
        return steps

    def run_reported(steps: int) -> int:
        model, opt_state, few = start(steps)
        losses = []
        with open(os.devnull, "w") as nowhere:
            bar = tqdm(few, total=steps, file=nowhere)
            for batch in bar:
                model, opt_state, loss = step(model, opt_state, batch)
                losses.append(float(loss))
                bar.set_postfix(loss=losses[-1], refresh=False)
        jax.block_until_ready(eqx.filter(model, eqx.is_array))
        return steps

    return run_reported if reported else run
