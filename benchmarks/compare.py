"""Time whole fits beside loops by hand, the limits, and other packages.

    python benchmarks/compare.py [--works tiny wide] [--loops fit-arrays hand]
        [--rounds 7] [--seconds 0.5] [--json readings.json]
    python benchmarks/compare.py --quick

Writes the readings to `benchmarks/suite/readings.json`, and from them the tables and
pictures of `docs/performance.md`. What is read of a work replaces what was there; other
works stay. With `--json` all goes to that file, and the page stays as it is. `--page`
renews the page from what was read before, and measures nothing. `--quick` takes two
minutes, shows the ratios to look at before and after a change, and writes nothing.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from suite.loops import Loop, LOOPS
from suite.page import ratios, write_page
from suite.works import WORKS


HERE = pathlib.Path(__file__).parent
READINGS = HERE / "suite" / "readings.json"
QUICK = (
    "fit-arrays fit-batches hand "
    "limit-loop limit-call limit-gather-two limit-call-two limit-stack-two"
)
PACKAGES = (
    "jax equinox optax numpy jax-dataloader tqdm",
    "keras klax flowjax flax torch lightning",
)


class Worker:
    """A loop in a process of its own, which sleeps until it is asked to run."""

    def __init__(self, name: str, work: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "suite.worker", name, work],
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.first = self._answer()
        self.steps, self.brief, self._seconds = 1, False, 0.0

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline() or '{"error": "it died"}')
        if "error" in answer:
            self.close()
            raise RuntimeError(answer["error"])
        return answer

    def run(self, steps: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        return self._answer()

    def choose_steps(self, seconds: float) -> None:
        """Find how many steps take about so long, or somewhat longer."""
        self._seconds = seconds
        self.run(1)  # the first after compiling is slower than the others
        short = self.run(1)
        steps, taken, found = short["steps"], 0.0, short
        while taken < seconds / 2:
            steps *= 3
            found = self.run(steps)
            taken = found["seconds"] - short["seconds"]
        self.brief = short["seconds"] < seconds / 5
        pace = taken / (found["steps"] - short["steps"])
        self.steps = max(round(seconds / pace), 2 * short["steps"])

    def read(self) -> dict[str, float]:
        """Time a run of one step, or of as few as it can, and a long one."""
        if self.brief:
            # Others ran in between, and have taken the caches of the processor.
            self.run(max(self.steps // 10, 1))
        short, long = self.run(1), self.run(self.steps)
        if long["seconds"] < 0.7 * self._seconds:
            # They were chosen while the machine was busier.
            self.steps = round(self.steps * self._seconds / long["seconds"])
        more = long["steps"] - short["steps"]
        each = (long["seconds"] - short["seconds"]) / more
        # A loop that compiles in every run is not charged for that.
        whole = each if long["compiles"] else long["seconds"] / long["steps"]
        return {
            "us": whole * 1e6,
            "us_of_one_more": each * 1e6,
            "fixed_ms": (short["seconds"] - each * short["steps"]) * 1e3,
            "steps": long["steps"],
            "compiles": long["compiles"],
        }

    def close(self) -> None:
        """End the process; it leaves when there is nothing more to read."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(work: str, names: list[str], rounds: int, seconds: float) -> Any:
    """The readings of every loop on one work, and why others were not read."""
    workers, missing = start(work, names)
    for name, worker in list(workers.items()):
        try:
            worker.choose_steps(seconds)
        except RuntimeError as error:
            missing[name] = str(error)
            del workers[name]
    found: dict[str, Any] = {
        name: {"first_s": significant(worker.first["seconds"])}
        for name, worker in workers.items()
    }
    for number in range(rounds):
        # Back and forth, so that no loop always comes after the same one.
        for name in list(workers)[:: 1 if number % 2 == 0 else -1]:
            for key, value in workers[name].read().items():
                found[name].setdefault(key, []).append(significant(value))
        print(f"  round {number + 1} of {rounds}", flush=True)
    for worker in workers.values():
        worker.close()
    return found, missing


def start(work: str, names: list[str]) -> tuple[dict[str, Worker], dict[str, str]]:
    """Start a process for each loop, one after the other, and let it compile."""
    workers, missing = {}, {}
    for name in names:
        loop: Loop = LOOPS[name]
        absent = loop.missing()
        try:
            if absent:
                raise RuntimeError(f"{absent} is not installed")
            workers[name] = Worker(name, work)
            print(f"  {name}: {workers[name].first['seconds']:.2f} s", flush=True)
        except RuntimeError as error:
            missing[name] = str(error)
            print(f"  {name}: {error}", flush=True)
    return workers, missing


def significant(value: float) -> float:
    return float(f"{value:.5g}")


def describe(rounds: int, seconds: float) -> dict[str, Any]:
    """What a reader has to know about the machine and the run."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "rounds": rounds,
        "seconds": seconds,
        "versions": dict(_versions(" ".join(PACKAGES).split())),
    }


def _cpu() -> str:
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1] for line in lines if line.startswith("model name")]
    return " ".join(names[0].split()) if names else platform.processor()


def _versions(packages: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in packages:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time fits beside other loops.")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--loops", nargs="+", choices=LOOPS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="for one reading")
    parser.add_argument("--json", type=pathlib.Path, help="not into the page")
    parser.add_argument("--page", action="store_true", help="only renew the page")
    parser.add_argument("--quick", action="store_true", help="only what is ours")
    args = parser.parse_args()
    args.loops = args.loops or (QUICK.split() if args.quick else list(LOOPS))
    args.rounds = args.rounds or (5 if args.quick else 7)
    args.seconds = args.seconds or (0.25 if args.quick else 0.5)
    return args


def main() -> None:
    args = arguments()
    path = args.json or READINGS
    keep = path.exists() and not args.quick
    readings = json.loads(path.read_text()) if keep else {}
    for work in [] if args.page else args.works:
        print(f"{work}: {WORKS[work].title}", flush=True)
        about = describe(args.rounds, args.seconds)
        loops, missing = measure(work, args.loops, args.rounds, args.seconds)
        readings[work] = {"about": about, "loops": loops, "missing": missing}
        if args.json or not args.quick:
            # After each work, so that what was read is kept if the next one fails.
            path.write_text(json.dumps(readings) + "\n")
    readings = {name: readings[name] for name in WORKS if name in readings}
    if args.quick:
        print(*ratios(readings), sep="\n")
    elif not args.json:
        write_page(readings)


if __name__ == "__main__":
    main()
