"""What a program will do at each step, seen before training."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax

from trainer._composed import check_loss
from trainer._counts import positive_int
from trainer._history import History
from trainer._minimize import Minimize
from trainer._outline import Outline
from trainer._plot import kind_of, plot_program
from trainer._program import Program
from trainer._tree import modules_in, strong
from trainer._types import Key
from trainer._update import AbstractUpdate


_MOST_ROWS = 30


@final
class Preview(Mapping[str, np.ndarray]):
    """The branches, weights and learning rates of a program, step by step.

    `preview["branch"]` is what `history["branch"]` will be, and likewise for every
    `weight/...`, `.../acts` and `learning_rate`. `print(preview)` shows a table of what
    is active at each change.

    Attributes:
        history: All of it, in the form in which a fit records it.
        open: What is not known before training, because it depends on the data.
    """

    def __init__(self, history: History, open: tuple[str, ...]):
        self.history, self.open = history, open

    def __getitem__(self, name: str) -> np.ndarray:
        """One value a step; masked where there is none."""
        return self.history[name]

    def __iter__(self) -> Iterator[str]:
        """Names of what is known."""
        return iter(self.history)

    def __len__(self) -> int:
        """How much is known."""
        return len(self.history)

    def changes(self) -> np.ndarray:
        """Steps at which something changes, the first and the last step included.

        A branch changes where its index does. A weight or a learning rate changes where
        it jumps, begins to move or comes to rest.
        """
        steps = {0}
        for name in self:
            values = self[name]
            steps |= {len(values) - 1} | set(_changes(values).tolist())
        return np.array(sorted(steps if len(self) else ()), int)

    def rows(self) -> list[dict[str, Any]]:
        """The table: for each change, its step and what is active from there on."""
        return [
            {"step": int(step)} | {name: self._cell(name, step) for name in self}
            for step in self.changes()
        ]

    def _cell(self, name: str, step: int) -> Any:
        value = self[name][step]
        if value is np.ma.masked:
            return None
        if name in self.history.branches:
            return self.history.branches[name][int(value)]
        return value.item()

    def __str__(self) -> str:
        """The table as text, its first rows if there are many."""
        rows = self.rows()
        heads = ["step", *self]
        cells = [[_text(row[head]) for head in heads] for row in rows[:_MOST_ROWS]]
        sizes = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
        lines = [
            "  ".join(cell.rjust(size) for cell, size in zip(line, sizes, strict=True))
            for line in [heads, *cells]
        ]
        if len(rows) > _MOST_ROWS:
            lines.append(f"... and {len(rows) - _MOST_ROWS:,} more changes")
        lines += [f"decided while training: {what}" for what in self.open]
        return "\n".join(lines)

    __repr__ = __str__

    def plot(self, path: Any = None) -> Any:
        """Draw branches as bands, and weights and learning rates as curves.

        Args:
            path: Where to save the picture, or None.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return plot_program(self.history, path)


def preview(
    program: Any,
    num_steps: int,
    *,
    steps_per_epoch: float | None = None,
    key: Key | None = None,
) -> Preview:
    """Look at what a loss or an update will do at each step, before training.

    The program is run in full, but for the losses and optimizers in it, on nothing. So
    it takes no model and no data, and what a fit records later is the same.

    What depends on the data is not known: adaptive weights, and branches that follow a
    metric. A learning rate is known if `optax.inject_hyperparams` made the optimizer.

    Args:
        program: A loss, a schedule of losses, or a `tr.AbstractUpdate`.
        num_steps: How many steps to look at; fractions of the run are of this.
        steps_per_epoch: Needed if something counts epochs. It need not be whole: with
            100 examples in batches of 32 an epoch of `tr.Arrays` has 3.125 steps.
        key: The key of the run, for `tr.Random`. `jax.random.key(0)` if not given.

    Raises:
        TypeError: `program` is neither a loss nor an update.
        ValueError: `steps_per_epoch` is needed and not given.

    Example:
        >>> from trainer import piecewise
        >>> def fit(model, batch): ...
        >>> def finetune(model, batch): ...
        >>> print(preview(piecewise([fit, finetune], boundaries=[0.5]), num_steps=10))
        step    branch
           0       fit
           5  finetune
           9  finetune
    """
    num_steps = positive_int(num_steps, "`num_steps`")
    if not isinstance(program, AbstractUpdate):
        check_loss(program)
        program = Minimize(program, optax.identity())
    if steps_per_epoch is None and any(
        getattr(node, "by", None) == "epoch" for node in modules_in(program)
    ):
        raise ValueError(
            "Something in the program counts epochs. Give `steps_per_epoch`, the "
            "number of steps in one."
        )
    outline = Outline()
    update = outline.of_update(program)
    if update is None:
        return Preview(History(), tuple(outline.open))
    steps = np.arange(num_steps)
    epochs = steps // steps_per_epoch if steps_per_epoch else np.zeros(num_steps)
    rows = _run(update, outline.size, epochs.astype(np.int32), num_steps, key)
    history = History(
        {name: names for name, names in update.branches().items() if name in rows}
    )
    history.extend(0, rows)
    return Preview(history, tuple(outline.open))


def _run(
    update: AbstractUpdate,
    size: int,
    epochs: np.ndarray,
    num_steps: int,
    key: Key | None,
) -> dict[str, np.ndarray]:
    """Run the outline of a program; return what is known of each step."""
    program = Program(update, None, None)
    model = tuple(jnp.zeros(()) for _ in range(size))
    state = program.init(model, None, jr.key(0) if key is None else key)
    if program.in_fractions:
        where = lambda s: s.memory.num_steps
        state = eqx.tree_at(where, state, jnp.int32(num_steps))
    arrays, static = eqx.partition(state, eqx.is_array)

    def body(arrays: Any, epoch: Any) -> Any:
        state, metrics = program.step(
            eqx.combine(arrays, static), None, None, epoch, None
        )
        known = {name: m for name, m in metrics.items() if kind_of(name)}
        arrays = jtu.tree_map(strong, eqx.filter(state, eqx.is_array))
        return arrays, {n: (m.value, jnp.asarray(m.present)) for n, m in known.items()}

    # One loop is needed for the form of it all, whatever the user has set for a look.
    with jax.disable_jit(False):
        _, found = jax.jit(functools.partial(jax.lax.scan, body))(arrays, epochs)
    # What stands higher in the program comes first.
    found = sorted(jax.device_get(found).items(), key=lambda pair: pair[0].count("/"))
    return {
        name: values if present.all() else np.ma.MaskedArray(values, mask=~present)
        for name, (values, present) in found
    }


def _changes(values: np.ndarray) -> np.ndarray:
    """Steps at which values change: an index by itself, a number by its movement."""
    filled, missing = np.ma.getdata(values), np.ma.getmaskarray(values)
    absent = np.flatnonzero(missing[1:] != missing[:-1]) + 1
    difference = np.where(missing[1:] | missing[:-1], 0, np.diff(filled))
    if filled.dtype.kind == "i":
        return np.union1d(absent, np.flatnonzero(difference) + 1)
    moves = np.concatenate([[False], difference != 0, [False]])
    turns = np.flatnonzero(moves[1:] != moves[:-1])
    # A jump amid a movement: much larger than the steps beside it.
    size = np.abs(difference)
    beside = np.maximum(np.append(0, size[:-1]), np.append(size[1:], 0))
    jumps = np.flatnonzero((size > 4 * beside) & (beside > 0)) + 1
    return np.union1d(absent, np.union1d(turns[turns < len(filled)], jumps)).astype(int)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
