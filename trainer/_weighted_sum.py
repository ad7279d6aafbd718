"""Losses added up, with weights that may change with the step."""

from collections.abc import Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from trainer._composed import (
    AbstractComposed,
    branches_of,
    check_unit,
    Evaluation,
    named_losses,
    Unit,
)
from trainer._counts import call_schedule, check_unit_of, is_number
from trainer._losses import AbstractJoint, call_leaf, Given, Output, RESERVED
from trainer._memory import part_of, renewed
from trainer._metrics import Metric, switch, under
from trainer._schedules import check_schedule
from trainer._tree import is_eager, trace_once
from trainer._types import Batch, Model


@final
class Sum(AbstractJoint):
    """The terms of a WeightedSum that always run: one forward pass, one gradient."""

    names: tuple[str, ...]
    losses: tuple[Any, ...]
    weights: tuple[Any, ...]

    def joint(self, model: Model, batch: Batch, given: Given) -> Output:
        """Add the terms up; each gets the state that the one before returned."""
        total, metrics = None, {}
        for name, loss, weight in zip(
            self.names, self.losses, self.weights, strict=True
        ):
            value, inner, state, _ = call_leaf(loss, model, batch, given)
            given = given._replace(state=state)
            weighted = weight * value
            total = weighted if total is None else total + weighted
            metrics |= term_metrics(name, value, inner)
        return Output(total, metrics, given.state)


def term_metrics(name: str, value: Any, inner: Mapping[str, Metric]) -> dict[str, Any]:
    return {name: Metric(value), **under(name, inner)}


@final
class WeightedSum(AbstractComposed):
    """Add losses up, each with a weight that may change with the step.

    A term is a loss, or a pair `(weight, loss)`. A weight is a number, a scalar array,
    or a schedule: any function from the step to a scalar, such as Optax's. A term whose
    weight is 0 at some step is not computed there, so that it cannot turn the sum into
    NaN; its value is then absent from the history. Losses that ask for `state` get it
    one after another, in the order of the terms.

    Reports each term's unweighted value under its name, its metrics under `name/`, and
    every weight that is a schedule as `weight/name`.

    Args:
        by: What the schedules count: `"step"` or `"epoch"`.
        **terms: The losses by name, alone or as `(weight, loss)`.

    Raises:
        TypeError: A term is not a loss, or its weight is not a number or a schedule.
        ValueError: There is no term, or a weight is not finite, or a schedule is 0 for
            ever (as Optax's are with `transition_steps=0`).

    Example:
        >>> import optax
        >>> def fit(model, batch): return (model - batch) ** 2
        >>> def size(model, batch): return model**2
        >>> loss = WeightedSum(fit=fit, size=(optax.linear_schedule(0.0, 1.0, 4), size))
        >>> float(loss(jnp.float32(2.0), 3.0, step=2)[0])
        3.0
    """

    names: tuple[str, ...]
    losses: tuple[Any, ...]
    weights: tuple[Any, ...]
    by: Unit

    def __init__(self, *, by: Unit = "step", **terms: Any):
        pairs = {n: t if isinstance(t, tuple) else (1.0, t) for n, t in terms.items()}
        check_terms(terms, "WeightedSum")
        for name, pair in pairs.items():
            if len(pair) != 2:
                raise TypeError(
                    f"Term `{name}` of `WeightedSum` is a tuple of {len(pair)}. A term "
                    "is a loss, or `(weight, loss)`."
                )
        losses = {name: loss for name, (_, loss) in pairs.items()}
        self.names, self.losses = named_losses(losses, "WeightedSum")
        self.weights = tuple(_check_weight(n, w) for n, (w, _) in pairs.items())
        self.by = check_unit(by)
        for name, weight in zip(self.names, self.weights, strict=True):
            check_unit_of(weight, by, f"weight of {name}")

    def branches(self) -> dict[str, tuple[str, ...]]:
        """Names of the branches of every Switch among the terms."""
        return term_branches(self)

    def combine(self, evaluate: Evaluation, given: Given) -> Output:
        """Evaluate the terms of weight other than 0; see `AbstractComposed.combine`."""
        count = getattr(given, self.by)
        memory, parts = given.memory, {}
        outputs, metrics = [], {}
        for group in self._groups(given.state is not None):
            if _always_runs(*group[0][1:]):
                terms = Sum(*zip(*group, strict=True))
                value, inner, state, _ = evaluate(terms, given)
            else:
                ((name, loss, weight),) = group
                is_schedule = callable(weight)
                if is_schedule:
                    weight = call_schedule(weight, count, given.num_steps)
                now, part = jnp.asarray(weight, float), part_of(memory, name)
                found = _term(evaluate, name, loss, now, given._replace(memory=part))
                value, inner, state, parts[name] = found
                if is_schedule:
                    inner = {**inner, f"weight/{name}": Metric(now)}
            outputs, given = [*outputs, value], given._replace(state=state)
            metrics = {**metrics, **inner}
        total = outputs[0]
        for output in outputs[1:]:
            total = jtu.tree_map(lambda a, b: a + b, total, output)
        memory = renewed(memory, None, parts)
        return Output(total, metrics, given.state, memory)

    def _groups(self, in_order: bool) -> list[list[tuple[str, Any, Any]]]:
        """Terms that are evaluated together: those that always run; each other alone.

        A model's state goes through the terms in order, so that only neighbors may be
        put together then.
        """
        groups: list[list[tuple[str, Any, Any]]] = []
        for term in zip(self.names, self.losses, self.weights, strict=True):
            places = groups[-1:] if in_order else groups
            joint = [g for g in places if _always_runs(*g[0][1:])]
            if joint and _always_runs(*term[1:]):
                joint[0].append(term)
            else:
                groups.append([term])
        return groups


