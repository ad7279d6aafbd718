"""Averages of the parameters along the way, to evaluate in their place."""

from collections.abc import Callable
from typing import Any, final, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from trainer._counts import is_traced, positive_int
from trainer._transforms import (
    AbstractTransform,
    check_number,
    if_due,
    is_due,
    mix,
    picked,
    wide,
)
from trainer._tree import describe
from trainer._types import Model, Step
from trainer._where import check_where, Where
from trainer.mistakes._trace_errors import explain_trace


class Average(NamedTuple):
    """An average of models: what `EMA` and `SWA` keep.

    Attributes:
        parameters: The average of each inexact array, in float32 or wider.
        weight: The sum of the models' weights; 0 while no model is in it.
    """

    parameters: PyTree
    weight: jax.Array


@final
class EMA(AbstractTransform):
    """Keep an exponential moving average of the parameters, and evaluate that.

    After each update the average becomes `decay * average + (1 - decay) * parameters`.
    It is kept in float32 or wider, and rounded to the parameters' own dtype when it is
    evaluated. The model that is trained does not change. Integers, keys and functions
    are not averaged.

    Attributes:
        decay: From 0 up to and excluding 1; or a schedule, any function from the
            completed updates (1 after the first) to a scalar. Where a schedule gives 1,
            the average stays as it is.
        debias: With True, the average starts at zero and is divided by the weight that
            it has gathered: the start model is not in it. With False, it starts at the
            start model, whose weight falls below 1% after `4.6 / (1 - decay)` steps.
        where: Picks what is averaged, as in `eqx.tree_at`; by default the whole model.
        every: Completed updates from one update of the average to the next.

    Raises:
        TypeError: An argument is of the wrong kind, or the schedule gives no scalar.
        ValueError: A number is out of range; or, in `init`, `where` picks no inexact
            array.

    Example:
        >>> ema = EMA(0.9, debias=False)
        >>> kept = ema.init(jnp.float32(1.0))
        >>> for step in (1, 2):
        ...     model, kept = ema(jnp.float32(step + 1), kept, step=step)
        >>> float(model), round(float(ema.evaluated(model, kept)), 4)
        (3.0, 1.29)

    Source:
        Polyak and Juditsky, "Acceleration of stochastic approximation by averaging",
        SIAM J. Control Optim. 30(4), 1992. `debias`: Kingma and Ba, "Adam", 2015,
        arXiv:1412.6980, section 3.
    """

    decay: Any
    debias: bool
    where: Where | None
    every: int

    def __init__(
        self,
        decay: float | Callable[[Step], Any],
        *,
        debias: bool = True,
        where: Where | None = None,
        every: int = 1,
    ):
        if not isinstance(debias, bool):
            raise TypeError(
                f"`debias` of `EMA` is `{debias!r}`. Give `True`, to start at zero, or "
                "`False`, to start at the start model."
            )
        self.decay = _check_decay(decay)
        self.debias = debias
        self.where = check_where(where, "EMA")
        self.every = positive_int(every, "`every` of `EMA`")

    def init(self, model: Model) -> Average:
        """Start with no weight, or at the start model; see `debias`."""
        return _start(picked(model, self.where, "EMA")[0], 0.0 if self.debias else 1.0)

    def __call__(
        self, model: Model, kept: Average, *, step: Step
    ) -> tuple[Model, Average]:
        """Update the average if it is due; see `AbstractTransform.__call__`."""

        def update(kept: Average, params: PyTree) -> Average:
            decay = self.decay(step) if callable(self.decay) else self.decay
            decay = jnp.asarray(decay, float)
            return _add(kept, params, decay, 1 - decay)

        params, _ = picked(model, self.where, "EMA")
        return model, if_due(is_due(step, self.every), update, kept, params)

    def evaluated(self, model: Model, kept: Average) -> Model:
        """The model with the average in it; as it is while that has no weight."""
        return _with_average(model, self.where, kept)


