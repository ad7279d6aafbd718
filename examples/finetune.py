"""Learn the digits 5 to 9 from 5 labels each: train a new head, and then the body, too.

    python examples/finetune.py [--config configs/finetune.toml] [--num-steps 1000]

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


class Classifier(eqx.Module):
    body: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, width, *, key):
        k1, k2 = jr.split(key)
        self.body = eqx.nn.MLP(64, width, width, 1, final_activation=jax.nn.relu, key=k1)
        self.head = eqx.nn.Linear(width, 5, key=k2)

    def __call__(self, x):
        return self.head(self.body(x))


def cross_entropy(model, batch):
    x, y = batch
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def accuracy(model, batch):
    x, y = batch
    return jnp.mean(jax.vmap(model)(x).argmax(axis=1) == y)


def load_data(config, seed):
    """Digits 0 to 4; a few of 5 to 9 to fine-tune on; and the rest of these."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = x[order].astype("float32") / 16, y[order]
    rows = [np.flatnonzero(y == digit) for digit in range(10)]
    few = np.concatenate([r[: config["labels"]] for r in rows[5:]])
    rest = np.concatenate([r[config["labels"] :] for r in rows[5:]])
    size, old = config["batch_size"], y < 5
    return (
        tr.Arrays(x[old], y[old], batch_size=size),
        tr.Arrays(x[few], y[few] - 5, batch_size=size),
        tr.Arrays(x[rest], y[rest] - 5, batch_size=len(rest)),
    )


def make_trainers(config):
    """Three ways to fine-tune: the same optimizers, at different times."""
    head = tr.Part(optax.adam(config["head_rate"]), lambda m: m.head)
    body = lambda **when: tr.Part(
        optax.adamw(config["body_rate"]), lambda m: m.body, **when
    )
    ways = {
        "head only": tr.Parts(head=head),
        "all from the start": tr.Parts(head=head, body=body()),
        "head, then all": tr.Parts(head=head, body=body(start=config["start"])),
    }
    return {name: tr.Trainer(cross_entropy, parts) for name, parts in ways.items()}


def experiment(config, progress=True):
    """Fine-tune in each way with each seed: `{way: [(result, accuracy), ...]}`."""
    pretrainer = tr.Trainer(cross_entropy, optax.adam(1e-3))
    trainers = make_trainers(config)
    trainers["scratch"] = tr.Trainer(cross_entropy, optax.adam(1e-3))
    runs = {name: [] for name in trainers}
    for seed in config["seeds"]:
        old, few, rest = load_data(config, seed)
        keys = jr.split(jr.key(seed), 4)
        model = Classifier(config["width"], key=keys[0])
        scratch = model
        model = pretrainer.fit(
            model, old, num_steps=config["pretrain_steps"], key=keys[1], progress=progress
        ).model
        model = eqx.tree_at(lambda m: m.head, model, Classifier(config["width"], key=keys[2]).head)
        for name, trainer in trainers.items():
            watch = tr.Evaluate(rest, every=50, loss=accuracy, name="test")
            result = trainer.fit(
                scratch if name == "scratch" else model, few, num_steps=config["num_steps"], key=keys[3], progress=progress, callbacks=[watch]
            )
            runs[name].append((result, result.history["test/loss"][-1]))
    return runs


if __name__ == "__main__":
    import sys, time
    config = tomllib.loads(open("configs/finetune.toml").read())
    for a in sys.argv[1:]:
        k, v = a.split("="); config[k] = eval(v)
    t=time.time()
    for s, rs in experiment(config, False).items():
        print(s, "%.4f"%np.mean([m for r, m in rs]), [round(float(m),3) for r,m in rs], rs[0][0].compiles, np.round(np.mean([r.history["test/loss"] for r,m in rs],axis=0),3))
    print(time.time()-t, time.process_time())
