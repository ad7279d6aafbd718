"""The tables of `docs/performance.md`, made from the readings."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from .loops import HAND, LIMITS, LOOPS, OURS, PEERS
from .numbers import best, limit, ratio, Spread, times
from .works import WORKS


DOCS = pathlib.Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- readings -->", "<!-- end of readings -->"
FITS = {"fit-arrays": "`tr.Arrays`", "fit-batches": "NumPy batches"}
COMPARED = [n for n, loop in LOOPS.items() if loop.group in (HAND, PEERS)]


def write_page(readings: dict[str, Any]) -> None:
    """Renew the pictures, and what stands between the two marks."""
    from .picture import draw

    for work, reading in readings.items():
        draw(WORKS[work].title, reading, DOCS / "img" / f"performance-{work}.png")
    path = DOCS / "performance.md"
    before, rest = path.read_text().split(BEGIN)
    after = rest.split(END)[1]
    found = "\n".join(_lines(readings))
    path.write_text(f"{before}{BEGIN}\n\n{found}\n{END}{after}")


def _lines(readings: dict[str, Any]) -> Iterator[str]:
    yield from ratios(readings)
    for work, reading in readings.items():
        yield from ("", f"### {_capital(WORKS[work].title)}", "")
        yield f"![Microseconds a step](img/performance-{work}.png)"
        yield ""
        yield from _table(reading)
    yield ""


def ratios(readings: dict[str, Any]) -> Iterator[str]:
    """What was measured, and the tables with a column for each work."""
    yield from _about(readings)
    for fit, name in FITS.items():
        yield from ("", f"### Times as long as `fit` on {name}", "")
        yield from _across(readings, _compared(fit))
    yield from ("", "### How near the limit", "")
    yield from _across(readings, _shares())


def _capital(title: str) -> str:
    return title[0].upper() + title[1:]


def _about(readings: dict[str, Any]) -> Iterator[str]:
    """One line for the machine, the versions and the run; once if all are alike."""
    said = ""
    for work, reading in readings.items():
        about = reading["about"]
        versions = ", ".join(f"{n} {v}" for n, v in about["versions"].items())
        line = (
            f"{about['cpu']}, {about['cores']} cores; {about['date']}; "
            f"{about['rounds']} rounds, {about['seconds']} s a reading; "
            f"Python {about['python']}, {versions}. Median (smallest..largest)."
        )
        if line != said:
            yield from ([""] if said else [])
            yield line if not said else f"From {work} on: {line}"
            said = line
    loads = (f"{work} {reading['about']['load']}" for work, reading in readings.items())
    yield from ("", f"Load of the machine before each: {', '.join(loads)}.")


Cell = Callable[[Any], Spread | None]


def _compared(fit: str) -> dict[str, tuple[Cell, float, str]]:
    def cell(name: str) -> Cell:
        return lambda reading: ratio(times(reading, name), times(reading, fit))

    return {LOOPS[name].label: (cell(name), 1, "x") for name in COMPARED}


def _shares() -> dict[str, tuple[Cell, float, str]]:
    """Shares of the limits, and what choosing the steps of a call by itself costs."""
    rows: dict[str, tuple[Cell, float, str]] = {}

    def share(fit: str, family: str, switched: bool) -> Cell:
        return lambda r: ratio(limit(r, family, switched), times(r, fit))

    def chosen(fit: str) -> Cell:
        fixed = [f"{fit}-1", f"{fit}-100"]
        return lambda r: ratio(times(r, fit), best(r, fixed))

    for fit, name in FITS.items():
        family = fit.removeprefix("fit-")
        for switched, losses in ((True, "two losses"), (False, "one loss")):
            text = f"{name}: of its limit with {losses}"
            rows[text] = share(fit, family, switched), 100, "%"
        rows[f"{name}: of the steps alone, two losses"] = (
            share(fit, "steps", True),
            100,
            "%",
        )
    for fit, name in FITS.items():
        text = f"{name}: time / time of the better of 1 and 100 steps a call"
        rows[text] = chosen(fit), 1, "x"
    return rows


def _across(
    readings: dict[str, Any], rows: dict[str, tuple[Cell, float, str]]
) -> Iterator[str]:
    """A table with a column for each work."""
    yield "| | " + " | ".join(readings) + " |"
    yield "|---|" + "---:|" * len(readings)
    for label, (cell, scale, unit) in rows.items():
        found = [cell(reading) for reading in readings.values()]
        texts = [f.text(scale, unit) if f else "-" for f in found]
        if any(found):
            yield f"| {label} | " + " | ".join(texts) + " |"


def _table(reading: Any) -> Iterator[str]:
    """All loops of one work, by group."""
    yield (
        "| loop | us/step | / `tr.Arrays` | / NumPy batches "
        "| fixed, ms | first call, s |"
    )
    yield "|---|---:|---:|---:|---:|---:|"
    for group in (OURS, LIMITS, HAND, PEERS):
        yield f"| **{group}** | | | | | |"
        names = [name for name, loop in LOOPS.items() if loop.group == group]
        yield from (row for name in names for row in _row(reading, name))


def _row(reading: Any, name: str) -> Iterator[str]:
    label, us = LOOPS[name].label, times(reading, name)
    if us is None:
        why = reading["missing"].get(name)
        if why:
            yield f"| {label} | {why} | | | | |"
        return
    ratios = [ratio(us, times(reading, fit)) for fit in FITS]
    cells = [f"{r.middle:.2f}" if r else "-" for r in ratios]
    found = reading["loops"][name]
    fixed = Spread.of(found["fixed_ms"]).middle
    note = " (compiles in every run)" if any(found["compiles"]) else ""
    yield (
        f"| {label}{note} | {Spread.of(us).text()} | {cells[0]} | {cells[1]} "
        f"| {fixed:.1f} | {found['first_s']:.2f} |"
    )
