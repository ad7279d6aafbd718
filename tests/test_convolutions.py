"""Convolutions with their dimensions in order: the same program, at any depth."""

import equinox as eqx
import jax
import jax.extend
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec

from trainer._convolutions import channels_last, is_worth
from trainer._cost import inner_jaxprs


def normal(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


X, W = normal(3, 8, 6, 6), normal(16, 8, 3, 3)


def layer(x, w):
    return jax.lax.conv(x, w, (1, 1), "SAME")


def convolutions(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            yield eqn
        for inner in inner_jaxprs(eqn):
            yield from convolutions(inner)


def in_order(eqn):
    rank = len(eqn.invars[0].aval.shape)
    images = (0, rank - 1, *range(1, rank - 1))
    kernel = (rank - 1, rank - 2, *range(rank - 2))
    return tuple(eqn.params["dimension_numbers"]) == (images, kernel, images)


def rewrite(function, *args):
    """The function after, and how many of its convolutions were changed."""
    before, like = jax.make_jaxpr(function, return_shape=True)(*args)
    after = channels_last(before)
    old, new = list(convolutions(before.jaxpr)), list(convolutions(after.jaxpr))
    assert len(old) == len(new)
    assert not any(map(is_worth, new))
    assert channels_last(after) is after
    assert before.in_avals == after.in_avals
    assert before.out_avals == after.out_avals
    assert before.effects == after.effects
    treedef, flat = jax.tree.structure(like), jax.extend.core.jaxpr_as_fun(after)
    run = lambda *a: jax.tree.unflatten(treedef, flat(*jax.tree.leaves(a)))
    return run, sum(map(in_order, new)) - sum(map(in_order, old))


def close(one, other, within=1e-6):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=within * np.abs(b).max())


@st.composite
def single(draw):
    """A convolution: its parameters, and the shapes and the dtype of what it takes."""
    spatial = draw(st.sampled_from([2, 1, 3]))
    several = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * spatial))
    order = lambda: tuple(draw(st.permutations(range(spatial + 2))))
    window, extra, dilation = several(1, 3), several(0, 2), several(1, 2)
    size = [*map(lambda w, e, d: d * (w - 1) + 1 + e, window, extra, dilation)]
    inputs, outputs = draw(st.sampled_from([8, 3])), draw(st.sampled_from([16, 32]))
    dtype = draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"]))
    numbers = jax.lax.ConvDimensionNumbers(order(), order(), order())
    lhs, rhs = np.zeros(spatial + 2, int), np.zeros(spatial + 2, int)
    lhs[list(numbers.lhs_spec)] = 2, inputs, *size
    rhs[list(numbers.rhs_spec)] = outputs, inputs, *window
    params = {
        "window_strides": several(1, 2),
        "padding": [(draw(st.integers(0, 2)), p) for p in several(0, 2)],
        "lhs_dilation": several(1, 2),
        "rhs_dilation": dilation,
        "dimension_numbers": numbers,
        "preferred_element_type": draw(st.sampled_from([None, "float32"])),
    }
    return params, tuple(lhs), tuple(rhs), dtype


@given(single())
@settings(max_examples=12)
def test_any_convolution_is_equal_to_the_bit(case):
    params, *shapes, dtype = case
    x, w = (normal(*shape, dtype=dtype) for shape in shapes)
    function = lambda x, w: jax.lax.conv_general_dilated(x, w, **params)
    after, _ = rewrite(function, x, w)
    close(jax.jit(after)(x, w), jax.jit(function)(x, w), within=0)


def changes(inputs, outputs, spatial, dtype="float32", **params):
    x = jax.ShapeDtypeStruct((4, inputs, *[5] * spatial), dtype)
    each = inputs // params.get("feature_group_count", 1)
    w = jax.ShapeDtypeStruct((outputs, each, *[3] * spatial), dtype)
    params = {"window_strides": (1,) * spatial, "padding": [(0, 0)] * spatial} | params
    function = lambda x, w: jax.lax.conv_general_dilated(x, w, **params)
    return rewrite(function, x, w)[1] == 1


def test_what_is_changed():
    for size in [(8, 16, 1), (4, 8, 2), (1, 32, 2), (8, 16, 3)]:
        assert changes(*size)
    for dtype in ["bfloat16", "float16"]:
        assert changes(8, 16, 2, dtype=dtype)
    for name in ["window_strides", "rhs_dilation", "lhs_dilation"]:
        assert changes(8, 16, 2, **{name: (2, 2)})


