"""Counting compiles, from XLA's own event."""

import itertools
import re
import threading
from collections import defaultdict
from typing import Any

import jax


_EVENT = "/jax/core/compile/backend_compile_duration"
_NAME = re.compile(r"trainer_step_(\d+)(?!\d)")
_numbers = itertools.count()
_counts: defaultdict[int, int] = defaultdict(int)
_lock = threading.Lock()
_listening = False


def _heard(event: str, duration_secs: float, **details: Any) -> None:
    del duration_secs
    found = _NAME.search(str(details.get("fun_name", ""))) if event == _EVENT else None
    if found:
        _counts[int(found[1])] += 1


class CompileCounter:
    """Counts how often XLA compiled the function of one unique name.

    A count of traces misses compiles that need no trace, such as those for another
    placement, so XLA is listened to instead.
    """

    def __init__(self) -> None:
        global _listening
        with _lock:
            if not _listening:
                jax.monitoring.register_event_duration_secs_listener(_heard)
                _listening = True
        self._number = next(_numbers)

    @property
    def name(self) -> str:
        """The name that the function must have."""
        return f"trainer_step_{self._number}"

    @property
    def count(self) -> int:
        """How often it was compiled."""
        return _counts[self._number]
