"""What compiling a Trainer's step took, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final


@final
@dataclass(frozen=True)
class CompileReport:
    """How often a Trainer's step was compiled, what that took, and what XLA says of it.

    Counts and seconds are those of all fits of the Trainer up to then, and the rest is
    of the step that ran last. They are one and the same unless `on_recompile` lets a
    Trainer compile for several forms of batches or models.

    Attributes:
        traces: How often the program's Python code ran to be traced.
        compiles: How often XLA compiled it, from XLA's own event.
        cache_hits: How often it was found in JAX's cache on disk instead.
        seconds: Seconds to `"trace"` the program, `"lower"` it and `"compile"` it.
        flops: Floating-point operations of one step, as XLA counts them; of several
            branches the dearest, or all of them where a small step has them as loops.
            None if the backend does not say.
        bytes_accessed: Bytes that one step reads and writes, counted in the same way.
        peak_memory: Bytes on the device during a call, state and batches included.
        steps_per_call: The most steps that one call runs.
        why: Why so many.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from trainer import Trainer
        >>> def square(model, batch): return jnp.sum(model**2)
        >>> trainer = Trainer(square, optax.sgd(0.1), steps_per_call=10)
        >>> result = trainer.fit(jnp.ones(3), None, num_steps=20, progress=False)
        >>> report = result.compile_report
        >>> report.traces, report.compiles, report.steps_per_call, report.why
        (1, 1, 10, 'as given')
    """

    traces: int
    compiles: int
    cache_hits: int
    seconds: Mapping[str, float]
    flops: float | None
    bytes_accessed: float | None
    peak_memory: float | None
    steps_per_call: int
    why: str

    def __str__(self) -> str:
        """All of it as a table."""
        stages = ", ".join(f"{name} {sec:.2f} s" for name, sec in self.seconds.items())
        rows = {
            "traces": self.traces,
            "compiles": self.compiles,
            "found in the cache on disk": self.cache_hits,
            "time": stages or "none",
            "flops of a step": amount(self.flops),
            "bytes of a step": amount(self.bytes_accessed, "B"),
            "peak memory": amount(self.peak_memory, "B"),
            "steps per call": f"{self.steps_per_call} ({self.why})",
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


NO_STEP = CompileReport(0, 0, 0, {}, None, None, None, 0, "there was no step to run")


def in_all(reports: list[CompileReport]) -> CompileReport:
    """Add up what several steps took. The rest is that of the first."""
    total = lambda name: sum(getattr(report, name) for report in reports)
    stages = reports[0].seconds
    return replace(
        reports[0],
        traces=total("traces"),
        compiles=total("compiles"),
        cache_hits=total("cache_hits"),
        seconds={name: sum(r.seconds[name] for r in reports) for name in stages},
    )


def amount(value: float | None, unit: str = "") -> str:
    """A number with a prefix of thousands: `1.5 MB`.

    Example:
        >>> amount(1.5e6, "B"), amount(20)
        ('1.5 MB', '20')
    """
    if value is None:
        return "not known"
    prefix = 0
    while value >= 999.5 and prefix < 5:
        value, prefix = value / 1000, prefix + 1
    unit = f"{' kMGTP'[prefix]}{unit}".strip()
    return f"{value:.3g} {unit}".rstrip()