def test_what_is_left():
    for size in [(4, 8, 1), (1, 8, 2), (4, 8, 3), (16, 16, 0), (16, 16, 4)]:
        assert not changes(*size)
    for dtype in ["int32", "complex64"]:
        assert not changes(8, 16, 2, dtype=dtype)
    for groups in [{"feature_group_count": 8}, {"batch_group_count": 2}]:
        assert not changes(8, 16, 2, **groups)
    assert not changes(8, 16, 3, lhs_dilation=(2, 2, 2))


def made(make):
    model = eqx.filter_eval_shape(make, jr.key(0))
    like, static = eqx.partition(model, lambda a: isinstance(a, jax.ShapeDtypeStruct))
    return jax.tree.map(lambda a: normal(*a.shape), like), static


@pytest.mark.parametrize(
    ("name", "args", "shape", "count"),
    [
        ("Conv1d", {"stride": 2}, (8, 9), 3),
        ("Conv2d", {"stride": 2, "padding": 1}, (8, 7, 7), 3),
        ("Conv3d", {}, (8, 4, 4, 4), 3),
        ("ConvTranspose2d", {"stride": 2, "output_padding": 1}, (8, 5, 5), 2),
    ],
)
def test_layers_have_the_same_values_and_gradients_in_a_cond(name, args, shape, count):
    params, static = made(lambda key: getattr(eqx.nn, name)(8, 16, 3, **args, key=key))
    x = normal(2, 4, *shape)

    def loss(given):
        run = eqx.combine(given[0], static)
        return jnp.mean(jax.vmap(jax.vmap(run))(given[1]) ** 2)

    def step(given, turn):
        nothing = lambda given: (0.0, jax.tree.map(jnp.zeros_like, given))
        return jax.lax.cond(turn, jax.value_and_grad(loss), nothing, given)

    after, changed = rewrite(step, (params, x), True)
    assert changed == count
    # Not to the bit: what is left is summed in another order in a branch.
    wanted = jax.jit(jax.value_and_grad(loss))((params, x))
    close(jax.jit(after)((params, x), True), wanted)


def test_batch_norm_and_checkpoint_and_a_scan_over_layers():
    make = lambda key: eqx.nn.Conv2d(8, 8, 3, padding=1, key=key)
    layers, static = made(lambda key: eqx.filter_vmap(make)(jr.split(key, 3)))
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="batch")

    @eqx.filter_checkpoint
    def one(weights, x):
        return jax.nn.relu(eqx.combine(weights, static)(x))

    def model(layers, x, state):
        x, _ = jax.lax.scan(lambda x, w: (one(w, x), None), x, layers)
        return norm(x, state)

    def loss(layers, state):
        run = jax.vmap(model, (None, 0, None), (0, None), axis_name="batch")
        out, state = run(layers, X, state)
        return jnp.mean(out**3), state

    step = jax.value_and_grad(loss, has_aux=True)
    after, changed = rewrite(step, layers, state)
    assert changed >= 3
    close(jax.jit(after)(layers, state), jax.jit(step)(layers, state))


def custom_vjp(x, w):
    f = jax.custom_vjp(layer)
    f.defvjp(lambda x, w: (layer(x, w), (x, w)), lambda r, g: jax.vjp(layer, *r)[1](g))
    return f(x, w)


def custom_jvp(x, w):
    f = jax.custom_jvp(layer)
    f.defjvp(lambda given, moved: jax.jvp(layer, given, moved))
    return f(x, w)


def in_a_while(x, w):
    """With a convolution in what it asks, and one in what it does."""
    going = lambda c: (c[0] < 3) & (jnp.sum(layer(c[1], w)) < jnp.inf)
    does = lambda c: (c[0] + 1, c[1] + jnp.tanh(layer(c[1], w))[:, :8])
    return jax.lax.while_loop(going, does, (0, x))


def in_everything(x, w):
    inner = lambda x: jax.lax.switch(1, [jnp.sin, lambda x: custom_vjp(x, w)[:, :8]], x)
    body = lambda _, x: jnp.tanh(jax.checkpoint(jax.jit(inner))(x))
    return jax.lax.fori_loop(0, 2, body, x)


RULES = [jax.checkpoint(layer), custom_vjp, custom_jvp]
PLACES = [*RULES, jax.jit(layer)]


