"""Python values that the step read while it was traced, and would not read again."""

from jaxtyping import PyTree

from trainer._types import RecompileError
from trainer.recompiles._reads import reads


class Baked:
    """The values that the functions of a program read from outside of themselves.

    They are variables of a closure, globals, and attributes of the objects, classes and
    modules that these functions name. A compiled step keeps what they were. Those that
    change while the step is traced are left out: a loss that counts its own calls is
    not mistaken for one whose settings were changed.

    Args:
        program: Functions, and the modules that they are fields of.
        model: What they are given, without its arrays.
    """

    def __init__(self, program: PyTree, model: PyTree = None):
        self._program, self._model = program, model
        self._reads = reads(program, model)

    def traced(self) -> None:
        """Say that the step was traced just now."""
        found = reads(self._program, self._model, self._reads.wide)
        kept = {}
        for key, place in found.places.items():
            # What was not there before has been imported, or computed and kept.
            before = self._reads.places.get(key)
            was = before and before.was.settled(place.read(), place.was)
            if before is None or was is not None:
                kept[key] = place._replace(was=was or place.was)
        self._reads = found._replace(places=kept)

    def changed(self, full: bool = True) -> str | None:
        """What is no longer as the step has read it, in words, or None.

        Args:
            full: Whether to look at all of large NumPy arrays, and not at a sample.
        """
        found = (place.changed(full) for place in self._reads.places.values())
        return next(filter(None, found), None)

    def check(self, full: bool = True) -> None:
        """Raise RecompileError if a value is no longer what the step has read."""
        changed = self.changed(full)
        if changed:
            raise RecompileError(
                f"{changed} since the step was compiled, which does not see it. Use a "
                "schedule of the step for what changes while training, or make a new "
                "Trainer."
            )
