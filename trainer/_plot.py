"""Pictures of what a program does over the steps."""

from typing import Any

import numpy as np

from trainer._history import History


# Okabe and Ito's palette: told apart by the colour-blind, too.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_KINDS = {"branch": "band", "acts": "band", "learning_rate": "learning rate"}
_CURVE_KINDS = ("weight", "learning rate")
_GAP = 0.02
_REST = "#BBBBBB"
_WIDTH, _BAND, _CURVES = 8.0, 0.45, 2.2


def kind_of(name: str) -> str | None:
    """What a metric tells of a program: its place, a weight or a rate; or None."""
    *above, last = name.split("/")
    if above[-1:] == ["weight"]:
        return "weight"
    return _KINDS.get(last)


def plot_program(history: History, path: Any = None) -> Any:
    """Draw branches as bands, weights and learning rates as curves; return the figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Pictures are drawn by matplotlib, which is not installed. Run "
            "`pip install 'equinox-trainer[plot]'`."
        ) from error
    names = list(history)
    bands = [n for n in names if kind_of(n) == "band"]
    curves = {k: [n for n in names if kind_of(n) == k] for k in _CURVE_KINDS}
    groups = [group for group in curves.items() if group[1]]
    if not names:
        raise ValueError("There is nothing to draw: nothing is known before training.")
    heights = [_BAND] * len(bands) + [_CURVES] * len(groups)
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.9), layout="constrained")
    axes = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, height_ratios=heights
    )[:, 0]
    for axis, name in zip(axes, bands, strict=False):
        _draw_band(axis, name, history)
    for axis, (label, group) in zip(axes[len(bands) :], groups, strict=True):
        _draw_curves(axis, label, group, history)
    axes[-1].set_xlabel("step")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _draw_band(axis: Any, name: str, history: History) -> None:
    """One strip whose colour says which branch is active."""
    values = np.ma.asarray(history[name])
    branches = history.branches.get(name, ("rests", "acts"))
    edges = np.flatnonzero(np.ma.filled(np.ma.diff(values), 0) != 0) + 1
    masked = np.ma.getmaskarray(values)
    edges = np.union1d(edges, np.flatnonzero(masked[1:] != masked[:-1]) + 1)
    starts = np.concatenate([[0], edges]).astype(int)
    ends = np.concatenate([edges, [len(values)]]).astype(int)
    for number in range(len(branches)):
        spans = [
            (start, end - start)
            for start, end in zip(starts, ends, strict=True)
            if not masked[start] and int(values[start]) == number
        ]
        rests = branches[number] == "rests" or branches[number].startswith("nothing")
        color = _REST if rests else _COLORS[number % len(_COLORS)]
        axis.broken_barh(spans, (0, 1), color=color, label=branches[number], lw=0)
    axis.set(yticks=[], ylim=(0, 1), xlim=(0, len(values)))
    axis.set_ylabel(name, rotation=0, ha="right", va="center")
    axis.spines[:].set_visible(False)
    legend = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}
    axis.legend(**legend, ncols=2, fontsize="small")


def _draw_curves(axis: Any, label: str, names: list[str], history: History) -> None:
    for number, name in enumerate(names):
        values = np.ma.asarray(history[name]).astype(float)
        color = _COLORS[number % len(_COLORS)]
        steps = np.flatnonzero(~np.ma.getmaskarray(values))
        # What is reported every few steps is one curve; a phase without it is a gap.
        cuts = np.flatnonzero(np.diff(steps) > max(1, _GAP * len(values))) + 1
        for part in np.split(steps, cuts):
            axis.plot(part, values.data[part], color=color, lw=1.8)
        axis.plot([], [], color=color, lw=1.8, label=name)
    axis.set_ylabel(label)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.3)
    legend = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}
    axis.legend(**legend, fontsize="small")
