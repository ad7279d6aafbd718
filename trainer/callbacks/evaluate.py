"""Measure the model on other data while it trains."""

from typing import Any

from trainer._callback import AbstractCallback, StepInfo


class Evaluate(AbstractCallback):
    """Evaluate the model every so many steps, as `Trainer.evaluate` does.

    What it finds is recorded in the history under `name/`, for example
    `validation/loss`, at the number of completed updates. Training is not touched: with
    and without it, the run is equal bit for bit.

    Args:
        data: As for `Trainer.evaluate`. It is gone through once each time.
        every: Period in steps. None means once, when `fit` has finished.
        loss: Evaluated in the place of the Trainer's own loss, if given.
        name: Prefix of the metrics.
        using: Evaluate an average in the place of the model; see `Trainer.evaluate`.

    Example:
        >>> Evaluate([(1.0, 2.0)], every=100).name
        'validation'
    """

    def __init__(
        self,
        data: Any,
        every: int | None = None,
        *,
        loss: Any = None,
        name: str = "validation",
        using: str | None = None,
    ):
        super().__init__(every)
        self.data, self.loss, self.name, self.using = data, loss, name, using

    def __call__(self, info: StepInfo) -> dict[str, float]:
        """Evaluate."""
        found = info.evaluate(self.data, loss=self.loss, using=self.using)
        return {f"{self.name}/{metric}": value for metric, value in found.items()}
