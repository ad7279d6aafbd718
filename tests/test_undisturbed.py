"""Data that a batch was read from are as they were, and give the same again."""

import itertools
import random
import sys
import types

import jax_dataloader as jdl
import numpy as np
import pytest

import trainer as tr
from trainer.preflight._undisturbed import undisturbed


X = np.linspace(-1, 1, 12, dtype=np.float32)


class Shuffled:
    """A loader that draws an order each time, and shuffles it where it lies."""

    def __init__(self):
        self.rng, self.rows, self.passes = np.random.default_rng(0), np.arange(12), 0

    def __iter__(self):
        self.passes += 1
        self.rng.shuffle(self.rows)
        return iter(np.split(X[self.rows] + self.passes, 3))


def with_numpy():
    return np.split(np.random.permutation(X), 3)


def with_python():
    return np.split(np.array(random.sample(X.tolist(), 12), np.float32), 3)


def with_a_generator():
    rng = np.random.default_rng(1)

    def draw():
        yield from np.split(rng.permutation(X), 3)

    return lambda: draw()


DATA = {
    "jax-dataloader": lambda: jdl.DataLoader(
        jdl.ArrayDataset(X), "jax", batch_size=4, shuffle=True
    ),
    "own loader": Shuffled,
    "numpy": lambda: with_numpy,
    "python": lambda: with_python,
    "generator": with_a_generator,
}


def read(given, count):
    items = tr.Loader(given).batches(pad=False)
    return [np.asarray(batch) for batch, _, _ in itertools.islice(items, count)]


@pytest.mark.parametrize("name", DATA)
def test_data_are_as_they_were(name):
    found = []
    for looks in (False, True):
        np.random.seed(0)
        random.seed(0)
        given = DATA[name]()
        with undisturbed(given):
            first = read(given, 1 if looks else 0)
        found.append(read(given, 3))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(first, found[0][:1])


def test_what_a_loader_holds_is_put_back(monkeypatch):
    torch = types.SimpleNamespace(state=1, Generator=np.random.RandomState)
    torch.get_rng_state = lambda: torch.state
    torch.set_rng_state = lambda state: setattr(torch, "state", state)
    monkeypatch.setitem(sys.modules, "torch", torch)
    held = types.SimpleNamespace(
        at=0, rng=random.Random(0), old=np.random.RandomState(0)
    )
    held.rows = [held, 1, 2]
    first = held.rng.random(), held.old.random()
    held.rng.seed(0)
    held.old.seed(0)
    with undisturbed([lambda: held]):
        held.at, held.new, torch.state = 1, 1, 2
        held.rows.reverse()
        assert (held.rng.random(), held.old.random()) == first
    assert (held.at, torch.state, held.rows) == (0, 1, [held, 1, 2])
    assert not hasattr(held, "new")
    assert (held.rng.random(), held.old.random()) == first
