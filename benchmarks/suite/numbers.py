"""What is made of the readings: medians, spreads, and ratios within each round."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from .loops import LIMITS, LOOPS


@dataclass(frozen=True)
class Spread:
    """The median of the rounds, and from the smallest to the largest."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(median(values), min(values), max(values))

    def text(self, scale: float = 1, unit: str = "", digits: int | None = None) -> str:
        values = [v * scale for v in (self.middle, self.low, self.high)]
        if digits is None:
            digits = max(0, 3 - len(str(int(abs(values[0])))))
        middle, low, high = (f"{v:.{digits}f}" for v in values)
        return f"{middle}{unit} ({low}..{high})"


def ratio(over: list[float] | None, under: list[float] | None) -> Spread | None:
    """One divided by the other, round by round; None if one was not read."""
    if not over or not under:
        return None
    return Spread.of([a / b for a, b in zip(over, under, strict=True)])


def times(reading: Any, name: str) -> list[float] | None:
    """Microseconds a step, one value a round."""
    found = reading["loops"].get(name)
    return found and found["us"]


def best(reading: Any, names: list[str]) -> list[float] | None:
    """The fastest of several loops, round by round."""
    found = [t for t in (times(reading, name) for name in names) if t]
    return [min(values) for values in zip(*found, strict=True)] if found else None


def limit(
    reading: Any, family: str, switched: bool | None = None
) -> list[float] | None:
    """The fastest limit of a family, round by round; with any losses by default."""
    return best(
        reading,
        [
            name
            for name, loop in LOOPS.items()
            if loop.group == LIMITS
            and loop.family == family
            and switched in (loop.options["switched"], None)
        ],
    )
