"""What is known of a training run before its first step, and how it is shown."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final, NamedTuple

from trainer.preflight._pieces import Choice, Weight
from trainer.preflight._table import columns, named, number, some, WIDTH, wrapped
from trainer.recompiles._report import amount, CompileReport


class Column(NamedTuple):
    """One array of the first batch.

    Attributes:
        form: Its dtype and shape, such as `float32[16,10]`.
        least: The smallest number in it that is finite; None if there is none.
        most: The largest; likewise. Of complex numbers both are of their sizes.
        bad: How many numbers are not finite.
    """

    form: str
    least: float | None
    most: float | None
    bad: int


class Part(NamedTuple):
    """A part of the model.

    Attributes:
        arrays: How many floating arrays it has.
        parameters: How many numbers they hold.
        trained: How many of these some optimizer may change.
        nbytes: Bytes that they take.
        dtypes: Their dtypes.
        norm: The root of the sum of their squares.
    """

    arrays: int
    parameters: int
    trained: int
    nbytes: int
    dtypes: tuple[str, ...]
    norm: float


class Owned(NamedTuple):
    """What an optimizer, or an update of the user's own, trains.

    Attributes:
        optimizer: What its state is made of, in words.
        acts: When it acts, in words; None for an update of the user's own.
        paths: Paths of the arrays that it may change.
        parameters: How many numbers they hold.
    """

    optimizer: str
    acts: str | None
    paths: tuple[str, ...]
    parameters: int


class Loss(NamedTuple):
    """A loss on the first batch, at the parameters that are given.

    Attributes:
        value: The loss.
        metrics: What it reports beside.
        gradient: The norm of its gradient by each part of the model that it trains.
        norm: The norm of the whole gradient.
        active: Whether it is a part of the first step.
        place: Where it is written, such as `losses.py:12`; empty if not known.
    """

    value: float
    metrics: Mapping[str, float]
    gradient: Mapping[str, float]
    norm: float
    active: bool
    place: str


@final
@dataclass(frozen=True, repr=False)
class Preflight:
    """What `Trainer.check` found; `print` shows it as a table.

    Attributes:
        choices: Every Switch of the program, by the metric that it reports: the `names`
            of its branches, what picks one, and which is `active` first.
        weights: Every weight of a sum by name: its first `value`, and what changes it.
        owners: Every optimizer by name: what it is, when it acts, what it trains.
        settings: What else the Trainer was given, in words.
        members: How many members an ensemble has, the first of which is seen in what
            follows; None for one model.
        batch: Every array of the first batch, by path.
        num_examples: Examples in a batch.
        masked: Whether the losses are given a mask.
        parameters: The model's floating arrays, by part of the model.
        not_trained: All else that the model holds, by path, in words.
        losses: Every loss by name, also those whose branch is not active first.
        metrics: What the first step reports.
        zero_gradients: Paths of arrays that are trained, and whose gradient by every
            loss is exactly 0 on this batch: they are not used, or stand behind
            something that starts at 0.
        nonfinite: Paths in the model and in the batch, names of losses, and paths of
            gradients that are not finite.
        compile_report: What compiling the step took, and what came of it.
        compiles: How often a fit on this model and data has to compile.
        warnings: What is wrong, or looks so, each with what to do.
    """

    choices: Mapping[str, Choice]
    weights: Mapping[str, Weight]
    owners: Mapping[str, Owned]
    settings: Mapping[str, str]
    members: int | None
    batch: Mapping[str, Column]
    num_examples: int
    masked: bool
    parameters: Mapping[str, Part]
    not_trained: Mapping[str, str]
    losses: Mapping[str, Loss]
    metrics: Mapping[str, float]
    zero_gradients: tuple[str, ...]
    nonfinite: tuple[str, ...]
    compile_report: CompileReport
    compiles: int
    warnings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no warnings."""
        return not self.warnings

    def __str__(self) -> str:
        """All of it as a table, for a terminal of 92 columns."""
        sections = [
            ("program", named(_program(self))),
            (_batch_head(self), columns(_batch(self))),
            (_model_head(self), _model(self)),
            ("losses on this batch", columns(_losses(self))),
            ("norm of the gradient by part of the model", _gradients(self)),
            ("reported by the first step", wrapped(_reported(self), "  ")),
            ("step", named(_step(self))),
            ("warnings" if self.warnings else "no warnings", _told(self)),
        ]
        lines = []
        for head, body in sections:
            body = list(body)
            if body or head in ("first batch: none", "no warnings"):
                lines += [head, *body, ""]
        return "\n".join(lines[:-1])

    __repr__ = __str__


