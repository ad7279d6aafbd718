"""What is given to `init` and `fit`, checked: a model, a key, an end."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from trainer._counts import positive_int
from trainer._minimize import Minimize
from trainer._result import FitResult
from trainer._state import TrainState
from trainer._tree import describe, parameters
from trainer._update import AbstractUpdate
from trainer.mistakes._deleted import check_alive


def split_model(model: Any) -> tuple[Any, eqx.nn.State | None]:
    """Take apart `(model, state)`; a model alone has no state."""
    if isinstance(model, FitResult):
        raise TypeError(
            "A FitResult is given in the place of a model. Give `result.state` to go "
            "on, or `result.model` to start anew."
        )
    if isinstance(model, TrainState):
        raise TypeError("A TrainState is given where a model starts a run.")
    if isinstance(model, tuple) and len(model) == 2:
        first, second = model
        if isinstance(second, eqx.nn.State):
            return first, second
    return model, None


def check_model(model: Any, model_state: Any, update: AbstractUpdate) -> None:
    """Raise TypeError unless the update can train the model."""
    if isinstance(update, Minimize) and not jax.tree.leaves(parameters(model)):
        raise TypeError(
            f"The model is `{describe(model)}`, which has no floating array to train. "
            "`fit` takes the model first and the data second."
        )
    if model_state is None and any(update.takes("state")):
        raise TypeError(
            "A loss or an update asks for `state`, but the model was given without "
            "one. Give what `eqx.nn.make_with_state` returned, `(model, state)`."
        )


def check_arrays(model: Any) -> None:
    """Raise ValueError if an array of a model or a TrainState was deleted."""
    check_alive("state" if isinstance(model, TrainState) else "model", model)


def check_key(key: Any) -> None:
    check_alive("key", key)
    typed = eqx.is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    raw = eqx.is_array(key) and key.dtype == jnp.uint32 and key.ndim == 1
    if not (raw or (typed and key.shape == ())):
        raise TypeError(
            f"`key` is `{describe(key)}`, which is not one random key. "
            "Use `jax.random.key(0)`."
        )


def check_ends(
    num_steps: int | None, num_epochs: int | None
) -> tuple[int | None, int | None]:
    if (num_steps is None) == (num_epochs is None):
        raise TypeError(
            f"`num_steps` is `{num_steps}` and `num_epochs` is `{num_epochs}`; give "
            "one of them. It is the total at which `fit` stops."
        )
    if num_steps is not None:
        return positive_int(num_steps, "`num_steps`"), None
    return None, positive_int(num_epochs, "`num_epochs`")
