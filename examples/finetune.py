"""Fine-tune on 50 labeled digits: train a new head at first, and then the body, too.

    python examples/finetune.py [--config configs/finetune.toml] [--num-steps 600]

The body was trained before to fill in hidden pixels of half of the digits, without
labels. Mean test accuracy over seeds 0 to 4, which draw other digits each, and how
often a way was the best:

    head alone            84.8 %    0
    all from the start    86.2 %    1
    head, then all        86.9 %    4
    not pretrained        85.1 %    0

The difference between the two best is small: 0.8 points, from -0.2 to 1.2 by seed. All
runs together take 15 seconds of one core.
"""

import argparse
import pathlib
import tomllib

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from sklearn.datasets import load_digits

import trainer as tr


class Model(eqx.Module):
    body: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, width, out, *, key):
        k1, k2 = jr.split(key)
        relu = jax.nn.relu
        self.body = eqx.nn.MLP(64, width, width, 1, final_activation=relu, key=k1)
        self.head = eqx.nn.Linear(width, out, key=k2)

    def __call__(self, x):
        return self.head(self.body(x))


def denoising(model, x, *, key):
    """Fill in the pixels, half of which are hidden. It needs no labels."""
    seen = jr.bernoulli(key, 0.5, x.shape)
    return jnp.sum((jax.vmap(model)(2 * x * seen) - x) ** 2, axis=1).mean()


def cross_entropy(model, batch):
    x, y = batch
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def accuracy(model, batch):
    x, y = batch
    return jnp.mean(jax.vmap(model)(x).argmax(axis=1) == y)


def load_data(labels, seed):
    """Digits without labels; a few of them with labels; and others to test on."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = x[order].astype("float32") / 16, y[order]
    half = len(x) // 2
    few = np.concatenate([np.flatnonzero(y == digit)[:labels] for digit in range(10)])
    return (
        tr.Arrays(x[:half], batch_size=64),
        tr.Arrays(x[few], y[few], batch_size=len(few)),
        tr.Arrays(x[half:], y[half:], batch_size=len(x) - half),
    )


def make_trainers(config):
    """Ways to fine-tune: the same optimizers, which act at different times."""
    head = tr.Part(optax.adam(config["head_rate"]), lambda m: m.head)
    adamw, of_body = optax.adamw(config["body_rate"]), lambda m: m.body
    body, later = (tr.Part(adamw, of_body, start=s) for s in (0, config["start"]))
    optimizers = {
        "head alone": tr.Parts(head=head),
        "all from the start": tr.Parts(head=head, body=body),
        "head, then all": tr.Parts(head=head, body=later),
    }
    return {name: tr.Trainer(cross_entropy, o) for name, o in optimizers.items()}


def experiment(config, progress=True):
    """Fine-tune in each way with each seed: `{way: [(result, accuracy), ...]}`."""
    pretrainer = tr.Trainer(denoising, optax.adam(config["pretrain_rate"]))
    trainers = make_trainers(config)
    runs = {way: [] for way in [*trainers, "not pretrained"]}
    for seed in config["seeds"]:
        unlabeled, few, test = load_data(config["labels"], seed)
        k1, k2, k3 = jr.split(jr.key(seed), 3)
        pretrained = pretrainer.fit(
            Model(config["width"], 64, key=k1),
            unlabeled,
            num_steps=config["pretrain_steps"],
            key=k2,
            progress=progress,
        )
        new = Model(config["width"], 10, key=k3)
        model = eqx.tree_at(lambda m: m.body, new, pretrained.model.body)
        starts = {way: (trainer, model) for way, trainer in trainers.items()}
        starts["not pretrained"] = trainers["all from the start"], new
        watch = tr.Evaluate(test, config["every"], loss=accuracy, name="test")
        for way, (trainer, start) in starts.items():
            steps = config["num_steps"]
            result = trainer.fit(
                start, few, num_steps=steps, callbacks=[watch], progress=progress
            )
            correct = trainer.evaluate(result.model, test, loss=accuracy)["loss"]
            runs[way].append((result, correct))
    return runs


def main():
    default = pathlib.Path(__file__).parents[1] / "configs" / "finetune.toml"
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=pathlib.Path, default=default)
    parser.add_argument("--num-steps", type=int, help="instead of the config's")
    args = parser.parse_args()
    config = tomllib.loads(args.config.read_text())
    config["num_steps"] = args.num_steps or config["num_steps"]
    for way, found in experiment(config).items():
        correct = [accuracy for _, accuracy in found]
        each = ", ".join(f"{a:.3f}" for a in correct)
        print(f"{way:20}{np.mean(correct):.4f}  ({each})")
        print(f"compiles: {found[-1][0].compiles}")


if __name__ == "__main__":
    main()
