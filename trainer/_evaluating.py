"""What a Trainer does with a model beside training it."""

import abc
import dataclasses
from typing import Any, final

import jax.numpy as jnp
import jax.random as jr

from trainer._checks import check_arrays, split_model
from trainer._counts import INT32_MAX, positive_int
from trainer._eager import values_if
from trainer._evaluate import Evaluator
from trainer._fitting import Fitting, started
from trainer._memory import Memory, part_of
from trainer._state import TrainState
from trainer._types import Key
from trainer.data import as_source
from trainer.preflight._checking import check_again, preflight
from trainer.preflight._preflight import Preflight


class Evaluating(Fitting):
    """Looks at models before they are trained, and evaluates them."""

    _evaluator: Evaluator

    @abc.abstractmethod
    def _own_loss(self) -> Any:
        """The one loss that is trained on, or None."""

    @abc.abstractmethod
    def init(self, model: Any, *, key: Key | None = None) -> TrainState:
        """Make the state before the first step."""

    @final
    def check(
        self,
        model: Any,
        data: Any,
        *,
        num_steps: int | None = None,
        key: Key | None = None,
    ) -> Preflight:
        """Look at model, data and losses before training, and change nothing.

        The step is compiled, every loss and its gradient are computed on the first
        batch, and one step is made of a copy. All of it is thrown away: a later `fit`
        does what it would have done. What random state data draw from is put back, as
        far as Python, NumPy, PyTorch and the attributes of a loader hold it.

        Warnings that tracing gives are listed and not shown. With `debug` the step is
        compiled as well, so a loss that needs values raises.

        Args:
            model: As for `fit`.
            data: As for `fit`, but for an iterator, which would lose a batch.
            num_steps: Total of the run, for what is given in fractions of it.
            key: As for `fit`.

        Returns:
            A `tr.Preflight`. Print it to see a table; `ok` says whether all is well.

        Raises:
            TypeError: `data` is an iterator; or as `fit` raises it.
            TraceError: A loss or an update does what cannot be compiled.

        Example:
            >>> import optax
            >>> from trainer import Trainer
            >>> def square(model, batch): return jnp.sum((model["w"] * batch) ** 2)
            >>> trainer = Trainer(square, optax.adam(1e-2))
            >>> model = {"w": jnp.ones(3)}
            >>> found = trainer.check(model, [jnp.array([1.0, 2.0, 3.0])])
            >>> found.ok, found.compiles, found.losses["loss"].value
            (True, 1, 14.0)
            >>> found.losses["loss"].gradient
            {"model['w']": 19.79898987322333}
        """
        if isinstance(model, TrainState) and key is not None:
            raise TypeError("A TrainState has its key already; `key` starts a new run.")
        if num_steps is not None:
            num_steps = positive_int(num_steps, "`num_steps`")
        source = check_again(as_source(data))
        has_state = isinstance(model, TrainState)
        if num_steps is None and has_state and model.memory.num_steps is not None:
            num_steps = int(model.memory.num_steps)
        total = INT32_MAX if num_steps is None else num_steps

        def start() -> TrainState:
            own = self._copied(model) if has_state else self.init(model, key=key)
            return started(self.program, own, source, total)

        return preflight(self.program, start, source, self.steps_per_call, self._steps)

    @final
    def evaluated_model(self, state: TrainState, using: str) -> Any:
        """The model that is meant to be evaluated, in the place of the one trained.

        Args:
            state: A TrainState.
            using: Name of a transform that keeps an average, such as a `tr.EMA`; or
                `"optimizer"`, for schedule-free optimizers, which evaluate other
                parameters than they train.

        Raises:
            KeyError: There is no transform of that name.
            TypeError: `state` is a model, which has no average.
        """
        if not isinstance(state, TrainState):
            raise TypeError(
                f"`using={using!r}` needs a TrainState, which holds the average; "
                f"`{type(state).__name__}` was given. Pass `result.state`."
            )
        return self.program.evaluated(state, using)

    @final
    def evaluate(
        self, model: Any, data: Any, *, loss: Any = None, using: str | None = None
    ) -> dict[str, float]:
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

            using: Name of the transform whose average is evaluated in the place of
                the model, or `"optimizer"`; see `evaluated_model`.

        Returns:
            `"loss"`, and every metric, as floats.

        Raises:
            ValueError: There are no batches, or an array of the model was deleted.
            TypeError: The Trainer has no loss of its own, and none is given.
        """
        check_arrays(model)
        own = self._own_loss()
        loss = own if loss is None else loss
        if using is not None:
            model = dataclasses.replace(model, model=self.evaluated_model(model, using))
        if not isinstance(model, TrainState):
            model, model_state = split_model(model)
            zero = jnp.int32(0)
            model = TrainState(zero, zero, model, model_state, None, jr.key(0))
        # What does not change an evaluation is no reason to compile it again.
        kept = part_of(model.memory.program, "loss") if loss is own else None
        num_steps = model.memory.num_steps
        num_steps = jnp.int32(INT32_MAX) if num_steps is None else num_steps
        memory = Memory(program=kept, num_steps=num_steps)
        model = dataclasses.replace(model, memory=memory)
        with values_if(self.debug):
            return self._evaluator(loss, model, data)
