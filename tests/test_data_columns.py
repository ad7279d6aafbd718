"""Columns of a batch: what becomes an array, what is refused, what is kept aside."""

import collections
import datetime
import decimal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trainer as tr


X = np.arange(8.0, dtype=np.float32)
NAMES = list("abcdefgh")
Row = collections.namedtuple("Row", ["x", "name"])


def taken(loader):
    """The batches of one epoch, as a step would get them."""
    return [batch for batch, _, _ in loader.batches(pad=False)]


def only(column):
    """A column as a step gets it."""
    return taken(tr.Loader([{"x": X, "column": column}]))[0]["column"]


@pytest.mark.parametrize(
    ("column", "dtype", "shape"),
    [
        (3, "int32", ()),
        (0.5, "float32", ()),
        (True, "bool", ()),
        (2j, "complex64", ()),
        (np.float64(0.5), "float32", ()),
        (np.int64(3), "int32", ()),
        (np.bool_(True), "bool", ()),
        ([1, 2, 3], "int32", (3,)),
        ([1, 2.5], "float32", (2,)),
        ([True, False], "bool", (2,)),
        ([np.float32(1), np.float32(2)], "float32", (2,)),
        ([[1, 2], [3, 4], [5, 6]], "int32", (3, 2)),
        (np.ones(3, np.float16), "float16", (3,)),
        (np.ones(3, np.uint8), "uint8", (3,)),
    ],
)
def test_numbers_and_lists_of_numbers_become_arrays(column, dtype, shape):
    found = only(column)
    assert (str(found.dtype), found.shape) == (dtype, shape)
    np.testing.assert_array_equal(found, column)


def test_lists_of_columns_stay_lists_and_none_stays_none():
    assert [np.shape(part) for part in only([X, 0.5])] == [(8,), ()]
    assert only(None) is None
    assert [np.shape(part) for part in only((1, 2.5))] == [(), ()]
    assert taken(tr.Loader([[1, 2], [3, 4]]))[1].tolist() == [3, 4]


def test_a_step_takes_numbers_in_nested_dicts_and_compiles_once():
    def loss(model, batch):
        options = batch["options"]
        scaled = options["scale"] * jnp.mean(batch["x"] - batch["y"]) * model**2
        return jnp.where(options["on"], scaled, 0.0)

    batches = [
        {"x": X, "y": X.tolist(), "options": {"scale": scale, "on": True}}
        for scale in (1.0, 2.0, 3.0)
    ]
    trainer = tr.Trainer(loss, optax.sgd(0.1))
    result = trainer.fit(jnp.ones(()), batches, num_epochs=2, progress=False)
    assert result.compiles == 1
    assert trainer.evaluate(jnp.ones(()), batches) == {"loss": 0.0}


@pytest.mark.parametrize(
    ("column", "why", "first"),
    [
        (NAMES, "has dtype `<U1`", "'a'"),
        (["1.5", "2.5"], "has dtype `<U3`", "'1.5'"),
        ("a cat", "has dtype `<U5`", "'a cat'"),
        (b"raw", "has dtype `|S3`", "b'raw'"),
        (np.array(NAMES), "has dtype `<U1`", "'a'"),
        (np.array(NAMES, object), "has dtype `object`", "'a'"),
        (np.array(["2024-01-01"], "datetime64[D]"), "has dtype `datetime64[D]`", ""),
        (
            [datetime.date(2024, 1, 1)],
            "has dtype `object`",
            "datetime.date(2024, 1, 1)",
        ),
        ([decimal.Decimal("1.5")], "has dtype `object`", "Decimal('1.5')"),
        (decimal.Decimal("1.5"), "has dtype `object`", "Decimal('1.5')"),
        ([1.0, None], "has dtype `object`", "1.0"),
        ([1, "a"], "has dtype `<U21`", "1"),
        ([[1, 2], [3]], "has rows of different lengths", "[1, 2]"),
        (print, "has dtype `object`", "<built-in function print>"),
    ],
)
def test_what_is_no_number_is_an_error_that_names_the_column(column, why, first):
    with pytest.raises(TypeError) as error:
        only(column)
    text = str(error.value)
    assert text.startswith(
        f"Column `batch['column']` {why}, and a compiled step takes "
    )
    assert f"its first value is `{first}" in text
    assert text.endswith("keep it aside: `tr.Loader(batches, aside=('column',))`.")


def test_a_column_deeper_down_and_one_of_a_tuple_are_named():
    deep = [{"x": X, "about": {"name": NAMES}}]
    with pytest.raises(TypeError, match=r"`batch\['about'\]\['name'\]`") as error:
        taken(tr.Loader(deep))
    assert "aside=(('about', 'name'),)" in str(error.value)
    loader = tr.Loader(deep, aside=(("about", "name"),))
    assert [[*b["about"]] for b in taken(loader)] == [[]]
    assert loader.aside == {("about", "name"): NAMES}
    with pytest.raises(TypeError, match=r"`batch\[1\]`.*aside=\(1,\)"):
        taken(tr.Loader([(X, np.array(NAMES))]))
    with pytest.raises(TypeError, match=r"`batch\.name`.*aside=\('name',\)"):
        taken(tr.Loader([Row(X, np.array(NAMES))]))
    with pytest.raises(TypeError, match=r"`batch` has dtype.*or leave it out\.$"):
        taken(tr.Loader([np.array(NAMES)]))


