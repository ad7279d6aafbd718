"""Evaluate a loss on data, in inference mode."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from trainer._composed import branches_of, check_loss, evaluate_loss, takes
from trainer._convolutions import ordered
from trainer._losses import Given
from trainer._metrics import Metric
from trainer._state import TrainState
from trainer._tree import canonical, is_eager
from trainer.data import as_source
from trainer.mistakes._trace_errors import explain_trace
from trainer.recompiles._baked import Baked
from trainer.recompiles._differences import first_difference


_MOST_LOSSES = 16
LossOf = Callable[[Any], Any]


class _Evaluation:
    """One loss, compiled to be evaluated on models of one static part.

    `loss_of`, if given, makes the loss that takes its place from a member's values.
    """

    def __init__(self, loss: Any, static: Any, loss_of: LossOf | None):
        self.loss, self.static = loss, static
        self.baked = Baked(loss, static.model)
        self.loss_of = loss_of
        # Not `filter_jit`: its cache would keep the Trainer for as long as the process.
        is_cpu = jax.default_backend() == "cpu"
        self.one_batch = jax.jit(
            ordered(self._one_batch) if is_cpu else self._one_batch
        )
        if is_eager():
            self.one_batch = lambda *given: self._one_batch(*canonical(given))

    def fits(self, loss: Any, static: Any, loss_of: LossOf | None) -> bool:
        """Whether it computes what this loss would compute now."""
        same = loss == self.loss if hasattr(loss, "__self__") else loss is self.loss
        return (
            same
            and loss_of == self.loss_of
            and first_difference("", self.static, static) is None
            and self.baked.changed() is None
        )

    def _one_batch(
        self, arrays: Any, values: Any, batch: Any, mask: Any, place: Any
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
        loss = self.loss if self.loss_of is None else self.loss_of(values)
        value, metrics, _, _ = evaluate_loss(loss, model, batch, given)
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

    def _evaluation(self, *what: Any) -> _Evaluation:
        for known in self._known:
            if known.fits(*what) and not is_eager():
                return known
        if is_eager():
            return _Evaluation(*what)
        self._known = [_Evaluation(*what), *self._known[: _MOST_LOSSES - 1]]
        return self._known[0]

    def __call__(self, loss: Any, state: TrainState, data: Any) -> dict[str, float]:
        """Average a loss and its metrics over all examples."""
        return self.each(loss, [(state, None)], data)[0]

    def each(
        self,
        loss: Any,
        members: list[tuple[TrainState, Any]],
        data: Any,
        loss_of: LossOf | None = None,
    ) -> list[dict[str, float]]:
        """Average it over all examples for several states, gone through together.

        Args:
            loss: The loss.
            members: States of one form, each with values.
            data: As for `Trainer.evaluate`.
            loss_of: Makes the loss from a state's values, if it depends on them.
        """
        if loss is None:
            raise TypeError("The Trainer has no loss of its own. Pass `loss=`.")
        check_loss(loss)
        masked = takes(loss, "mask")
        # Neither the optimizer's state nor where a leaf lies is a reason to compile.
        needed = [
            canonical(
                dataclasses.replace(state, opt_state=None, extra={}, source=None),
                copy=False,
            )
            for state, _ in members
        ]
        parts = [eqx.partition(state, eqx.is_array) for state in needed]
        one_batch = self._evaluation(loss, parts[0][1], loss_of).one_batch
        found, counts = [], []
        for batch, mask, count in as_source(data).batches(all(masked)):
            if mask is None and any(masked):
                mask = np.ones(count, np.bool_)
            place = np.uint32(len(found))
            pairs = zip(parts, members, strict=True)
            with contextlib.nullcontext() if is_eager() else explain_trace(loss):
                each = [one_batch(a, v, batch, mask, place) for (a, _), (_, v) in pairs]
            found.append(each)
            counts.append(count)
        if not found:
            raise ValueError("The data to evaluate on has no batches.")
        return [
            _means(list(one), counts)
            for one in zip(*jax.device_get(found), strict=True)
        ]


def _means(found: list[dict[str, Metric]], counts: list[int]) -> dict[str, float]:
    """Means weighted by examples, over the batches that a metric is present in."""
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for batch in found for name in batch):
        pairs = [
            (count, float(batch[name].value))
            for count, batch in zip(counts, found, strict=True)
            if name in batch and batch[name].present
        ]
        if pairs:
            total = sum(count for count, _ in pairs)
            means[name] = sum(count * value for count, value in pairs) / total
    return means
