"""What differs between two trees and two calls, and the words for it."""

import collections
import dataclasses
import warnings
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from trainer.recompiles._differences import differences, first_difference
from trainer.recompiles._forms import Form


class Model(eqx.Module):
    w: jax.Array
    table: jax.Array
    act: object
    name: object = eqx.field(static=True, default="m")


def make(w=(1.0, 2.0), table=(1, 2), act=jax.nn.relu, name="m"):
    return Model(jnp.asarray(w), jnp.asarray(table), act, name)


NAN = float("nan")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ({"x": 1}, {}, "`batch['x']` was 1 and is now gone"),
        ({}, {"x": jnp.ones(2)}, "`batch['x']` is new: float32[2]"),
        ({"x": None}, {"x": 1}, "`batch['x']` is new: 1"),
        ({"x": 1}, {"x": None}, "`batch['x']` was 1 and is now gone"),
        (jnp.ones(2), (), "`batch` was float32[2] and is now gone"),
        ([1, 2], [1, 3], "`batch[1]` was 2 and is now 3"),
        ([np.ones(2)], [np.ones(3)], "was float64[2] and is now float64[3]"),
        ([np.ones(2)], [np.ones((2, 1))], "was float64[2] and is now float64[2,1]"),
        ([jnp.ones(2)], [jnp.ones(2, int)], "was float32[2] and is now int32[2]"),
        ([jr.key(0)], [jr.key_data(jr.key(0))], "was key<fry>[] and is now uint32[2]"),
        ([jnp.ones(())], [1.0], "`batch[0]` was float32[] and is now 1.0"),
        ([1.0], [jnp.ones(())], "`batch[0]` was 1.0 and is now float32[]"),
        (make(), make(act=jax.nn.gelu), "`batch.act` was "),
        (make(), make(w=[1.0]), "`batch.w` was float32[2] and is now float32[1]"),
        (make(), make(name="other"), "`batch.name` was 'm' and is now 'other'"),
        ((1,), [1], "`batch` was of class `tuple` and is now of class `list`"),
        ((), None, "`batch` was of class `tuple` and is now of class `NoneType`"),
        (
            [np.float32],
            [np.int32],
            "was of class `float32` and is now of class `int32`",
        ),
    ],
)
def test_the_first_difference_is_named(old, new, text):
    found = first_difference("batch", old, new)
    assert found is not None
    assert text in found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (make(), make(w=[3.0, 4.0], table=[5, 6])),
        ([jnp.ones(2)], [np.zeros(2, np.float32)]),
        ([jnp.ones(2)], [jax.ShapeDtypeStruct((2,), jnp.float32)]),
        ([jnp.asarray(1.0)], [jnp.float32(1)]),
        ([NAN], [NAN]),
        (["a", 1, None], ["a", 1, None]),
        ([1], [1.0]),
        ([np.float32], [np.float32]),
        (jr.key(0), jr.key(1)),
    ],
)
def test_what_is_no_difference(old, new):
    assert first_difference("batch", old, new) is None


def test_a_static_field_that_differs_is_named():
    class Inner(eqx.Module):
        w: jax.Array
        act: Callable = eqx.field(static=True)

    class Outer(eqx.Module):
        parts: list

    tanh, other = lambda x: x, lambda x: 2 * x
    old = {"m": Outer([Inner(jnp.ones(2), tanh)])}
    new = {"m": Outer([Inner(jnp.ones(2), other)])}
    found = first_difference("", old, new)
    assert found is not None
    assert found.startswith("`['m'].parts[0].act` was <function")
    assert first_difference("", old, old) is None


def test_a_class_that_was_defined_anew_is_named():
    def make():
        class Same(eqx.Module):
            w: jax.Array

        return Same(jnp.ones(2))

    found = first_difference("model", [make()], [make()])
    assert found is not None
    text = "`model[0]` was of class `Same` and is now of class `Same`, another one"
    assert found == text


