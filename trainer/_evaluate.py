"""Evaluate a loss on data, in inference mode."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from trainer._baked import Baked
from trainer._composed import branches_of, check_loss, evaluate_loss, takes
from trainer._explain import explain_trace
from trainer._losses import Given
from trainer._metrics import Metric
from trainer._state import TrainState
from trainer._tree import canonical, first_difference
from trainer.data import as_source


_MOST_LOSSES = 16


class _Evaluation:
    """One loss, compiled to be evaluated on models of one static part."""

    def __init__(self, loss: Any, static: Any):
        self.loss, self.static, self.baked = loss, static, Baked(loss)
        # Not `filter_jit`: its cache would keep the Trainer for as long as the process.
        self.one_batch = jax.jit(self._one_batch)

    def fits(self, loss: Any, static: Any) -> bool:
        """Whether it computes what this loss would compute now."""
        same = loss == self.loss if hasattr(loss, "__self__") else loss is self.loss
        return (
            same
            and first_difference("", self.static, static) is None
            and self.baked.changed() is None
        )

    def _one_batch(
        self, arrays: Any, batch: Any, mask: Any, place: Any
    ) -> dict[str, Metric]:
        state = eqx.combine(arrays, self.static)
        model, key = eqx.nn.inference_mode(state.model), jr.fold_in(jr.key(0), place)
        memory = state.memory
        given = Given(
            state.step,
            state.epoch,
            key,
            mask,
            state.model_state,
            memory.program,
            memory.reports,
            memory.num_steps,
        )
        with explain_trace():
            value, metrics, _, _ = evaluate_loss(self.loss, model, batch, given)
        self.baked.traced()
        # The index of a branch and a weight belong to a step; they have no mean.
        branches = branches_of(self.loss)
        weights = {n for n in metrics if "weight" in n.split("/")[:-1]}
        found = {n: m for n, m in metrics.items() if n not in {*branches, *weights}}
        found["loss"] = Metric(value)
        # The step is traced, so presence is a value like the others.
        return {n: Metric(m.value, jnp.asarray(m.present)) for n, m in found.items()}


class Evaluator:
    """Means of losses over data; see `Trainer.evaluate`.

    A loss stays compiled for the next time. If what it reads from outside has changed
    since, it is compiled again.
    """

    def __init__(self) -> None:
        self._known: list[_Evaluation] = []

    def _evaluation(self, loss: Any, static: Any) -> _Evaluation:
        for known in self._known:
            if known.fits(loss, static):
                return known
        self._known = [_Evaluation(loss, static), *self._known[: _MOST_LOSSES - 1]]
        return self._known[0]

    def __call__(self, loss: Any, state: TrainState, data: Any) -> dict[str, float]:
        """Average a loss and its metrics over all examples."""
        if loss is None:
            raise TypeError("The Trainer has no loss of its own. Pass `loss=`.")
        check_loss(loss)
        masked = takes(loss, "mask")
        # Neither the optimizer's state nor where a leaf lies is a reason to compile.
        state = canonical(
            dataclasses.replace(state, opt_state=None, extra={}, source=None),
            copy=False,
        )
        arrays, static = eqx.partition(state, eqx.is_array)
        one_batch = self._evaluation(loss, static).one_batch
        found, counts = [], []
        for batch, mask, count in as_source(data).batches(all(masked)):
            if mask is None and any(masked):
                mask = np.ones(count, np.bool_)
            found.append(one_batch(arrays, batch, mask, np.uint32(len(found))))
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
