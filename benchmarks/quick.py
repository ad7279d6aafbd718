"""How near `tr.Trainer.fit` is to the fastest loop, and how far from one by hand.

    python benchmarks/quick.py [--rounds 7] [--seconds 0.5] [--json readings.json]

Rows are timed in turn, round after round, so that what else the machine does falls on
all of them alike. Compiling is left out. README.md beside this file explains the rows.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from tqdm import tqdm

import trainer as tr


EXAMPLES = 4096
SWITCH_EVERY = 100
STEPS_PER_CALL = 100
OPTIMIZER = optax.adam(1e-3)


def mse(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def huber(model, batch):
    x, y = batch
    return jnp.mean(optax.huber_loss(jax.vmap(model)(x), y))


def cross_entropy(model, batch):
    x, y = batch
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def smoothed(model, batch):
    x, y = batch
    labels = optax.smooth_labels(jax.nn.one_hot(y, 10), 0.1)
    return optax.softmax_cross_entropy(jax.vmap(model)(x), labels).mean()


@dataclass(frozen=True)
class Work:
    """A network, its data, and the two losses that take turns."""

    name: str
    model: Any
    x: np.ndarray
    y: np.ndarray
    batch_size: int
    losses: tuple[Callable[..., Any], Callable[..., Any]]

    def batches(self) -> list[Any]:
        size = self.batch_size
        starts = range(0, EXAMPLES, size)
        return [(self.x[s : s + size], self.y[s : s + size]) for s in starts]


def make_works() -> list[Work]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((EXAMPLES, 10), np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True))
    tiny = eqx.nn.MLP(10, 1, 64, 2, key=jr.key(0))
    images = rng.standard_normal((EXAMPLES, 784), np.float32)
    labels = (images @ rng.standard_normal((784, 10), np.float32)).argmax(axis=1)
    wide = eqx.nn.MLP(784, 10, 256, 1, key=jr.key(0))
    labels = labels.astype(np.int32)
    return [
        Work("10-64-64-1", tiny, x, y, 64, (mse, huber)),
        Work("784-256-10", wide, images, labels, 128, (cross_entropy, smoothed)),
    ]


def update(work: Work, model: Any, opt_state: Any, batch: Any, step: Any) -> Any:
    """One update, for a step number that is traced."""
    # The gradient inside the branches, so that one not taken is not differentiated.
    value, grads = jax.lax.cond(
        step // SWITCH_EVERY % 2 == 0,
        *(lambda f=f: eqx.filter_value_and_grad(f)(model, batch) for f in work.losses),
    )
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, value


def first_state(work: Work) -> Any:
    return OPTIMIZER.init(eqx.filter(work.model, eqx.is_inexact_array))


def shuffled(work: Work) -> Iterator[Any]:
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(EXAMPLES).reshape(-1, work.batch_size)
        yield from ((work.x[rows], work.y[rows]) for rows in order)


def cycled(work: Work) -> Iterator[Any]:
    while True:
        yield from work.batches()


def fit(work: Work, resident: bool) -> Callable[[int], None]:
    """`tr.Trainer` with its defaults: progress bar, history, everything."""
    trainer = tr.Trainer(tr.switch_every(SWITCH_EVERY, *work.losses), OPTIMIZER)
    data = tr.Arrays(work.x, work.y, batch_size=work.batch_size)
    data = data if resident else work.batches()

    def run(steps: int) -> None:
        result = trainer.fit(work.model, data, num_steps=steps)
        assert result.compiles == 1
        assert len(result.history["loss"]) == steps

    return run


def by_hand(work: Work, resident: bool, reported: bool) -> Callable[[int], None]:
    """A jitted step called batch by batch; if `reported`, with a bar and the losses."""

    @eqx.filter_jit
    def step(model: Any, opt_state: Any, batch: Any, number: Any) -> Any:
        return update(work, model, opt_state, batch, number)

    def run(steps: int) -> None:
        model, opt_state, losses = work.model, first_state(work), []
        batches = (shuffled if resident else cycled)(work)
        with open(os.devnull, "w") as nowhere:
            bar = tqdm(total=steps, file=nowhere, disable=not reported)
            for number in range(steps):
                batch = next(batches)
                # As a NumPy scalar it is traced; as an int it would be compiled in.
                number = np.int32(number)
                model, opt_state, loss = step(model, opt_state, batch, number)
                if reported:
                    losses.append(float(loss))
                    bar.set_postfix(loss=losses[-1], refresh=False)
                    bar.update()
            bar.close()
        jax.block_until_ready(eqx.filter(model, eqx.is_array))

    return run


def limit(work: Work, resident: bool) -> Callable[[int], None]:
    """Only the steps: scans of 100 over what is on the device, nothing reported."""
    params, static = eqx.partition(work.model, eqx.is_array)
    whole = jax.device_put((work.x, work.y)) if resident else None
    order = np.random.default_rng(0).permuted(
        np.tile(np.arange(EXAMPLES, dtype=np.int32), (STEPS_PER_CALL, 1)), axis=1
    )
    rows = order.reshape(-1, STEPS_PER_CALL, work.batch_size)
    chunks = list(jax.device_put(rows))
    if not resident:
        some = list(itertools.islice(cycled(work), STEPS_PER_CALL))
        columns = zip(*some, strict=True)
        chunks = [jax.device_put(tuple(np.stack(column) for column in columns))]

    def run_chunk(carry: Any, chunk: Any, whole: Any) -> Any:
        def body(carry: Any, content: Any) -> Any:
            params, opt_state, number = carry
            take = lambda a: a.at[content].get(mode="promise_in_bounds")
            batch = jax.tree.map(take, whole) if resident else content
            model = eqx.combine(params, static)
            model, opt_state, loss = update(work, model, opt_state, batch, number)
            return (eqx.filter(model, eqx.is_array), opt_state, number + 1), loss

        return jax.lax.scan(body, carry, chunk)

    compiled = jax.jit(run_chunk, donate_argnums=0)

    def run(steps: int) -> None:
        start = params, first_state(work), jnp.int32(0)
        carry = jax.tree.map(jnp.copy, start)
        for number in range(steps // STEPS_PER_CALL):
            carry, _ = compiled(carry, chunks[number % len(chunks)], whole)
        jax.block_until_ready(carry)

    return run


def clock(run: Callable[[int], None], steps: int) -> float:
    began = time.perf_counter()
    run(steps)
    return time.perf_counter() - began


def measure(rows: dict[str, Any], rounds: int, seconds: float) -> Any:
    """Microseconds a step, one reading a round; milliseconds for a fit of one step."""
    steps = {}
    for name, run in rows.items():
        run(STEPS_PER_CALL)  # compiles
        pace = clock(run, 2 * STEPS_PER_CALL) / 2
        steps[name] = max(round(seconds / pace), 2) * STEPS_PER_CALL
    found: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(rounds):
        # Back and forth, so that no row always comes after the same one.
        for name in list(rows)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(clock(rows[name], steps[name]) / steps[name] * 1e6)
    one_step = [clock(rows["fit"], 1) * 1e3 for _ in range(rounds)]
    return found, steps, one_step


def spread(values: list[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def show(title: str, found: dict[str, list[float]], one_step: list[float]) -> None:
    print(f"\n{title}\n{'':24}{'us/step':>22}{'time / time of fit':>24}")
    for name, values in found.items():
        ratios = [a / b for a, b in zip(values, found["fit"], strict=True)]
        print(f"{name:24}{spread(values, 1):>22}{spread(ratios, 2):>24}")
    print(f"{'a fit of one step':24}{spread(one_step, 1) + ' ms':>22}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time fit beside other loops.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="for one reading")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the readings")
    args = parser.parse_args()
    packages = ("jax", "equinox", "optax", "numpy", "tqdm")
    about = {name: version(name) for name in packages}
    about |= {"python": platform.python_version(), "backend": jax.default_backend()}
    about |= {"cores": str(os.cpu_count()), "rounds": str(args.rounds)}
    print(", ".join(f"{name} {what}" for name, what in about.items()))
    readings = []
    for work in make_works():
        for resident in (True, False):
            rows = {
                "fit": fit(work, resident),
                "hand-written": by_hand(work, resident, reported=False),
                "hand-written, tqdm": by_hand(work, resident, reported=True),
                "limit": limit(work, resident),
            }
            with (
                open(os.devnull, "w") as nowhere,
                contextlib.redirect_stderr(nowhere),
            ):
                found, steps, one_step = measure(rows, args.rounds, args.seconds)
            data = "tr.Arrays, shuffled" if resident else "a list of NumPy batches"
            show(f"MLP {work.name}, {data}", found, one_step)
            reading = {"net": work.name, "data": data, "steps": steps}
            readings.append({**reading, "us": found, "fit_of_one_step_ms": one_step})
    if args.json:
        args.json.write_text(json.dumps({"about": about, "readings": readings}))


if __name__ == "__main__":
    main()
