"""Evaluate a loss on data, in inference mode."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from trainer._composed import AbstractComposed, evaluate_loss, leaves_of
from trainer._explain import explain_trace
from trainer._losses import asked_for, Given, LOSS_ARGUMENTS
from trainer._metrics import Metric
from trainer._state import TrainState
from trainer._tree import canonical
from trainer._types import Key
from trainer.data import as_source


@eqx.filter_jit
def _one_batch(
    loss: Any, state: TrainState, batch: Any, mask: Array | None, key: Key
) -> dict[str, Metric]:
    model = eqx.nn.inference_mode(state.model)
    given = Given(state.step, state.epoch, key, mask, state.model_state)
    with explain_trace():
        value, metrics, _ = evaluate_loss(loss, model, batch, given)
    # The index of a branch and a weight belong to a step; they have no mean.
    branches = loss.branches() if isinstance(loss, AbstractComposed) else {}
    schedule = {n for n in metrics if n in branches or "weight" in n.split("/")[:-1]}
    found = {n: m for n, m in metrics.items() if n not in schedule}
    found["loss"] = Metric(value)
    # The step is traced, so presence is a value like the others.
    return {n: Metric(m.value, jnp.asarray(m.present)) for n, m in found.items()}


def evaluate(loss: Any, state: TrainState, data: Any) -> dict[str, float]:
    """Mean of a loss and its metrics over all examples; see `Trainer.evaluate`."""
    takes = [asked_for(leaf, LOSS_ARGUMENTS, "loss") for leaf in leaves_of(loss)]
    pad = all("mask" in names for names in takes)
    # Neither the optimizer's state nor where a leaf lies is a reason to compile again.
    state = dataclasses.replace(state, opt_state=None)
    state = canonical(state, copy=False)
    key = jr.key(0)
    found, counts = [], []
    for batch, mask, count in as_source(data).batches(pad):
        place = jnp.uint32(len(found))
        found.append(_one_batch(loss, state, batch, mask, jr.fold_in(key, place)))
        counts.append(count)
    if not found:
        raise ValueError("The data to evaluate on has no batches.")
    means: dict[str, float] = {}
    read = jax.device_get(found)
    for name in read[0]:
        weights = [c * bool(m[name].present) for c, m in zip(counts, read, strict=True)]
        if sum(weights):
            total = sum(
                w * float(m[name].value)
                for w, m in zip(weights, read, strict=True)
                if w
            )
            means[name] = total / sum(weights)
    return means
