"""A preview shows what a fit will record, before it is run."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import pull, Twins

import trainer as tr


def a(model, batch):
    return jnp.sum(model.a**2)


def b(model, batch):
    return jnp.sum((model.b - 3) ** 2)


def twins():
    return Twins(jnp.ones(2), jnp.ones(2))


def adam(rate):
    return optax.inject_hyperparams(optax.adam)(learning_rate=rate)


RATE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 40)
ONE, TWO = lambda m: m.a, lambda m: m.b
SUM = tr.WeightedSum(
    a=a,
    b=(tr.Anneal(0.0, 2.0, over=0.8, cycles=3, ramp=0.4, shape="cosine"), b),
    both=tr.switch_every(3, a, tr.alternate(b, pull)),
)
PROGRAMS = {
    "one loss": tr.Minimize(a, optax.sgd(0.1), where=lambda m: m.a),
    "periods": tr.Minimize(tr.switch_every(7, a, b), adam(RATE)),
    "fractions": tr.Minimize(tr.piecewise([a, b], boundaries=[0.3]), adam(RATE)),
    "epochs": tr.Minimize(
        tr.WeightedSum(by="epoch", a=a, b=(optax.linear_schedule(0.0, 1.0, 4), b)),
        optax.sgd(0.1),
    ),
    "chance": tr.Minimize(tr.Switch(tr.Random((1, 3)), [a, SUM]), optax.sgd(0.1)),
    "parts": tr.Minimize(
        SUM,
        tr.Parts(
            one=tr.Part(adam(RATE), ONE, stop=0.5), two=tr.Part(adam(0.1), TWO, start=9)
        ),
    ),
    "updates": tr.SwitchUpdate(
        tr.At((11, 0.6)),
        {
            "first": tr.Minimize(SUM, adam(RATE)),
            "turns": tr.JointUpdate(
                {
                    "one": tr.Minimize(a, adam(RATE), where=ONE),
                    "two": tr.SwitchUpdate(
                        tr.Cycle((2, 1)),
                        [None, tr.Minimize(SUM, adam(RATE), where=TWO)],
                    ),
                }
            ),
            "last": tr.Minimize(b, optax.lbfgs()),
        },
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_history_is_what_the_preview_showed(name):
    program, key = PROGRAMS[name], jr.key(3)
    expected = tr.preview(program, 40, steps_per_epoch=4, key=key)
    data = [jnp.zeros(1)] * 4
    trainer = tr.Trainer(update=program)
    result = trainer.fit(twins(), data, num_steps=40, key=key, progress=False)
    ends = ("branch", "acts", "learning_rate")
    for metric in result.history:
        known = metric.split("/")[-1] in ends or metric.split("/")[-2:-1] == ["weight"]
        assert known == (metric in expected), metric
    for metric, values in expected.items():
        found = result.history[metric]
        assert np.array_equal(np.ma.getmaskarray(found), np.ma.getmaskarray(values))
        np.testing.assert_array_equal(
            np.ma.filled(found, -1), np.ma.filled(values, -1), err_msg=metric
        )
    assert expected.open == ()


def test_the_table_has_a_row_for_each_change():
    loss = tr.WeightedSum(
        fit=tr.piecewise({"coarse": a, "fine": b}, boundaries=[6]),
        size=(optax.linear_schedule(0.0, 1.0, 4), pull),
    )
    table = tr.preview(loss, 10)
    assert table.changes().tolist() == [0, 4, 6, 9]
    assert str(table).splitlines() == [
        "step  fit/branch  weight/size",
        "   0      coarse            0",
        "   4      coarse            1",
        "   6        fine            1",
        "   9        fine            1",
    ]
    assert table.rows()[2] == {"step": 6, "fit/branch": "fine", "weight/size": 1.0}


def test_a_jump_amid_a_movement_is_a_change():
    saw = tr.Anneal(0.0, 1.0, over=30, cycles=3)
    changes = tr.preview(tr.WeightedSum(x=a, y=(saw, b)), 40).changes()
    assert {10, 20} < set(changes.tolist())


def test_a_long_table_is_cut():
    text = str(tr.preview(tr.alternate(a, b), 1000)).splitlines()
    assert len(text) == 32
    assert text[-1] == "... and 970 more changes"


def test_what_is_decided_while_training_is_said():
    plateau = tr.Switch(tr.Plateau(patience=2), {"x": a, "y": b})
    loss = tr.WeightedSum(
        p=plateau, q=tr.AdaptiveSum(tr.SoftAdapt(), u=a, v=b), r=tr.alternate(a, b)
    )
    found = tr.preview(loss, 5)
    assert list(found) == ["r/branch"]
    assert found.open == (
        "which of `x`, `y`, by `Plateau`",
        "`weight/u`, `weight/v`, by `SoftAdapt`",
    )
    assert "decided while training: which of `x`" in str(found)


def test_nothing_may_be_known():
    update = tr.SwitchUpdate(
        tr.Threshold(below=0.1), [tr.Minimize(a, optax.sgd(0.1))] * 2
    )
    found = tr.preview(update, 5)
    assert (len(found), len(found.changes()), found.rows()) == (0, 0, [])
    assert "decided while training" in str(found)
    with pytest.raises(ValueError, match="nothing is known before training"):
        found.plot()


def test_epochs_need_a_length():
    with pytest.raises(ValueError, match="Give `steps_per_epoch`"):
        tr.preview(tr.switch_every(2, a, b, by="epoch"), 10)
    found = tr.preview(tr.switch_every(2, a, b, by="epoch"), 8, steps_per_epoch=1.5)
    assert found["branch"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("wrong", [3, "loss", [a, b]])
def test_a_program_is_a_loss_or_an_update(wrong):
    with pytest.raises(TypeError, match="is not a loss"):
        tr.preview(wrong, 10)


def test_the_plot_has_a_band_and_curves(tmp_path):
    found = tr.preview(PROGRAMS["updates"], 40)
    figure = found.plot(tmp_path / "program.png")
    assert (tmp_path / "program.png").stat().st_size > 10_000
    labels = [axis.get_ylabel() for axis in figure.axes]
    assert labels[0] == "branch"
    assert labels[-2:] == ["weight", "learning rate"]
    names = {
        t.get_text() for axis in figure.axes for t in axis.get_legend().get_texts()
    }
    assert {"first", "turns", "last", "first/weight/b"} <= names
