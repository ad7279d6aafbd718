"""Runs a cause of a second compile in a process of its own.

It reads names, a line each, and writes what it found, as JSON. All is imported once,
and each cause is run by a fork of this process, in which JAX has not yet done anything.
"""

import json
import os
import sys
import warnings

import recompile_by_arguments
import recompile_by_context
import recompile_by_placement
import recompile_by_state
from recompiles import AGAIN, listen, ONCE, Recorder


# A table is filled when it is imported.
TABLES = (
    recompile_by_arguments,
    recompile_by_context,
    recompile_by_placement,
    recompile_by_state,
)


def run(name):
    """Run one cause, and report."""
    cause = AGAIN[name][0] if name in AGAIN else ONCE[name]
    recorder = Recorder()
    try:
        cause(recorder)
        return recorder.report()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def serve():
    """Answer each line of the standard input."""
    # JAX warns of its threads when a process is forked, but has none before its use.
    warnings.simplefilter("ignore", RuntimeWarning)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            listen()
            print(json.dumps(run(line.strip())), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"error": f"ended with status {status}"}), flush=True)


if __name__ == "__main__":
    serve()
