"""What the user's code prints while it is traced."""

import builtins
import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from trainer.mistakes._silent import Mistake, Place
from trainer.mistakes._user_code import is_of_user


# How JAX writes a traced value.
_TRACED = re.compile(r"\b\w*Tracer[(<]|\bTraced<")
_lock = threading.Lock()
_print = builtins.print
# By thread: several may trace at the same time.
_heard: dict[int, Callable[[Any, tuple[Any, ...]], None]] = {}


@contextlib.contextmanager
def traced_prints() -> Iterator[list[Mistake]]:
    """Find each `print` of a traced value while the context lasts. It still prints."""
    global _print
    found: list[Mistake] = []

    def heard(frame: Any, values: tuple[Any, ...]) -> None:
        filename = frame.f_code.co_filename
        if is_of_user(filename) and any(_TRACED.search(str(v)) for v in values):
            found.append(_printed(Place(filename, frame.f_lineno)))

    thread = threading.get_ident()
    with _lock:
        if not _heard:
            _print, builtins.print = builtins.print, _print_and_tell
        _heard[thread] = heard
    try:
        yield found
    finally:
        with _lock:
            del _heard[thread]
            if not _heard and builtins.print is _print_and_tell:
                builtins.print = _print


def _print_and_tell(*values: Any, **options: Any) -> None:
    _print(*values, **options)
    heard = _heard.get(threading.get_ident())
    if heard is not None:
        heard(sys._getframe(1), values)


def _printed(place: Place) -> Mistake:
    return Mistake(
        f"`print` is given a traced value{place}: it prints once, while the step is "
        'compiled, and shows no number. Write `jax.debug.print("{x}", x=x)`, or look '
        "at the program with `tr.Trainer(..., debug=True)`.",
        place,
    )
