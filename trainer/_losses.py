"""What a loss is: a function of the model and a batch, and what else it may ask for."""

import abc
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from trainer._metrics import as_metrics, Metric
from trainer._tree import describe
from trainer._types import Batch, Model


class Given(NamedTuple):
    """What a loss or an update may ask for by name, at one step. All of it is traced.

    Attributes:
        step: Completed steps, a strong int32 scalar; inside a branch of a Switch, how
            many steps that branch has had.
        epoch: Completed epochs of the batch's first example, a strong int32 scalar.
        key: This step's random key. Every loss of one step sees the same.
        mask: One bool an example, False where a short batch was padded; or None.
        state: The model's `eqx.nn.State`, or None.
    """

    step: Any
    epoch: Any
    key: Any = None
    mask: Any = None
    state: Any = None


class Output(NamedTuple):
    """A loss's value, its metrics, and the model's state after it."""

    value: Any
    metrics: Mapping[str, Metric]
    state: Any


NAMES = Given._fields
LOSS_ARGUMENTS = ("model", "batch")


def asked_for(
    fn: Callable[..., Any], lead: tuple[str, ...], kind: str
) -> frozenset[str]:
    """Read which of `NAMES` a function takes, after the positional arguments `lead`.

    Raises:
        TypeError: It does not take `lead`, or has another argument without a default.
    """
    article = "an" if kind == "update" else "a"
    try:
        arguments = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{fn!r}` is not {article} {kind}: {error}.") from None
    positional = [
        p.name
        for p in arguments
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    rest = [p for p in arguments if p.name not in positional[: len(lead)]]
    unknown = [
        p.name
        for p in rest
        if (p.name not in NAMES or p.kind is p.POSITIONAL_ONLY)
        and p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    misplaced = [name for name in positional[: len(lead)] if name in NAMES]
    if len(positional) < len(lead) or unknown or misplaced:
        raise TypeError(
            f"{article.title()} {kind} takes `({', '.join(lead)})`, then any of "
            "`step`, `epoch`, `key`, `mask`, `state` by name; "
            f"`{name_of(fn)}` takes `({', '.join(p.name for p in arguments)})`. "
            "A batch of several arrays is one argument: unpack it inside."
        )
    return frozenset(p.name for p in rest) & frozenset(NAMES)


def name_of(fn: Any) -> str:
    """Name of a loss in messages and in the history."""
    return getattr(fn, "__name__", None) or type(fn).__name__


class AbstractLoss(eqx.Module):
    """A loss that carries something along: numbers, arrays, a frozen network.

    A plain function is a loss too; subclass this when the loss has fields. `__call__`
    takes `(model, batch)` and, asked for by name, any of `step`, `epoch`, `key`, `mask`
    and `state`. It returns a scalar, or `(scalar, metrics)` with a dict of scalars. One
    that asked for `state` returns the new state last.

    Example:
        >>> class Ridge(AbstractLoss):
        ...     strength: float
        ...     def __call__(self, model, batch):
        ...         return self.strength * jnp.sum(model**2)
        >>> float(Ridge(0.5)(jnp.ones(4), None))
        2.0
    """

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of one batch; see the class."""


Evaluate = Callable[[Any, Given], Output]


class AbstractComposed(AbstractLoss):
    """A loss made of losses. What happens to each of them is left to the caller.

    `combine` does not evaluate its parts itself. It is handed a function that does, so
    that the caller may differentiate each part where it stands, inside the branch.
    """

    @abc.abstractmethod
    def combine(self, evaluate: Evaluate, given: Given) -> Output:
        """Evaluate the parts that are active now, and put them together.

        Args:
            evaluate: Called with a part that is not itself composed, and what it may
                ask for. The value it returns is a PyTree of arrays.
            given: What the parts may ask for.
        """

    @abc.abstractmethod
    def parts(self) -> dict[str, Any]:
        """The losses this one is made of, by name."""

    @abc.abstractmethod
    def branches(self) -> dict[str, tuple[str, ...]]:
        """For every metric that is a branch's index: the names of the branches."""

    def __call__(
        self,
        model: Model,
        batch: Batch,
        *,
        step: Any,
        epoch: Any = 0,
        key: Any = None,
        mask: Any = None,
        state: Any = None,
    ) -> Any:
        """Compute the loss of one batch. Returns `(value, metrics)`, and the state."""
        given = Given(jnp.int32(step), jnp.int32(epoch), key, mask, state)
        value, metrics, state = evaluate_loss(self, model, batch, given)
        return (value, metrics) if state is None else (value, metrics, state)


def check_loss(loss: Any) -> None:
    """Raise TypeError unless `loss` can be used as one."""
    if not callable(loss):
        raise TypeError(
            f"`{describe(loss)}` is not a loss. A loss is a function of "
            "`(model, batch)`, or a `tr.AbstractLoss`."
        )
    if not isinstance(loss, AbstractComposed):
        asked_for(loss, LOSS_ARGUMENTS, "loss")


def leaves_of(loss: Any) -> list[Any]:
    """All losses in `loss` that are not composed of others, in order."""
    if not isinstance(loss, AbstractComposed):
        return [loss]
    return [leaf for part in loss.parts().values() for leaf in leaves_of(part)]


def combine(loss: Any, evaluate: Evaluate, given: Given) -> Output:
    """Evaluate a loss, composed or not, with `evaluate` for its leaves."""
    if isinstance(loss, AbstractComposed):
        return loss.combine(evaluate, given)
    return evaluate(loss, given)


def evaluate_loss(loss: Any, model: Model, batch: Batch, given: Given) -> Output:
    """Evaluate a loss, composed or not, without a gradient."""
    return combine(loss, lambda leaf, g: call_leaf(leaf, model, batch, g), given)


def call_leaf(loss: Any, model: Model, batch: Batch, given: Given) -> Output:
    """Call a loss that is not composed with what it asks for; check its answer."""
    if isinstance(loss, AbstractJoint):
        return loss.joint(model, batch, given)
    names = asked_for(loss, LOSS_ARGUMENTS, "loss")
    arguments = {name: value_of(name, given, loss) for name in names}
    return unpack(loss, loss(model, batch, **arguments), given, "state" in names)


class AbstractJoint(eqx.Module):
    """Several losses that are differentiated as one, because all of them always run."""

    @abc.abstractmethod
    def joint(self, model: Model, batch: Batch, given: Given) -> Output:
        """Evaluate them all."""


def value_of(name: str, given: Given, asker: Any) -> Any:
    """What a loss or update asked for by name, or the reason there is none."""
    value = getattr(given, name)
    if name == "state":
        if value is None:
            raise TypeError(
                f"`{name_of(asker)}` asks for `state`, but the model was given without "
                "one. Pass what `eqx.nn.make_with_state` returned, `(model, state)`."
            )
        # A State forgets its values once it was updated; each reader gets its own.
        return jtu.tree_map(lambda leaf: leaf, value)
    return value


def unpack(loss: Any, returned: Any, given: Given, has_state: bool) -> Output:
    """Take apart what a loss returned: `value[, metrics][, state]`."""
    name, state, metrics = name_of(loss), given.state, {}
    parts = returned if isinstance(returned, tuple) else (returned,)
    if has_state:
        if len(parts) < 2 or not isinstance(parts[-1], eqx.nn.State):
            raise TypeError(
                f"`{name}` asks for `state` and must return the new state last: "
                f"`return value, state` or `return value, metrics, state`."
            )
        parts, state = parts[:-1], parts[-1]
    if len(parts) == 2:
        metrics = as_metrics(parts[1], name)
        _check_names(parts[1], name)
    elif len(parts) != 1:
        raise TypeError(
            f"`{name}` returned {len(parts)} values. A loss returns a scalar, or "
            "`(scalar, metrics)`; one that asks for `state` returns the state last."
        )
    return Output(_checked_value(parts[0], name), metrics, state)


def _check_names(metrics: Mapping[str, Any], owner: str) -> None:
    for name, value in metrics.items():
        # A composed loss that was called inside this one reports its own weights.
        own = not isinstance(value, Metric)
        if own and (name == "loss" or name.split("/")[0] == "weight"):
            raise ValueError(
                f"`{owner}` returned a metric named `{name}`, a name the Trainer "
                "reports itself. Give it another name."
            )


def _checked_value(value: Any, name: str) -> jax.Array:
    if not isinstance(value, jax.Array):
        raise TypeError(
            f"`{name}` returned `{describe(value)}` of type `{type(value).__name__}`, "
            "which has no gradient. A loss returns a scalar JAX array."
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"`{name}` returned {describe(value)}; a loss is a real floating number. "
            "Take the real part, or compute it from floating arrays."
        )
    if value.shape != ():
        raise TypeError(
            f"`{name}` returned {describe(value)}; a loss is one number. "
            "Reduce it, for example with `jnp.mean`."
        )
    return jax.lax.convert_element_type(value, value.dtype)


Unit = Literal["step", "epoch"]


def check_unit(by: str) -> Unit:
    if by not in ("step", "epoch"):
        raise ValueError(f"`by` is `{by!r}`; it is `'step'` or `'epoch'`.")
    return cast(Unit, by)


def named_losses(losses: Any, owner: str) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Names and losses: the dict's own names, else the functions', numbered if equal.

    They are kept as tuples, because a dict in a PyTree comes back with its keys sorted.
    """
    if isinstance(losses, Mapping):
        named = dict(losses)
    else:
        named = {}
        for number, loss in enumerate(losses):
            name = name_of(loss)
            taken = name in named or name == "<lambda>"
            named[f"{name.strip('<>')}_{number}" if taken else name] = loss
    if not named:
        raise ValueError(f"`{owner}` was given no losses.")
    for name, loss in named.items():
        if "/" in name:
            raise ValueError(
                f"A loss of `{owner}` is named `{name}`. The history puts a slash "
                "between names, so that one cannot hold a slash itself."
            )
        check_loss(loss)
    return tuple(named), tuple(named.values())
