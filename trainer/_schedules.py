"""Schedules: from the step to a scalar. Most are Optax's; this one repeats."""

import math
from typing import Any, final, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from trainer._counts import (
    call_schedule,
    INT32_MAX,
    is_traced,
    number_in,
    positive_int,
    steps_of,
    steps_or_fraction,
)
from trainer._types import Step
from trainer.mistakes._trace_errors import explain_trace


@final
class Anneal(eqx.Module):
    """A schedule that goes from one value to another, once or in cycles.

    In each of the cycles the value goes from `start` to `stop` over the first part,
    `ramp`, and stays there for the rest. After the last cycle it stays at `stop`. With
    one cycle and a ramp of 1 and a linear shape it is `optax.linear_schedule`; what it
    adds to Optax are cycles, and lengths that are fractions of the run.

    It is a schedule like any other: a weight of a `tr.WeightedSum`, a probability of
    `tr.Random`, or, if it is not given a fraction, a learning rate.

    Attributes:
        start: Value at step 0, and at the first step of every cycle.
        stop: Value at the end of every ramp, and from step `over` on.
        over: Length of all cycles together: a whole number of steps, or a float above 0
            and below 1, a fraction of the run.
        cycles: Number of cycles, at least 1. A cycle has `over / cycles` steps, rounded
            up.
        ramp: Share of a cycle in which the value moves, above 0 and at most 1.
        shape: `"linear"`; `"cosine"`, which starts and ends flat; or `"sqrt"`, which is
            fast at first: the square of the value is linear.

    Raises:
        TypeError: A number is of the wrong kind.
        ValueError: A number is out of bounds, or `shape` is unknown.

    Example:
        >>> beta = Anneal(0.0, 1.0, over=8, cycles=2, ramp=0.5)
        >>> [float(beta(step)) for step in range(10)]
        [0.0, 0.5, 1.0, 1.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0]

    Source:
        Cycles: Fu et al., "Cyclical Annealing Schedule: A Simple Approach to Mitigating
        KL Vanishing", 2019, arXiv:1903.10145, eq. 6 and 7, with M = `cycles` and
        R = `ramp`. The square root: Platanios et al., "Competence-based Curriculum
        Learning for Neural Machine Translation", 2019, arXiv:1903.09848, eq. 8.
    """

    start: float
    stop: float
    over: int | float
    cycles: int
    ramp: float
    shape: Literal["linear", "cosine", "sqrt"]

    def __init__(
        self,
        start: float,
        stop: float,
        over: int | float,
        *,
        cycles: int = 1,
        ramp: float = 1.0,
        shape: Literal["linear", "cosine", "sqrt"] = "linear",
    ):
        self.start = number_in(start, "`start` of `Anneal`")
        self.stop = number_in(stop, "`stop` of `Anneal`")
        self.over = steps_or_fraction(over, "`over` of `Anneal`")
        self.cycles = positive_int(cycles, "`cycles` of `Anneal`")
        self.ramp = number_in(ramp, "`ramp` of `Anneal`", above=0.0)
        if self.ramp > 1:
            raise ValueError(
                f"`ramp` of `Anneal` is `{ramp}`; it is a share of a cycle, at most 1."
            )
        if isinstance(self.over, int) and self.cycles > self.over:
            raise ValueError(
                f"`Anneal` has {cycles} cycles in {over} steps. A cycle needs a step."
            )
        if shape not in _SHAPES:
            raise ValueError(
                f"`shape` of `Anneal` is `{shape!r}`; it is one of {sorted(_SHAPES)}."
            )
        if shape == "sqrt" and min(self.start, self.stop) < 0:
            raise ValueError(
                f"`Anneal` goes from `{start}` to `{stop}` by a square root, which "
                "needs values that are not negative."
            )
        self.shape = shape

    @property
    def in_fractions(self) -> bool:
        """Whether it has to be told the run's total."""
        return isinstance(self.over, float)

    def __call__(self, step: Any, *, num_steps: Step | None = None) -> Array:
        """The value at a step, a scalar. `num_steps` is the run's total."""
        step = jnp.asarray(step, jnp.int32)
        over = jnp.maximum(steps_of(self.over, num_steps), 1)
        # Rounded up, without an overflow.
        cycle = over // self.cycles + jnp.sign(over % self.cycles)
        place = (step % cycle).astype(float) * self.cycles / over
        share = jnp.where(step < over, jnp.minimum(place / self.ramp, 1.0), 1.0)
        return _SHAPES[self.shape](self.start, self.stop, share)


def _linear(start: float, stop: float, share: Array) -> Array:
    # Both ends come out exactly, however far apart they are.
    return (1 - share) * start + share * stop


def _cosine(start: float, stop: float, share: Array) -> Array:
    return _linear(start, stop, (1 - jnp.cos(math.pi * share)) / 2)


def _sqrt(start: float, stop: float, share: Array) -> Array:
    return jnp.sqrt(_linear(start**2, stop**2, share))


_SHAPES = {"linear": _linear, "cosine": _cosine, "sqrt": _sqrt}


def check_schedule(schedule: Any, what: str) -> float | None:
    """Check that it returns a scalar; return that scalar if it is a Python number."""
    returned = []

    def call(step: jax.Array) -> jax.Array:
        returned.append(call_schedule(schedule, step, step))
        return jnp.asarray(returned[0])

    with explain_trace():
        shape = jax.eval_shape(call, jax.ShapeDtypeStruct((), jnp.int32)).shape
    if shape != ():
        raise TypeError(
            f"{what} is a schedule that returns shape {shape}, not a scalar."
        )
    if isinstance(returned[0], int | float):
        return returned[0]
    first = call_schedule(schedule, jnp.int32(0), jnp.int32(INT32_MAX))
    first = None if is_traced(first) else float(first)
    if first is not None and not np.isfinite(first):
        raise ValueError(
            f"{what} is a schedule that is {first} at step 0. A division by the number "
            "of steps needs one that is not 0."
        )
    return None
