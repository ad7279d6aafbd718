"""Keep a VAE's latents alive by raising the weight of its KL term in cycles.

    python examples/vae.py [--config configs/vae.toml] [--num-steps 4000]

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

import trainer as tr


class VAE(eqx.Module):
    """The decoder sees the pixels before each one, so that it could do without `z`."""

    encoder: eqx.nn.MLP
    decoder: eqx.nn.MLP
    pixels: eqx.nn.Linear

    def __init__(self, latents, width, *, key):
        k1, k2, k3 = jr.split(key, 3)
        self.encoder = eqx.nn.MLP(64, 2 * latents, width, 1, key=k1)
        self.decoder = eqx.nn.MLP(latents, 64, width, 1, key=k2)
        self.pixels = eqx.nn.Linear(64, 64, use_bias=False, key=k3)

    def posterior(self, x):
        return jnp.split(self.encoder(x), 2)

    def logits(self, x, z):
        return self.decoder(z) + jnp.tril(self.pixels.weight, -1) @ x


def reconstruction(model, x, *, key):
    mean, log_std = jax.vmap(model.posterior)(x)
    z = mean + jnp.exp(log_std) * jr.normal(key, mean.shape)
    logits = jax.vmap(model.logits)(x, z)
    return optax.sigmoid_binary_cross_entropy(logits, x).sum(axis=1).mean()


def kl(model, x):
    mean, log_std = jax.vmap(model.posterior)(x)
    return 0.5 * (mean**2 + jnp.exp(2 * log_std) - 1 - 2 * log_std).sum(axis=1).mean()


def active_units(model, x):
    """Latents whose posterior mean has a variance above 0.01 over the data."""
    mean, _ = jax.vmap(model.posterior)(x)
    return jnp.sum(mean.var(axis=0) > 0.01)


def negative_elbo(model, x, *, key):
    rate, units = kl(model, x), active_units(model, x)
    return reconstruction(model, x, key=key) + rate, {"kl": rate, "units": units}


def weight_of_kl(schedule, config):
    beta, over = config["beta"], config["over"]
    if schedule == "constant":
        return beta
    if schedule == "linear":
        return tr.Anneal(0.0, beta, over=over)
    cycles, ramp = config["cycles"], config["ramp"]
    return tr.Anneal(0.0, beta, over=over, cycles=cycles, ramp=ramp)


def load_data(batch_size):
    x = (load_digits().data > 7.5).astype("float32")
    train, test = train_test_split(x, random_state=0)
    return tr.Arrays(train, batch_size=batch_size), tr.Arrays(test, batch_size=len(test))


def experiment(config, progress=True):
    """Train with each schedule and seed: `{schedule: [(result, measured), ...]}`."""
    train, test = load_data(config["batch_size"])
    runs = {}
    for schedule in config["schedules"]:
        weight = weight_of_kl(schedule, config)
        loss = tr.WeightedSum(reconstruction=reconstruction, kl=(weight, kl))
        trainer = tr.Trainer(loss, optax.adam(config["learning_rate"]))
        runs[schedule] = []
        for seed in config["seeds"]:
            model_key, key = jr.split(jr.key(seed))
            model = VAE(config["latents"], config["width"], key=model_key)
            steps = config["num_steps"]
            result = trainer.fit(
                model, train, num_steps=steps, key=key, progress=progress
            )
            measured = trainer.evaluate(result.model, test, loss=negative_elbo)
            runs[schedule].append((result, measured))
    return runs


if __name__ == "__main__":
    import sys, time
    config = tomllib.loads(open("configs/vae.toml").read())
    for a in sys.argv[1:]:
        k, v = a.split("="); config[k] = eval(v)
    t=time.time()
    for s, rs in experiment(config, False).items():
        for r, m in rs: print(s, m, r.compiles, round(r.seconds,2), round(r.compile_seconds,2))
    print(time.time()-t)
