"""Where the wall time of a fit goes, as the host sees it."""

import time
from collections.abc import Mapping
from types import MappingProxyType


class WallTime:
    """Seconds of one fit, by what the host did in them.

    The loop adds to the attributes. That costs it two reads of the clock a call of the
    step, since the end of one part is the beginning of the next.

    Attributes:
        data: Waiting for batches, and filling chunks with them.
        dispatch: Handing calls over.
        device: Waiting for the device.
        callbacks: In callbacks.
        began: Reading of the clock when the fit began.
        since: Reading of the clock when the part that is going on began.
    """

    __slots__ = ("began", "callbacks", "data", "device", "dispatch", "since")

    def __init__(self) -> None:
        self.data = self.dispatch = self.device = self.callbacks = 0.0
        self.began = self.since = time.perf_counter()

    def split(self) -> Mapping[str, float]:
        """The seconds so far by name; `other` is what is left, so that all add up."""
        parts = {
            "data": self.data,
            "dispatch": self.dispatch,
            "device": self.device,
            "callbacks": self.callbacks,
        }
        whole = time.perf_counter() - self.began
        return MappingProxyType({**parts, "other": whole - sum(parts.values())})
