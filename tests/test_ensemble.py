"""An ensemble is its members trained alone, in one step that is compiled once."""

import functools
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import batches, equal, Net, net_mse
from members import (
    close,
    DATA,
    fit,
    MODELS,
    noisy,
    of_a,
    of_b,
    of_t,
    RATES,
    SEEDS,
    size,
    spoiled,
    stack,
)

import trainer as tr


# Not every loss uses all parts of the members' model.
pytestmark = pytest.mark.filterwarnings("ignore:.* no gradient:trainer.LossWarning")


def masked(model, batch, *, mask):
    return jnp.mean((model["a"] * batch - 1) ** 2, where=mask[:, None])


class Own(tr.Trainer):
    """A subclass, which reads its value in the loss; one step is bad for a member."""

    def __init__(self, rate):
        super().__init__(optimizer=optax.adam(0.01), nonfinite="skip")
        self.rate = rate

    def loss(self, model, batch, *, mask, step):
        total = masked(model, batch, mask=mask) + self.rate * jnp.sum(model["b"] ** 2)
        return spoiled(total, self.rate, step)


def swapped_sums(rate):
    """The value is a weight, and the parameter of a weight's schedule."""
    falling = tr.Anneal(0.5, rate, over=0.5)
    rising = optax.linear_schedule(0.0, 100 * rate, 5)
    total = tr.WeightedSum(fit=fit, size=(rate, size), noisy=(falling, noisy))
    other = tr.WeightedSum(fit=fit, size=(rising, size))
    return tr.Trainer(tr.switch_every(2, total, other), optax.adam(0.01))


def updates(rate):
    """Updates that take turns, beside one whose optimizer counts micro-batches."""
    slow = optax.MultiSteps(optax.sgd(rate), 3)
    a = tr.Minimize(fit, optax.adam(rate), where=of_a)
    b = tr.Minimize(noisy, optax.sgd(rate), where=of_b)
    turns = tr.SwitchUpdate(tr.Cycle((2, 1)), {"a": a, "b": b})
    third = tr.Minimize(lambda m, x: jnp.sum((m["t"] - x) ** 2), slow, where=of_t)
    return tr.Trainer(update=tr.JointUpdate({"ab": turns, "t": third}))


def parts(rate):
    inject = optax.inject_hyperparams(optax.adam)
    late = tr.Part(optax.sgd(rate), of_b, start=0.3)
    optimizer = tr.Parts(a=tr.Part(inject(rate), of_a), b=late)
    update = tr.Minimize(noisy, optimizer, micro_batches=3)
    transforms = {
        "ema": tr.EMA(lambda step: 0.9 - rate),
        "swa": tr.SWA(2, every=2),
        "target": tr.Target(of_a, of_t, tau=0.1),
        "clip": tr.Project(lambda w: jnp.clip(w, -0.5, 0.5), where=of_b),
    }
    return tr.Trainer(update=update, transforms=transforms, nonfinite="raise")


def by_the_data(rate):
    """Choices that may differ between the members."""
    near = tr.MeanSquare(lambda m, x: m["a"] * x - 1)
    far = tr.MeanSquare(lambda m, x: m["b"] * x + 1)
    balanced = tr.AdaptiveSum(tr.GradNorm(every=2), near=near, far=far)
    drawn = tr.Switch(tr.Random((0.5, 0.5)), [fit, noisy])
    which = tr.Plateau(patience=1, min_delta=0.02)
    return tr.Trainer(tr.Switch(which, [balanced, drawn]), optax.adam(rate))


def run(trainer, start, data, **options):
    """Two fits, of which the second goes on; their results, and the whole history."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is left over, and of what was skipped
        first = trainer.fit(start, data, num_steps=5, progress=False, **options)
        result = trainer.fit(first.state, data, num_steps=11, progress=False)
    return first, result, first.history + result.history


def same(its, own, within):
    """Whether two metrics have the same values, in the same steps."""
    masks = [np.ma.getmaskarray(x).tolist() for x in (its, own)]
    its, own = (np.ma.filled(x, 0) for x in (its, own))
    near = {"rtol": within, "atol": within, "equal_nan": True}
    return masks[0] == masks[1] and np.allclose(its, own, **near)


def check_members(make, start, models, data=DATA, rates=RATES, within=1e-6):
    """Each member's state and history are those of the member alone."""
    members = tr.ensemble(make, rate=rates, seeds=SEEDS)
    members.steps_per_call = 3
    alike = functools.cache(make)  # one compile for members of the same rate
    first, result, history = run(members, start, data)
    assert result.compiles == 1
    names = set()
    for place, member in enumerate(models):
        alone, key = alike(rates[place]), jr.key(SEEDS[place])
        _, one, own = run(alone, member, data, key=key)
        assert close(members.member(result.state, place), one.state, within)
        for name in own:
            assert same(history[f"{place}/{name}"], own[name], 10 * within), name
        # Its own Trainer goes on with a member.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = members.member(first.state, place)
            later = alone.fit(state, data, num_steps=11, progress=False)
        assert close(later.state, one.state, within)
        names |= {*own, *(f"{place}/{name}" for name in own)}
    assert set(history) == names


@pytest.mark.parametrize("make", [Own, swapped_sums, updates, parts])
def test_each_member_is_what_it_is_alone(make, step_compiles):
    check_members(make, stack(MODELS), MODELS)
    assert step_compiles() == 3


def test_choices_that_may_differ_between_members(step_compiles):
    check_members(by_the_data, stack(MODELS), MODELS, rates=(0.05, 0.05))
    assert step_compiles() == 2


