"""What is drawn or read from a clock while a step is traced is told."""

import datetime
import inspect
import os
import random
import secrets
import sys
import time
import uuid
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trainer as tr


clock = time.perf_counter
rng = np.random.default_rng(0)
dice = random.Random(0)


def square(model):
    return jnp.sum(model**2)


def fit(loss):
    trainer = tr.Trainer(loss, optax.sgd(0.1))
    return trainer.fit(jnp.ones(3), None, num_steps=2, progress=False)


def line(function):
    """The line that is marked, as messages name it."""
    lines, first = inspect.getsourcelines(function)
    (number,) = (n for n, text in enumerate(lines) if "# here" in text)
    return f" at test_frozen_draws.py:{first + number}, `{lines[number].strip()}`"


def draws(model, batch):
    return square(model) + np.random.normal()  # here


def draws_plainly(model, batch):
    return square(model) * random.random()  # here


def draws_from_its_own(model, batch):
    return square(model + rng.normal(size=3))  # here


def throws(model, batch):
    return square(model) * dice.random()  # here


def seeds_nothing(model, batch):
    from numpy.random import default_rng

    return square(model + default_rng().normal(size=3))  # here


def reads_the_clock(model, batch):
    return square(model) + clock()  # here


def reads_the_date(model, batch):
    return square(model) + datetime.datetime.now().second  # here


def asks_the_system(model, batch):
    return square(model) + os.urandom(1)[0]  # here


def asks_for_secrets(model, batch):
    return square(model) + secrets.randbelow(5)  # here


def asks_for_an_id(model, batch):
    return square(model) + float(uuid.uuid4().int % 7)  # here


@pytest.mark.parametrize(
    ("loss", "begins"),
    [
        (draws, "`numpy.random` draws random numbers"),
        (draws_plainly, "`random` draws random numbers"),
        (draws_from_its_own, "Global `rng` draws random numbers"),
        (throws, "Global `dice` draws random numbers"),
        (seeds_nothing, "The system draws random numbers"),
        (asks_the_system, "The system draws random numbers"),
        (asks_for_secrets, "The system draws random numbers"),
        (asks_for_an_id, "The system draws random numbers"),
        (reads_the_clock, "`time.perf_counter` reads the clock"),
        (reads_the_date, "`datetime.now` reads the clock"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_drawn_or_read_once_is_told(loss, begins):
    traces, profile = [], sys.getprofile()

    def counted(model, batch):
        traces.append(1)
        return loss(model, batch)

    with pytest.raises(tr.LossWarning) as caught:
        fit(counted)
    text = str(caught.value)
    assert text.startswith(f"{begins}{line(loss)}: that is done once")
    assert "Ask for" in text
    assert len(traces) == 1
    assert sys.getprofile() is profile


def is_seeded(model, batch):
    fixed = np.random.default_rng(0).normal(size=3)
    again = np.random.RandomState(1).normal() + random.Random(2).random()
    return square(model + fixed) * again


def is_seeded_globally(model, batch):
    np.random.seed(0)
    return square(model) + np.random.normal()


library: Any = {"random": np.random}
exec(compile("def drawn(): random.normal()", "<frozen library>", "exec"), library)


def shuffled(batch):
    np.random.shuffle(batch)


def draws_in_a_library(model, batch):
    if batch is not None:
        shuffled(batch)
    return square(model + np.random.default_rng(0).normal()) + (library["drawn"]() or 0)


def draws_in_a_callback(model, batch):
    like = jax.ShapeDtypeStruct((), np.float32)
    noise = jax.pure_callback(lambda: np.float32(np.random.normal()), like)
    return square(model) + jax.lax.stop_gradient(noise)


def draws_with_jax(model, batch, *, key):
    return square(model + jax.random.normal(key, (3,)) + jnp.asarray(np.pi))


def draws_nowhere(model, batch):
    if batch is not None:
        return square(model) + np.random.normal() + time.time()
    return square(model) + 0 * datetime.timedelta(1).days


@pytest.mark.parametrize(
    "loss",
    [
        is_seeded,
        is_seeded_globally,
        draws_in_a_library,
        draws_in_a_callback,
        draws_with_jax,
        draws_nowhere,
    ],
)
def test_what_is_the_same_at_each_trace_is_not_told(loss):
    traces = []

    def counted(model, batch, *, key):
        traces.append(1)
        keys = {"key": key} if loss is draws_with_jax else {}
        return loss(model, batch, **keys)

    with warnings.catch_warnings(action="error"):
        result = fit(counted)
    assert len(traces) == result.compiles == 1


def test_generators_are_left_as_the_one_trace_left_them():
    def drawn(model, batch):
        return square(model) + np.random.normal() + random.random() + rng.normal()

    np.random.seed(0)
    random.seed(0)
    rng.bit_generator.state = np.random.default_rng(0).bit_generator.state
    with pytest.raises(tr.LossWarning):
        fit(drawn)
    again = np.random.RandomState(0), random.Random(0), np.random.default_rng(0)
    _ = again[0].normal(), again[1].random(), again[2].normal()
    assert np.random.normal() == again[0].normal()
    assert random.random() == again[1].random()
    assert rng.normal() == again[2].normal()


def test_a_profiler_of_the_users_own_is_not_disturbed():
    events = []
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        with pytest.raises(tr.LossWarning, match="draws random numbers"):
            fit(draws)
        heard = len(events)
    finally:
        sys.setprofile(None)
    assert heard
