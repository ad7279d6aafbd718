"""What is told of an ensemble: history, evaluation, bad steps, errors."""

import functools

import jax
import numpy as np
import optax
import pytest
from conftest import EVENT
from helpers import flat
from members import close, DATA, fit, MODELS, noisy, RATES, SEEDS, size, spoiled, stack

import trainer as tr


# Not every loss uses all parts of the members' model.
pytestmark = pytest.mark.filterwarnings("ignore:.* no gradient:trainer.LossWarning")


def test_the_history_has_each_member_and_what_they_have_in_common():
    make = lambda below: tr.Trainer(
        tr.Switch(tr.Threshold(below=below), {"first": fit, "second": size}),
        optax.sgd(0.01),
        steps_per_call=3,
    )
    # The first member's loss is below its threshold at once.
    members = tr.ensemble(make, below=[1e3, 0.0], seeds=SEEDS)
    result = members.fit(stack(MODELS), DATA, num_steps=3, progress=False)
    history = result.history
    assert history["0/branch"].tolist() == [0, 1, 1]
    assert history["1/branch"].tolist() == [0, 0, 0]
    assert history["branch"].tolist() == [0, None, None]
    assert history.branches["1/branch"] == ("first", "second")
    mean = (history["0/loss"] + history["1/loss"]) / 2
    assert np.allclose(history["loss"], mean)
    assert history["seen"].tolist() == [None] * 3


def test_each_member_is_evaluated_by_one_compiled_function():
    names = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **more: (
            names.append(str(more.get("fun_name"))) if event == EVENT else None
        )
    )

    def make(rate):
        loss = tr.WeightedSum(fit=fit, size=(rate, size))
        kept = {"ema": tr.EMA(0.5)}
        return tr.Trainer(loss, optax.sgd(rate), transforms=kept, steps_per_call=2)

    members = tr.ensemble(make, rate=RATES, seeds=SEEDS)
    check = tr.Evaluate(DATA, every=2)
    options = {"callbacks": [check], "progress": False}
    result = members.fit(stack(MODELS), DATA, num_steps=4, **options)
    found = members.evaluate(result.state, iter(DATA))
    averages = members.evaluate(result.state, DATA, using="ema")
    assert sum("_one_batch" in name for name in names) == 1
    plain = members.evaluate(result.model, DATA, loss=fit)
    for place, rate in enumerate(RATES):
        alone, own = make(rate), members.member(result.state, place)
        one = alone.evaluate(own, DATA)
        assert np.allclose([found[f"{place}/{name}"] for name in one], [*one.values()])
        one = alone.evaluate(own, DATA, using="ema")
        assert np.isclose(averages[f"{place}/loss"], one["loss"])
        one = alone.evaluate(own.model, DATA, loss=fit)
        assert np.isclose(plain[f"{place}/loss"], one["loss"])
    assert found["loss"] == (found["0/loss"] + found["1/loss"]) / 2
    assert result.history["validation/loss"][-1] == found["loss"]
    assert result.history["validation/1/fit"][-1] == found["1/fit"]


def test_a_selector_sees_what_a_callback_reports_of_all():
    which = tr.Threshold("validation/loss", below=1e9, reported=True)
    make = lambda: tr.Trainer(tr.Switch(which, [fit, noisy]), optax.sgd(0.01))
    members = tr.ensemble(make, seeds=SEEDS)
    check = tr.Evaluate(DATA, every=2, loss=fit)
    options = {"callbacks": [check], "progress": False}
    result = members.fit(stack(MODELS), DATA, num_steps=4, **options)
    assert result.history["branch"].tolist() == [0, 0, 1, 1]


