"""What a callback sees, and how it asks to stop."""

import abc
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

from trainer._counts import positive_int
from trainer._state import TrainState


@final
@dataclass(frozen=True)
class Stop:
    """Returned by a callback to end `fit`.

    Attributes:
        reason: Becomes `FitResult.stop_reason`.
    """

    reason: str


@final
@dataclass(frozen=True)
class StepInfo:
    """What a callback may read. It is a view: nothing in it can be assigned.

    Attributes:
        step: Number of completed updates.
        metrics: The last step's metrics, and what earlier callbacks returned. One that
            the step did not report is not in it.
        get_state: Returns a copy of the TrainState, which may be kept. It costs a copy
            of the model and optimizer state, so call it only when needed.
        evaluate: `Trainer.evaluate` of the state as it is now: takes the data and
            `loss=` and `using=`.
        first_step: Number of completed updates when this fit began.
        seconds: What the host has done with the time of this fit so far, in seconds:
            `"data"` is waiting for batches and filling calls with them, `"dispatch"`
            handing calls over, `"device"` waiting for the device, `"callbacks"` those
            that were called before, and `"other"` the rest. They add up to the wall
            time since the first step began, which is after it was compiled.
    """

    step: int
    metrics: Mapping[str, Any]
    get_state: Callable[[], TrainState]
    evaluate: Callable[..., dict[str, float]]
    first_step: int
    seconds: Mapping[str, float]

    @property
    def state(self) -> TrainState:
        """A copy of the TrainState as it is now."""
        return self.get_state()

    @property
    def model(self) -> Any:
        """A copy of the model as it is now."""
        return self.get_state().model


class AbstractCallback(abc.ABC):
    """Something that happens on the host, every so many steps.

    Callbacks run in the order given. One may return a dict of numbers, which are
    recorded in the history and seen by the callbacks after it, or `Stop(reason)`. It
    cannot change the run in any other way: whatever changes the model belongs into the
    step.

    Attributes:
        every: Period in steps: called when the number of completed updates is a
            multiple of it. None means once, when `fit` has finished.

    Example:
        >>> class Patience(AbstractCallback):
        ...     def __call__(self, info):
        ...         if info.metrics["loss"] < 0.1:
        ...             return Stop("the loss is low enough")
        >>> Patience(every=50).every
        50
    """

    every: int | None = None

    def __init__(self, every: int | None = None):
        if every is not None:
            self.every = positive_int(every, f"`every` of `{type(self).__name__}`")

    @abc.abstractmethod
    def __call__(self, info: StepInfo) -> Mapping[str, Any] | Stop | None:
        """Read `info`; return numbers to record by name, `Stop(reason)`, or None."""

    def after_fit(self) -> None:  # noqa: B027
        """Called once when a fit is over, also one that raised: close what is open.

        Override it if there is something to close. It does nothing by itself.
        """


def check_callbacks(callbacks: Any) -> None:
    """Raise TypeError unless it is a sequence of callbacks."""
    if not isinstance(callbacks, Sequence):
        raise TypeError(
            f"`callbacks` is `{callbacks!r}`, which is not a list. Write "
            "`callbacks=[...]`."
        )
    for callback in callbacks:
        if not isinstance(callback, AbstractCallback):
            raise TypeError(
                f"`{callback!r}` is not a callback. Subclass `tr.AbstractCallback`, "
                "with `__call__(self, info)`."
            )
        try:
            inspect.signature(callback).bind(None)
        except TypeError:
            raise TypeError(
                f"Callback `{type(callback).__name__}` takes "
                f"`{inspect.signature(callback)}`. A callback takes one argument, "
                "`info`."
            ) from None
    _check_names(callbacks)


def _check_names(callbacks: Sequence[AbstractCallback]) -> None:
    """Two evaluations may share a name if they measure the same, and not otherwise."""
    known: dict[str, tuple[Any, ...]] = {}
    for callback in cast(Sequence[Any], callbacks):
        if hasattr(callback, "name") and hasattr(callback, "data"):
            options = ("data", "loss", "using")
            what = tuple(getattr(callback, option, None) for option in options)
            first = known.setdefault(callback.name, what)
            if any(a is not b for a, b in zip(first, what, strict=True)):
                raise ValueError(
                    f"Two callbacks record different things as `{callback.name}`. Give "
                    "each a name of its own: `tr.Evaluate(data, name='test')`."
                )


def checked_numbers(
    callback: AbstractCallback,
    returned: Any,
    taken: Collection[str],
) -> dict[str, float]:
    """What a callback returned, as floats by name, or an error that says what is wrong.

    Args:
        callback: Who returned it.
        returned: A dict of numbers.
        taken: Names that the step itself reports.
    """
    name = type(callback).__name__
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"Callback `{name}` returned `{returned!r}`. It returns a dict of numbers, "
            "`tr.Stop(reason)`, or None."
        )
    numbers = {}
    for metric, value in returned.items():
        try:
            numbers[metric] = float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"Callback `{name}` returned `{value!r}` as `{metric}`. It returns "
                "one real number for each name."
            ) from None
        if metric in taken:
            raise ValueError(
                f"Callback `{name}` returned `{metric}`, which every step reports. "
                "Give it a name of its own, such as `validation/loss`."
            )
    return numbers
