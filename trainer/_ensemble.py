"""Several models trained in one step, each with values and a key of its own."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from trainer._evaluate import Evaluator
from trainer._members import Members, stacked, taken
from trainer._state import TrainState
from trainer._trainer import Trainer
from trainer._tree import canonical, describe, path_name
from trainer.mistakes._trace_errors import explain_trace


@final
class Ensemble(Trainer):
    """Trains several models in one step that is compiled once.

    `tr.ensemble` makes it. `init`, `fit` and `evaluate` are those of a Trainer, for
    models that are stacked: each array has the members on its first axis. A member
    becomes what its Trainer would have made of it alone, on the same batches.

    The step and the batch are the same for all members. So a Switch by the step stays a
    choice of one branch. What chooses by the data, such as `tr.Plateau`, may choose
    otherwise for each member: every branch is computed then.

    In the history, `3/loss` is the loss of member 3, and `loss` the mean over those
    members that report it. A whole number, such as `branch`, has no mean: it is there
    where all members have the same. `evaluate`, and so `tr.Evaluate`, does likewise.

    Attributes:
        num_members: How many members there are.

    Example:
        >>> import equinox as eqx, jax.random as jr, optax
        >>> def mse(model, batch):
        ...     x, y = batch
        ...     return jnp.mean((jax.vmap(model)(x) - y) ** 2)
        >>> make = lambda rate: Trainer(mse, optax.sgd(rate))
        >>> rates = ensemble(make, rate=[0.1, 0.01])
        >>> make_model = lambda key: eqx.nn.Linear(1, 1, key=key)
        >>> models = eqx.filter_vmap(make_model)(jr.split(jr.key(0), 2))
        >>> x = jnp.linspace(-1, 1, 32)[:, None]
        >>> result = rates.fit(models, [(x, 3 * x)], num_steps=100, progress=False)
        >>> bool(result.history["0/loss"][-1] < result.history["1/loss"][-1])
        True
        >>> result.model.weight.shape, rates.member(result.state, 1).model.weight.shape
        ((2, 1, 1), (1, 1))
    """

    num_members: int

    def __init__(
        self,
        make: Callable[..., Trainer],
        values: dict[str, PyTree],
        seeds: tuple[int, ...] | None,
        num_members: int,
    ):
        first = _made(make, values, num_members)
        super().__init__(
            update=first.program.update,
            steps_per_call=first.steps_per_call,
            on_recompile=first.on_recompile,
            debug=first.debug,
        )
        self.num_members = num_members
        self._first = first
        self._members = Members(make, values, seeds, num_members, first.program)
        self.program = self._members
        self._evaluator = _EvaluatorOfEach(first, self._members)

    def member(self, state: TrainState, place: int) -> TrainState:
        """The state of one member, which its Trainer alone can go on with.

        Args:
            state: The ensemble's state, as in `result.state`.
            place: Which member, from 0.

        Returns:
            A TrainState whose key is the member's, if the ensemble has `seeds`.

        Raises:
            IndexError: There is no such member.
        """
        if not 0 <= place < self.num_members:
            raise IndexError(
                f"There is no member {place} among {self.num_members}. They are "
                "counted from 0."
            )
        return self._members.member(state, place)

    def _own_loss(self) -> Any:
        return self._first._own_loss()


class _EvaluatorOfEach(Evaluator):
    """Means of losses over data, for each member and over all of them."""

    def __init__(self, first: Trainer, members: Members):
        super().__init__()
        self._first, self._members = first, members

    def __call__(self, loss: Any, state: TrainState, data: Any) -> dict[str, float]:
        """Evaluate every member on each batch."""
        members, own = self._members, self._first._own_loss()
        members.check_stacked(state.model, "model")
        states = [
            (members.member(state, place), taken(members.values, place))
            for place in range(members.num)
        ]
        # The Trainer's own loss may depend on a member's values.
        is_own = loss is own or (hasattr(own, "__self__") and loss == own)
        found = self.each(loss, states, data, self._loss_of if is_own else None)
        means = {}
        for name in dict.fromkeys(name for one in found for name in one):
            values = [one[name] for one in found if name in one]
            means[name] = sum(values) / len(values)
        for place, one in enumerate(found):
            means |= {f"{place}/{name}": value for name, value in one.items()}
        return means

    def _loss_of(self, values: dict[str, PyTree]) -> Any:
        return self._members.make(**values)._own_loss()


def ensemble(
    make: Callable[..., Trainer],
    /,
    *,
    seeds: Iterable[int] | None = None,
    **values: Any,
) -> Ensemble:
    """Train several models at once that differ in seeds, learning rates or weights.

    All members are trained in one step, which is compiled once. It is that of a Trainer
    which `make` returns, mapped over the members.

    Args:
        make: Takes one value by each of the names in `values`, scalar arrays where
            numbers are given, and returns a new Trainer for it. It is called for each
            member, and once more while the step is compiled, with values that are not
            known yet. So it may do with them what a loss may: give them to Optax, to
            `tr.WeightedSum` or to a schedule, but not look at them with `if` or use
            them as a number of steps.
        seeds: One whole number a member, for a random key of its own:
            `jax.random.key(seed)`. Without it all have the run's key. The order of
            shuffled data follows from the run's key alone, and is the same for all.
        **values: For each name one value a member: a list of numbers, an array with the
            members on its first axis, or a PyTree of such arrays.

    Returns:
        An Ensemble, which is a Trainer of stacked models.

    Raises:
        TypeError: `make` returns no Trainer; a value is not made of numbers, or is used
            as a Python number.
        ValueError: There are not as many values of one name as of another.

    Example:
        >>> import optax
        >>> from trainer import WeightedSum
        >>> def fit(model, batch): return (model - batch) ** 2
        >>> def size(model, batch): return model**2
        >>> make = lambda weight: Trainer(
        ...     WeightedSum(fit=fit, size=(weight, size)), optax.sgd(0.25))
        >>> weights = ensemble(make, weight=[0.0, 1.0, 3.0])
        >>> models, data = jnp.ones(3), [jnp.float32(1.0)]
        >>> result = weights.fit(models, data, num_steps=1, progress=False)
        >>> result.model.tolist(), result.compiles
        ([1.0, 0.5, -0.5], 1)
    """
    if not callable(make):
        raise TypeError(
            f"`make` is `{describe(make)}`. Give a function that returns a Trainer, "
            "such as `lambda rate: tr.Trainer(loss, optax.adam(rate))`."
        )
    checked = {name: _as_arrays(name, given) for name, given in values.items()}
    own = None if seeds is None else tuple(operator.index(seed) for seed in seeds)
    counts = {n: jtu.tree_leaves(tree)[0].shape[0] for n, tree in checked.items()}
    counts |= {} if own is None else {"seeds": len(own)}
    if not counts or 0 in counts.values():
        raise TypeError(
            "`ensemble` is given no members. Give one value a member, as in "
            "`tr.ensemble(make, rate=[1e-3, 1e-2])`, or `seeds=range(8)`."
        )
    if len(set(counts.values())) > 1:
        given = ", ".join(f"`{name}` has {count}" for name, count in counts.items())
        raise ValueError(
            f"The values of `ensemble` differ in their number: {given}. Each has one "
            "for every member."
        )
    return Ensemble(make, checked, own, next(iter(counts.values())))


def _as_arrays(name: str, given: Any) -> PyTree:
    """The values of one name, as arrays with the members on the first axis."""
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given):
        forms = {jtu.tree_structure(value) for value in given}
        if len(forms) > 1:
            raise TypeError(
                f"The values of `{name}` differ in their form: {given!r}. Give each "
                "member the same, with other numbers in it."
            )
        as_array = lambda leaf: _as_array(leaf, name)
        return canonical(stacked([jtu.tree_map(as_array, value) for value in given]))
    tree = jtu.tree_map(lambda leaf: _as_array(leaf, name), given)
    sizes = {
        path_name(name, p): x.shape[:1] for p, x in jtu.tree_leaves_with_path(tree)
    }
    if len(set(sizes.values())) != 1 or () in sizes.values():
        raise ValueError(
            f"`{name}` is `{describe(given)}`. Give one value a member: a list, or "
            "arrays whose first axis counts the members."
        )
    return canonical(tree)


def _as_array(leaf: Any, name: str) -> jax.Array:
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    if not (leaf.dtype.kind in "biufc" or jnp.issubdtype(leaf.dtype, jnp.floating)):
        raise TypeError(
            f"`{name}` holds `{leaf}`. Members of an ensemble differ in numbers alone; "
            "for another loss or model, make another Trainer."
        )
    return jnp.asarray(leaf)


def _made(
    make: Callable[..., Any], values: dict[str, PyTree], num_members: int
) -> Trainer:
    """The first member's Trainer, after each has been made once, to check its values.

    Raises:
        TypeError: `make` returns something else, or does with a value what it cannot.
    """
    made = [make(**taken(values, place)) for place in range(num_members)]
    for trainer in made:
        if not isinstance(trainer, Trainer) or isinstance(trainer, Ensemble):
            raise TypeError(
                f"`make` returned `{describe(trainer)}`, which is not a Trainer. It "
                "returns a new one for the values it is given."
            )
    first = taken(values, 0)
    for name, value in first.items():

        def traced(value: Any, name: str = name) -> None:
            make(**{**first, name: value})

        try:
            with explain_trace():
                jax.eval_shape(traced, value)
        except Exception as error:
            raise TypeError(
                f"`{name}` cannot differ between the members: `make` uses it as a "
                "Python number, which it is not while the step is compiled. Give all "
                "members the same, or make a Trainer for each."
            ) from error
    return made[0]
