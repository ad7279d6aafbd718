"""What it costs to pass the step number into a jitted step as a Python int.

    python examples/recompile.py [--config configs/recompile.toml] [--epochs 6]

Cross-validation on scikit-learn's diabetes data, with a loss that changes every N
steps. The obvious loop hands its batch index to an `eqx.filter_jit` step, which looks
at it with an `if`. To `filter_jit` a Python int is part of the program: each new index
is a program of its own, traced and compiled when it is first met. Folds after the first
meet no new index and are fast, so the price is one compile for every step of a fold.

The same work by one `tr.Trainer` for all folds compiles once. Both train the same
models on the same batches in the same order, and must end at the same parameters.
"""

import argparse
import pathlib
import time
import tomllib
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from sklearn.datasets import load_diabetes

import trainer as tr


CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "recompile.toml"
EVENT = "/jax/core/compile/backend_compile_duration"
compiled = Counter()


def count_compile(event, duration_secs, **details):
    del duration_secs
    if event == EVENT:
        compiled[details.get("fun_name")] += 1


jax.monitoring.register_event_duration_secs_listener(count_compile)


def mse(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def huber(model, batch):
    x, y = batch
    return jnp.mean(optax.huber_loss(jax.vmap(model)(x), y))


def load(folds, batch_size):
    """For every fold the batches to train on, and the rest in one batch.

    All folds have one size, and all batches: a shorter one would be another shape, and
    so another program, in both loops.
    """
    x, y = (np.asarray(a, np.float32) for a in load_diabetes(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(x))
    parts = order[: len(x) // folds * folds].reshape(folds, -1)
    found = []
    for fold in range(folds):
        rest = np.delete(parts, fold, axis=0).ravel()
        mean, std = y[rest].mean(), y[rest].std()
        whole = rest[: len(rest) // batch_size * batch_size].reshape(-1, batch_size)
        # The columns come with a sum of squares of 1; times sqrt(n), a deviation of 1.
        data = x * len(x) ** 0.5, (y[:, None] - mean) / std
        pick = lambda rows: tuple(a[rows] for a in data)  # noqa: B023
        found.append(([pick(rows) for rows in whole], pick(parts[fold])))
    return found


def fit_cv_by_hand(models, folds, config):
    """The obvious loop. `index` is a Python int, and `step` is compiled for each."""
    optimizer = optax.adam(config["learning_rate"])
    every = config["switch_every"]

    @eqx.filter_jit
    def step_by_hand(model, opt_state, batch, index):
        loss = mse if index // every % 2 == 0 else huber
        grads = eqx.filter_grad(loss)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state

    found = []
    for model, (batches, _) in zip(models, folds, strict=True):
        opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        for epoch in range(config["epochs"]):
            for number, batch in enumerate(batches):
                index = epoch * len(batches) + number
                model, opt_state = step_by_hand(model, opt_state, batch, index)
        found.append(jax.block_until_ready(model))
    return found, compiled["jit(step_by_hand)"]


def fit_cv_by_trainer(models, folds, config):
    """The same. The step number is an array that the compiled step counts up itself."""
    loss = tr.switch_every(config["switch_every"], mse, huber)
    trainer = tr.Trainer(loss, optax.adam(config["learning_rate"]))
    found = [
        trainer.fit(model, batches, num_epochs=config["epochs"], progress=False)
        for model, (batches, _) in zip(models, folds, strict=True)
    ]
    return [result.model for result in found], found[-1].compiles


def compare(config):
    """Run both; return `(models, compiles, seconds)` of each, and the folds."""
    folds = load(config["folds"], config["batch_size"])
    keys = jr.split(jr.key(config["seed"]), len(folds))
    models = [eqx.nn.MLP(10, 1, config["width"], 2, key=key) for key in keys]
    runs = []
    for fit_cv in (fit_cv_by_hand, fit_cv_by_trainer):
        began = time.perf_counter()
        found, compiles = fit_cv(models, folds, config)
        runs.append((found, compiles, time.perf_counter() - began))
    return runs, folds


def largest_difference(models, others):
    pairs = zip(jax.tree.leaves(models), jax.tree.leaves(others), strict=True)
    return max(float(jnp.abs(a - b).max()) for a, b in pairs if eqx.is_array(a))


def main():
    parser = argparse.ArgumentParser(description="A Python int in a jitted step.")
    parser.add_argument("--config", type=pathlib.Path, default=CONFIG)
    parser.add_argument("--epochs", type=int, help="instead of the config's")
    args = parser.parse_args()
    config = tomllib.loads(args.config.read_text())
    if args.epochs is not None:
        config["epochs"] = args.epochs
    (by_hand, by_trainer), folds = compare(config)
    difference = largest_difference(by_hand[0], by_trainer[0])
    assert difference < 1e-5, f"the parameters differ by {difference}"
    steps = sum(len(batches) for batches, _ in folds) * config["epochs"]
    print(f"{'':17}{'steps':>8}{'compiles':>10}{'seconds':>9}{'held-out mse':>14}")
    for name, run in (("eqx.filter_jit", by_hand), ("tr.Trainer", by_trainer)):
        models, compiles, seconds = run
        held_out = [mse(m, rest) for m, (_, rest) in zip(models, folds, strict=True)]
        error = float(np.mean(held_out))
        print(f"{name:17}{steps:8}{compiles:10}{seconds:9.2f}{error:14.4f}")
    print(f"parameters differ by at most {difference:.1e}")
    print(f"the hand-written loop takes {by_hand[2] / by_trainer[2]:.1f} times as long")


if __name__ == "__main__":
    main()