class Point(NamedTuple):
    x: object
    y: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    w: object
    size: int = dataclasses.field(metadata={"static": True}, default=1)


@jax.tree_util.register_pytree_node_class
class Odd:
    """Says nothing of its paths, and has something besides its children."""

    def __init__(self, child, rest):
        self.child, self.rest = child, rest

    def tree_flatten(self):
        return (self.child,), self.rest

    @classmethod
    def tree_unflatten(cls, rest, children):
        return cls(*children, rest)


Ordered = collections.OrderedDict


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (None, np.ones(2), [("t", "structure", "None", "float64[2]")]),
        (
            [1, None],
            [None, 1],
            [("t[0]", "structure", "1", "None")] * 1
            + [("t[1]", "structure", "None", "1")],
        ),
        (
            {"a": 1, "b": 2},
            {"b": 3, "c": {}},
            [
                ("t['a']", "structure", "1", "not there"),
                ("t['b']", "static value", "2", "3"),
                ("t['c']", "structure", "not there", "of class `dict`"),
            ],
        ),
        (Point(1, 2), Point(1, (2,)), [("t.y", "structure", "2", "of class `tuple`")]),
        (Registered(1, 2), Registered(1, 3), [("t.size", "static value", "2", "3")]),
        (
            Odd(1, "p"),
            Odd(1, "q"),
            [("t", "structure", "of class `Odd` with 'p'", "of class `Odd` with 'q'")],
        ),
        (Odd(1, "p"), Odd(2, "p"), [("t[<flat index 0>]", "static value", "1", "2")]),
        (
            Ordered(a=1, b=2),
            Ordered(b=2, a=1),
            [
                (
                    "t",
                    "structure",
                    "of class `OrderedDict` with ('a', 'b')",
                    "of class `OrderedDict` with ('b', 'a')",
                )
            ],
        ),
        (np.ones(2, np.int8), np.ones(3), [("t", "shape", "int8[2]", "float64[3]")]),
        (
            jnp.asarray(1),
            jnp.int32(1),
            [("t", "weak type", "weakly typed int32[]", "int32[]")],
        ),
        (jr.key(0), jr.key(0, impl="rbg"), [("t", "key", "key<fry>[]", "key<rbg>[]")]),
        (3, jnp.int32(3), [("t", "traced", "3", "int32[]")]),
        ("mean", np.ones(2), [("t", "traced", "'mean'", "float64[2]")]),
    ],
)
def test_all_differences_are_named(old, new, expected):
    found = list(differences("t", old, new))
    assert [(d.path, d.what, d.was, d.now) for d in found] == expected
    assert all(d.remedy.endswith(".") and d.remedy.count(". ") == 0 for d in found)
    assert list(differences("t", old, old)) == []


@pytest.mark.parametrize("value", [np.ones(2), jnp.ones(2), (1, np.ones(2))])
def test_an_array_in_a_static_field_is_named_and_said_to_be_one(value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        same, was = (make(name=value) for _ in range(2))
        now = make(name=jax.tree.map(lambda x: x + 0, value))
    assert list(differences("model", was, same)) == []
    (found,) = differences("model", was, now)
    assert found.path == "model.name"
    assert "an array cannot be" in found.remedy
    assert "not static" in found.remedy


def test_what_nothing_is_known_of_is_no_difference():
    committed = jax.device_put(jnp.ones(2), jax.devices()[0])
    struct = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert list(differences("x", struct, committed)) == []
    (found,) = differences("x", jnp.ones(2), committed)
    assert (found.what, found.was) == ("committed", "uncommitted")
    assert list(differences("x", jnp.ones(2), committed, forms_only=True)) == []
    inside = []
    jax.jit(lambda x: inside.extend(differences("x", x, committed)))(jnp.ones(2))
    assert inside == []


def test_a_form_is_described_as_its_array_is():
    assert repr(Form(jnp.ones((4, 2)))) == "float32[4,2]"
    assert repr(Form(jr.key(0))) == "key<fry>[]"
