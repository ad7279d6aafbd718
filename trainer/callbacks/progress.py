"""The progress bar."""

import sys
from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm


class Progress:
    """A bar with the loss, the active branch, and steps per second.

    Args:
        start: Steps that were completed before this fit.
        total: Steps at which fit stops, or None if not known.
        branches: Names of the branches by metric, as in `History.branches`.
        silent: Show nothing.
    """

    def __init__(
        self,
        start: int,
        total: int | None,
        branches: Mapping[str, tuple[str, ...]],
        silent: bool,
    ):
        self._branches = branches
        self._bar = tqdm(
            initial=start,
            total=total,
            unit="step",
            disable=silent,
            desc="compiling",
            file=sys.stderr,
            dynamic_ncols=True,
        )

    def compiled(self) -> None:
        """Start the clock: the time left does not count the time to compile."""
        self._bar.unpause()
        self._bar.set_description("training", refresh=False)

    def update(self, steps: int, metrics: Mapping[str, Any]) -> None:
        """Show `steps` more, and the metrics of the last one."""
        if self._bar.disable:
            return
        shown = {k: f"{metrics[k]:.4g}" for k in ("loss",) if k in metrics}
        for metric, names in self._branches.items():
            if metric in metrics:
                shown[metric] = names[int(metrics[metric])]
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(steps)

    def close(self) -> None:
        """Leave the bar as it is, and the cursor below it."""
        self._bar.close()
