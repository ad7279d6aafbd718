"""Losses that read something, traced without a Trainer."""

import dataclasses
import functools
import textwrap
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from trainer.recompiles._baked import Baked


MODEL = jnp.ones(2)


def traced(loss):
    """The values of a loss that was traced. None of them has changed."""
    baked = Baked(loss)
    jax.eval_shape(lambda model: loss(model, None), MODEL)
    baked.traced()
    assert baked.changed() is None
    assert baked.changed(full=False) is None
    return baked


def loss_of(expression, thing, is_closure):
    """A loss that reads a thing as it is written."""
    function = f"def loss(model, batch):\n    x = jnp.sum(model)\n    {expression}\n"
    around = f"def make(thing):\n{textwrap.indent(function, '    ')}    return loss\n"
    shared = {**globals(), "thing": thing}
    exec(compile(around if is_closure else function, "losses.py", "exec"), shared)
    return shared["make"](thing) if is_closure else shared["loss"]


def change_after_tracing(thing, expression, change, is_closure):
    """What is said of a change to a thing after a loss that reads it was traced."""
    baked = traced(loss_of(expression, thing, is_closure))
    exec(change, {**globals(), "thing": thing})
    return said(baked)


def said(baked):
    """What is said of a change; nothing if there is none."""
    return baked.changed() or ""


class Thing:
    """An object of the user's, whose `k` is what is changed."""

    kind = 1.0
    count: int
    activation: Any
    below: Any

    def __init__(self, **attributes):
        self.k = 1.0
        vars(self).update(attributes)

    def __call__(self, x):
        return x * self.k

    def scaled(self, x):
        return x * self.k

    def itself(self, x):
        return handed_on(self, x)

    @property
    def doubled(self):
        return 2 * self.k

    @functools.cached_property
    def table(self):
        return np.ones(3)

    @classmethod
    def of_class(cls, x):
        return x * cls.kind

    @functools.partial(jax.jit, static_argnums=0)
    def jitted(self, x):
        return x * self.k


class Heir(Thing):
    def scaled(self, x):
        return super().scaled(x)


class Slots:
    __slots__ = ("k",)

    def __init__(self):
        self.k = 1.0


@dataclasses.dataclass(frozen=True)
class Fixed:
    k: float = 1.0
    j: float = 1.0


class Layer(eqx.Module):
    options: Any

    def __call__(self, x):
        return x * self.options.k


def handed_on(thing, x):
    return x * thing.k


def by_key(thing, x):
    return x * thing["k"]


def by_name(x, k):
    return x * k