def test_a_bad_step_of_one_member_is_skipped_or_ends_the_run_of_all():
    def make(rate, nonfinite):
        def loss(model, batch, *, step):
            return spoiled(fit(model, batch), rate, step)

        return tr.Trainer(loss, optax.adam(rate), nonfinite=nonfinite, steps_per_call=4)

    go = {"num_steps": 5, "progress": False}
    skip, end, none = (
        tr.ensemble(functools.partial(make, nonfinite=what), rate=RATES)
        for what in ("skip", "raise", None)
    )
    with pytest.warns(UserWarning, match=r"Step 2 made `model\['a'\]` not finite"):
        result = skip.fit(stack(MODELS), DATA, **go)
    found = result.nonfinite
    assert (found.count, found.step, found.metric) == (1, 2, "1/loss")
    assert np.isfinite(flat(result.model)).all()
    assert result.history["1/nonfinite"].tolist() == [0, 0, 2, 0, 0]
    assert result.history["nonfinite"].tolist() == [0, 0, None, 0, 0]
    with pytest.raises(tr.NonfiniteError, match=r"`1/loss` was nan"):
        end.fit(stack(MODELS), DATA, **go)
    before = skip.fit(stack(MODELS), DATA, num_steps=2, progress=False)
    assert int(end.last_state.step) == 2
    assert close(end.last_state.opt_state, before.state.opt_state)
    assert close(end.last_state.model, before.model)
    with pytest.warns(UserWarning, match="`1/loss` was nan"):
        result = none.fit(stack(MODELS), DATA, **go)
    assert np.isfinite(flat(none.member(result.state, 0).model)).all()


ADAM = lambda rate=0.1: tr.Trainer(fit, optax.adam(rate))
EVERY = lambda every: tr.Trainer(tr.switch_every(every, fit, noisy), optax.sgd(0.1))


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (ADAM(), {"seeds": [1]}, TypeError, "`make` is .* Give a function"),
        (ADAM, {}, TypeError, "given no members"),
        (ADAM, {"rate": []}, ValueError, "`rate` is `\\[\\]`. Give one value a member"),
        (ADAM, {"rate": 0.1}, ValueError, "`rate` is `0.1`. Give one value a member"),
        (ADAM, {"rate": ["a", "b"]}, TypeError, "`rate` holds `a`.* numbers alone"),
        (ADAM, {"rate": [1, (1, 2)]}, TypeError, "`rate` differ in their form"),
        (
            ADAM,
            {"rate": [0.1], "seeds": range(2)},
            ValueError,
            "differ in their number: `rate` has 1, `seeds` has 2",
        ),
        (lambda: fit, {"seeds": [1]}, TypeError, "which is not a Trainer"),
        (
            EVERY,
            {"every": [2, 3]},
            TypeError,
            "`every` cannot differ .* a Python number",
        ),
        (
            lambda rate: ADAM(rate if rate > 0 else 0.1),
            {"rate": RATES},
            TypeError,
            "`rate` cannot differ .* a Python number",
        ),
        (
            lambda decay: tr.Trainer(
                fit, optax.sgd(0.1), transforms={"ema": tr.EMA(decay)}
            ),
            {"decay": [0.5, 1.5]},
            TypeError,
            "`decay` of `EMA` is .* or a schedule",
        ),
    ],
)
def test_what_makes_no_ensemble_is_refused(make, options, error, message):
    with pytest.raises(error, match=message):
        tr.ensemble(make, **options)


def test_states_and_models_that_are_not_of_its_members_are_refused():
    members = tr.ensemble(ADAM, rate=RATES, seeds=SEEDS)
    go = {"num_steps": 2, "progress": False}
    with pytest.raises(ValueError, match=r"`model\['a'\]` is float32\[3,2\], .* of 2"):
        members.fit(stack([*MODELS, MODELS[0]]), DATA, **go)
    with pytest.raises(ValueError, match=r"`model\['a'\]` is float32\[3,2\]"):
        members.evaluate(stack([*MODELS, MODELS[0]]), DATA)
    unseeded = tr.ensemble(ADAM, rate=RATES)
    with pytest.raises(ValueError, match="has no keys of members' own"):
        members.fit(unseeded.init(stack(MODELS)), DATA, **go)
    with pytest.raises(ValueError, match=r"`model\['a'\]` is float32\[2\]|of 2"):
        unseeded.fit(ADAM().init(MODELS[0]), DATA, **go)
    momentum = lambda rate: tr.Trainer(fit, optax.sgd(rate, momentum=0.9))
    with pytest.raises(ValueError, match="The state is of another program"):
        unseeded.fit(tr.ensemble(momentum, rate=RATES).init(stack(MODELS)), DATA, **go)
    with pytest.raises(IndexError, match="no member 2 among 2"):
        members.member(members.init(stack(MODELS)), 2)
