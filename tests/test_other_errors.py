"""Errors while tracing that are no known mistakes: left as they are, with a note."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mistakes import marked_line, MODEL

import trainer as tr


def fit(loss, data=None):
    trainer = tr.Trainer(loss, optax.sgd(0.1))
    trainer.fit(MODEL, data, num_steps=2, progress=False)


def fine(model, batch):
    return jnp.sum(model**2)


def wrong_shapes(model, batch):
    return jnp.sum(jnp.ones((2, 5)) @ model)


class OwnError(TypeError):
    pass


SAME_WORDS = [
    OwnError("unhashable type: 'MyTracer'"),
    TypeError("JAX arrays are immutable"),
    TypeError("unhashable type: 'MyTracer'"),
    IndexError("Slice entries must be static integers"),
    ValueError("Reverse-mode differentiation does not work for lax.while_loop"),
    AttributeError("module 'jax.numpy' has no attribute 'softmax'"),
    ValueError("mine"),
    KeyError("k"),
    ZeroDivisionError("division by zero"),
]


@pytest.mark.parametrize("error", SAME_WORDS, ids=lambda e: str(e)[:20])
def test_what_the_user_raises_is_left_as_it_is(error):
    def loss(model, batch):
        raise error

    text = str(error)
    with pytest.raises(type(error)) as caught:
        fit(loss)
    assert caught.value is error
    assert str(error) == text


def test_what_the_user_raises_without_a_file_is_left_as_it_is():
    scope: dict[str, Any] = {}
    exec(
        "def loss(m, b):\n if not b: raise TypeError('JAX arrays are immutable')", scope
    )
    with pytest.raises(TypeError, match="JAX arrays are immutable") as caught:
        fit(scope["loss"])
    assert not isinstance(caught.value, tr.TraceError)


@pytest.mark.parametrize(
    "words",
    [
        "x = [1, 2]; x[0] = 0",
        "'%d' % 1, f'{1.0:.3f}', {0: 1}[0], hash(0)",
        "import numpy as np; y = np.zeros(3); y[0] = 1; y += 1",
        "assert model.shape == (3,); max(1, 2), range(3), float(1)",
        "isinstance(model, int) and not batch",
    ],
)
def test_the_same_words_without_a_traced_value_are_fine(words):
    scope: dict[str, Any] = {}
    source = f"def loss(model, batch):\n    {words}\n    return model.sum()"
    exec(source, scope)
    fit(scope["loss"])


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("import types; types.SimpleNamespace().softmax", AttributeError),
        ("jnp.qwerty(model)", AttributeError),
        ("model.backward()", AttributeError),
        ("{}[[1]]", TypeError),
        ("'%d' % 'a'", TypeError),
        ("f'{None:.3f}'", TypeError),
        ("numpy.zeros(3)[:1.5]", TypeError),
        ("numpy.zeros(3).__setitem__(0, [1, 2])", ValueError),
        ("numpy.sqrt(2, 3, 4, 5)", TypeError),
        ("float('a')", ValueError),
    ],
)
def test_errors_that_are_not_of_tracing_are_left_as_they_are(source, kind):
    scope: dict[str, Any] = {"jnp": jnp, "numpy": np}
    exec(f"def loss(model, batch):\n    {source}\n    return jnp.sum(model)", scope)
    with pytest.raises(kind) as caught:
        fit(scope["loss"])
    assert type(caught.value) is kind


# The note that other errors get.


def note_of(error):
    """The one note of this package's."""
    (note,) = [text for text in error.__notes__ if text.startswith("In the ")]
    return note


def mismatched(model, batch):
    return jnp.sum(batch["x"] @ model)  # here


BATCH = {"x": np.ones((4, 5), np.float32), "y": np.ones(4, np.int32)}


@pytest.mark.parametrize("how", ["alone", "in a switch", "in parts"])
def test_a_shape_mismatch_is_noted_with_the_batch(how):
    switch = tr.Switch(tr.Every(2), [fine, mismatched])
    loss = switch if how == "in a switch" else mismatched
    parts = 2 if how == "in parts" else 1
    update = tr.Minimize(loss, optax.sgd(0.1), micro_batches=parts)
    with pytest.raises(TypeError, match=r"^dot_general requires contracting") as caught:
        tr.Trainer(update=update).fit(MODEL, [BATCH], num_steps=2, progress=False)
    line = inspect.getsourcelines(mismatched)[1]
    rows = 4 // parts
    assert note_of(caught.value).splitlines() == [
        f"In the loss `mismatched` at test_other_errors.py:{line}, raised"
        f"{marked_line(mismatched)}.",
        "Its batch:",
        f"    batch['x']: float32[{rows},5]",
        f"    batch['y']: int32[{rows}]",
    ]


def test_a_mismatch_while_evaluating_is_noted():
    trainer = tr.Trainer(fine, optax.sgd(0.1))
    with pytest.raises(TypeError, match="dot_general") as caught:
        trainer.evaluate(MODEL, [BATCH], loss=mismatched)
    assert "    batch['x']: float32[4,5]\n" in note_of(caught.value)


def test_a_note_has_six_lines_at_most():
    batch = [np.ones((1, n), np.float32) for n in range(1, 8)]

    def loss(model, batch):
        return jnp.sum(batch[6] @ model)

    with pytest.raises(TypeError, match="dot_general") as caught:
        fit(loss, data=[batch])
    lines = note_of(caught.value).splitlines()
    assert lines[2:] == [
        "    batch[0]: float32[1,1]",
        "    batch[1]: float32[1,2]",
        "    batch[2]: float32[1,3]",
        "    and 4 more",
    ]


def test_an_error_in_an_update_is_noted_once():
    class Own(tr.Trainer):
        def update(self, model, opt_state, batch):
            value, _ = tr.WeightedSum(a=wrong_shapes)(model, batch, step=0)
            return model, opt_state, {"value": value}

    with pytest.raises(TypeError, match="dot_general") as caught:
        Own().fit(MODEL, None, num_steps=2, progress=False)
    assert note_of(caught.value).startswith("In the loss `wrong_shapes` at ")
    assert note_of(caught.value).endswith("It has no batch.")

    class Other(tr.AbstractUpdate):
        def init(self, model):
            return None

        def __call__(self, model, opt_state, batch):
            return jnp.ones((2, 5)) @ model, opt_state, {}

    with pytest.raises(TypeError, match="dot_general") as caught:
        tr.Trainer(update=Other()).fit(MODEL, None, num_steps=2, progress=False)
    assert note_of(caught.value).startswith("In the update `Other` at ")


def test_an_error_in_a_gradient_rule_is_noted():
    @jax.custom_vjp
    def squared(x):
        return jnp.sum(x**2)

    def backward(x, cotangent):
        return (jnp.ones((2, 5)) @ x,)  # here

    squared.defvjp(lambda x: (jnp.sum(x**2), x), backward)
    with pytest.raises(TypeError, match="dot_general") as caught:
        fit(lambda model, batch: squared(model))
    assert marked_line(backward) in note_of(caught.value)


def test_what_a_loss_returns_needs_no_note():
    with pytest.raises(TypeError, match="a loss is one number") as caught:
        fit(lambda model, batch: model)
    notes = getattr(caught.value, "__notes__", [])
    assert not any(note.startswith("In the ") for note in notes)
