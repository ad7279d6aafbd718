"""Calls that compile, and what is said of them: recorded for the tables of causes."""

import re

import equinox as eqx
import jax

import trainer as tr


EVENT = "/jax/core/compile/backend_compile_duration"
AGAIN = {}
ONCE = {}
_names = []


def listen():
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **details: (
            _names.append(str(details.get("fun_name"))) if event == EVENT else None
        )
    )


def again(*expected):
    """A cause: each call compiles. Of each but the first, what is to be said of it.

    It is a list of `(path, was, now)` for each of these calls, and all that is said.
    """
    return lambda cause: AGAIN.setdefault(cause.__name__, (cause, expected))


def once(cause):
    """No cause: the first call compiles alone, and there is nothing to say."""
    return ONCE.setdefault(cause.__name__, cause)


def target(function, wrap=eqx.filter_jit, **options):
    """Compile a function under the name that is counted."""
    function.__name__ = "target"
    return wrap(function, **options)


class Recorder:
    """Calls functions. Keeps how often each call compiled, and what it looked like."""

    def __init__(self):
        self.calls = []

    def __call__(self, function, /, *args, **kwargs):
        call = tr.Call(*args, **kwargs)
        start = len(_names)
        out = function(*args, **kwargs)
        compiles = sum("target" in name for name in _names[start:])
        self.calls.append((function, call, compiles))
        return out

    def explanations(self):
        """What `tr.explain` says of each call but the first."""
        for (was, before, _), (now, after, _) in zip(
            self.calls, self.calls[1:], strict=False
        ):
            yield tr.explain(now if was is now else (was, now), before, after)

    def report(self):
        """Compiles of each call, what is said of each but the first, and the words."""
        found = list(self.explanations())
        return {
            "compiles": [compiles for *_, compiles in self.calls],
            "found": [
                [[d.path, _plain(d.was), _plain(d.now)] for d in each] for each in found
            ],
            "texts": [str(each) for each in found],
        }


def _plain(text):
    """Without addresses in memory and numbers of lines."""
    return re.sub(r" at 0x[0-9a-f]+|(?<=\.py):\d+", "", text)
