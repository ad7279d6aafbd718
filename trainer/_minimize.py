"""Follow the gradient of one loss."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, final, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from trainer._composed import branches_of, check_loss, memory_of, takes
from trainer._counts import positive_int
from trainer._grad import How, value_and_grad, value_only
from trainer._losses import Given
from trainer._memory import Node, node, own_of, part_of, renewed
from trainer._metrics import do_if, Metric
from trainer._optax import (
    check_optimizer,
    evaluated,
    init_optimizer,
    learning_rate,
    optimize,
)
from trainer._parts import Part, Parts
from trainer._precision import (
    all_finite,
    check_compute,
    choose,
    Compute,
    first_scale,
)
from trainer._types import Batch, Model
from trainer._update import AbstractOwnUpdate, AbstractUpdate, Updated
from trainer._where import check_where, owned, Where


@final
class Minimize(AbstractOwnUpdate):
    """Follow the gradient of one loss with one Optax optimizer, or one for each part.

    The optimizer sees the model's inexact arrays as its parameters, or those that
    `where` picks: functions, integer tables and keys in the model are left alone. An
    optimizer that takes `value`, `grad` or `value_fn` is given them, as L-BFGS and
    `reduce_on_plateau` need.

    Reports `loss`, the loss at the parameters the step started from; `learning_rate`,
    if the optimizer shows it, as one made by `optax.inject_hyperparams` does; and
    `loss_scale` with `compute="float16"`.

    Attributes:
        loss: A function `(model, batch)`, a `tr.AbstractLoss`, or a schedule of them.
        optimizer: An `optax.GradientTransformation`, or `tr.Parts`.
        where: Picks what is trained: a sub-tree of the model, or a list of several, as
            in `eqx.tree_at`. The rest is frozen: it gets no gradient, no update and no
            decay, and the optimizer keeps nothing for it. None picks all.
        micro_batches: In how many parts each batch is gone through, one after the
            other. The update is that of the whole batch, for a loss that is a mean over
            examples, and needs the memory of a part. The batch need not divide.
        compute: `"bfloat16"` or `"float16"`: the type that the loss and its gradient
            are computed in. Parameters, optimizer and the loss that is reported keep
            theirs. With float16 the loss is scaled, and a step whose gradient is not
            finite is left out.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: `micro_batches` or `compute` is out of bounds, or `where` is given
            beside `tr.Parts`.

    Example:
        >>> import jax.numpy as jnp
        >>> def square(model, batch): return model**2
        >>> update = Minimize(square, optax.sgd(0.25))
        >>> model = jnp.float32(1.0)
        >>> step, epoch = jnp.int32(0), jnp.int32(0)
        >>> model, _, metrics, _ = update(
        ...     model, update.init(model), None, step=step, epoch=epoch
        ... )
        >>> float(model), float(metrics["loss"].value)
        (0.5, 1.0)
    """

    loss: Any
    optimizer: optax.GradientTransformation | Parts
    where: Where | None
    micro_batches: int
    compute: Compute | None

    def __init__(
        self,
        loss: Any,
        optimizer: optax.GradientTransformation | Parts,
        *,
        where: Where | None = None,
        micro_batches: int = 1,
        compute: Compute | None = None,
    ):
        check_loss(loss)
        if isinstance(optimizer, AbstractUpdate):
            raise TypeError(
                f"`{type(optimizer).__name__}` is an update, which has losses and "
                "optimizers of its own. Write `tr.Trainer(update=...)`."
            )
        self.loss = loss
        if isinstance(optimizer, Parts):
            if where is not None:
                raise ValueError(
                    "`where` is given beside `tr.Parts`. Each part has a `where` of "
                    "its own."
                )
            self.optimizer = optimizer
        else:
            self.optimizer = check_optimizer(optimizer)
        self.where = check_where(where, "Minimize")
        self.micro_batches = positive_int(micro_batches, "`micro_batches`")
        self.compute = check_compute(compute)

    def init(self, model: Model) -> PyTree:
        """Make the optimizer's state for what it owns; a dict by name for `tr.Parts`.

        Raises:
            ValueError: `where` picks nothing to train, or two parts own one array.
        """
        self.owned(model)
        states = {
            name: init_optimizer(part.optimizer, eqx.filter(model, spec))
            for name, part, spec in self._owners(model)
        }
        return self._as_state(states)

    def _parts(self) -> list[tuple[str, Part]]:
        """Name and part; a single optimizer is a part without a name."""
        if isinstance(self.optimizer, Parts):
            named = zip(self.optimizer.names, self.optimizer.parts, strict=True)
            return list(named)
        return [("", Part(self.optimizer, self.where))]

    def _owners(self, model: Model) -> Iterator[tuple[str, Part, PyTree]]:
        """Name, part, and what of the model it owns."""
        for name, part in self._parts():
            yield name, part, owned(model, part.where, name or "Minimize")

    def _as_state(self, states: dict[str, PyTree]) -> PyTree:
        """What is kept as `opt_state`: for a single optimizer, its own state."""
        return states if isinstance(self.optimizer, Parts) else states[""]

    def owned(self, model: Model) -> PyTree:
        """Mark what the optimizers own; see `AbstractUpdate.owned`."""
        if isinstance(self.optimizer, Parts):
            return self.optimizer.owned(model)
        return owned(model, self.where, "Minimize")

    def takes(self, name: str) -> list[bool]:
        """Whether each loss that is not composed of others asks for `name`."""
        return takes(self.loss, name)

    def branches(self) -> dict[str, tuple[str, ...]]:
        """Names of the branches of every Switch in the loss."""
        return branches_of(self.loss)

    def memory(self) -> Node | None:
        """What the loss remembers, and the loss scale."""
        return node(first_scale(self.compute), {"loss": memory_of(self.loss)})

    def evaluated(self, model: Model, opt_state: PyTree) -> Model:
        """With the parameters that a schedule-free optimizer means; see Optax."""
        for name, _, spec in self._owners(model):
            state = opt_state[name] if name else opt_state
            model = eqx.combine(evaluated(state, eqx.filter(model, spec)), model)
        return model

    def run(
        self, model: Model, opt_state: PyTree, batch: Batch, given: Given
    ) -> Updated:
        """Update the model once."""
        memory, scale = given.memory, own_of(given.memory)
        how = How(
            self.owned(model),
            self.micro_batches,
            self.compute,
            None if scale is None else scale.scale,
        )
        inner = given._replace(memory=part_of(memory, "loss"))
        found = value_and_grad(self.loss, model, batch, inner, how)
        value, grad = found.value
        # A line search sees the loss as this step has it, with its branch and weights.
        seen = inner._replace(memory=found.memory)
        value_of = lambda model: value_only(self.loss, model, batch, seen, how)
        grad_of = lambda model: value_and_grad(
            self.loss, model, batch, seen, how, trains=False
        ).value[1]
        loss = _At(value, grad, value_of, grad_of)
        new, states, metrics = self._optimize(model, opt_state, loss, given)
        metrics = {"loss": Metric(value), **found.metrics, **metrics}
        memory = renewed(memory, scale, {"loss": found.memory})
        updated = Updated(new, states, metrics, found.state, memory)
        if scale is None:
            return updated
        is_finite = all_finite(grad)
        old = (model, opt_state, given.state, given.memory)
        chosen = choose(is_finite, (new, states, found.state, memory), old)
        model, opt_state, state, memory = chosen
        memory = renewed(memory, scale.renewed(is_finite), memory.parts)
        metrics["loss_scale"] = Metric(scale.scale)
        return Updated(model, opt_state, metrics, state, memory)

    def _optimize(
        self, model: Model, opt_state: PyTree, loss: "_At", given: Given
    ) -> tuple[Model, PyTree, dict[str, Metric]]:
        """Let every part's optimizer act on the same gradient."""
        new, states, metrics = model, {}, {}
        for name, part, spec in self._owners(model):
            params, rest = eqx.partition(model, spec)
            state = opt_state[name] if name else opt_state
            act = partial(_act, part.optimizer, spec, rest, loss)
            if part.always:
                (params, state), _ = act(params, state)
            else:
                acts = part.acts(given).astype(jnp.int32)
                (params, state), _ = do_if(acts, act, params, state)
                metrics[f"{name}/acts"] = Metric(acts)
            rate = learning_rate(state)
            if rate is not None:
                label = f"{name}/learning_rate" if name else "learning_rate"
                acts = True if part.always else metrics[f"{name}/acts"].value == 1
                metrics[label] = Metric(rate, acts)
            new, states = eqx.combine(params, new), {**states, name: state}
        return new, self._as_state(states), metrics


class _At(NamedTuple):
    """The loss at one model, and as a function of the model."""

    value: Any
    grad: PyTree
    value_of: Callable[[Model], Any]
    grad_of: Callable[[Model], PyTree]


def _act(
    optimizer: Any, spec: PyTree, rest: PyTree, loss: _At, params: PyTree, state: Any
) -> Any:
    """Let one optimizer act on what it owns."""
    whole = lambda params: eqx.combine(params, rest)
    value_of = lambda params: loss.value_of(whole(params))
    grad_of = lambda params: eqx.filter(loss.grad_of(whole(params)), spec)
    grad = eqx.filter(loss.grad, spec)
    return optimize(optimizer, params, state, grad, loss.value, value_of, grad_of), {}