def test_each_place_that_holds_a_jaxpr():
    assert [rewrite(place, X, W)[1] for place in PLACES] == [1] * 4
    branches = lambda x, w: jax.lax.cond(x.sum() > 9, layer, layer, x, w)
    every = lambda x, w: [place(x, w) for place in [*PLACES, branches]]
    after, changed = rewrite(every, X, W)
    assert changed == 6
    for found in jax.jit(after)(X, W):
        close(found, layer(X, W))


@pytest.mark.parametrize(("function", "count"), [(in_a_while, 2), (in_everything, 1)])
def test_places_in_places(function, count):
    after, changed = rewrite(function, X, W)
    assert changed == count
    close(jax.jit(after)(X, W), jax.jit(function)(X, W))


def test_gradients_before_and_after():
    loss = lambda f: lambda x, w: jnp.sum(f(x, w) ** 2)
    slopes = lambda x, w: [jax.grad(loss(rule), (0, 1))(x, w) for rule in RULES]
    later = [rewrite(loss(rule), X, W)[0] for rule in RULES]
    slopes_later = lambda x, w: [jax.grad(after, (0, 1))(x, w) for after in later]
    after, changed = rewrite(slopes, X, W)
    assert changed >= 9
    for found in (*jax.jit(after)(X, W), *jax.jit(slopes_later)(X, W)):
        close(found, jax.grad(loss(layer), (0, 1))(X, W))


def test_a_program_with_nothing_to_change_is_the_same_object():
    without = lambda x, w: jax.lax.cond(x.sum() > 0, jax.jit(jnp.sin), jnp.cos, w)
    for function in (without, jax.jit(layer)):
        before = jax.make_jaxpr(function)(X, W[:1])
        assert channels_last(before) is before
    params = ((1, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"))
    ordered = lambda x, w: jax.lax.conv_general_dilated(x, w, *params)
    x, w = X.transpose(0, 2, 3, 1), W.transpose(2, 3, 1, 0)
    before = jax.make_jaxpr(jax.jit(ordered))(x, w)
    assert channels_last(before) is before


def test_a_jaxpr_in_several_places_stays_one():
    shared = jax.jit(lambda x, w: layer(x, w)[:, :8])
    before = jax.make_jaxpr(lambda x, w: shared(shared(x, w), w))(X, W)
    one, other = (eqn for eqn in channels_last(before).jaxpr.eqns if inner_jaxprs(eqn))
    assert one.params["jaxpr"] is other.params["jaxpr"]


def test_a_shard_map_is_left():
    mesh, whole = jax.make_mesh((1,), ("x",)), PartitionSpec()
    function = jax.shard_map(layer, mesh=mesh, in_specs=whole, out_specs=whole)
    before = jax.make_jaxpr(jax.jit(function))(X, W)
    assert channels_last(before) is before


def test_effects_keys_and_constants_stay(capfd):
    def noisy(x, key):
        jax.debug.print("at {}", x[0, 0, 0, 0], ordered=True)
        return layer(x + jr.normal(key, x.shape), W), jr.split(key)[0]

    rest = lambda x, key: (jnp.zeros((3, 16, 6, 6)), key)
    function = lambda x, key: jax.lax.cond(x.sum() != 0, noisy, rest, x, key)
    after, changed = rewrite(function, X, jr.key(0))
    assert changed == 1
    found, key = jax.jit(after)(X, jr.key(0))
    jax.effects_barrier()
    assert capfd.readouterr().out == f"at {X[0, 0, 0, 0]}\n"
    assert jnp.array_equal(jr.key_data(jr.split(jr.key(0))[0]), jr.key_data(key))
    close(found, layer(X + jr.normal(jr.key(0), X.shape), W))


def test_a_branch_in_a_loop_that_is_given_its_memory():
    loss = lambda x, w: jnp.mean(layer(x, w) ** 2)
    grad = jax.value_and_grad(loss, 1)
    rest = lambda x, w: (0.0, w)
    step = lambda x, w: w - 0.1 * jax.lax.cond(w.sum() != 0, grad, rest, x, w)[1]
    after, changed = rewrite(step, X, W)
    assert changed == 2
    loop = lambda w, x, n: jax.lax.fori_loop(0, n, lambda _, w: after(x, w), w)
    compiled = jax.jit(loop, donate_argnums=0).lower(W, X, 3).compile()
    text, given = compiled.as_text(), jnp.copy(W)
    assert text.count(" convolution(") == 2
    assert text.count("dim_labels=b01f_01io->b01f") == 2
    found = compiled(given, X, 3)
    assert given.is_deleted()
    close(found, jax.lax.fori_loop(0, 3, lambda _, w: step(X, w), W))
