"""What a step reads: lists, dicts, sets and NumPy arrays that change in place."""

import collections
import types

import jax.numpy as jnp
import numpy as np
import pytest
from reading import change_after_tracing, said, Thing, traced


GROWS = {
    "index": (lambda: [1.0], "return x * thing[0]", "append(2.0)", "1 to 2 items"),
    "loop": (
        lambda: [1.0],
        "return sum(each * x for each in thing)",
        "append(2.0)",
        "1 to 2 items",
    ),
    "length": (lambda: [1.0], "return x * len(thing)", "append(2.0)", "1 to 2 items"),
    "shrinks": (lambda: [1.0], "return x * len(thing)", "pop()", "1 to 0 items"),
    "deque": (
        lambda: collections.deque([1.0]),
        "return x * thing[0]",
        "append(2.0)",
        "1 to 2 items",
    ),
    "functions": (
        lambda: [jnp.sin],
        "return sum(f(x) for f in thing)",
        "append(jnp.cos)",
        "1 to 2 items",
    ),
    "set": (
        lambda: {"a"},
        "return x * (2.0 if 'b' in thing else 1.0)",
        "add('b')",
        "`{'a'}` to ",
    ),
    "items": (
        lambda: {"a": 1.0},
        "return sum(w * x for w in thing.values())",
        "update(b=2.0)",
        "nothing to `2.0`",
    ),
    "some key": (
        lambda: {"a": 1.0, "c": 1.0},
        "return thing['a'] * sum(thing[k] * x for k in thing)",
        "update(c=2.0)",
        "`1.0` to `2.0`",
    ),
    "get": (
        lambda: {"a": 1.0},
        "return x * thing.get('b', 0.0) * thing['a']",
        "update(b=2.0)",
        "nothing to `2.0`",
    ),
    "gone": (
        lambda: {"a": 1.0, "b": 1.0},
        "return x * thing.get('b', 0.0) * thing['a']",
        "pop('b')",
        "`1.0` to nothing",
    ),
    "kind": (
        lambda: {"a": 1},
        "return x * thing['a']",
        "update(a=1.0)",
        "`1` to `1.0`",
    ),
    "long": (
        lambda: [0.5] * 5000,
        "return x * thing[7]",
        "__setitem__(7, 2.0)",
        "`0.5` to `2.0`",
    ),
}


@pytest.mark.parametrize("is_closure", [False, True], ids=["global", "closure"])
@pytest.mark.parametrize("case", GROWS)
def test_what_is_read_may_not_grow_or_shrink(case, is_closure):
    make, expression, change, text = GROWS[case]
    thing = make()
    found = change_after_tracing(thing, expression, f"thing.{change}", is_closure)
    assert f" has changed from {text}" in found


@pytest.mark.parametrize(
    ("make", "expression", "change", "name"),
    [
        (lambda: [1, [2]], "x * thing[1][0]", "thing[1][0] = 3", "thing[1][0]"),
        (lambda: {"a": [1]}, "x * thing['a'][0]", "thing['a'][0] = 3", "thing['a'][0]"),
        (lambda: Thing(v=[1]), "x * thing.v[0]", "thing.v.append(3)", "thing.v"),
        (lambda: np.ones((2, 3)), "x * thing[0]", "thing[1, 2] = 3", "thing[1, 2]"),
        (lambda: np.array(1.0), "x * thing", "thing.fill(3)", "thing"),
    ],
)
def test_the_message_names_the_place(make, expression, change, name):
    expression = f"return {expression}"
    found = change_after_tracing(make(), expression, change, is_closure=False)
    assert found.startswith(f"Global `{name}` of `loss` (losses.py) has changed from ")


CHANGES = {
    "one": lambda a: a.__setitem__((100, 70), 2.0),
    "all": lambda a: np.negative(a, out=a),
    "order": lambda a: a.__setitem__([0, 1], a[[1, 0]]),
    "last": lambda a: a.__setitem__((-1, -1), 2.0),
}
KINDS = {
    "float32": lambda: np.random.default_rng(0).normal(size=(128, 256)).astype("f4"),
    "float64": lambda: np.random.default_rng(0).normal(size=(128, 256)),
    "by columns": lambda: np.asfortranarray(np.ones((128, 256)) * np.arange(256)),
    "every other": lambda: (np.ones((256, 512)) * np.arange(512))[::2, ::2],
    "small": lambda: np.random.default_rng(0).normal(size=(128, 80)).astype("f2"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_large_array_is_looked_at_as_a_whole(kind, change):
    array = KINDS[kind]()
    if kind in ("by columns", "every other"):
        array += np.arange(128)[:, None]
    baked = traced(lambda model, batch: jnp.sum(model) * jnp.asarray(array)[0, 0])
    CHANGES[change](array)
    assert said(baked).startswith("Variable `array")


def test_a_sample_of_a_large_array_is_looked_at_meanwhile():
    array = np.ones((128, 256))
    baked = traced(lambda model, batch: jnp.sum(model) * jnp.asarray(array)[0, 0])
    array[100, 70] = 2.0
    assert baked.changed(full=False) is None
    array *= -1.0
    assert baked.changed(full=False) is not None


def test_a_file_in_memory_is_not_read_as_a_whole(tmp_path):
    array = np.memmap(tmp_path / "table", np.float32, "w+", shape=(64, 1024))
    baked = traced(lambda model, batch: jnp.sum(model) * jnp.asarray(array)[0, 0])
    array[0, 1] = 2.0
    assert baked.changed() is None
    array[:] = 3.0
    assert baked.changed() is not None


def test_a_dict_that_cannot_be_written_to_is_looked_through():
    options = {"k": 1.0}
    shown = types.MappingProxyType(options)
    baked = traced(lambda model, batch: jnp.sum(model) * shown["k"])
    options["k"] = 2.0
    assert "`shown['k']`" in said(baked)
