"""What is trained: four networks, on the same NumPy data for every loop."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np


EXAMPLES = 4096
RATE = 1e-3
SWITCH_EVERY = 100


@dataclass(frozen=True)
class Work:
    """A network by its sizes, how it is trained, and what it is called.

    Attributes:
        title: What a reader sees.
        sizes: Widths of a network's layers; empty for the network of convolutions.
        batch_size: Examples a step.
    """

    title: str
    sizes: tuple[int, ...]
    batch_size: int

    @property
    def convolutions(self) -> bool:
        return not self.sizes

    @property
    def classifies(self) -> bool:
        """Whether the loss is a cross-entropy of ten classes, or a square."""
        return self.convolutions or self.sizes[-1] == 10

    @property
    def steps_per_epoch(self) -> int:
        return EXAMPLES // self.batch_size


WORKS = {
    "tiny": Work("MLP 10-64-64-1, batches of 64", (10, 64, 64, 1), 64),
    "wide": Work("MLP 784-256-10, batches of 128", (784, 256, 10), 128),
    "large": Work("MLP 256-1024-1024-1, batches of 64", (256, 1024, 1024, 1), 64),
    "cnn": Work("two convolutions on 28 by 28, batches of 128", (), 128),
}


def make_data(work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets; images have their channel first."""
    rng = np.random.default_rng(0)
    size = 784 if work.convolutions else work.sizes[0]
    x = rng.standard_normal((EXAMPLES, size), np.float32)
    if work.classifies:
        y = (x @ rng.standard_normal((size, 10), np.float32)).argmax(axis=1)
        y = y.astype(np.int32)
    else:
        y = np.sin(x.sum(axis=1, keepdims=True))
    return x.reshape(-1, 1, 28, 28) if work.convolutions else x, y


def make_batches(work: Work) -> list[tuple[np.ndarray, np.ndarray]]:
    """One epoch in order, each batch an array of its own."""
    x, y = make_data(work)
    cuts = range(work.batch_size, EXAMPLES, work.batch_size)
    return list(zip(np.split(x, cuts), np.split(y, cuts), strict=True))


def rows_of_steps(work: Work) -> Iterator[np.ndarray]:
    """The row numbers of every step, in a new order each epoch, without an end."""
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(EXAMPLES).astype(np.int32)
        yield from order.reshape(-1, work.batch_size)


def make_model(work: Work, seed: Any = 0) -> Any:
    """The network in Equinox."""
    import equinox as eqx
    import jax.random as jr

    key = jr.key(seed)
    if work.convolutions:
        return _make_convolutions(key)
    first, width, *_, last = work.sizes
    return eqx.nn.MLP(first, last, width, len(work.sizes) - 2, key=key)


def _make_convolutions(key: Any) -> Any:
    import equinox as eqx
    import jax
    import jax.random as jr

    class Convolutions(eqx.Module):
        first: eqx.nn.Conv2d
        second: eqx.nn.Conv2d
        last: eqx.nn.Linear

        def __call__(self, x: Any) -> Any:
            x = jax.nn.relu(self.first(x))
            x = jax.nn.relu(self.second(x))
            return self.last(x.ravel())

    one, two, three = jr.split(key, 3)
    return Convolutions(
        eqx.nn.Conv2d(1, 8, 3, stride=2, padding=1, key=one),
        eqx.nn.Conv2d(8, 16, 3, stride=2, padding=1, key=two),
        eqx.nn.Linear(784, 10, key=three),
    )


def make_losses(work: Work) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The loss, and the one that it takes turns with where losses take turns."""
    import jax
    import jax.numpy as jnp
    import optax

    def mse(model: Any, batch: Any) -> Any:
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    def huber(model: Any, batch: Any) -> Any:
        x, y = batch
        return jnp.mean(optax.huber_loss(jax.vmap(model)(x), y))

    def cross_entropy(model: Any, batch: Any) -> Any:
        x, y = batch
        logits = jax.vmap(model)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def smoothed(model: Any, batch: Any) -> Any:
        x, y = batch
        labels = optax.smooth_labels(jax.nn.one_hot(y, 10), 0.1)
        return optax.softmax_cross_entropy(jax.vmap(model)(x), labels).mean()

    return (cross_entropy, smoothed) if work.classifies else (mse, huber)
