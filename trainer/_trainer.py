"""The Trainer: one compiled step, and the loop around it."""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, final, Literal

import jax.random as jr
import optax

from trainer._callback import AbstractCallback, check_callbacks
from trainer._checks import (
    check_arrays,
    check_ends,
    check_key,
    check_model,
    split_model,
)
from trainer._compile_cache import keep_compiled
from trainer._counts import positive_int
from trainer._eager import values_if
from trainer._evaluate import Evaluator
from trainer._evaluating import Evaluating
from trainer._fitting import check_measured, check_watched
from trainer._guard import check_nonfinite, Nonfinite
from trainer._history import History
from trainer._make_update import make_update
from trainer._parts import Parts
from trainer._program import Program
from trainer._result import FitResult
from trainer._state import TrainState
from trainer._steps import check_on_recompile, OnRecompile
from trainer._transforms import AbstractTransform
from trainer._types import Key
from trainer._update import AbstractUpdate
from trainer._watch import Watch
from trainer.callbacks import Progress
from trainer.data import as_source


_FINAL = ("init", "fit", "evaluate", "check")


class Trainer(Evaluating):
    """Trains a model with one step that is compiled once.

    Give it a loss and an optimizer; or an update; or subclass it and override `loss`
    (then give the optimizer alone) or `update`. The loss is given in exactly one way.

    Attributes that a subclass sets are read while the step is traced and are part of it
    from then on: one that is assigned afterwards raises `RecompileError`. What changes
    while training is a schedule: `tr.Switch`, `tr.WeightedSum`, or the `step` that a
    loss can ask for.

    Args:
        loss: A function `(model, batch)` that returns a scalar, or `(scalar, metrics)`,
            and may ask for `step`, `epoch`, `key`, `mask` and `state` by name; a
            `tr.AbstractLoss`; or a schedule of them.
        optimizer: An `optax.GradientTransformation`, or `tr.Parts`.
        update: In the place of both: a `tr.AbstractUpdate`.
        transforms: What is done to the model after each update, by name and in order:
            averages, target networks, projections.
        nonfinite: What to do when a step makes the loss or the state infinite or NaN.
            `"skip"` leaves the update out: model, optimizer and averages stay as they
            were, and only copies to a target and projections are made. `"raise"` ends
            the run with a `NonfiniteError` and keeps the state before it. None goes on,
            and warns of a loss that is not finite.
        steps_per_call: How many steps one call of the compiled function runs at most.
            It changes how long a run takes and nothing else. `"auto"` chooses it.
        on_recompile: What to do with a batch or a model of another form than the first,
            for which the step would have to compile again. `"error"` refuses it, with
            the reason. `"warn"` and `"allow"` compile once for each form and keep all:
            for sequences that are padded to a few lengths. See `tr.explain`.
        compile_cache: Folder in which JAX keeps what this process compiles from now on,
            and finds what an earlier one has: a script that is run again starts sooner.
        debug: Whether to run the same program op by op, with values, for a look inside:
            `breakpoint()`, `print`, `assert` and `if` work in a loss, and attributes
            may be set at any time. Nothing is compiled, and it is slow. It is the same
            as `fit` and `evaluate` under `jax.disable_jit()`.

    Raises:
        TypeError: The loss is given in two ways or in none, or is not a loss.
        ValueError: `steps_per_call` is below 1, or an option is none of its values.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp, jax.random as jr, optax
        >>> def mse(model, batch):
        ...     x, y = batch
        ...     return jnp.mean((jax.vmap(model)(x) - y) ** 2)
        >>> x = jnp.linspace(-1, 1, 32)[:, None]
        >>> trainer = Trainer(mse, optax.adam(1e-2))
        >>> model = eqx.nn.Linear(1, 1, key=jr.key(0))
        >>> result = trainer.fit(model, [(x, 3 * x)], num_steps=500, progress=False)
        >>> float(result.history["loss"][-1]) < 1e-3, result.compiles
        (True, 1)
    """

    last_state: TrainState | None
    """The state at the end of the last fit, also of one that raised.

    If the device itself failed in the middle of a call, and took the state with it, it
    is the state that the fit began with. None before the first fit.
    """

    last_history: History | None
    """What the last fit recorded, also of one that raised."""

    def __init__(
        self,
        loss: Any = None,
        optimizer: optax.GradientTransformation | Parts | None = None,
        *,
        update: AbstractUpdate | None = None,
        transforms: Mapping[str, AbstractTransform] | None = None,
        nonfinite: Nonfinite | None = None,
        steps_per_call: int | Literal["auto"] = "auto",
        on_recompile: OnRecompile = "error",
        compile_cache: str | os.PathLike[str] | None = None,
        debug: bool = False,
    ):
        if compile_cache is not None:
            keep_compiled(compile_cache)
        self.last_state, self.last_history = None, None
        self._evaluator = Evaluator()
        if steps_per_call != "auto":
            steps_per_call = positive_int(steps_per_call, "`steps_per_call`")
        self.steps_per_call: int | Literal["auto"] = steps_per_call
        self.on_recompile: OnRecompile = check_on_recompile(on_recompile)
        self.debug = bool(debug)
        cls = type(self)
        own = make_update(
            cls.__name__,
            loss,
            optimizer,
            update,
            None if cls.loss is Trainer.loss else self.loss,
            None if cls.update is Trainer.update else self.update,
        )
        self.program = Program(own, transforms, check_nonfinite(nonfinite))

    def __init_subclass__(cls, **kwargs: Any):
        """Refuse a subclass that overrides what it may not."""
        super().__init_subclass__(**kwargs)
        for name in _FINAL:
            if getattr(cls, name) is not getattr(Trainer, name):
                raise TypeError(
                    f"`{cls.__name__}` overrides `Trainer.{name}`, which is final. "
                    "Override `loss` or `update`, or pass a callback."
                )

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """Override to define the loss.

        `def loss(self, model, batch)`, and any of `step`, `epoch`, `key`, `mask`,
        `state` by name; it returns what a function given as `loss=` returns.
        """
        raise NotImplementedError

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Override to define a whole update.

        `def update(self, model, opt_state, batch)`, and what it asks for by name; it
        returns what a `tr.AbstractUpdate` returns. `opt_state` starts as the
        optimizer's state for the model, or as None without an optimizer.
        """
        raise NotImplementedError

    @final
    def init(self, model: Any, *, key: Key | None = None) -> TrainState:
        """Make the state before the first step.

        Args:
            model: The model, or `(model, state)` as `eqx.nn.make_with_state` returns.
            key: The run's random key, typed or not. `jax.random.key(0)` if not given.

        Returns:
            A TrainState of new, strongly typed arrays. The caller's model stays usable,
            and arrays that were one are separate.

        Raises:
            TypeError: `key` is not a key, the model has nothing to train, or it has no
                state and a loss asks for it.
            ValueError: An array of the model was deleted.
        """
        check_arrays(model)
        model, model_state = split_model(model)
        check_model(model, model_state, self.program.update)
        key = jr.key(0) if key is None else key
        check_key(key)
        with values_if(self.debug):
            return self.program.init(model, model_state, key)

    @final
    def fit(
        self,
        model: Any,
        data: Any,
        *,
        num_steps: int | None = None,
        num_epochs: int | None = None,
        key: Key | None = None,
        callbacks: Sequence[AbstractCallback] = (),
        progress: bool = True,
    ) -> FitResult:
        """Train up to a total number of steps or epochs.

        Args:
            model: A model starts a run; `(model, state)` too, as
                `eqx.nn.make_with_state` returns. A TrainState continues one.
            data: `tr.Arrays`; a `tr.Loader`, or what one takes: any re-iterable of
                batches, a function that makes one, an iterator; or None, for a loss
                that needs no batch.
            num_steps: Completed steps at which to stop, those of the state included.
            num_epochs: Or: completed epochs at which to stop, likewise.
            key: The run's random key, when a model is given; see `init`.
            callbacks: Called in order; see `tr.AbstractCallback`.
            progress: Whether to show a progress bar.

        Returns:
            A FitResult. What was given is never changed.

        Raises:
            TypeError: Not exactly one of `num_steps` and `num_epochs` is given, or a
                key with a TrainState.
            RecompileError: The state or a batch would compile the step again.
            ValueError: The data ends before `num_steps`, or an epoch has no batches.

        After any error, `last_state` and `last_history` say how far it came.
        """
        num_steps, num_epochs = check_ends(num_steps, num_epochs)
        check_callbacks(callbacks)
        if isinstance(model, TrainState) and key is not None:
            raise TypeError("A TrainState has its key already; `key` starts a new run.")
        check_watched(self.program, callbacks)
        check_measured(self._own_loss(), callbacks)
        source, history = as_source(data), History(self.program.branches())
        self.last_history = history
        total = num_steps if num_epochs is None else source.num_steps(num_epochs)
        if isinstance(model, TrainState):
            check_arrays(model)
            first, start = int(model.step), functools.partial(self._copied, model)
        else:
            first, start = 0, lambda: self.init(model, key=key)
        branches = self.program.update.branches()
        bar = Progress(first, total, branches, not progress)
        watch = Watch(history, bar, callbacks, self.evaluate)
        try:
            return self._run(start, source, (num_steps, num_epochs, total), watch)
        finally:
            bar.close()

    def _own_loss(self) -> Any:
        """The one loss that is trained on, or None."""
        own = None if type(self).loss is Trainer.loss else self.loss
        return getattr(self.program.update, "loss", own)
