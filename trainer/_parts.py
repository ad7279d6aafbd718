"""Optimizers for parts of a model, and when each of them acts."""

from typing import final

import equinox as eqx
import jax.tree_util as jtu
import optax
from jaxtyping import Array, PyTree

from trainer._composed import check_name, check_unit, Unit
from trainer._counts import check_unit_of, steps_of, steps_or_fraction
from trainer._losses import Given
from trainer._optax import check_optimizer
from trainer._tree import describe
from trainer._types import Model
from trainer._where import check_where, owned, shared_leaf, Where


@final
class Part(eqx.Module):
    """An optimizer for a part of the model, and the steps in which it acts.

    Outside of these steps the part and its optimizer's state do not change by a bit:
    no update, no weight decay, no momentum from before, no count.

    Attributes:
        optimizer: An `optax.GradientTransformation`.
        where: Picks the part: a sub-tree of the model, or a list of several, as in
            `eqx.tree_at`. None picks all.
        start: First step in which it acts; 0 for from the beginning. A float is a
            fraction of the run, above 0 and below 1.
        stop: First step in which it does not act any more; None for never.
        by: What `start` and `stop` count: `"step"` or `"epoch"`.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: `stop` is not above `start`, or one is out of bounds.

    Example:
        >>> head = Part(optax.adam(1e-3), where=lambda model: model.layers[-1])
        >>> body = Part(optax.adam(1e-4), where=lambda model: model.layers[:-1],
        ...             start=500)
        >>> body.start, body.stop
        (500, None)
    """

    optimizer: optax.GradientTransformation
    where: Where | None
    start: int | float
    stop: int | float | None
    by: Unit

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        where: Where | None = None,
        *,
        start: int | float = 0,
        stop: int | float | None = None,
        by: Unit = "step",
    ):
        self.optimizer = check_optimizer(optimizer)
        self.where = check_where(where, "Part")
        self.start = steps_or_fraction(start, "`start` of `Part`", least=0)
        self.stop = (
            None if stop is None else steps_or_fraction(stop, "`stop` of `Part`")
        )
        alike = self.stop is not None and type(self.stop) is type(self.start)
        if alike and self.stop <= self.start:  # pyright: ignore[reportOperatorIssue]
            raise ValueError(
                f"`Part` stops at `{stop}`, which is not after its start at `{start}`, "
                "so that it never acts."
            )
        self.by = check_unit(by)
        check_unit_of(self, by, "Part")

    @property
    def in_fractions(self) -> bool:
        """Whether it has to be told the run's total."""
        return isinstance(self.start, float) or isinstance(self.stop, float)

    @property
    def always(self) -> bool:
        """Whether it acts at every step."""
        return self.start == 0 and self.stop is None

    def acts(self, given: Given) -> Array:
        """Whether it acts at this step."""
        now = getattr(given, self.by)
        acts = now >= steps_of(self.start, given.num_steps)
        if self.stop is not None:
            acts = acts & (now < steps_of(self.stop, given.num_steps))
        return acts


@final
class Parts(eqx.Module):
    """Several optimizers at once, each for a part of the model.

    It stands in the place of an optimizer. One gradient of the loss serves all of them.
    No array may belong to two parts; one that belongs to none is frozen.

    A part that does not act at every step reports `<name>/acts`, 1 or 0.

    Attributes:
        names: Names of the parts.
        parts: The parts.

    Raises:
        TypeError: A part is not a `tr.Part`.
        ValueError: There is none.

    Example:
        >>> parts = Parts(
        ...     head=Part(optax.adam(1e-3), lambda model: model.layers[-1]),
        ...     body=Part(optax.adam(1e-4), lambda model: model.layers[:-1]),
        ... )
        >>> parts.names
        ('head', 'body')
    """

    names: tuple[str, ...]
    parts: tuple[Part, ...]

    def __init__(self, **parts: Part):
        if not parts:
            raise ValueError("`Parts` was given no parts.")
        for name, part in parts.items():
            if not isinstance(part, Part):
                raise TypeError(
                    f"`{name}` of `Parts` is `{describe(part)}`. Write "
                    f"`{name}=tr.Part(optimizer, where=lambda model: ...)`."
                )
            check_name(name, "A part")
        self.names, self.parts = tuple(parts), tuple(parts.values())

    def owned(self, model: Model) -> PyTree:
        """Mark what any part owns; see `_where.owned`.

        Raises:
            ValueError: Two parts own the same array, or one owns none.
        """
        specs = [
            owned(model, part.where, name)
            for name, part in zip(self.names, self.parts, strict=True)
        ]
        return union(self.names, specs)


def union(
    names: tuple[str, ...], specs: list[PyTree], may_share: bool = False
) -> PyTree:
    """Mark what any of several owners owns.

    Raises:
        ValueError: Two of them own the same array, and they may not.
    """
    for number, spec in enumerate(specs):
        for other in range(0 if may_share else number):
            leaf = shared_leaf(specs[other], spec)
            if leaf is not None:
                raise ValueError(
                    f"`{names[other]}` and `{names[number]}` both own `{leaf}`. Each "
                    "array has one owner: give `where=` to both, for different parts "
                    "of the model."
                )
    return jtu.tree_map(lambda *owns: any(owns), *specs)
