"""What a step of the small part costs, when a large part rests.

    python benchmarks/updates.py [--rounds 7] [--steps 200]

A model has a large part and a small one, each with a loss and Adam of its own. Every
step is one of the small part. `SwitchUpdate` computes what that part needs and nothing
else. The other loops compute the gradients first, and only then choose whose optimizer
acts: that is how such a step is often written. README.md explains the rows.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

import trainer as tr


ADAM = optax.adam(1e-4)
PARTS = ("small", "large")


class Pair(eqx.Module):
    small: eqx.nn.MLP
    large: eqx.nn.MLP

    def __init__(self, key):
        one, two = jr.split(key)
        self.small = eqx.nn.MLP(64, 64, 64, 1, key=one)
        self.large = eqx.nn.MLP(64, 1, 512, 3, key=two)


def small_loss(model, batch):
    return -jnp.mean(jax.vmap(model.large)(jax.vmap(model.small)(batch)))


def large_loss(model, batch):
    fake = jax.vmap(model.large)(jax.vmap(model.small)(batch))
    return jnp.mean(fake) - jnp.mean(jax.vmap(model.large)(batch))


def alone_loss(model, batch):
    return jnp.mean((jax.vmap(model.small)(batch) - batch) ** 2)


LOSSES = {"through the large part": small_loss, "by itself": alone_loss}


def fit(model: Pair, x: np.ndarray, loss: Any) -> Callable[[int], None]:
    """`tr.SwitchUpdate`, with all that a fit does beside the steps."""
    turns = tr.SwitchUpdate(
        tr.At([1_000_000]),
        {
            "small": tr.Minimize(loss, ADAM, where=lambda m: m.small),
            "large": tr.Minimize(large_loss, ADAM, where=lambda m: m.large),
        },
    )
    trainer = tr.Trainer(update=turns)

    def run(steps: int) -> None:
        assert trainer.fit(model, [x], num_steps=steps, progress=False).compiles == 1

    return run


def by_hand(
    model: Pair, x: np.ndarray, gradients: Callable[..., Any]
) -> Callable[[int], None]:
    """One compiled loop with gradients first, and a cond for each optimizer."""
    params, static = eqx.partition(model, eqx.is_array)

    def body(number: Any, carry: Any) -> Any:
        params, states = carry
        index = (number >= 1_000_000).astype(jnp.int32)
        grads = gradients(index, eqx.combine(params, static), x)
        for place, part in enumerate(PARTS):
            get = lambda tree, part=part: getattr(tree, part)
            grad, mine = get(grads), eqx.filter(get(params), eqx.is_array)

            def act(mine: Any, state: Any, grad: Any = grad) -> Any:
                updates, state = ADAM.update(grad, state, mine)
                return eqx.apply_updates(mine, updates), state

            keep = lambda mine, state: (mine, state)
            mine, state = jax.lax.cond(index == place, act, keep, mine, states[place])
            params = eqx.tree_at(get, params, mine)
            states = (*states[:place], state, *states[place + 1 :])
        return params, states

    loop = jax.jit(lambda n, carry: jax.lax.fori_loop(0, n, body, carry))

    def run(steps: int) -> None:
        states = tuple(
            ADAM.init(eqx.filter(getattr(model, part), eqx.is_array)) for part in PARTS
        )
        jax.block_until_ready(loop(steps, (params, states)))

    return run


def both(loss: Any) -> Callable[..., Any]:
    """The gradient of each loss, at every step."""

    def gradients(index: Any, model: Pair, x: Any) -> Pair:
        del index
        small, large = eqx.filter_grad(loss), eqx.filter_grad(large_loss)
        return eqx.tree_at(lambda m: m.large, small(model, x), large(model, x).large)

    return gradients


def of_switch(loss: Any) -> Callable[..., Any]:
    """The gradient of the loss that a switch picks, for the whole model."""

    def gradients(index: Any, model: Pair, x: Any) -> Pair:
        branches = [lambda m: loss(m, x), lambda m: large_loss(m, x)]
        arrays, rest = eqx.partition(model, eqx.is_array)
        pick = lambda arrays: jax.lax.switch(
            index,
            [lambda a, f=f: f(eqx.combine(a, rest)) for f in branches],
            arrays,
        )
        return jax.grad(pick)(arrays)

    return gradients


def measure(
    rows: dict[str, Callable[[int], None]], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Microseconds a step, the rows in turn, round after round."""
    found: dict[str, list[float]] = {name: [] for name in rows}
    for run in rows.values():
        run(steps)  # compiles
    for number in range(rounds):
        for name in list(rows)[:: 1 if number % 2 == 0 else -1]:
            began = time.perf_counter()
            rows[name](steps)
            found[name].append((time.perf_counter() - began) / steps * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a step of a small part.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    about = ", ".join(f"{name} {version(name)}" for name in ("jax", "equinox", "optax"))
    print(f"{about}, Python {platform.python_version()}, {os.cpu_count()} cores")
    model = Pair(jr.key(0))
    x = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    for title, loss in LOSSES.items():
        rows = {
            "SwitchUpdate": fit(model, x, loss),
            "both gradients first": by_hand(model, x, both(loss)),
            "gradient of a switch": by_hand(model, x, of_switch(loss)),
        }
        found = measure(rows, args.rounds, args.steps)
        print(f"\nthe small part's loss goes {title}")
        for name, values in found.items():
            pairs = zip(found["SwitchUpdate"], values, strict=True)
            ratio = statistics.median(mine / other for mine, other in pairs)
            print(f"{name:24}{statistics.median(values):10.1f} us/step{ratio:8.2f}x")


if __name__ == "__main__":
    main()