def _program(found: Preflight) -> Iterator[tuple[str, str]]:
    for name, choice in found.choices.items():
        first = f"first `{choice.active}`" if choice.active else "rests at first"
        yield name, f"{', '.join(choice.names)}; {first}; {choice.selector}"
    for name, weight in found.weights.items():
        change = f", changed by {weight.by}" if weight.by else ""
        yield name, f"{number(weight.value)}{change}"
    for name, owner in found.owners.items():
        count = len(owner.paths)
        arrays = f"{count:,} {'array' if count == 1 else 'arrays'}"
        does = f"trains {arrays} {owner.acts}" if owner.acts else f"may change {arrays}"
        yield name, f"{owner.optimizer}; {does}: {owner.parameters:,} parameters"
    if found.members:
        yield "members", f"{found.members}, of which the first is shown"
    yield from found.settings.items()


def _batch_head(found: Preflight) -> str:
    if not found.batch:
        return "first batch: none"
    mask = "a mask" if found.masked else "no mask"
    return f"first batch: {found.num_examples:,} examples, {mask}"


def _batch(found: Preflight) -> Iterator[tuple[str, ...]]:
    if found.batch:
        yield "", "form", "least", "most", "not finite"
    for path, column in found.batch.items():
        ends = (number(column.least), number(column.most))
        yield path, column.form, *ends, f"{column.bad:,}" if column.bad else "-"


def _model_head(found: Preflight) -> str:
    parts = found.parameters.values()
    total, size = sum(p.parameters for p in parts), sum(p.nbytes for p in parts)
    return f"model: {total:,} parameters, {amount(size, 'B')}"


def _model(found: Preflight) -> Iterator[str]:
    rows = [("", "arrays", "parameters", "trained", "memory", "dtype", "norm")]
    for name, part in found.parameters.items():
        counts = (f"{part.arrays:,}", f"{part.parameters:,}", f"{part.trained:,}")
        size, dtypes = amount(part.nbytes, "B"), ", ".join(part.dtypes)
        rows.append((name, *counts, size, dtypes, number(part.norm)))
    yield from columns(rows)
    if found.not_trained:
        other = [f"{path} {what}" for path, what in found.not_trained.items()]
        yield from wrapped(f"not trained: {some(other)}", "  ")
    if found.zero_gradients:
        text = f"with a gradient of 0 on this batch: {some(found.zero_gradients)}"
        yield from wrapped(text, "  ")


def _losses(found: Preflight) -> Iterator[tuple[str, ...]]:
    if found.losses:
        yield "", "value", "gradient", "first step", "place", "metrics"
    for name, loss in found.losses.items():
        when = "active" if loss.active else "rests"
        metrics = ", ".join(f"{n} {number(v)}" for n, v in loss.metrics.items())
        yield name, number(loss.value), number(loss.norm), when, loss.place, metrics


def _gradients(found: Preflight) -> Iterator[str]:
    """A column for each loss, as many beside one another as there is room for."""
    names, width = list(found.losses), max(map(len, found.parameters), default=0) + 2
    while names:
        count, used = 0, width
        while count < len(names) and (not count or used + len(names[count]) < WIDTH):
            used, count = used + max(len(names[count]), 9) + 2, count + 1
        beside, names = names[:count], names[count:]
        rows = [("", *beside)]
        for part in found.parameters:
            norms = [found.losses[name].gradient.get(part) for name in beside]
            rows.append((part, *map(number, norms)))
        yield from columns(rows)


def _reported(found: Preflight) -> str:
    choices = found.choices
    texts = {
        name: choices[name].names[int(v)] if name in choices else number(v)
        for name, v in found.metrics.items()
    }
    # In an ensemble each member has every metric once more.
    common = (n for n in texts if not (found.members and n.split("/")[0].isdigit()))
    return ", ".join(f"{name} {texts[name]}" for name in common)


def _step(found: Preflight) -> Iterator[tuple[str, str]]:
    report = found.compile_report
    yield "expected compiles", str(found.compiles)
    stages = ", ".join(f"{name} {sec:.2f} s" for name, sec in report.seconds.items())
    yield "time", stages
    yield "flops", amount(report.flops)
    yield "bytes", amount(report.bytes_accessed, "B")
    yield "peak memory", amount(report.peak_memory, "B")
    yield "steps per call", f"{report.steps_per_call} ({report.why})"


def _told(found: Preflight) -> Iterator[str]:
    for text in found.warnings:
        yield from wrapped(text, "  * ", "    ")
