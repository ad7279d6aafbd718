"""Recognize handwritten digits with two losses in turn, in a step that compiles once.

    python examples/digits.py [--config configs/digits.toml] [--num-steps 2000]

For 100 steps the loss is the cross-entropy; for the next 100 it also asks for the same
prediction under two dropout masks. Test accuracy over seeds 0 to 4: 97.8 to 98.0 %.
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


def make_model(width, dropout, key):
    k1, k2 = jr.split(key)
    hidden, out = eqx.nn.Linear(64, width, key=k1), eqx.nn.Linear(width, 10, key=k2)
    relu, drop = eqx.nn.Lambda(jax.nn.relu), eqx.nn.Dropout(dropout)
    return eqx.nn.Sequential([hidden, relu, drop, out])


def predict(model, x, key):
    return jax.nn.log_softmax(jax.vmap(model)(x, key=jr.split(key, len(x))))


def cross_entropy(model, batch, *, key):
    x, y = batch
    return -jnp.mean(predict(model, x, key)[jnp.arange(len(y)), y])


class Consistency(tr.AbstractLoss):
    weight: float

    def __call__(self, model, batch, *, key):
        x, y = batch
        one, two = (predict(model, x, k) for k in jr.split(key))
        right = ((one + two) / 2)[jnp.arange(len(y)), y]
        distance = jnp.sum((jnp.exp(one) - jnp.exp(two)) * (one - two), axis=1).mean()
        return self.weight * distance - right.mean(), {"distance": distance}


def accuracy(model, batch):
    return jnp.mean(jax.vmap(model)(batch[0]).argmax(axis=1) == batch[1])


def experiment(config, progress=True):
    """Train once; return what `fit` returned, and the accuracy on the test digits."""
    x, y = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, stratify=y, random_state=0)
    scaler, size = StandardScaler().fit(x), config["batch_size"]
    train = tr.Arrays(scaler.transform(x), y, batch_size=size, shuffle=True)
    test = tr.Arrays(scaler.transform(x_test), y_test, batch_size=len(y_test))

    model_key, key = jr.split(jr.key(config["seed"]))
    model = make_model(config["width"], config["dropout"], model_key)
    other = Consistency(config["consistency"])
    loss = tr.switch_every(config["switch_every"], cross_entropy, other)
    trainer = tr.Trainer(loss, optax.adam(config["learning_rate"]))
    steps = config["num_steps"]
    result = trainer.fit(model, train, num_steps=steps, key=key, progress=progress)
    return result, trainer.evaluate(result.model, test, loss=accuracy)["loss"]


def main():
    default = pathlib.Path(__file__).parents[1] / "configs" / "digits.toml"
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=pathlib.Path, default=default)
    parser.add_argument("--num-steps", type=int, help="instead of the config's")
    args = parser.parse_args()
    config = tomllib.loads(args.config.read_text())
    config["num_steps"] = args.num_steps or config["num_steps"]
    result, correct = experiment(config)
    print(f"test accuracy: {correct:.4f}")
    print(f"steps per second: {config['num_steps'] / result.seconds:.0f}")
    print(f"compiles: {result.compiles}")


if __name__ == "__main__":
    main()
