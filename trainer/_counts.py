"""Numbers of steps: whole ones, and fractions of the run."""

import inspect
import math
import operator
from fractions import Fraction
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from trainer._types import Step


INT32_MAX = 2**31 - 1
# The largest whose square is an int32.
_FINEST = 46_340


def positive_int(value: Any, what: str, least: int = 1) -> int:
    """Check that `value` is a whole number from `least` to 2**31 - 1; return an int."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(
            f"{what} is `{value!r}`, which is not a whole number. Steps are counted "
            "in Python ints."
        )
    if not least <= number <= INT32_MAX:
        raise ValueError(
            f"{what} is `{value!r}`; it must be from {least} to 2**31 - 1, "
            "because the step is an int32."
        )
    return number


def steps_or_fraction(value: Any, what: str, least: int = 1) -> int | float:
    """Check that `value` is a whole number from `least`, or a float between 0 and 1."""
    if not isinstance(value, float | np.floating):
        return positive_int(value, what, least)
    value = float(value)
    if not 0 < value < 1:
        whole = f" or `{int(value)}` for steps" if value.is_integer() else ""
        raise ValueError(
            f"{what} is `{value!r}`. A float is a fraction of the run, above 0 and "
            f"below 1; steps are whole numbers. Write `0.5` for half of the run{whole}."
        )
    if not 0 < share_of(value) < 1:
        raise ValueError(
            f"{what} is `{value!r}`, a fraction of the run that is finer than "
            f"1/{_FINEST:,}. Give a whole number of steps."
        )
    return value


def share_of(value: float) -> Fraction:
    """The fraction that is reckoned with: the nearest whose terms are small."""
    return Fraction(repr(value)).limit_denominator(_FINEST)


def steps_of(value: int | float, num_steps: Any) -> Step:
    """The step that a whole number or a fraction of the run stands for.

    A fraction is rounded down to a whole step. It is worked out in whole numbers, so
    that it is exact for every run that an int32 can count. A fraction is taken as the
    nearest one with a denominator up to 46,340.

    Args:
        value: As checked by `steps_or_fraction`.
        num_steps: The run's total, an int32 scalar. Not needed for a whole number.
    """
    if not isinstance(value, float):
        return jnp.int32(value)
    if num_steps is None:
        raise ValueError(
            f"`{value!r}` is a fraction of a run whose `num_steps` is not known here. "
            "Call it with `num_steps=`, or give a whole number of steps."
        )
    share = share_of(value)
    top, bottom = share.numerator, share.denominator
    whole, rest = num_steps // bottom, num_steps % bottom
    return jnp.asarray(whole * top + rest * top // bottom, jnp.int32)


def asks_num_steps(fn: Any) -> bool:
    """Whether a schedule or selector has to be told the run's total.

    One of ours says so itself, as it depends on whether it was given a fraction. One of
    the user's own does by an argument `num_steps` that has no default.
    """
    own = getattr(fn, "in_fractions", None)
    if own is not None:
        return bool(own)
    try:
        argument = inspect.signature(fn).parameters.get("num_steps")
    except (TypeError, ValueError):
        return False
    return argument is not None and argument.default is argument.empty


def call_schedule(schedule: Any, step: Any, num_steps: Any) -> Any:
    """Read a schedule at a step, telling it the run's total if it asks."""
    if asks_num_steps(schedule):
        return schedule(step, num_steps=num_steps)
    return schedule(step)


def check_unit_of(fn: Any, by: str, owner: str) -> None:
    """Raise ValueError for a fraction of the run where epochs are counted."""
    if by == "epoch" and asks_num_steps(fn):
        raise ValueError(
            f"`{owner}` counts epochs, and was given a fraction of the run, which is "
            "counted in steps. Use `by='step'`, or whole numbers of epochs."
        )


def is_number(value: Any) -> bool:
    """Whether it is a real number of Python's or NumPy's, and not a bool."""
    kinds = int | float | np.integer | np.floating
    return isinstance(value, kinds) and not isinstance(value, bool)


def is_traced(value: Any) -> bool:
    """Whether it has no value yet: one member's in an ensemble, in the step."""
    return isinstance(value, Tracer)


def number_in(
    value: Any, what: str, *, above: float = -math.inf, below: float = math.inf
) -> float:
    """Check that `value` is a finite number within open bounds; return it as a float.

    One member's number in an ensemble has no value while the step is traced, and is
    returned as it is. It was checked when the ensemble was made.

    Raises:
        TypeError: It is not a number.
        ValueError: It is out of bounds, or not finite.
    """
    if is_traced(value) and value.shape == ():
        return cast(float, value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool | str):
        raise TypeError(f"{what} is `{value!r}`, which is not a number.")
    if not (math.isfinite(number) and above < number < below):
        bounds = [f"above {above:g}"] if above > -math.inf else []
        bounds += [f"below {below:g}"] if below < math.inf else []
        raise ValueError(
            f"{what} is `{value!r}`. It is a finite number"
            f"{' ' + ' and '.join(bounds) if bounds else ''}."
        )
    return number
