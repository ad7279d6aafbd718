"""Learn the parity of up to 60 bits, from short rows to long ones.

    python examples/curriculum.py [--config configs/curriculum.toml] [--num-steps 3000]

Rows are drawn from a share of the data, the shortest, which grows from 5 % to all of
them in three quarters of the run. With seeds 0 to 2, the test accuracy on rows of all
lengths is 95 % after 800, 700 and 800 steps. If rows are drawn from all data from the
start, it takes 2700, 2100 and 2250. In the end both ways are at 100 %. The six runs
take 47 seconds of one core. The idea: Platanios et al., arXiv:1903.09848.
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

import trainer as tr


class Parity(eqx.Module):
    """A GRU that reads the bits one by one, and stops at the row's end."""

    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, width, *, key):
        k1, k2 = jr.split(key)
        self.cell = eqx.nn.GRUCell(1, width, key=k1)
        self.head = eqx.nn.Linear(width, "scalar", key=k2)

    def __call__(self, bits, length):
        def read(hidden, at):
            place, bit = at
            return jnp.where(place < length, self.cell(bit, hidden), hidden), None

        places = jnp.arange(len(bits)), bits[:, None]
        hidden, _ = jax.lax.scan(read, jnp.zeros(self.cell.hidden_size), places)
        return self.head(hidden)


def cross_entropy(model, batch):
    bits, length, odd = batch
    logits = jax.vmap(model)(bits, length)
    return optax.sigmoid_binary_cross_entropy(logits, odd).mean()


def accuracy(model, batch):
    bits, length, odd = batch
    return jnp.mean((jax.vmap(model)(bits, length) > 0) == odd)


def make_rows(number, longest, seed):
    """Rows of bits, from the shortest to the longest."""
    rng = np.random.default_rng(seed)
    length = np.sort(rng.integers(1, longest + 1, number))
    inside = np.arange(longest) < length[:, None]
    bits = rng.integers(0, 2, (number, longest)) * inside
    return jnp.float32(bits), jnp.asarray(length), jnp.float32(bits.sum(axis=1) % 2)


class FromTheEasiest(tr.AbstractSampler):
    """Draws from a share of the data, which are sorted by difficulty."""

    data: tuple
    share: tr.Anneal
    batch_size: int

    def init(self, key):
        del key

    def sample(self, carry, model, *, step, key, num_steps=None):
        del model
        share = self.share(step, num_steps=num_steps)
        known = jnp.ceil(share * len(self.data[0])).astype(int)
        rows = jr.randint(key, (self.batch_size,), 0, known)
        return jax.tree.map(lambda a: a[rows], self.data), carry


def train(config, share, progress):
    """Train with one schedule of the share and every seed."""
    longest, steps = config["longest"], config["num_steps"]
    data = make_rows(config["examples"], longest, seed=0)
    test = tr.Arrays(*make_rows(2000, longest, seed=1), batch_size=2000)
    sampler = FromTheEasiest(data, share, config["batch_size"])
    clip = optax.clip_by_global_norm(config["clip"])
    adam = optax.adam(config["learning_rate"])
    trainer = tr.Trainer(cross_entropy, optax.chain(clip, adam))
    watch = tr.Evaluate(test, config["every"], loss=accuracy, name="test")
    for seed in config["seeds"]:
        model_key, key = jr.split(jr.key(seed))
        model = Parity(config["width"], key=model_key)
        yield trainer.fit(
            model,
            sampler,
            num_steps=steps,
            key=key,
            callbacks=[watch],
            progress=progress,
        )


def experiment(config, progress=True):
    """Train in both ways with each seed: `{way: [result, ...]}`."""
    firsts = {"uniform": 1.0, "curriculum": config["first"]}
    shares = {
        n: tr.Anneal(first, 1.0, over=config["over"]) for n, first in firsts.items()
    }
    return {way: list(train(config, share, progress)) for way, share in shares.items()}


def steps_to(level, result):
    """The first step at which the test accuracy was as high; None if at none."""
    reached = result.history["test/loss"] >= level
    return (
        int(result.history.steps("test/loss")[reached.argmax()])
        if reached.any()
        else None
    )


def main():
    default = pathlib.Path(__file__).parents[1] / "configs" / "curriculum.toml"
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=pathlib.Path, default=default)
    parser.add_argument("--num-steps", type=int, help="instead of the config's")
    args = parser.parse_args()
    config = tomllib.loads(args.config.read_text())
    config["num_steps"] = args.num_steps or config["num_steps"]
    for way, results in experiment(config).items():
        steps = [steps_to(0.95, result) for result in results]
        final = ", ".join(f"{r.history['test/loss'][-1]:.3f}" for r in results)
        print(f"{way}: 95 % after {steps} steps; at the end {final}")
        print(f"compiles: {results[-1].compiles}")


if __name__ == "__main__":
    main()
