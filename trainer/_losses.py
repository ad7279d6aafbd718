"""What a loss is: a function of the model and a batch, and what else it may ask for."""

import abc
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from trainer._metrics import as_metrics, Metric
from trainer._tree import describe
from trainer._types import Batch, Model
from trainer.mistakes._trace_errors import noted
from trainer.mistakes._user_code import defined_at, name_of
from trainer.mistakes._zero_gradients import seen


class Given(NamedTuple):
    """What is known at one step. All of it is traced.

    A loss or an update may ask by name for all but the last three.

    Attributes:
        step: Completed steps, a strong int32 scalar; inside a branch of a Switch, how
            many steps that branch has had.
        epoch: Completed epochs of the batch's first example, a strong int32 scalar.
        key: This step's random key. Every loss of one step sees the same.
        mask: One bool an example, False where a short batch was padded; or None.
        state: The model's `eqx.nn.State`, or None.
        memory: What the loss or update that it is given to remembers, or None.
        reports: What callbacks measured, by name.
        num_steps: The run's total, or None if nothing asks for it.
    """

    step: Any
    epoch: Any
    key: Any = None
    mask: Any = None
    state: Any = None
    memory: Any = None
    reports: Any = None
    num_steps: Any = None


class Output(NamedTuple):
    """A loss's value, its metrics, and the model's state and its memory after it."""

    value: Any
    metrics: Mapping[str, Metric]
    state: Any
    memory: Any = None


NAMES = ("step", "epoch", "key", "mask", "state")
LOSS_ARGUMENTS = ("model", "batch")
# Metrics that the Trainer reports itself.
RESERVED = frozenset({"loss", "learning_rate", "loss_scale", "nonfinite"})


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
        bare = inspect.Signature([p.replace(annotation=p.empty) for p in arguments])
        raise TypeError(
            f"{article.title()} {kind} takes `({', '.join(lead)})`, then any of "
            "`step`, `epoch`, `key`, `mask`, `state` by name; "
            f"`{name_of(fn)}` takes `{bare}`. "
            "A batch of several arrays is one argument: unpack it inside."
        )
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in rest if p.kind in by_name) & frozenset(NAMES)


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


def call_leaf(loss: Any, model: Model, batch: Batch, given: Given) -> Output:
    """Call a loss that is not composed with what it asks for; check its answer."""
    if isinstance(loss, AbstractJoint):
        return loss.joint(model, batch, given)
    names = asked_for(loss, LOSS_ARGUMENTS, "loss")
    arguments = {name: value_of(name, given, loss) for name in names}
    with noted("loss", loss, batch):
        returned = loss(model, batch, **arguments)
    found = unpack(loss, returned, given, "state" in names)
    return found._replace(value=seen(loss, found.value))


class AbstractJoint(eqx.Module):
    """Several losses that are differentiated as one, because all of them always run."""

    losses: eqx.AbstractVar[tuple[Any, ...]]

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
    state, metrics = given.state, {}
    parts = returned if isinstance(returned, tuple) else (returned,)
    if has_state:
        if len(parts) < 2 or not isinstance(parts[-1], eqx.nn.State):
            raise TypeError(
                f"{_titled(loss)} asks for `state` and must return the new state last: "
                f"`return value, state` or `return value, metrics, state`."
            )
        parts, state = parts[:-1], parts[-1]
    _check_parts(loss, parts)
    if len(parts) == 2:
        metrics = as_metrics(parts[1], name_of(loss), defined_at(loss))
        _check_names(parts[1], loss)
    return Output(_checked_value(parts[0], loss), metrics, state)


def _titled(loss: Any) -> str:
    """Name of a loss and where it is, as messages begin."""
    return f"`{name_of(loss)}`{defined_at(loss)}"


def _check_parts(loss: Any, parts: tuple[Any, ...]) -> None:
    if isinstance(parts[-1] if parts else None, eqx.nn.State):
        raise TypeError(
            f"{_titled(loss)} returned a State, for which it did not ask. Ask for it "
            "by name: `def loss(model, batch, *, state)`."
        )
    if len(parts) not in (1, 2):
        raise TypeError(
            f"{_titled(loss)} returned {len(parts)} values. A loss returns a scalar, "
            "or `(scalar, metrics)`; one that asks for `state` returns the state last."
        )
    if len(parts) == 2 and isinstance(parts[1], jax.Array):
        raise TypeError(
            f"{_titled(loss)} returned {_form(parts)}, and the second is no dict of "
            "metrics. Return one loss, such as their sum; or report the second: "
            "`return loss, {'name': value}`."
        )


def _check_names(metrics: Mapping[str, Any], owner: Any) -> None:
    for name, value in metrics.items():
        # A composed loss that was called inside this one reports its own weights.
        own = not isinstance(value, Metric)
        if own and (name in RESERVED or name.split("/")[0] == "weight"):
            raise ValueError(
                f"{_titled(owner)} returned a metric named `{name}`, a name the "
                "Trainer reports itself. Give it another name."
            )


def _checked_value(value: Any, loss: Any) -> jax.Array:
    if not isinstance(value, jax.Array):
        raise TypeError(f"{_titled(loss)} returned {_not_an_array(value)}")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        is_complex = jnp.issubdtype(value.dtype, jnp.complexfloating)
        raise TypeError(
            f"{_titled(loss)} returned {describe(value)}; a loss is a real floating "
            "number, which has a gradient. "
            + (
                "Take the real part: `jnp.real(value)`."
                if is_complex
                else "Compute it from floating arrays, or report it as a metric: "
                "`return loss, {'name': value}`."
            )
        )
    if value.shape != ():
        raise TypeError(
            f"{_titled(loss)} returned {describe(value)}; a loss is one number. "
            "Reduce it, for example with `jnp.mean`."
        )
    # A sum of losses, and what is recorded, would lose too much in half precision.
    wide = jnp.promote_types(value.dtype, jnp.float32)
    return jax.lax.convert_element_type(value, wide)


def _not_an_array(value: Any) -> str:
    """Say of what is no JAX array why it is no loss, and what to write."""
    if value is None:
        return "`None`. End it with `return` and the loss, a scalar JAX array."
    if isinstance(value, bool | int | float | complex | np.ndarray | np.generic):
        kind = "NumPy" if isinstance(value, np.ndarray | np.generic) else "Python"
        return (
            f"{_form(value)}, which is {kind}'s and has no gradient. Compute it from "
            "the model with `jnp`; where no loss is meant, return `jnp.zeros(())`."
        )
    if isinstance(value, Mapping):
        return (
            f"{_form(value)}, a dict without a loss before it. Return a scalar JAX "
            "array first, and then the metrics: `return loss, {'name': value}`."
        )
    return (
        f"{_form(value)} of type `{type(value).__name__}`, which has no gradient. A "
        "loss returns a scalar JAX array, or `(scalar, metrics)`."
    )


class _Described:
    """A leaf that is shown by its dtype and shape."""

    def __init__(self, leaf: Any):
        self._text = describe(leaf)

    def __repr__(self) -> str:
        return self._text


def _form(tree: Any) -> str:
    """A few characters for a tree of arrays: `{'loss': float32[]}`."""
    return f"`{describe(jtu.tree_map(_Described, tree))}`"
