"""The Trainer: one compiled step, and the loop around it."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, final, Literal

import jax.numpy as jnp
import jax.random as jr
import optax

from trainer._callback import AbstractCallback, check_callbacks
from trainer._evaluate import Evaluator
from trainer._frozen import Frozen
from trainer._history import History
from trainer._loop import Loop, Watch
from trainer._program import (
    check_ends,
    check_key,
    check_model,
    make_program,
    split_model,
)
from trainer._result import FitResult
from trainer._selectors import positive_int
from trainer._state import TrainState
from trainer._step import CompiledStep
from trainer._tree import canonical
from trainer._types import Key
from trainer._update import AbstractUpdate
from trainer.callbacks import Progress
from trainer.data import AbstractSource, as_source, Wanted


_FINAL = ("init", "fit", "evaluate")


class Trainer(Frozen):
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
        optimizer: An `optax.GradientTransformation`.
        update: In the place of both: a `tr.AbstractUpdate`.
        steps_per_call: How many steps one call of the compiled function runs at most.
            It changes how long a run takes and nothing else. `"auto"` chooses it from
            the cost of a step.

    Raises:
        TypeError: The loss is given in two ways or in none, or is not a loss.
        ValueError: `steps_per_call` is below 1.

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
        optimizer: optax.GradientTransformation | None = None,
        *,
        update: AbstractUpdate | None = None,
        steps_per_call: int | Literal["auto"] = "auto",
    ):
        self.last_state, self.last_history = None, None
        self._evaluator = Evaluator()
        if steps_per_call != "auto":
            steps_per_call = positive_int(steps_per_call, "`steps_per_call`")
        self.steps_per_call: int | Literal["auto"] = steps_per_call
        cls = type(self)
        self.program: AbstractUpdate = make_program(
            cls.__name__,
            loss,
            optimizer,
            update,
            None if cls.loss is Trainer.loss else self.loss,
            None if cls.update is Trainer.update else self.update,
        )

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
        """
        model, model_state = split_model(model)
        check_model(model, model_state, self.program)
        key = jr.key(0) if key is None else key
        check_key(key)
        model = canonical(model)
        zero, opt_state = jnp.int32(0), self.program.init(model)
        return canonical(TrainState(zero, zero, model, model_state, opt_state, key))

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
        continues = isinstance(model, TrainState)
        first = int(model.step) if continues else 0
        start = lambda: canonical(model) if continues else self.init(model, key=key)
        source, history = as_source(data), History(self.program.branches())
        self.last_history = history
        total = num_steps if num_epochs is None else source.num_steps(num_epochs)
        bar = Progress(first, total, history.branches, not progress)
        watch = Watch(history, bar, callbacks, self.evaluate)
        try:
            return self._run(start, first, source, num_steps, num_epochs, watch)
        finally:
            bar.close()

    def _run(
        self,
        start: Callable[[], TrainState],
        first: int,
        source: AbstractSource,
        num_steps: int | None,
        num_epochs: int | None,
        watch: Watch,
    ) -> FitResult:
        state = start()
        if self._compiled is not None:
            self._compiled.check_state(state, source)
        self.last_state = state
        ended = num_steps is not None and first >= num_steps
        items = source.items(self._wanted(state.key, first, num_epochs))
        item = None if ended else next(items, None)
        if item is None:
            reason = "num_steps" if ended else "num_epochs"
            return FitResult(state, watch.history, reason, self._compiles(), 0.0, 0.0)
        compile_seconds = 0.0
        if self._compiled is None:
            self._compiled = CompiledStep(
                self.program,
                state,
                source,
                item.content,
                self.steps_per_call,
                watch.period,
            )
            compile_seconds = self._compiled.seconds
        watch.progress.compiled()
        items = itertools.chain([item], items)
        loop = Loop(self._compiled, state, first, source, items, watch)
        try:
            loop.run(num_steps)
        finally:
            self.last_state = start() if loop.is_lost() else loop.state()
        return FitResult(
            self.last_state,
            watch.history,
            loop.stop_reason or "",
            self._compiles(),
            compile_seconds,
            loop.seconds,
        )

    def _wanted(self, key: Key, first: int, num_epochs: int | None) -> Wanted:
        asked = self.program.takes("mask")
        like = None if self._compiled is None else self._compiled.layout.like
        return Wanted(first, num_epochs, key, any(asked), all(asked), like)

    def _compiles(self) -> int:
        return 0 if self._compiled is None else self._compiled.compiles

    @final
    def evaluate(self, model: Any, data: Any, *, loss: Any = None) -> dict[str, float]:
        """Average the loss and its metrics over data, in inference mode.

        Dropout is off, BatchNorm uses its running statistics and does not change them,
        and a loss that asks for a key gets one that depends on the batch's place alone:
        the same model gives the same numbers. Batches count by their examples, so the
        result is the mean over examples for a loss that is a mean. A short last batch
        is padded if the loss takes `mask`; otherwise its shape is compiled once more.

        Args:
            model: A model, `(model, state)`, or a TrainState. A schedule is evaluated
                at the state's step and epoch; at 0 for a model.
            data: As for `fit`. It is gone through once.
            loss: Evaluated in the place of the Trainer's own loss, if given. It has the
                form of a loss; an accuracy may be one. One function object is compiled
                once, so give the same each time.

        Returns:
            `"loss"`, and every metric, as floats.

        Raises:
            ValueError: There are no batches.
            TypeError: The Trainer has no loss of its own, and none is given.
        """
        if loss is None:
            own = None if type(self).loss is Trainer.loss else self.loss
            loss = getattr(self.program, "loss", own)
        if not isinstance(model, TrainState):
            model, model_state = split_model(model)
            zero = jnp.int32(0)
            model = TrainState(zero, zero, model, model_state, None, jr.key(0))
        return self._evaluator(loss, model, data)