def test_batchnorm_and_dropout():
    # Without Adam, which makes updates of what is 0 but for rounding: a bias before
    # BatchNorm.
    make = lambda rate: tr.Trainer(net_mse, optax.sgd(rate), steps_per_call=3)
    start = eqx.filter_vmap(eqx.nn.make_with_state(Net))(jr.split(jr.key(0), 2))
    arrays, static = eqx.partition(start, eqx.is_array)
    taken = [jax.tree.map(lambda leaf, i=i: leaf[i], arrays) for i in (0, 1)]
    nets = [eqx.combine(own, static) for own in taken]
    check_members(make, start, nets, batches(), rates=(0.05, 0.05))


def test_narrow_types_are_equal_but_for_their_rounding():
    def make(rate):
        update = tr.Minimize(fit, optax.sgd(rate), compute="bfloat16")
        return tr.Trainer(update=update, steps_per_call=3)

    rates = (0.05, 0.05)
    check_members(make, stack(MODELS), MODELS, rates=rates, within=1e-3)


def test_steps_may_be_grouped_into_calls_in_any_way():
    found = []
    for steps_per_call in (1, 7):
        members = tr.ensemble(updates, rate=RATES, seeds=SEEDS)
        members.steps_per_call = steps_per_call
        found.append(run(members, stack(MODELS), DATA)[1].state)
    assert equal(*found)


def test_without_seeds_all_have_the_key_of_the_run_and_its_shuffle():
    make = lambda rate: tr.Trainer(noisy, optax.sgd(rate), steps_per_call=3)
    members = tr.ensemble(make, rate=jnp.array(RATES))
    data = tr.Arrays(np.concatenate(DATA), batch_size=4)
    options = {"num_steps": 7, "key": jr.key(9), "progress": False}
    result = members.fit(stack([MODELS[0], MODELS[0]]), data, **options)
    one = make(RATES[1]).fit(MODELS[0], data, **options)
    assert close(members.member(result.state, 1), one.state)
    assert members.member(result.state, 1).key == jr.key(9)


def test_trees_of_values_and_members_that_have_seeds_alone():
    def make(weights):
        a, b = weights["a"], weights["b"]
        loss = tr.WeightedSum(a=(a, fit), b=(b[0] * b[1], fit))
        return tr.Trainer(loss, optax.sgd(0.1), steps_per_call=1)

    values = [{"a": 1.0, "b": np.array([1.0, 2.0])}, {"a": 0.0, "b": np.ones(2)}]
    stacked = {"a": np.array([1.0, 0.0]), "b": np.array([[1.0, 2.0], [1.0, 1.0]])}
    found = []
    for given in (values, stacked):
        members = tr.ensemble(make, weights=given)
        result = members.fit(stack(MODELS), DATA, num_steps=2, progress=False)
        found.append(result)
        assert (members.num_members, result.compiles) == (2, 1)
    assert close(found[0].model, found[1].model)
    # A term whose weight is 0 is absent, and the mean is that of the others.
    history = found[0].history
    assert history["0/a"].count() == 2
    assert history["1/a"].count() == 0
    assert history["a"].tolist() == history["0/a"].tolist()
    members = tr.ensemble(lambda: tr.Trainer(noisy, optax.sgd(0.1)), seeds=range(2))
    result = members.fit(stack(MODELS), DATA, num_steps=1, progress=False)
    assert history["loss"].shape == (2,)
    assert result.history["0/loss"] != result.history["1/loss"]


def compiled_text(make):
    members = tr.ensemble(make, rate=RATES, seeds=SEEDS)
    arrays, static = eqx.partition(members.init(stack(MODELS)), eqx.is_array)

    def step(arrays, batch):
        state = eqx.combine(arrays, static)
        state, metrics = members.program.step(state, batch, None, jnp.int32(0), None)
        return eqx.filter(state, eqx.is_array), metrics["loss"].value

    return str(jax.jit(step).lower(arrays, DATA[0]).compile().as_text())


def test_a_choice_by_the_step_stays_a_choice():
    by_step = tr.switch_every(2, fit, noisy)
    text = compiled_text(lambda rate: tr.Trainer(by_step, optax.adam(rate)))
    assert len(re.findall(r" conditional\(", text)) == 1
    turns = tr.SwitchUpdate(
        tr.Every(2),
        [
            tr.Minimize(fit, optax.sgd(0.1), where=of_a),
            tr.Minimize(fit, optax.sgd(0.1), where=of_b),
        ],
    )
    text = compiled_text(lambda rate: tr.Trainer(update=turns))
    # A loop of one turn or none for each. If its condition were mapped, the loop would
    # go on while that of any member holds.
    conditions = set(re.findall(r" while\(.*condition=(%\S+?),", text))
    assert len(conditions) >= 2
    for condition in conditions:
        body = text.split(f"\n{condition} ")[1].split("\n}")[0]
        assert "compare" in body
        assert "reduce" not in body
    by_data = tr.Switch(tr.Plateau(patience=2), [fit, noisy])
    text = compiled_text(lambda rate: tr.Trainer(by_data, optax.adam(rate)))
    assert " conditional(" not in text


def test_a_transform_may_be_added_to_a_run():
    plain = tr.ensemble(lambda rate: tr.Trainer(fit, optax.sgd(rate)), rate=RATES)
    state = plain.init(stack(MODELS))
    make = lambda rate: tr.Trainer(
        fit, optax.sgd(rate), transforms={"ema": tr.EMA(0.5, debias=False)}
    )
    averaged = tr.ensemble(make, rate=RATES)
    result = averaged.fit(state, DATA, num_steps=2, progress=False)
    one = make(RATES[1]).fit(MODELS[1], DATA, num_steps=2, progress=False)
    assert close(averaged.member(result.state, 1), one.state)
