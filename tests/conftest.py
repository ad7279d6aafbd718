"""Settings and fixtures that every test file shares."""

import os

import hypothesis
import jax
import jax.random as jr
import pytest


# A property that fails must fail again: examples are drawn from a fixed seed.
hypothesis.settings.register_profile(
    "default", max_examples=30, deadline=None, derandomize=True
)
hypothesis.settings.load_profile("default")

EVENT = "/jax/core/compile/backend_compile_duration"
_names: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **kwargs: (
        _names.append(str(kwargs.get("fun_name"))) if event == EVENT else None
    )
)


@pytest.fixture
def key():
    """A random key; another with `TRAINER_SEED`."""
    return jr.key(int(os.environ.get("TRAINER_SEED", "0")))


@pytest.fixture
def step_compiles():
    """Counts compiles of any Trainer's step since the test began, from XLA's event."""
    start = len(_names)
    return lambda: sum("trainer_step_" in name for name in _names[start:])
