"""Rows and columns as text, for a terminal."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence


WIDTH = 92
_MOST_ROWS = 20
_MOST_NAMED = 8


def number(value: float | None) -> str:
    """A number in a few digits."""
    return "-" if value is None else f"{value:.4g}"


def some(texts: Sequence[str], most: int = _MOST_NAMED) -> str:
    """The first few of several, and how many there are beside them."""
    left = len(texts) - most
    more = f" and {left:,} more" if left > 0 else ""
    return f"{', '.join(texts[:most])}{more}"


def wrapped(text: str, indent: str, rest: str | None = None) -> list[str]:
    """A text as lines; the first begins with `indent`, the others with `rest`."""
    rest = indent if rest is None else rest
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def named(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Names, and texts of one line or several."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0) + 4
    for name, text in pairs:
        yield from wrapped(text, f"  {name}".ljust(width), " " * width)


def columns(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Rows as lines of columns: a head, and the first of those below it."""
    rows = list(rows)
    # A column in which there is nothing is left out.
    every = zip(*rows[: _MOST_ROWS + 1], strict=True)
    kept = [column for column in every if any(column[1:])]
    sizes = [max(map(len, column)) for column in kept]
    shown = list(zip(*kept, strict=True))
    for row in shown:
        cells = [cell.ljust(size) for cell, size in zip(row, sizes, strict=True)]
        yield f"  {'  '.join(cells)}".rstrip()
    if len(rows) > len(shown):
        yield f"  ... and {len(rows) - len(shown):,} more"
