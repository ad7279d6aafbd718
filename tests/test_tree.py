"""PyTrees of arrays: canonical leaves, tracing once."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from trainer._tree import (
    canonical,
    describe,
    parameters,
    path_name,
    struct,
    trace_once,
)
from trainer.recompiles._differences import first_difference


class Model(eqx.Module):
    w: jax.Array
    table: jax.Array
    act: object
    name: str = eqx.field(static=True, default="m")


def make(w=(1.0, 2.0), table=(1, 2), act=jax.nn.relu, name="m"):
    return Model(jnp.asarray(w), jnp.asarray(table), act, name)


def test_canonical_leaves_are_strong_committed_and_equal():
    tree = {
        "weak": jnp.asarray(1.5),
        "strong": jnp.arange(3, dtype=jnp.int8),
        "numpy": np.arange(2.0, dtype=np.float32),
        "key": jr.key(7),
        "static": "text",
        "number": 3,
        "fn": jax.nn.relu,
        "none": None,
    }
    found = canonical(tree)
    for name in ("weak", "strong", "numpy", "key"):
        assert isinstance(found[name], jax.Array)
        assert found[name].committed
        assert found[name].dtype == tree[name].dtype
        assert (found[name] == tree[name]).all()
    assert not found["weak"].weak_type
    assert tree["weak"].weak_type
    for name in ("static", "number", "fn", "none"):
        assert found[name] is tree[name]
    assert jax.tree.structure(found) == jax.tree.structure(tree)


def address(leaf):
    return leaf.unsafe_buffer_pointer()


def aligned():
    """A NumPy array that JAX could use where it lies, without a copy."""
    raw = np.zeros(128, np.uint8)
    start = -raw.ctypes.data % 64
    host = raw[start : start + 16].view(np.float32)
    host[:] = range(4)
    return host


def test_canonical_copies_an_array_once_for_each_leaf():
    one = jnp.arange(4.0)
    found = canonical({"a": one, "b": one})
    assert len({address(leaf) for leaf in (one, *found.values())}) == 3
    donated = jax.jit(lambda t: jax.tree.map(jnp.cos, t), donate_argnums=0)(found)
    np.testing.assert_array_equal(donated["a"], donated["b"])
    np.testing.assert_array_equal(one, np.arange(4.0))


def test_canonical_copies_a_numpy_array_once_for_each_leaf():
    host = aligned()
    found = canonical({"a": host, "b": host})
    host[:] = 9.0
    np.testing.assert_array_equal(found["a"], np.arange(4.0))
    np.testing.assert_array_equal(found["b"], np.arange(4.0))
    assert address(found["a"]) != address(found["b"])


def test_canonical_without_a_copy_still_makes_leaves_strong():
    tree = (jnp.asarray(1.0), jnp.arange(1024.0))
    found = canonical(tree, copy=False)
    assert not found[0].weak_type
    assert found[1].committed
    assert address(found[1]) == address(tree[1])


def test_canonical_is_idempotent_and_takes_an_empty_tree():
    once = canonical(make())
    assert eqx.tree_equal(canonical(once), once)
    assert first_difference("model", once, canonical(once)) is None
    assert canonical(()) == ()


def test_parameters_are_the_inexact_arrays():
    found = parameters(make())
    np.testing.assert_array_equal(found.w, [1.0, 2.0])
    assert found.table is None
    assert found.act is None


def test_struct_is_never_weak():
    weak = jnp.asarray(1.0)
    assert struct(weak) == jax.ShapeDtypeStruct((), jnp.float32)
    assert not getattr(struct(weak), "weak_type", False)


def test_names_are_the_python_that_reaches_the_leaf():
    tree = {"x": [make()]}
    names = [path_name("batch", p) for p, _ in jax.tree.leaves_with_path(tree)]
    assert names == ["batch['x'][0].w", "batch['x'][0].table", "batch['x'][0].act"]
    names = [path_name("", p) for p, _ in jax.tree.leaves_with_path(make())]
    assert names == ["w", "table", "act"]


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (np.zeros((4, 2), np.uint8), "uint8[4,2]"),
        (jnp.float32(1), "float32[]"),
        (jax.ShapeDtypeStruct((3,), jnp.bool_), "bool[3]"),
        ("a", "'a'"),
        (None, "None"),
        ("x" * 80, "'" + "x" * 56 + "..."),
    ],
)
def test_describe(leaf, text):
    assert describe(leaf) == text


def test_trace_once_runs_the_body_once():
    runs = []

    def body(x, key, option):
        runs.append(option)
        return {"x": x * 2, "key": jr.fold_in(key, 1), "option": option, "none": None}

    x, key = jnp.arange(3.0), jr.key(0)
    replay, out = trace_once(body, x, key, "yes")
    assert runs == ["yes"]
    assert out["x"] == jax.ShapeDtypeStruct((3,), jnp.float32)
    assert out["key"].dtype == key.dtype
    assert (out["option"], out["none"]) == ("yes", None)
    for scale in (1.0, 3.0):
        found = jax.jit(lambda v: replay(v, key, "yes")["x"])(x * scale)
        np.testing.assert_array_equal(found, x * scale * 2)
    found = replay(x, key, "yes")
    assert found["key"] == jr.fold_in(key, 1)
    assert (found["option"], found["none"]) == ("yes", None)
    assert runs == ["yes"]


def test_trace_once_may_close_over_what_is_being_traced():
    def run(scale, x):
        replay, _ = trace_once(lambda v: scale * v**2, x)
        return jnp.sum(replay(x)) + jnp.sum(jax.jit(replay)(x))

    x = jnp.arange(1.0, 4.0)
    np.testing.assert_allclose(jax.jit(run)(3.0, x), 2 * 3 * 14)
    np.testing.assert_allclose(jax.grad(run)(3.0, x), 2 * 14)
    np.testing.assert_allclose(jax.grad(run, 1)(3.0, x), 2 * 3 * 2 * x)
    scales = jnp.array([1.0, 2.0])
    batched = jax.vmap(run, (0, None))(scales, x)
    np.testing.assert_allclose(batched, 2 * scales * 14)
