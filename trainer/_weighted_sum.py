"""Losses added up, with weights that may change with the step."""

from collections.abc import Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from trainer._composed import (
    AbstractComposed,
    branches_of,
    check_unit,
    combine,
    Evaluate,
    named_losses,
    Unit,
)
from trainer._explain import explain_trace
from trainer._losses import AbstractJoint, call_leaf, Given, Output
from trainer._metrics import Metric, switch
from trainer._tree import trace_once
from trainer._types import Batch, Model


@final
class _Sum(AbstractJoint):
    """The terms of a WeightedSum that always run: one forward pass, one gradient."""

    names: tuple[str, ...]
    losses: tuple[Any, ...]
    weights: tuple[float, ...]

    def joint(self, model: Model, batch: Batch, given: Given) -> Output:
        """Add the terms up; each gets the state that the one before returned."""
        total, metrics = None, {}
        for name, loss, weight in zip(
            self.names, self.losses, self.weights, strict=True
        ):
            value, inner, state = call_leaf(loss, model, batch, given)
            given = given._replace(state=state)
            weighted = weight * value
            total = weighted if total is None else total + weighted
            metrics |= _term_metrics(name, value, inner)
        return Output(total, metrics, given.state)


def _term_metrics(name: str, value: Any, inner: Mapping[str, Metric]) -> dict[str, Any]:
    return {name: Metric(value), **{f"{name}/{k}": v for k, v in inner.items()}}


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
        for name, pair in pairs.items():
            if name in ("loss", "branch", "weight"):
                raise ValueError(
                    f"A term of `WeightedSum` is named `{name}`, which the history "
                    "uses for something else. Give it another name."
                )
            if len(pair) != 2:
                raise TypeError(
                    f"Term `{name}` of `WeightedSum` is a tuple of {len(pair)}. A term "
                    "is a loss, or `(weight, loss)`."
                )
        losses = {name: loss for name, (_, loss) in pairs.items()}
        self.names, self.losses = named_losses(losses, "WeightedSum")
        self.weights = tuple(_check_weight(n, w) for n, (w, _) in pairs.items())
        self.by = check_unit(by)

    def parts(self) -> dict[str, Any]:
        """The terms' losses, by name."""
        return dict(zip(self.names, self.losses, strict=True))

    def branches(self) -> dict[str, tuple[str, ...]]:
        """Names of the branches of every Switch among the terms."""
        return {
            f"{name}/{metric}": names
            for name, loss in self.parts().items()
            for metric, names in branches_of(loss).items()
        }

    def combine(self, evaluate: Evaluate, given: Given) -> Output:
        """Evaluate the terms of weight other than 0; see `AbstractComposed.combine`."""
        count = given.step if self.by == "step" else given.epoch
        outputs, metrics = [], {}
        for group in self._groups(given.state is not None):
            if _always_runs(*group[0][1:]):
                value, inner, state = evaluate(_Sum(*zip(*group, strict=True)), given)
            else:
                ((name, loss, weight),) = group
                now = weight(count) if callable(weight) else weight
                now = jnp.asarray(now, float)
                value, inner, state = _term(evaluate, name, loss, now, given)
                if callable(weight):
                    inner = {**inner, f"weight/{name}": Metric(now)}
            outputs, given = [*outputs, value], given._replace(state=state)
            metrics = {**metrics, **inner}
        total = outputs[0]
        for output in outputs[1:]:
            total = jtu.tree_map(lambda a, b: a + b, total, output)
        return Output(total, metrics, given.state)

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


def _always_runs(loss: Any, weight: Any) -> bool:
    """A plain loss with a number for a weight needs no branch of its own."""
    plain = not isinstance(loss, AbstractComposed)
    return plain and isinstance(weight, float) and weight != 0.0


def _term(
    evaluate: Evaluate, name: str, loss: Any, weight: jax.Array, given: Given
) -> Output:
    """One term of a sum, computed only where its weight is not 0."""

    def run(weight: jax.Array, given: Given) -> Any:
        value, inner, state = combine(loss, evaluate, given)
        scaled = jtu.tree_map(lambda leaf: (weight * leaf).astype(leaf.dtype), value)
        unweighted = jtu.tree_leaves(value)[0]
        return (scaled, state), _term_metrics(name, unweighted, inner)

    replay, ((value, _), _) = trace_once(run, weight, given)

    def skip(_: jax.Array, given: Given) -> Any:
        zeros = jtu.tree_map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), value)
        return (zeros, given.state), {}

    index = jnp.asarray(weight != 0, jnp.int32)
    (value, state), metrics = switch(index, [skip, replay], weight, given)
    return Output(value, metrics, state)


def _check_weight(name: str, weight: Any) -> Any:
    what = f"The weight of `{name}` in `WeightedSum`"
    if callable(weight):
        constant = _check_schedule(weight, what)
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
    number = isinstance(weight, int | float | np.integer | np.floating)
    if isinstance(weight, bool) or not number:
        raise TypeError(
            f"{what} is `{weight!r}`. A weight is a number or a schedule, a function "
            "from the step to a scalar."
        )
    if not np.isfinite(weight):
        raise ValueError(f"{what} is `{weight}`, which makes the sum meaningless.")
    return float(weight)


def _check_schedule(schedule: Any, what: str) -> float | None:
    """Check that it returns a scalar; return that scalar if it is a Python number."""
    returned = []

    def call(step: jax.Array) -> jax.Array:
        returned.append(schedule(step))
        return jnp.asarray(returned[0])

    with explain_trace():
        shape = jax.eval_shape(call, jax.ShapeDtypeStruct((), jnp.int32)).shape
    if shape != ():
        raise TypeError(
            f"{what} is a schedule that returns shape {shape}, not a scalar."
        )
    if isinstance(returned[0], int | float):
        return returned[0]
    first = float(schedule(jnp.int32(0)))
    if not np.isfinite(first):
        raise ValueError(
            f"{what} is a schedule that is {first} at step 0. A division by the number "
            "of steps needs one that is not 0."
        )
    return None
