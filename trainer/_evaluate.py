"""Evaluate a loss on data, in inference mode."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from trainer._baked import Baked
from trainer._composed import (
    AbstractComposed,
    check_loss,
    evaluate_loss,
    leaves_of,
)
from trainer._explain import explain_trace
from trainer._losses import asked_for, Given, LOSS_ARGUMENTS
from trainer._metrics import Metric
from trainer._state import TrainState
from trainer._tree import canonical
from trainer.data import as_source


_MOST_LOSSES = 16


class _Evaluation:
    """One loss, compiled to be evaluated."""

    def __init__(self, loss: Any):
        self.loss, self.baked = loss, Baked(loss)
        self.one_batch: Any = eqx.filter_jit(self._one_batch)

    def _one_batch(
        self, loss: Any, state: TrainState, batch: Any, mask: Any, key: Any
    ) -> dict[str, Metric]:
        model = eqx.nn.inference_mode(state.model)
        given = Given(state.step, state.epoch, key, mask, state.model_state)
        with explain_trace():
            value, metrics, _ = evaluate_loss(loss, model, batch, given)
        self.baked.traced()
        # The index of a branch and a weight belong to a step; they have no mean.
        branches = loss.branches() if isinstance(loss, AbstractComposed) else {}
        schedule = {
            n for n in metrics if n in branches or "weight" in n.split("/")[:-1]
        }
        found = {n: m for n, m in metrics.items() if n not in schedule}
        found["loss"] = Metric(value)
        # The step is traced, so presence is a value like the others.
        return {n: Metric(m.value, jnp.asarray(m.present)) for n, m in found.items()}


class Evaluator:
    """Means of losses over data; see `Trainer.evaluate`.

    A loss stays compiled for the next time. If what it reads from outside has changed
    since, it is compiled again.
    """

    def __init__(self) -> None:
        self._known: dict[Any, _Evaluation] = {}

    def _evaluation(self, loss: Any) -> _Evaluation:
        # A method is a new object each time that it is looked up.
        owner = getattr(loss, "__self__", None)
        name = (id(owner), getattr(loss, "__func__", None)) if owner else id(loss)
        known = self._known.get(name)
        if known is None or known.baked.changed():
            self._known.pop(name, None)
            while len(self._known) >= _MOST_LOSSES:
                self._known.pop(next(iter(self._known)))
            known = self._known[name] = _Evaluation(loss)
        return known

    def __call__(self, loss: Any, state: TrainState, data: Any) -> dict[str, float]:
        """Average a loss and its metrics over all examples."""
        if loss is None:
            raise TypeError(
                "The Trainer has no loss of its own to evaluate. Pass `loss=`."
            )
        check_loss(loss)
        takes = [asked_for(leaf, LOSS_ARGUMENTS, "loss") for leaf in leaves_of(loss)]
        pad = all("mask" in names for names in takes)
        # Neither the optimizer's state nor where a leaf lies is a reason to compile.
        state = canonical(dataclasses.replace(state, opt_state=None), copy=False)
        one_batch, key = self._evaluation(loss).one_batch, jr.key(0)
        found, counts = [], []
        for batch, mask, count in as_source(data).batches(pad):
            place = jr.fold_in(key, jnp.uint32(len(found)))
            found.append(one_batch(loss, state, batch, mask, place))
            counts.append(count)
        if not found:
            raise ValueError("The data to evaluate on has no batches.")
        return _means(jax.device_get(found), counts)


def _means(found: list[dict[str, Metric]], counts: list[int]) -> dict[str, float]:
    """Means weighted by examples, over the batches that a metric is present in."""
    means: dict[str, float] = {}
    for name in found[0]:
        pairs = [
            (count, float(batch[name].value))
            for count, batch in zip(counts, found, strict=True)
            if batch[name].present
        ]
        if pairs:
            total = sum(count for count, _ in pairs)
            means[name] = sum(count * value for count, value in pairs) / total
    return means
