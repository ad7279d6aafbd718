"""A picture of one work: every loop's time a step, beside the limits."""

import pathlib
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator

from .loops import HAND, LOOPS, OURS, PEERS
from .numbers import limit, Spread


# Okabe and Ito's colors, which are told apart with any color vision; the marks differ
# too.
COLORS = {OURS: "#0072B2", HAND: "#D55E00", PEERS: "#5b5b5b"}
MARKS = {OURS: "o", HAND: "s", PEERS: "D"}
LIMITS = {"arrays": ("#009E73", "-"), "batches": ("#CC79A7", "--")}
LEFT_OUT = ("-1", "-100", "jdl")

STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.dpi": 150,
}


def draw(title: str, reading: Any, path: pathlib.Path) -> None:
    """Save a picture: the fastest above, time on a logarithmic axis."""
    mpl.use("Agg")
    rows = [
        (name, Spread.of(found["us"]))
        for name, found in reading["loops"].items()
        if LOOPS[name].group in COLORS and not name.endswith(LEFT_OUT)
    ]
    rows.sort(key=lambda row: -row[1].middle)
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(
            figsize=(8.6, 1.7 + 0.3 * len(rows)), layout="constrained"
        )
        _draw_limits(axes, reading)
        for height, (name, spread) in enumerate(rows):
            _draw_row(axes, height, name, spread)
        _label(figure, axes, title[0].upper() + title[1:], [name for name, _ in rows])
        figure.savefig(path)
        plt.close(figure)


def _draw_limits(axes: Any, reading: Any) -> None:
    """A line and a band for the least that a step can take with such data."""
    names = {"arrays": "limit, data on the device", "batches": "limit, NumPy batches"}
    for family, (color, line) in LIMITS.items():
        found = limit(reading, family)
        if found:
            spread = Spread.of(found)
            axes.axvspan(spread.low, spread.high, color=color, alpha=0.15, lw=0)
            axes.axvline(
                spread.middle, color=color, ls=line, lw=1.6, label=names[family]
            )


def _draw_row(axes: Any, height: int, name: str, spread: Spread) -> None:
    group = LOOPS[name].group
    color, ours = COLORS[group], group == OURS
    axes.plot([spread.low, spread.high], [height] * 2, color=color, lw=3, alpha=0.4)
    axes.plot(spread.middle, height, MARKS[group], color=color, ms=9 if ours else 6)
    axes.annotate(
        f"{spread.middle:,.0f}",
        (max(spread.high, spread.middle), height),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        color=color,
        fontweight="bold" if ours else "normal",
    )


def _label(figure: Any, axes: Any, title: str, names: list[str]) -> None:
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), [LOOPS[name].label for name in names])
    for name, text in zip(names, axes.get_yticklabels(), strict=True):
        if LOOPS[name].group == OURS:
            text.set(color=COLORS[OURS], fontweight="bold")
    axes.tick_params(axis="y", length=0)
    low, longest = axes.get_xlim()
    subs = (1, 2, 5) if longest / low > 10 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="x", lw=0.6)
    axes.set_axisbelow(True)
    axes.set(xlabel="microseconds a step, logarithmic; a bar is all rounds")
    # Room for the number beside the slowest.
    axes.set_xlim(right=longest * (longest / low) ** 0.1)
    figure.suptitle(title, fontweight="bold", x=0.02, ha="left")
    figure.legend(loc="outside lower right", ncols=2)