@pytest.mark.parametrize(
    ("batch", "aside", "kept", "name"),
    [
        ({"x": X, "name": NAMES}, ("name",), {"x": X}, "name"),
        ((X, NAMES), (1,), X, 1),
        ((X, NAMES), (-1,), X, -1),
        ((NAMES, X, X), (0,), (X, X), 0),
        ([X, X, NAMES], (2,), [X, X], 2),
        (Row(X, NAMES), ("name",), Row(X, None), "name"),
        (Row(X, NAMES), (1,), Row(X, None), 1),
        ([{"x": X, "name": NAMES}], ("name",), {"x": X}, "name"),
        (
            (X, {"name": NAMES, "y": X}),
            ((1, "name"),),
            (X, {"y": X}),
            (1, "name"),
        ),
        (collections.OrderedDict(x=X, name=NAMES), ("name",), {"x": X}, "name"),
    ],
)
def test_a_column_is_kept_aside(batch, aside, kept, name):
    loader = tr.Loader([batch], aside=aside)
    assert loader.aside == {}
    assert str(taken(loader)[0]) == str(kept)
    assert loader.aside == {name: NAMES}


def test_a_fit_does_not_see_what_is_kept_aside_and_compiles_once():
    def loss(model, batch):
        assert sorted(batch) == ["x"]
        return jnp.mean(batch["x"] * model)

    columns = [{"x": X * n, "name": NAMES, "id": [n] * 8} for n in range(4)]
    seen = []

    class Look(tr.AbstractCallback):
        def __call__(self, info):
            seen.append(loader.aside["id"][0])

    loader = tr.Loader(columns, aside=("name", "id"))
    trainer = tr.Trainer(loss, optax.sgd(0.1), steps_per_call=2)
    result = trainer.fit(
        jnp.ones(()), loader, num_steps=6, progress=False, callbacks=[Look(every=1)]
    )
    plain = [{"x": batch["x"]} for batch in columns]
    other = tr.Trainer(loss, optax.sgd(0.1))
    by_hand = other.fit(jnp.ones(()), plain, num_steps=6, progress=False)
    assert result.model == by_hand.model
    assert result.compiles == 1
    assert seen == [0, 1, 2, 3, 0, 1]
    assert trainer.evaluate(result.model, loader) == other.evaluate(result.model, plain)
    assert loader.aside == {"name": NAMES, "id": [3] * 8}


def test_a_generator_and_a_short_batch_are_kept_aside_too():
    def batches():
        yield X, NAMES
        yield X[:5], NAMES[:5]

    def loss(model, batch, *, mask):
        return jnp.sum(batch * mask) * model, {"rows": jnp.sum(mask)}

    trainer = tr.Trainer(loss, optax.sgd(0.1))
    loader = tr.Loader(batches, ragged="pad", aside=(1,))
    result = trainer.fit(jnp.ones(()), loader, num_epochs=1, progress=False)
    assert result.history["rows"].tolist() == [8, 5]
    loader = tr.Loader(batches(), aside=(1,), ragged="pad")
    trainer.fit(jnp.ones(()), loader, num_steps=1, progress=False)
    assert loader.aside == {1: NAMES}
    trainer.fit(jnp.ones(()), tr.Loader([X]), num_steps=1, progress=False)


@pytest.mark.parametrize(
    ("batch", "aside", "text"),
    [
        ({"x": X}, ("name",), r"`aside` names `'name'`, and the batch has \['x'\]"),
        ((X, X), (2,), "`aside` names `2`, and the batch has 2 columns"),
        ((X, X), ("x",), "`aside` names `'x'`, and the batch has 2 columns"),
        (X, ("x",), "`aside` names `'x'`, and the batch has a `ndarray` there"),
        ({"x": X}, (("x", "y"),), r"names `\('x', 'y'\)`, and the batch has a `ndarr"),
    ],
)
def test_a_column_that_is_not_there_is_an_error(batch, aside, text):
    with pytest.raises(KeyError, match=text):
        taken(tr.Loader([batch], aside=aside))


@pytest.mark.parametrize("aside", ["name", 1, {"name": 1}])
def test_aside_is_a_tuple(aside):
    with pytest.raises(TypeError, match=r"`aside` is `.*`, and not a tuple of columns"):
        tr.Loader([{"x": X}], aside=aside)


class Table:
    """What pandas calls a DataFrame."""

    def __init__(self, **columns):
        self.columns = list(columns)
        self._held = columns

    def items(self):
        return self._held.items()

    def __array__(self, dtype=None, copy=None):
        return np.array(list(zip(*self._held.values(), strict=True)), object)


def test_arrays_name_a_text_column_and_do_not_speak_of_aside():
    with pytest.raises(TypeError, match=r"`arrays\['name'\]` has dtype `<U1`") as error:
        tr.Arrays({"x": X, "name": np.array(NAMES)}, batch_size=2)
    assert str(error.value).endswith("Encode it as numbers, or leave it out.")
    with pytest.raises(TypeError, match=r"`arrays\[1\]` has dtype `object`"):
        tr.Arrays(X, np.array(NAMES, object), batch_size=2)
    with pytest.raises(TypeError, match=r"`arrays\[1\]\['name'\]` has dtype `<U1`"):
        tr.Arrays(X, Table(y=X, name=np.array(NAMES)), batch_size=2)
    with pytest.raises(TypeError, match=r"`arrays` has rows of different lengths"):
        tr.Arrays([[1.0, 2.0], [3.0]], batch_size=1)


def test_arrays_take_lists_of_numbers_at_any_depth():
    data = tr.Arrays({"x": [1.0, 2.0], "more": {"y": [[1], [2]]}}, batch_size=1)
    shapes = jax.tree.map(lambda a: (str(a.dtype), a.shape), data.arrays)
    assert shapes == {"x": ("float32", (2,)), "more": {"y": ("int32", (2, 1))}}
