"""Second compiles by what a function hands on to itself."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from recompiles import again, once, target


X = np.ones((4, 2), np.float32)


@again(
    [
        ("coef", "weakly typed float32[]", "float32[]"),
        ("state[0].nu", "weakly typed float32[]", "float32[]"),
    ],
    [("state[0].mu", "weakly typed float32[]", "float32[]")],
)
def a_learnable_scalar_under_adam(run):
    optimizer = optax.adam(0.1)

    def update(coef, state):
        updates, state = optimizer.update(jax.grad(jnp.square)(coef), state)
        return optax.apply_updates(coef, updates), state

    step = target(update, donate="all")
    coef = jnp.array(1.0)
    state = optimizer.init(coef)
    for _ in range(3):
        coef, state = run(step, coef, state)


@again([("seen", "weakly typed float32[]", "float32[]")])
def a_weak_accumulator(run):
    step = target(lambda seen, x: seen + jnp.sum(x), donate="all-except-first")
    seen = run(step, jnp.array(0.0), X)
    run(step, seen, X)


@again([("seen", "0.0", "float32[]")])
def an_accumulator_that_begins_as_a_python_float(run):
    step = target(lambda seen, x: seen + jnp.sum(x))
    seen = run(step, 0.0, X)
    run(step, seen, X)


@again([("count", "int32[]", "weakly typed int32[]")])
def a_branch_that_returns_a_python_number(run):
    step = target(lambda count: jax.lax.cond(count > 3, lambda: 0, lambda: 1))
    count = run(step, jnp.int32(0))
    run(step, count)


@again([("count", "int32[]", "float32[]")])
def an_integer_that_is_divided(run):
    step = target(lambda count: count / 2)
    count = run(step, jnp.int32(4))
    run(step, count)


def _with_rate(run, rate):
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    step = target(lambda w, state: optimizer.update(w, state))
    state = optimizer.init(X)
    _, state = run(step, X, state)
    state.hyperparams["learning_rate"] = rate
    run(step, X, state)


RATE = "state.hyperparams['learning_rate']"


@again([(RATE, "float32[]", "0.05")])
def a_learning_rate_set_to_a_python_float(run):
    _with_rate(run, 0.05)


@again([(RATE, "float32[]", "weakly typed float32[]")])
def a_learning_rate_set_to_a_weak_scalar(run):
    _with_rate(run, jnp.asarray(0.05))


@once
def a_step_that_hands_on_what_it_takes(run):
    step = target(lambda seen, key: (0.9 * seen + 0.1, jr.split(key)[0]), donate="all")
    state = (jnp.asarray(1.0), jr.key(0))
    for _ in range(3):
        state = run(step, *state)
