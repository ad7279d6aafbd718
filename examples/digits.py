"""Recognise handwritten digits with two losses that take turns, in one compiled step.

    python examples/digits.py [--config configs/digits.toml] [--num-steps 2000]

A small network with dropout learns scikit-learn's 8x8 digits. For 100 steps its loss is
the cross-entropy; for the next 100 it is the cross-entropy under two dropout masks, plus
how far the two predictions are apart; then the cross-entropy again, and so on.
"""

import argparse
import pathlib
import tomllib

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import trainer as tr


CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "digits.toml"


def load(batch_size):
    """The digits as training and test data, every pixel standardised."""
    x, y = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, stratify=y, random_state=0)
    scaler = StandardScaler().fit(x)
    train = tr.Arrays(scaler.transform(x), y, batch_size=batch_size, shuffle=True)
    test = tr.Arrays(scaler.transform(x_test), y_test, batch_size=len(y_test))
    return train, test


def make_model(width, dropout, key):
    k1, k2, k3 = jr.split(key, 3)
    relu, drop = eqx.nn.Lambda(jax.nn.relu), eqx.nn.Dropout(dropout)
    first, second = (
        eqx.nn.Linear(64, width, key=k1),
        eqx.nn.Linear(width, width, key=k2),
    )
    last = eqx.nn.Linear(width, 10, key=k3)
    return eqx.nn.Sequential([first, relu, drop, second, relu, drop, last])


def predict(model, x, key):
    return jax.vmap(model)(x, key=jr.split(key, len(x)))


def cross_entropy(model, batch, *, key):
    x, y = batch
    logits = predict(model, x, key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


class Consistency(tr.AbstractLoss):
    """Cross-entropy under two dropout masks, which should predict the same."""

    weight: float

    def __call__(self, model, batch, *, key):
        x, y = batch
        one, two = (jax.nn.log_softmax(predict(model, x, k)) for k in jr.split(key))
        disagreement = jnp.mean((jnp.exp(one) - jnp.exp(two)) * (one - two))
        right = jnp.take_along_axis((one + two) / 2, y[:, None], axis=1)
        return self.weight * disagreement - right.mean(), {"disagreement": disagreement}


def accuracy(model, batch):
    x, y = batch
    return jnp.mean(jax.vmap(model)(x).argmax(axis=1) == y)


def experiment(config, progress=True):
    """Train once; return what `fit` returned and the accuracy on the test data."""
    train, test = load(config["batch_size"])
    model_key, key = jr.split(jr.key(config["seed"]))
    model = make_model(config["width"], config["dropout"], model_key)
    loss = tr.switch_every(
        config["switch_every"], cross_entropy, Consistency(config["consistency"])
    )
    trainer = tr.Trainer(loss, optax.adam(config["learning_rate"]))
    result = trainer.fit(
        model, train, num_steps=config["num_steps"], key=key, progress=progress
    )
    return result, trainer.evaluate(result.model, test, loss=accuracy)["loss"]


def main():
    parser = argparse.ArgumentParser(description="Digits, with two losses in turn.")
    parser.add_argument("--config", type=pathlib.Path, default=CONFIG)
    parser.add_argument("--num-steps", type=int, help="instead of the config's")
    args = parser.parse_args()
    config = tomllib.loads(args.config.read_text())
    if args.num_steps is not None:
        config["num_steps"] = args.num_steps
    result, reached = experiment(config)
    print(f"test accuracy: {reached:.4f}")
    print(f"steps per second: {config['num_steps'] / result.seconds:.0f}")
    print(f"compiles: {result.compiles}")


if __name__ == "__main__":
    main()
