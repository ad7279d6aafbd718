"""Train a WGAN-GP on a ring of eight Gaussians: five critic steps, then one generator's.

    python examples/gan.py [--config configs/gan.toml] [--num-steps 18000]

"""

import argparse
import pathlib
import tomllib

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax

import trainer as tr


MODES, DEVIATION = 8, 0.05


def centers():
    angles = 2 * jnp.pi * jnp.arange(MODES) / MODES
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)


def ring(key, number):
    which, where = jr.split(key)
    mode = jr.randint(which, (number,), 0, MODES)
    return centers()[mode] + DEVIATION * jr.normal(where, (number, 2))


class Ring(tr.AbstractSampler):
    batch_size: int

    def init(self, key):
        del key

    def sample(self, carry, model, *, step, key):
        del model, step
        return ring(key, self.batch_size), carry


class GAN(eqx.Module):
    critic: eqx.nn.MLP
    generator: eqx.nn.MLP

    def __init__(self, noise, width, *, key):
        k1, k2 = jr.split(key)
        self.critic = eqx.nn.MLP(2, "scalar", width, 3, key=k1)
        self.generator = eqx.nn.MLP(noise, 2, width, 3, key=k2)

    def generate(self, key, number):
        noise = jr.normal(key, (number, self.generator.in_size))
        return jax.vmap(self.generator)(noise)


class CriticLoss(tr.AbstractLoss):
    """The Wasserstein distance, negative, and how far slopes are from 1."""

    penalty: float

    def __call__(self, model, real, *, key):
        fake_key, mix_key = jr.split(key)
        fake = model.generate(fake_key, len(real))
        mixed = real + jr.uniform(mix_key, (len(real), 1)) * (fake - real)
        score = jax.vmap(model.critic)
        distance = score(real).mean() - score(fake).mean()
        slopes = jnp.linalg.norm(jax.vmap(jax.grad(model.critic))(mixed), axis=1)
        loss = self.penalty * jnp.mean((slopes - 1) ** 2) - distance
        return loss, {"distance": distance}


def generator_loss(model, real, *, key):
    return -jax.vmap(model.critic)(model.generate(key, len(real))).mean()


def quality(points):
    """Share of points within 3 deviations of a mode, and how many modes they cover."""
    distances = jnp.linalg.norm(points[:, None] - centers(), axis=-1)
    good = distances.min(axis=1) < 3 * DEVIATION
    found = jnp.bincount(distances.argmin(axis=1), weights=good * 1.0, length=MODES)
    return float(good.mean()), int(jnp.sum(found > 0.2 * len(points) / MODES))


def sliced_wasserstein(one, other, num_slices=200):
    """Mean over directions of the distance between two clouds, seen from there."""
    angles = jnp.pi * jnp.arange(num_slices) / num_slices
    directions = jnp.stack([jnp.cos(angles), jnp.sin(angles)])
    one, other = jnp.sort(one @ directions, axis=0), jnp.sort(other @ directions, axis=0)
    return float(jnp.abs(one - other).mean())


def make_trainer(config):
    adam = optax.adam(config["learning_rate"], b1=0.0, b2=0.9)
    critic_loss = CriticLoss(config["penalty"])
    updates = {
        "critic": tr.Minimize(critic_loss, adam, where=lambda m: m.critic),
        "generator": tr.Minimize(generator_loss, adam, where=lambda m: m.generator),
    }
    update = tr.SwitchUpdate(tr.Cycle(config["turns"]), updates)
    # The average moves once in a round, as the generator does.
    every = sum(config["turns"])
    ema = tr.EMA(config["decay"], where=lambda m: m.generator, every=every)
    return tr.Trainer(update=update, transforms={"ema": ema})


def experiment(config, progress=True):
    """Train with each seed: `[(result, measured), ...]`."""
    trainer, runs = make_trainer(config), []
    for seed in config["seeds"]:
        model_key, key, fake_key, real_key = jr.split(jr.key(seed), 4)
        model = GAN(config["noise"], config["width"], key=model_key)
        data, steps = Ring(config["batch_size"]), config["num_steps"]
        result = trainer.fit(model, data, num_steps=steps, key=key, progress=progress)
        averaged = trainer.evaluated_model(result.state, "ema")
        for m in (result.model, averaged):
            fake, real = m.generate(fake_key, 4000), ring(real_key, 4000)
            good, modes = quality(fake)
            measured = {"good": good, "modes": modes}
            measured["distance"] = sliced_wasserstein(fake, real)
            print(seed, measured)
        runs.append((result, measured))
    return runs


if __name__ == "__main__":
    import sys, time
    config = tomllib.loads(open("configs/gan.toml").read())
    for a in sys.argv[1:]:
        k, v = a.split("="); config[k] = eval(v)
    print("real", quality(ring(jr.key(5), 4000)), [sliced_wasserstein(ring(jr.key(i), 4000), ring(jr.key(i+99), 4000)) for i in range(10)])
    t=time.time()
    for r, m in experiment(config, False): print(m, r.compiles, round(r.seconds,2), round(r.compile_seconds,2))
    print(time.time()-t)
