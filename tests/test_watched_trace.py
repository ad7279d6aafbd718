"""A step that is watched while it is traced is the same program."""

import contextlib

import jax.numpy as jnp
import optax
import pytest
from helpers import pull, Twins

import trainer as tr
from trainer._traced_step import trace_step
from trainer.mistakes._watched_trace import watched_trace


sgd = optax.sgd(0.1)


def only_a(model, batch):
    return jnp.sum(model.a**2)


def only_b(model, batch):
    return jnp.sum(model.b**2)


class Stop(Exception):
    pass


PROGRAMS = {
    "switch": tr.Minimize(tr.alternate(pull, only_a), optax.adam(0.1)),
    "adaptive": tr.Minimize(tr.AdaptiveSum(tr.GradNorm(), x=only_a, y=only_b), sgd),
    "float16": tr.Minimize(pull, sgd, compute="float16"),
}


@pytest.mark.parametrize("update", PROGRAMS.values(), ids=PROGRAMS)
def test_a_watched_step_is_the_same_program(update, monkeypatch):
    traced = []

    def noted(*args):
        traced.append(str(trace_step(*args).closed))
        raise Stop

    monkeypatch.setattr("trainer._step.trace_step", noted)
    for watch in (watched_trace, unwatched):
        monkeypatch.setattr("trainer._traced_step.watched_trace", watch)
        trainer = tr.Trainer(update=update)
        model = Twins(jnp.ones(2), jnp.ones(2))
        with pytest.raises(Stop):
            trainer.fit(model, None, num_steps=1, progress=False)
    assert traced[0] == traced[1]
    assert "custom_vjp" not in traced[0]


@contextlib.contextmanager
def unwatched(program, like):
    yield lambda jaxpr: None
