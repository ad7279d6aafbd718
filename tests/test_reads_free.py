"""What may change, though a loss names it: records, counters, caches, and the like."""

import dataclasses
import functools
import io
import itertools
import logging
import os
import random
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tqdm
from reading import Thing, traced


FREE = []
CACHED = {3: 3.0}


def free(make):
    """Put a case to the list: it returns a loss, and what happens after the trace."""
    FREE.append(make)
    return make


@pytest.mark.parametrize("make", FREE, ids=lambda make: make.__name__)
def test_it_may_change(make):
    loss, change = make()
    baked = traced(loss)
    change()
    assert baked.changed() is None
    baked.traced()
    change()
    assert baked.changed() is None


class Log:
    def __init__(self):
        self.rows, self.count = [], 0

    def add(self, value):
        self.rows.append(value)
        self.count += 1


def value_of(n):
    if n not in CACHED:
        CACHED[n] = float(n)
    return CACHED[n]


def total(model, *others):
    return jnp.sum(model)


@free
def a_record_that_the_loss_writes():
    seen = []

    def loss(model, batch):
        seen.append("trace")
        return jnp.sum(model) * len(seen)

    return loss, lambda: seen.append(1)


@free
def a_record_that_the_loss_could_write(is_verbose=False):
    seen, log, sums, places = [], Log(), {}, set()

    def loss(model, batch):
        if is_verbose:
            seen.append(model)
            sums["total"] = jnp.sum(model)
            places.add(batch)
            log.add(model)
        return jnp.sum(model)

    def change():
        seen.append(1)
        log.add(1)
        sums[len(sums)] = 1.0
        places.add(1)

    return loss, change


@free
def a_record_of_the_same_name_as_a_function():
    class Own:
        def __init__(self):
            self.k, self.log, self.mean = 1.0, [], []

        def __call__(self, model, batch):
            return jnp.log(self.k + model.mean())

    own = Own()
    return own, lambda: (own.log.append(1), own.mean.append(1))


@free
def what_the_loss_does_not_name():
    options, thing = {"k": 1.0}, Thing()
    loss = lambda model, batch: thing.k * options["k"] * jnp.sum(model)
    return loss, lambda: (options.update(note=1), vars(thing).update(note=1))


@free
def counters():
    count, counts, thing = 0, {"calls": 0, "k": 1.0}, Thing(count=0)

    def loss(model, batch):
        nonlocal count
        count += 1
        counts["calls"] += 1
        thing.count += 1
        return counts["k"] * jnp.sum(model)

    def change():
        nonlocal count
        count += 1
        counts["calls"] += 1
        thing.count += 1

    return loss, change


@free
def what_a_host_callback_reads_and_writes():
    total, settings, log = [], {"k": 1.0}, Log()

    def loss(model, batch):
        def note(value):
            total.append(float(value) * settings["k"])

        value = jnp.sum(model)
        jax.debug.callback(note, value)
        jax.debug.callback(lambda v: total.append(float(v)), value)
        jax.debug.callback(log.add, value)
        return value

    return loss, lambda: (total.append(1.0), settings.update(k=2.0), log.add(1))


@free
def an_array_that_the_loss_writes_to():
    row = np.zeros(3)

    def loss(model, batch):
        row[0] += 1.0
        return jnp.sum(model)

    return loss, lambda: row.fill(7.0)


@free
def a_dict_that_remembers(memory=CACHED):
    return lambda model, batch: value_of(3) * jnp.sum(model), lambda: value_of(
        len(memory) + 7
    )


@free
def caches():
    table = functools.cache(lambda n: np.ones(n))
    thing = types.SimpleNamespace(n=3)

    class Lazy:
        @functools.cached_property
        def table(self):
            return np.ones(3)

    lazy, is_asked = Lazy(), False

    def loss(model, batch):
        return table(thing.n)[0] * (lazy.table[0] if is_asked else jnp.sum(model))

    return loss, lambda: (table(7), lazy.table)


@free
def iterators_and_random_numbers():
    count, fed, rng = itertools.count(), iter(range(99)), random.Random(0)
    own = np.random.default_rng(0)

    def loss(model, batch):
        return total(model, next(count), next(fed), rng.random(), own.normal())

    return loss, lambda: (next(count), next(fed), rng.random(), own.normal())


@free
def files_locks_bars_and_logs():
    file, lock, log = io.StringIO(), threading.Lock(), logging.getLogger("own")
    bar = tqdm.tqdm(total=99, file=io.StringIO())

    def loss(model, batch):
        with lock:
            file.write("trace")
            log.debug("trace")
            bar.update()
        return total(model, bar.n, log.level)

    return loss, lambda: (file.write("x"), log.setLevel(10), bar.update())


@free
def the_environment(environ=os.environ):
    def loss(model, batch):
        return total(model, environ.get("OWN_VALUE", "1"))

    return loss, lambda: environ.update(OWN_VALUE=str(len(environ)))


@free
def what_is_not_there_yet():
    package, shared = types.ModuleType("own"), {"jnp": jnp, "ready": False}
    vars(package).update(k=1.0)
    shared["package"] = package
    code = "lambda model, batch: later(model) if ready else package.k * jnp.sum(model)"
    change = lambda: (shared.update(later=jnp.sum), vars(package).update(part=package))
    return eval(code, shared), change


@free
def what_is_deleted():
    shared = {"jnp": jnp, "table": np.ones(3)}
    loss = eval("lambda model, batch: table[0] * jnp.sum(model)", shared)
    return loss, lambda: shared.pop("table", None)


@free
def what_is_made_anew_and_is_the_same():
    @dataclasses.dataclass
    class Options:
        k: float = 1.0

    options, rows, table = Options(), [1.0], np.ones(3)
    nothing, scale = float("nan"), functools.partial(jnp.multiply, 2.0)

    def loss(model, batch):
        scaled = scale(options.k * rows[0] * table[0] * jnp.sum(model))
        return jnp.where(scaled > 0, scaled, nothing)

    def change():
        nonlocal options, rows, table, nothing, scale
        options, rows, table = Options(), [1.0], np.ones(3)
        nothing, scale = float("nan"), functools.partial(jnp.multiply, 2.0)

    return loss, change


@free
def things_that_know_each_other():
    above = Thing()
    above.below = Thing(above=above, note=0)

    def walk(thing, x):
        return thing.k * x if hasattr(thing, "above") else walk(thing.below, x)

    def change():
        above.below.note += 1

    return lambda model, batch: walk(above, jnp.sum(model)), change
