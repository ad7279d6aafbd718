"""Ctrl-C, held back while a call has the state."""

import signal
import threading
from types import FrameType
from typing import Any


class HeldInterrupt:
    """Hands over a KeyboardInterrupt where `taken` is called, and not within a call.

    A call of the step donates the state: Python would raise between the moment the old
    state is gone and the moment the new one has a name, and the run would be lost. A
    second Ctrl-C raises at once. Outside the main thread, and where the program has a
    handler of its own, nothing is changed.
    """

    def __init__(self) -> None:
        self._pending = False
        self._before: Any = None

    def __enter__(self) -> "HeldInterrupt":
        """Take over the handler."""
        mine = threading.current_thread() is threading.main_thread()
        if mine and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Give the handler back, and raise what nobody has taken."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self._pending and kind is None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            signal.default_int_handler(number, frame)
        self._pending = True

    def taken(self) -> KeyboardInterrupt | None:
        """The interrupt to raise, if there was one."""
        pending, self._pending = self._pending, False
        return KeyboardInterrupt() if pending else None
