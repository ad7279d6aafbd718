"""Counting compiles, from XLA's own event."""

import itertools
import re
import threading
from collections import Counter
from typing import Any

import jax


_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"
_NAME = re.compile(r"trainer_step_(\d+)(?!\d)")
_numbers = itertools.count()
_compiles: Counter[int] = Counter()
_hits: Counter[int] = Counter()
_lock = threading.Lock()
_listening = False
# JAX tells of a program found in its cache on disk before it tells that the program is
# there, in the same thread, and does not name it.
_found = threading.local()


def _heard_of_hit(event: str, **details: Any) -> None:
    del details
    if event == _HIT:
        _found.is_hit = True


def _heard(event: str, duration_secs: float, **details: Any) -> None:
    del duration_secs
    if event != _EVENT:
        return
    is_hit, _found.is_hit = getattr(_found, "is_hit", False), False
    name = _NAME.search(str(details.get("fun_name", "")))
    if name:
        (_hits if is_hit else _compiles)[int(name[1])] += 1


class CompileCounter:
    """Counts how often XLA compiled the function of one unique name.

    A count of traces misses compiles that need no trace, such as those for another
    placement, so XLA is listened to instead.
    """

    def __init__(self) -> None:
        global _listening
        with _lock:
            if not _listening:
                jax.monitoring.register_event_listener(_heard_of_hit)
                jax.monitoring.register_event_duration_secs_listener(_heard)
                _listening = True
        self._number = next(_numbers)

    @property
    def name(self) -> str:
        """The name that the function must have."""
        return f"trainer_step_{self._number}"

    @property
    def count(self) -> int:
        """How often it was compiled, and not found in JAX's cache on disk."""
        return _compiles[self._number]

    @property
    def hits(self) -> int:
        """How often it was found in JAX's cache on disk."""
        return _hits[self._number]
