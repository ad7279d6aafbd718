"""One loop in a process of its own: `python -m suite.worker LOOP WORK`.

Reads how many steps to run, a line each, and answers each with a line of JSON. While
it waits for the next line it costs nothing.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    # The answers go where the process was started from; all that is printed does not.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**what: Any) -> None:
        print(json.dumps(what), file=answers, flush=True)

    try:
        _serve(say)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}".splitlines()[0])
        raise


def _serve(say: Any) -> None:
    from .loops import LOOPS

    name, work = sys.argv[1:]
    run, compiles = LOOPS[name].make(work), _count_compiles()
    began = time.perf_counter()
    run(1)
    say(seconds=time.perf_counter() - began)
    for line in sys.stdin:
        before, began = len(compiles), time.perf_counter()
        steps = run(int(line))
        seconds = time.perf_counter() - began
        say(seconds=seconds, steps=steps, compiles=len(compiles) - before)


def _count_compiles() -> list[float]:
    """Grows by one with every program that XLA compiles in this process."""
    found: list[float] = []
    if "jax" in sys.modules:
        import jax

        def note(event: str, duration_secs: float, **_: Any) -> None:
            if event.endswith("backend_compile_duration"):
                found.append(duration_secs)

        jax.monitoring.register_event_duration_secs_listener(note)
    return found


if __name__ == "__main__":
    main()
