"""How the cost of a fit grows: with leaves, branches, steps, and megabytes.

    python benchmarks/growth.py [leaves branches steps memory cache overlap ensemble]
        [--json readings.json]

Without a part, all of them are measured, and their tables written to
`docs/performance.md`, or with `--json` to that file.
README.md explains the parts.
"""

import argparse
import itertools
import json
import operator
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from suite.works import make_data, make_losses, make_model, WORKS

import trainer as tr


ROUNDS = 7
BEGIN, END = "<!-- growth -->", "<!-- end of growth -->"


TINY = WORKS["tiny"]
mse, huber = make_losses(TINY)


def tiny(seed: Any = 0) -> Any:
    return make_model(TINY, seed)


def arrays() -> tr.Arrays:
    return tr.Arrays(*make_data(TINY), batch_size=TINY.batch_size)


def clock(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def in_turns(runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of each, round after round, back and forth."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # compiles
    for number in range(ROUNDS):
        for name in list(runs)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(clock(runs[name]))
    return found


def ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(map(operator.truediv, over, under))


def leaves() -> list[dict[str, Any]]:
    """A step of `fit` beside a call of a flat, donated `jax.jit` function."""
    rows = []
    for count in (10, 100, 1000):
        steps = max(200, 40_000 // count)
        model, batch = [jnp.full(8, i, jnp.float32) for i in range(count)], np.ones(8)
        loss = lambda m, b: sum(jnp.sum((x - b) ** 2) for x in m)
        sgd = optax.sgd(1e-2)

        def one(model: Any, batch: Any, loss: Any = loss) -> Any:
            value, grads = jax.value_and_grad(loss)(model, batch)
            return jax.tree.map(lambda w, g: w - 1e-2 * g, model, grads), value

        flat, batch = jax.jit(one, donate_argnums=0), batch.astype(np.float32)

        def call(model=model, flat=flat, batch=batch, steps=steps) -> None:
            now = [jnp.copy(x) for x in model]
            for _ in range(steps):
                now, _ = flat(now, batch)
            jax.block_until_ready(now)

        runs: dict[str, Callable[[], Any]] = {"flat": call}
        trainers = {
            "fit": tr.Trainer(loss, sgd),
            "fit, K=1": tr.Trainer(loss, sgd, steps_per_call=1),
        }
        for name, trainer in trainers.items():
            runs[name] = lambda t=trainer, m=model, b=batch, n=steps: t.fit(
                m, [b], num_steps=n, progress=False
            )
        found = in_turns(runs)
        for name in runs:
            us = statistics.median(found[name]) / steps * 1e6
            times = ratio(found[name], found["flat"])
            row = {"leaves": count, "loop": name, "us/step": us}
            rows.append({**row, "of a flat call": times})
    return rows


def branches() -> list[dict[str, Any]]:
    """Compile time and time of a step, by the number of losses that take turns."""
    runs, rows = {}, []
    for count in (1, 2, 4, 8, 16):
        losses = [
            lambda m, b, p=p: jnp.mean(jnp.abs(jax.vmap(m)(b[0]) - b[1]) ** p)
            for p in np.linspace(1.5, 3.0, count)
        ]
        loss = losses[0] if count == 1 else tr.switch_every(1000, *losses)
        trainer, data = tr.Trainer(loss, optax.adam(1e-3)), arrays()
        fit = lambda n, t=trainer, d=data: t.fit(tiny(), d, num_steps=n, progress=False)
        rows.append({"branches": count, "compile s": fit(1).compile_seconds})
        # All of them in the first branch, so that each step does the same.
        runs[str(count)] = lambda fit=fit: fit(1000)
    found = in_turns(runs)
    for row in rows:
        own = found[str(row["branches"])]
        row["us/step"] = statistics.median(own) / 1000 * 1e6
        row["of 2 branches"] = ratio(own, found["2"])
    return rows


def resident_mb() -> float:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def steps(count: int = 1_000_000) -> list[dict[str, Any]]:
    """A long run: the time of a step and the memory, from a tenth of it to its end."""

    class Look(tr.AbstractCallback):
        every: int | None = count // 10

        def __call__(self, info: tr.StepInfo) -> None:
            seen.append((info.step, time.perf_counter(), resident_mb()))

    seen: list[tuple[int, float, float]] = []
    trainer = tr.Trainer(tr.switch_every(100, mse, huber), optax.adam(1e-3))
    data = arrays()
    trainer.fit(tiny(), data, num_steps=1000, progress=False)
    result = trainer.fit(tiny(), data, num_steps=count, callbacks=[Look()])
    history = sum(
        np.ma.getdata(result.history[n]).nbytes + result.history.steps(n).nbytes
        for n in result.history
    )
    rows = []
    for before, now in itertools.pairwise(seen):
        own = history / 2**20 * (now[0] - seen[0][0]) / count
        row = {
            "steps": now[0],
            "us/step": (now[1] - before[1]) / (now[0] - before[0]) * 1e6,
        }
        rows.append({**row, "MB": now[2], "without history, of the first": 0.0})
        rows[-1]["without history, of the first"] = (now[2] - own) / seen[0][2]
    return rows


def child(*arguments: str) -> dict[str, float]:
    script = pathlib.Path(__file__).with_name("growth_process.py")
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def memory() -> list[dict[str, Any]]:
    """Peak memory with 200 MB of parameters and Adam."""
    rows = [{"loop": kind, **child("peak", kind)} for kind in ("flat, donated", "fit")]
    rows[1]["of the flat loop"] = rows[1]["peak MB"] / rows[0]["peak MB"]
    return rows


def cache() -> list[dict[str, Any]]:
    """A process with the folder of `compile_cache`, and one that finds it filled."""
    with tempfile.TemporaryDirectory() as folder:
        kinds = {"no cache": "none", "first with it": folder, "second": folder}
        return [{"process": n, **child("started", f)} for n, f in kinds.items()]


def overlap() -> list[dict[str, Any]]:
    """Loading that sleeps 5 ms, and a step that takes about 5 ms."""

    a = jnp.eye(192) + 0.01

    def loss(model, batch):
        work = lambda _, b: b @ a / jnp.linalg.norm(b)
        start = a + jax.lax.stop_gradient(model[0])
        busy = jax.lax.fori_loop(0, rounds, work, start).sum()
        return jnp.sum((model - batch) ** 2) + 0 * jax.lax.stop_gradient(busy)

    def loaded(seconds: float) -> Any:
        for _ in range(400):
            time.sleep(seconds)
            yield np.zeros(3, np.float32)

    rounds, per_step, fit = 100, {"step alone": 5e-3}, None
    for _ in range(4):
        rounds = max(1, int(rounds * 5e-3 / per_step["step alone"]))
        trainer = tr.Trainer(loss, optax.sgd(1e-2))
        fit = lambda s, n, t=trainer: t.fit(
            jnp.zeros(3), lambda: loaded(s), num_steps=n, progress=False
        )
        fit(0.0, 20)
        per_step["step alone"] = clock(lambda fit=fit: fit(0.0, 200)) / 200
    assert fit is not None
    per_step["loading alone"] = clock(lambda: list(loaded(5e-3))) / 400
    per_step["both"] = clock(lambda: fit(5e-3, 400)) / 400
    return [{"what": name, "ms": s * 1e3} for name, s in per_step.items()]


def ensemble() -> list[dict[str, Any]]:
    """Members of the tiny network in one step, beside one by itself."""
    make = lambda rate: tr.Trainer(tr.switch_every(100, mse, huber), optax.adam(rate))
    data, alone = arrays(), make(1e-3)
    runs = {"1": lambda: alone.fit(tiny(), data, num_steps=2000, progress=False)}
    for count in (2, 4, 8):
        many = tr.ensemble(make, rate=np.logspace(-4, -2, count).astype(np.float32))
        models = eqx.filter_vmap(tiny)(jnp.arange(count))
        runs[str(count)] = lambda e=many, m=models: e.fit(
            m, data, num_steps=2000, progress=False
        )
    found = in_turns(runs)
    return [
        {"members": name, "us/step": statistics.median(own) / 2000 * 1e6,
         "of one": ratio(own, found["1"])}
        for name, own in found.items()
    ]  # fmt: skip


PARTS = {
    f.__name__: f for f in (leaves, branches, steps, memory, cache, overlap, ensemble)
}


def tables(readings: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """A table for each part, as `docs/performance.md` has them."""
    for name, rows in readings.items():
        heads = list(dict.fromkeys(head for row in rows for head in row))
        yield from (f"**{name.capitalize()}.** {PARTS[name].__doc__}", "")
        yield "| " + " | ".join(heads) + " |"
        yield "|---|" + "---:|" * (len(heads) - 1)
        for row in rows:
            values = (row.get(head, "") for head in heads)
            cells = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in values)
            yield "| " + " | ".join(cells) + " |"
        yield ""


def write_page(readings: dict[str, list[dict[str, Any]]]) -> None:
    path = pathlib.Path(__file__).parents[1] / "docs" / "performance.md"
    before, rest = path.read_text().split(BEGIN)
    versions = ", ".join(f"{n} {version(n)}" for n in ("jax", "equinox", "optax"))
    about = f"Python {platform.python_version()}, {versions}; {os.cpu_count()} cores."
    text = "\n".join([about, "", *tables(readings)])
    path.write_text(f"{before}{BEGIN}\n\n{text}{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time how costs grow.")
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument("--json", type=pathlib.Path, help="where to write the readings")
    args = parser.parse_args()
    readings = {}
    for name in args.parts or PARTS:
        readings[name] = PARTS[name]()
        print(*tables({name: readings[name]}), sep="\n", flush=True)
    if args.json:
        args.json.write_text(json.dumps(readings, indent=1))
    elif not args.parts:
        write_page(readings)


if __name__ == "__main__":
    main()
