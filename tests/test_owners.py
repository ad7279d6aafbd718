"""Updates that share a model: who owns what, and updates of one's own among them."""

import re
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Twins

import trainer as tr


SGD = optax.sgd(0.1)
of_a, of_b = (lambda m: m.a), (lambda m: m.b)


def twins():
    return Twins(jnp.float32(5.0), jnp.arange(1.0, 4.0))


def fit(update, model, num_steps=6):
    trainer = tr.Trainer(update=update, steps_per_call=4)
    return trainer.fit(model, None, num_steps=num_steps, progress=False)


def squares(model, batch):
    return (model.a - 1) ** 2 + jnp.sum((model.b - 2) ** 2)


A, B = tr.Minimize(squares, SGD, where=of_a), tr.Minimize(squares, SGD, where=of_b)
BOTH = tr.Minimize(squares, SGD)


class Own(tr.AbstractUpdate):
    """Adds to `b`; what else it changes is up to the test."""

    change: Callable = lambda state: state

    def init(self, model):
        return {"count": jnp.int32(0), "name": 0}

    def owned(self, model):
        return eqx.tree_at(of_b, jax.tree.map(lambda _: False, model), True)

    def __call__(self, model, opt_state, batch, *, step):
        new = {**opt_state, "count": opt_state["count"] + 1}
        grown = eqx.tree_at(of_b, model, model.b + 1)
        return grown, self.change(new), {"loss": jnp.sum(model.b), "step": step}


@pytest.mark.parametrize(
    ("make", "times"),
    [(lambda u: tr.SwitchUpdate(tr.Cycle((2, 1)), u), 2), (tr.JointUpdate, 6)],
)
def test_an_update_of_ones_own_is_a_part(make, times):
    result = fit(make({"a": A, "own": Own()}), twins())
    np.testing.assert_array_equal(result.model.b, np.arange(1, 4) + times)
    assert result.state.opt_state["own"]["count"] == times
    assert np.ma.compressed(result.history["own/step"]).tolist() == list(range(times))
    alone = fit(A, twins(), num_steps=4 if times == 2 else 6)
    assert result.model.a == alone.model.a


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: {**s, "name": 1}, "was 0 and is now 1"),
        (lambda s: {**s, "more": jnp.zeros(2)}, "is new: float32[2]"),
        (lambda s: {**s, "count": jnp.zeros(3, int)}, "was int32[] and is now int32[3"),
    ],
    ids=["static", "structure", "shape"],
)
@pytest.mark.parametrize(
    "make", [lambda u: tr.SwitchUpdate(tr.Cycle((1, 1)), u), tr.JointUpdate]
)
def test_a_part_keeps_the_structure_of_its_state(make, change, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        fit(make({"a": A, "own": Own(change)}), twins())


OVERLAPS = {
    "switch": lambda: tr.SwitchUpdate(tr.Every(3), {"x": A, "y": BOTH}),
    "joint": lambda: tr.JointUpdate({"x": A, "y": BOTH}, order="sequential"),
    "parts": lambda: tr.Minimize(
        squares, tr.Parts(x=tr.Part(SGD, of_a), y=tr.Part(SGD))
    ),
    "own": lambda: tr.SwitchUpdate(tr.Cycle((1, 1)), {"x": A, "y": Everything()}),
    "nested": lambda: tr.JointUpdate(
        {"x": A, "y": tr.SwitchUpdate(tr.At([2]), [B, A])}
    ),
}


class Everything(tr.AbstractUpdate):
    def init(self, model):
        return None

    def __call__(self, model, opt_state, batch):
        return model, opt_state, {}


@pytest.mark.parametrize("name", OVERLAPS)
def test_two_owners_of_one_array_are_refused(name):
    with pytest.raises(
        ValueError, match=r"`x` and `y` both own `model\.a`\. Each array"
    ):
        tr.Trainer(update=OVERLAPS[name]()).init(twins())


@pytest.mark.parametrize(
    "update",
    [
        tr.SwitchUpdate(tr.Every(3), [A, BOTH], overlap=True),
        tr.SwitchUpdate(tr.At([3]), [A, BOTH]),
        tr.SwitchUpdate(tr.Plateau(patience=3), [A, BOTH]),
        tr.SwitchUpdate(tr.Threshold(below=1.0), [A, BOTH]),
    ],
    ids=["overlap", "at", "plateau", "threshold"],
)
def test_updates_in_phases_and_on_purpose_may_share(update):
    state = tr.Trainer(update=update).init(twins())
    assert list(state.opt_state) == ["0", "1"]


REFUSED = [
    (lambda: tr.SwitchUpdate(tr.At([1]), 3), TypeError, "Give a dict that names them"),
    (
        lambda: tr.SwitchUpdate(tr.At([1]), {"x/y": A, "z": B}),
        ValueError,
        "is named `x",
    ),
    (lambda: tr.SwitchUpdate(tr.At([1]), {1: A, 2: B}), TypeError, "`1`"),
    (lambda: tr.SwitchUpdate(tr.At([1]), [None] * 2), ValueError, "was given no upd"),
    (lambda: tr.SwitchUpdate(tr.At([1]), [A, B, B]), ValueError, "drives 3 branches"),
    (lambda: tr.SwitchUpdate(3, [A, B]), TypeError, "`3` is not a selector. Use"),
    (lambda: tr.SwitchUpdate(tr.At([1]), [A, 3]), TypeError, "`3` is not an update"),
    (lambda: tr.SwitchUpdate(tr.At([1]), [A, B], by="x"), ValueError, "`by` is `'x'`"),
    (lambda: tr.JointUpdate([]), ValueError, "`JointUpdate` was given no updates"),
    (lambda: tr.JointUpdate([A, None]), TypeError, "`None` is not an update"),
    (lambda: tr.JointUpdate([A, B], order="x"), ValueError, "or `'sequential'`"),
]


@pytest.mark.parametrize(
    ("make", "error", "text"), REFUSED, ids=[r[2] for r in REFUSED]
)
def test_what_is_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_an_update_that_remembers_is_not_called_by_itself():
    update = tr.SwitchUpdate(tr.Plateau(patience=2), [A, BOTH])
    with pytest.raises(
        TypeError, match="`SwitchUpdate` remembers what was before, and"
    ):
        update(twins(), None, None, step=0, epoch=0)


def test_labels_in_the_form_of_a_model_that_can_be_called():
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    labels = jax.tree.map(lambda _: "x", eqx.filter(model, eqx.is_array))
    optimizer = optax.partition({"x": SGD}, labels)
    loss = lambda model, batch: jnp.sum(model.weight**2)
    text = "Write `lambda _: labels` in its place, or use `tr.Parts`"
    with pytest.raises(TypeError, match=text):
        tr.Trainer(loss, optimizer).init(model)


@pytest.mark.parametrize(
    ("transforms", "error", "text"),
    [
        ([tr.EMA(0.9)], TypeError, "as in `transforms={'ema': tr.EMA(0.999)}`"),
        ({"ema": 0.9}, TypeError, "Transform `ema` is `0.9`. Use `tr.EMA`"),
        ({"optimizer": tr.EMA(0.9)}, ValueError, "Give it another name"),
    ],
)
def test_transforms_that_are_refused(transforms, error, text):
    with pytest.raises(error, match=re.escape(text)):
        tr.Trainer(squares, SGD, transforms=transforms)
