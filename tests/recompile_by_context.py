"""Second compiles by the function itself, and by JAX's settings."""

import contextlib
import functools
import math
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from recompiles import again, once, target


X = np.ones((4, 2), np.float32)


def made(k):
    """A function that reads `k` from outside."""
    return target(lambda x: k * jnp.sum(x))


class Scaled:
    """A plain class, with a method that is compiled."""

    def __init__(self, k):
        self.k = k

    def target(self, x):
        return self.k * jnp.sum(x)


class Net(eqx.Module):
    w: jax.Array

    @eqx.filter_jit
    def target(self, x):
        return jnp.sum(self.w) * jnp.sum(x)

    def plain(self, x):
        return jnp.sum(self.w) * jnp.sum(x)


HERE = "made at recompile_by_context.py"


@again([("target", HERE, HERE), ("target.<closure>.k", "1", "2")])
def a_closure_made_anew(run):
    run(made(1), X)
    run(made(2), X)


@again([("target", HERE, HERE), ("target.<closure>.k", "float32[]", "float32[]")])
def a_closure_over_an_array(run):
    run(made(jnp.float32(1)), X)
    run(made(jnp.float32(2)), X)


@again([("target", HERE, HERE)], [("target", HERE, HERE)])
def a_lambda_compiled_in_a_loop(run):
    for _ in range(3):
        run(target(lambda x: jnp.sum(x), jax.jit), X)


@again([("target", HERE, HERE), ("target.<default>.k", "0", "1")])
def a_lambda_with_a_default_of_the_loop(run):
    for i in range(2):
        run(target(lambda x, k=i: k * jnp.sum(x)), X)


@again([("target", *["a method of an object of class `Scaled`"] * 2)])
def a_method_of_a_new_object(run):
    run(eqx.filter_jit(Scaled(1).target), X)
    run(eqx.filter_jit(Scaled(2).target), X)


@again(
    [
        ("target", *["an object of class `partial`"] * 2),
        ("target.keywords['k']", "1", "2"),
    ]
)
def a_partial_made_anew(run):
    def target(x, k):
        return k * jnp.sum(x)

    for k in (1, 2):
        run(eqx.filter_jit(functools.partial(target, k=k)), X)


@again([("self.w", "float32[2]", "float32[3]")])
def a_method_of_another_model(run):
    run(Net(jnp.ones(2)).target, X)
    run(Net(jnp.ones(3)).target, X)


@again([("target", "compiled with donate=none", "compiled with donate=all")])
def donation_that_was_not_asked_for_before(run):
    function = lambda x: 2 * x
    run(target(function), jnp.ones(2))
    run(target(function, donate="all"), jnp.ones(2))


@again([("target", "compiled by `eqx.filter_jit`", "compiled by `jax.jit`")])
def another_way_to_compile(run):
    function = lambda x: jnp.sum(x)
    run(target(function), X)
    run(target(function, jax.jit), X)


@again([("x", "given by position", "given by name")])
def an_argument_by_name_to_jax_jit(run):
    step = target(lambda x: jnp.sum(x), jax.jit)
    run(step, X)
    run(step, x=X)


@again([("k", "1", "2")], [("k", "2", "2.0")])
def a_static_argument_of_jax_jit(run):
    step = target(lambda x, k: k * jnp.sum(x), jax.jit, static_argnums=1)
    run(step, X, 1)
    run(step, X, 2)
    run(step, X, 2.0)


@again([("k", "int32[]", "float32[]")])
def a_number_of_another_kind_to_jax_jit(run):
    step = target(lambda x, k: k * jnp.sum(x), jax.jit)
    run(step, X, 1)
    run(step, X, 1.0)


def under(run, context):
    """Call one function as it is, and in a context."""
    step = target(lambda x: x.T @ x)
    x = jnp.asarray(X)
    run(step, x)
    with context():
        run(step, x)


@again([("jax_default_matmul_precision", "None", "'highest'")])
def the_precision_of_products(run):
    under(run, lambda: jax.default_matmul_precision("highest"))


@again([("jax_enable_x64", "False", "True")])
def double_precision(run):
    under(run, lambda: jax.enable_x64(True))


@again([("jax_default_device", "None", "CpuDevice(id=1)")])
def the_default_device(run):
    under(run, lambda: jax.default_device(jax.devices()[1]))


@again([("jax_numpy_dtype_promotion", "'standard'", "'strict'")])
def the_rules_of_promotion(run):
    under(run, lambda: jax.numpy_dtype_promotion("strict"))


@again([("jax_threefry_partitionable", "True", "False")])
def how_random_numbers_are_made(run):
    under(run, lambda: jax.threefry_partitionable(False))


@again([("jax.set_mesh", "no mesh", "the explicit mesh (data=4)")])
def a_mesh_that_is_set(run):
    under(run, lambda: jax.set_mesh(jax.make_mesh((4,), ("data",))))


@again([("with mesh", "no mesh", "the explicit mesh (data=4)")])
def a_mesh_that_is_entered(run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        under(run, lambda: jax.make_mesh((4,), ("data",)))


@once
def the_same_function_wrapped_again(run):
    function = lambda x, k: k * jnp.sum(x)
    for _ in range(2):
        run(target(function), X, math.nan)


@once
def the_same_function_wrapped_by_jax_again(run):
    function = lambda x, k: k * jnp.sum(x)
    run(target(function, jax.jit), X, 1)
    run(target(function, jax.jit), X, 2)


@once
def a_method_of_the_same_object(run):
    scaled = Scaled(1)
    run(eqx.filter_jit(scaled.target), X)
    run(eqx.filter_jit(scaled.target), X)


@once
def a_method_of_a_model_of_the_same_kind(run):
    for value in (1.0, 2.0):
        net = Net(jnp.full(2, value, "float32"))
        run(net.target, X)


@once
def settings_that_are_no_part_of_a_program(run):
    step = target(lambda x: x.T @ x)
    run(step, X)
    for context in (
        jax.debug_nans(True),
        jax.default_prng_impl("rbg"),
        jax.named_scope("here"),
        contextlib.nullcontext(),
    ):
        with context:
            run(step, X)