def check_terms(terms: Mapping[str, Any], owner: str) -> None:
    """Raise ValueError for a name that the history uses for something else."""
    for name in terms:
        if name in RESERVED | {"branch", "weight"}:
            raise ValueError(
                f"A term of `{owner}` is named `{name}`, which the history uses for "
                "something else. Give it another name."
            )


def term_branches(total: AbstractComposed) -> dict[str, tuple[str, ...]]:
    """Names of the branches of every Switch among the terms of a sum."""
    found = {}
    for name, loss in total.parts().items():
        found |= under(name, branches_of(loss))
    return found


def _always_runs(loss: Any, weight: Any) -> bool:
    """A plain loss with a number for a weight needs no branch of its own."""
    plain = not isinstance(loss, AbstractComposed)
    return plain and isinstance(weight, float) and weight != 0.0


def _term(
    evaluate: Evaluation, name: str, loss: Any, weight: jax.Array, given: Given
) -> Output:
    """One term of a sum, computed only where its weight is not 0."""

    def run(weight: jax.Array, given: Given) -> Any:
        value, inner, state, memory = evaluate(loss, given)
        unweighted = jtu.tree_leaves(value)[0]
        found = (scaled(value, weight), state, memory)
        return found, term_metrics(name, unweighted, inner)

    if is_eager(weight):
        if weight != 0:
            (value, state, memory), metrics = run(weight, given)
            return Output(value, metrics, state, memory)
        return Output(evaluate.zero(), {}, given.state, given.memory)

    replay, ((value, _, _), _) = trace_once(run, weight, given)

    def skip(_: jax.Array, given: Given) -> Any:
        zeros = jtu.tree_map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), value)
        return (zeros, given.state, given.memory), {}

    index = jnp.asarray(weight != 0, jnp.int32)
    (value, state, memory), metrics = switch(index, [skip, replay], weight, given)
    return Output(value, metrics, state, memory)


def scaled(value: PyTree, weight: jax.Array) -> PyTree:
    """A loss, or a loss and its gradient, times a weight, in its own dtypes."""
    return jtu.tree_map(lambda leaf: (weight * leaf).astype(leaf.dtype), value)


def _check_weight(name: str, weight: Any) -> Any:
    what = f"The weight of `{name}` in `WeightedSum`"
    if callable(weight):
        constant = check_schedule(weight, what)
        if constant == 0:
            raise ValueError(
                f"{what} is a schedule that is 0 at every step. Optax's schedules keep "
                "their first value when `transition_steps` is 0; to leave the term "
                "out, give the number 0."
            )
        return weight
    if isinstance(weight, jax.Array) and weight.shape == ():
        return weight.astype(float)
    if isinstance(weight, np.ndarray) and weight.shape == ():
        weight = weight[()]
    if not is_number(weight):
        raise TypeError(
            f"{what} is `{weight!r}`. A weight is a number or a schedule, a function "
            "from the step to a scalar."
        )
    if not np.isfinite(weight):
        raise ValueError(f"{what} is `{weight}`, which makes the sum meaningless.")
    return float(weight)