@final
class SWA(AbstractTransform):
    """Keep the equally weighted average of models along the way, and evaluate that.

    It is kept and rounded as `EMA`'s; the model that is trained does not change.

    BatchNorm's statistics belong to the model that they were gathered with: recompute
    them for the averaged model, by a pass over the training data, before it is used.

    Attributes:
        start: Completed updates at which the first model is taken, at least 1.
        every: Completed updates from one model that is taken to the next.
        where: Picks what is averaged, as in `eqx.tree_at`; by default the whole model.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: A number is below 1; or, in `init`, `where` picks no inexact array.

    Example:
        >>> swa = SWA(2, every=2)
        >>> kept = swa.init(jnp.float32(0.0))
        >>> for step in (1, 2, 3, 4):
        ...     model, kept = swa(jnp.float32(step), kept, step=step)
        >>> float(swa.evaluated(model, kept))
        3.0

    Source:
        Izmailov et al., "Averaging Weights Leads to Wider Optima and Better
        Generalization", 2018, arXiv:1803.05407, Algorithm 1.
    """

    start: int
    every: int
    where: Where | None

    def __init__(self, start: int, *, every: int = 1, where: Where | None = None):
        self.start = positive_int(start, "`start` of `SWA`")
        self.every = positive_int(every, "`every` of `SWA`")
        self.where = check_where(where, "SWA")

    def init(self, model: Model) -> Average:
        """Start with no model in the average."""
        return _start(picked(model, self.where, "SWA")[0], 0.0)

    def __call__(
        self, model: Model, kept: Average, *, step: Step
    ) -> tuple[Model, Average]:
        """Take the model if it is due; see `AbstractTransform.__call__`."""
        take = lambda kept, params: _add(kept, params, 1.0, 1.0)
        due = (step >= self.start) & is_due(step - self.start, self.every)
        params, _ = picked(model, self.where, "SWA")
        return model, if_due(due, take, kept, params)

    def evaluated(self, model: Model, kept: Average) -> Model:
        """The model with the average in it; as it is before the first is taken."""
        return _with_average(model, self.where, kept)


def _start(params: PyTree, weight: float) -> Average:
    copy = lambda leaf: jnp.array(leaf, wide(leaf.dtype), copy=True)
    return Average(jtu.tree_map(copy, params), jnp.full((), weight, float))


def _add(kept: Average, params: PyTree, decay: Any, new: Any) -> Average:
    """Add parameters of weight `new`, after the old weight has decayed."""
    weight = decay * kept.weight + new
    # The first ones replace what is there. If both weights are 0, it stays.
    share = new / jnp.maximum(weight, jnp.finfo(weight.dtype).tiny)
    return Average(mix(kept.parameters, params, share), weight)


def _with_average(model: Model, where: Where | None, kept: Average) -> Model:
    params, rest = picked(model, where, "an average")
    pick = lambda leaf, mean: jnp.where(kept.weight > 0, mean.astype(leaf.dtype), leaf)
    return eqx.combine(jtu.tree_map(pick, params, kept.parameters), rest)


def _check_decay(decay: Any) -> Any:
    if callable(decay):
        with explain_trace():
            found = jax.eval_shape(decay, jax.ShapeDtypeStruct((), jnp.int32))
        if getattr(found, "shape", None) != ():
            raise TypeError(
                f"`decay` of `EMA` is a schedule that returns `{describe(found)}`, not "
                "a scalar. Average parts with different decays by an `EMA` each."
            )
        first = jnp.asarray(decay(jnp.int32(1)))
        if not (is_traced(first) or 0 <= first <= 1):
            raise ValueError(
                f"`decay` of `EMA` is a schedule that gives `{float(first)}` after the "
                "first update; it must be from 0 to 1."
            )
        return decay
    number = check_number(decay, "`decay` of `EMA`", "`0.999`, or a schedule")
    if not 0 <= np.float32(number) < 1:
        raise ValueError(
            f"`decay` of `EMA` is `{decay!r}`; it must be from 0 to below 1 (as a "
            "float32 too), because it is the share of the average that is kept."
        )
    return number
