"""Other packages that train with JAX, each by the way its documentation shows.

They are not needed to work on this package, so a checker may not find them.
"""
# pyright: reportMissingImports=false

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from .works import make_batches, make_data, make_losses, make_model, RATE, Work


def make_keras(work: Work, steps_per_execution: int) -> Callable[[int], int]:
    """`Model.fit` by whole epochs, shuffled, and silent."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    dense = keras.layers.Dense
    if work.convolutions:
        how = {"strides": 2, "padding": "same", "activation": "relu"}
        convolutions = [keras.layers.Conv2D(n, 3, **how) for n in (8, 16)]
        layers = [*convolutions, keras.layers.Flatten(), dense(10)]
    else:
        *widths, last = work.sizes[1:]
        layers = [*(dense(n, activation="relu") for n in widths), dense(last)]
    x, y = make_data(work)
    if work.convolutions:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    model = keras.Sequential([keras.Input(x.shape[1:]), *layers])
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer=keras.optimizers.Adam(RATE),
        loss=cross_entropy if work.classifies else "mse",
        steps_per_execution=steps_per_execution,
    )

    def run(steps: int) -> int:
        epochs = -(-steps // work.steps_per_epoch)
        model.fit(x, y, batch_size=work.batch_size, epochs=epochs, verbose=0)
        return epochs * work.steps_per_epoch

    return run


def make_klax(work: Work, logger: bool) -> Callable[[int], int]:
    """`klax.fit`, with its record of the loss every 100 steps or without; silent."""
    import jax
    import klax
    import optax

    loss_of, optimizer = make_losses(work)[0], optax.adam(RATE)
    model, data = make_model(work), make_data(work)

    @klax.loss
    def loss(model: Any, batch: Any, run_state: Any) -> Any:
        del run_state
        return loss_of(model, batch)

    how = {"loss": loss, "optimizer": optimizer, "batch_size": work.batch_size}

    def run(steps: int) -> int:
        key = jax.random.key(0)
        trained, _ = klax.fit(
            model, data, steps=steps, make_logger=logger, verbose=0, key=key, **how
        )
        jax.block_until_ready(jax.tree.leaves(trained))
        return steps

    return run


def make_flowjax(work: Work) -> Callable[[int], int]:
    """`fit_to_data` by whole epochs, without its bar.

    It holds a part of the data out and measures the loss there once an epoch: one
    batch, which is the least that it takes.
    """
    import equinox as eqx
    import jax
    import optax
    from flowjax.train import fit_to_data

    loss_of, optimizer = make_losses(work)[0], optax.adam(RATE)
    model, data = make_model(work), make_data(work)
    per_epoch = work.steps_per_epoch - 1

    def loss(params: Any, static: Any, x: Any, y: Any, key: Any) -> Any:
        del key
        return loss_of(eqx.combine(params, static), (x, y))

    def run(steps: int) -> int:
        epochs = -(-steps // per_epoch)
        trained, _ = fit_to_data(
            jax.random.key(0),
            model,
            data,
            loss_fn=loss,
            optimizer=optimizer,
            max_epochs=epochs,
            max_patience=epochs,
            batch_size=work.batch_size,
            val_prop=1 / work.steps_per_epoch,
            return_best=False,
            show_progress=False,
        )
        jax.block_until_ready(jax.tree.leaves(trained))
        return epochs * per_epoch

    return run


def make_nnx(work: Work, how: str) -> Callable[[int], int]:
    """A step by `nnx.jit`, or by what keeps its model taken apart between calls."""
    import jax
    import optax
    from flax import nnx

    def loss_of(model: Any, x: Any, y: Any) -> Any:
        found = model(x)
        if not work.classifies:
            return ((found - y) ** 2).mean()
        return optax.softmax_cross_entropy_with_integer_labels(found, y).mean()

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
        optimizer.update(model, grads)
        return loss

    batches, model = make_batches(work), _make_nnx_model(work)
    optimizer = nnx.Optimizer(model, optax.adam(RATE), wrt=nnx.Param)
    one = {
        "jit": lambda: functools.partial(nnx.jit(step), model, optimizer),
        "cached_partial": lambda: nnx.cached_partial(nnx.jit(step), model, optimizer),
        "jit_partial": lambda: nnx.jit_partial(step, model, optimizer, graph=False),
    }[how]()

    def run(steps: int) -> int:
        for x, y in itertools.islice(itertools.cycle(batches), steps):
            one(x, y)
        jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
        return steps

    return run


def _make_nnx_model(work: Work) -> Any:
    from flax import nnx

    rngs = nnx.Rngs(0)
    if work.convolutions:
        how = {"strides": 2, "padding": 1, "rngs": rngs}
        return nnx.Sequential(
            lambda x: x.transpose(0, 2, 3, 1),
            nnx.Conv(1, 8, (3, 3), **how),
            nnx.relu,
            nnx.Conv(8, 16, (3, 3), **how),
            nnx.relu,
            lambda x: x.reshape(len(x), -1),
            nnx.Linear(784, 10, rngs=rngs),
        )
    layers = []
    for size, following in itertools.pairwise(work.sizes):
        layers += [nnx.Linear(size, following, rngs=rngs), nnx.relu]
    return nnx.Sequential(*layers[:-1])
