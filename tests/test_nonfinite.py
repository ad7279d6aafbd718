"""Steps that are not finite: stopped at, left out, or told at the end."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batches, equal, mlp, mse, net, net_mse, Twins

import trainer as tr


ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1)
BAD = 4


def bad_batch():
    x, y = batches()[0]
    return x, np.full_like(y, np.nan)


def feed(bad=(BAD,), num=9):
    return [bad_batch() if i in bad else batches()[i % 4] for i in range(num)]


def fit(trainer, model, data, num_steps=9, **options):
    return trainer.fit(model, data, num_steps=num_steps, progress=False, **options)


def make(nonfinite, k=7, loss=net_mse, **options):
    return tr.Trainer(loss, ADAM, nonfinite=nonfinite, steps_per_call=k, **options)


@pytest.mark.parametrize("k", [1, 7])
def test_a_run_that_raises_keeps_the_state_before(k):
    trainer = make("raise", k)
    text = (
        rf"Step {BAD} made `model\.first\.weight` not finite \(the loss was nan\)\. "
        r"The state before it is in `trainer\.last_state`"
    )
    with pytest.raises(tr.NonfiniteError, match=text):
        fit(trainer, net(), feed())
    state, history = trainer.last_state, trainer.last_history
    assert history is not None
    assert int(state.step) == BAD
    assert history.steps("loss").tolist() == list(range(BAD + 1))
    assert np.isnan(history["loss"]).tolist() == [False] * BAD + [True]
    good = fit(trainer, net(), feed(bad=()), BAD)
    assert equal(good.state, state)
    assert good.history["loss"].tolist() == history["loss"][:BAD].tolist()
    more = fit(trainer, state, feed(bad=()))
    assert equal(more.state, fit(trainer, net(), feed(bad=())).state)
    assert (more.compiles, more.nonfinite) == (1, None)


def test_a_step_that_is_left_out_changes_nothing():
    ema = {"ema": tr.EMA(0.9)}
    trainer = make("skip", transforms=ema)
    with pytest.warns(UserWarning, match=r"Steps left out: 2"):
        result = fit(trainer, net(), feed(bad=(3, 6)))
    state = trainer.init(net())
    for i in set(range(9)) - {3, 6}:
        at = eqx.tree_at(lambda s: s.step, state, jnp.int32(i))
        state = fit(trainer, at, feed(bad=()), i + 1).state
    names = ("model", "model_state", "opt_state", "extra", "step")
    for name in names:
        assert equal(getattr(result.state, name), getattr(state, name)), name
    # The optimizer counts the updates it has made.
    assert result.state.opt_state[0].count == 7
    found = result.nonfinite
    assert (found.count, found.step, found.leaf) == (2, 3, "model.first.weight")
    assert np.isnan(found.loss)
    assert np.flatnonzero(np.isnan(result.history["loss"])).tolist() == [3, 6]


def test_a_step_before_and_after_one_that_is_left_out():
    trainer = make("skip", loss=mse)
    before = fit(trainer, mlp(), feed(), BAD).state
    with pytest.warns(UserWarning, match="Steps left out: 1"):
        after = fit(trainer, before, feed(), BAD + 1).state
    assert int(after.step) == BAD + 1
    for name in ("model", "opt_state", "key"):
        assert equal(getattr(before, name), getattr(after, name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit(trainer, after, feed(bad=()), 9).nonfinite is None


def sum_of_squares(model, batch):
    return jnp.sum(model.a**2) + jnp.sum(model.b**2)


def root(model, batch):
    """Finite at 0, where its derivative by `b` is not."""
    return jnp.sum(model.a**2) + jnp.sum(jnp.sqrt(model.b * batch))


TWINS = Twins(jnp.ones(2), jnp.ones(3))
ZERO = [jnp.float32(1), jnp.float32(1), jnp.float32(0)]


def test_a_gradient_of_one_leaf_with_a_finite_loss():
    trainer = tr.Trainer(root, SGD, nonfinite="raise")
    text = r"Step 2 made `model\.b` not finite \(the loss was 0\.8"
    with pytest.raises(tr.NonfiniteError, match=text):
        fit(trainer, TWINS, ZERO)
    assert np.isfinite(trainer.last_state.model.b).all()


def test_a_state_that_is_not_finite_under_a_finite_model():
    """The second moment overflows, and the update is 0."""
    loss = lambda model, batch: jnp.sum(model.a * batch) + jnp.sum(model.b)
    trainer = tr.Trainer(loss, ADAM, nonfinite="raise")
    text = r"`opt_state\[0\]\.nu\.a` not finite"
    with pytest.raises(tr.NonfiniteError, match=text):
        fit(trainer, TWINS, [jnp.float32(1), jnp.float32(1e25)])


def test_a_loss_alone_that_is_not_finite():
    loss = lambda m, b: sum_of_squares(m, b) + jax.lax.stop_gradient(1 / b)
    trainer = tr.Trainer(loss, SGD, nonfinite="raise")
    with pytest.raises(
        tr.NonfiniteError, match=r"Step 2 made the loss not finite .*inf"
    ):
        fit(trainer, TWINS, ZERO)


def test_the_active_branch_is_named():
    a = tr.Minimize(sum_of_squares, SGD, where=lambda m: m.a)
    either = tr.switch_every(2, sum_of_squares, root)
    b = tr.Minimize(either, SGD, where=lambda m: m.b)
    update = tr.SwitchUpdate(tr.Cycle((1, 1)), {"a": a, "b": b})
    trainer = tr.Trainer(update=update, nonfinite="raise")
    with pytest.raises(tr.NonfiniteError) as caught:
        fit(trainer, TWINS, [jnp.float32(1)] * 5 + ZERO[2:])
    text = str(caught.value)
    assert "Step 5 made `model.b` not finite" in text
    assert "`branch` was `b`" in text
    assert "`b/branch` was `root`" in text


def test_joint_updates_say_which_loss():
    a = tr.Minimize(sum_of_squares, SGD, where=lambda m: m.a)
    b = tr.Minimize(root, SGD, where=lambda m: m.b)
    update = tr.JointUpdate({"a": a, "b": b})
    trainer = tr.Trainer(update=update, nonfinite="raise")
    with pytest.raises(tr.NonfiniteError, match=r"made `model\.b` not") as caught:
        fit(trainer, TWINS, ZERO)
    # Both losses are finite.
    assert "nan" not in str(caught.value)
    log = lambda model, batch: jnp.sum(jnp.log(model.a - 2))
    a = tr.Minimize(log, SGD, where=lambda m: m.a)
    with pytest.warns(UserWarning, match="Step 0 made the loss not finite"):
        fit(tr.Trainer(update=tr.JointUpdate({"a": a, "b": b})), TWINS, ZERO[:2])


def test_infinite_numbers_to_begin_with_are_no_alarm():
    plateau = optax.contrib.reduce_on_plateau(patience=2)
    padded = eqx.tree_at(lambda m: m.b, TWINS, jnp.array([1.0, jnp.inf, jnp.nan]))
    loss = lambda model, batch: jnp.sum(model.a**2)
    optimizer = optax.chain(ADAM, plateau)
    update = tr.Minimize(loss, optimizer, where=lambda m: m.a)
    trainer = tr.Trainer(update=update, nonfinite="raise")
    result = fit(trainer, padded, None)
    assert np.isinf(trainer.init(padded).opt_state[1].best_value)
    assert result.history["nonfinite"].tolist() == [0] * 9
    assert result.nonfinite is None


def test_without_a_guard_it_is_told_at_the_end():
    trainer = tr.Trainer(mse, SGD, steps_per_call=2)
    text = (
        rf"Step {BAD} made the loss not finite \(the loss was nan\). "
        "Such steps in all: 5. Give the Trainer `nonfinite='raise'`"
    )
    with pytest.warns(UserWarning, match=text) as caught:
        result = fit(trainer, mlp(), feed())
    assert len([w for w in caught if w.category is UserWarning]) == 1
    assert caught[0].filename == __file__
    assert (result.nonfinite.count, result.nonfinite.step) == (5, BAD)
    assert "nonfinite" not in result.history


def test_the_guard_reads_no_more_of_the_device(monkeypatch):
    counts, read = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: counts.append(1) or read(x))
    numbers = {}
    for nonfinite in (None, "raise", "skip"):
        trainer = make(nonfinite, 1, loss=mse)
        warm = fit(trainer, mlp(), feed(bad=()), 9).state
        counts.clear()
        fit(trainer, warm, feed(bad=()), 109)
        numbers[nonfinite] = len(counts)
    assert max(numbers.values()) <= 12, numbers


def test_callbacks_and_the_selector_do_not_see_a_step_that_is_left_out():
    update = tr.SwitchUpdate(
        tr.Plateau(patience=1), [tr.Minimize(mse, SGD), tr.Minimize(mse, ADAM)]
    )
    trainer = tr.Trainer(update=update, nonfinite="skip")
    with pytest.warns(UserWarning, match="Steps left out: 1"):
        result = fit(trainer, mlp(), [batches()[0], bad_batch()], 2)
    assert result.state.memory.program.own["selector"]["local"] == 1
    assert result.history["branch"].tolist() == [0, 0]


def test_a_metric_of_the_guards_name_is_not_lost():
    loss = lambda model, batch: (jnp.sum(model.a**2), {"nonfinite": jnp.float32(5)})
    trainer = tr.Trainer(loss, SGD, nonfinite="skip")
    with pytest.raises(ValueError, match="`nonfinite`, a name the Trainer reports"):
        fit(trainer, TWINS, None, 2)


def test_an_error_in_the_data_is_not_hidden():
    def broken():
        yield from feed(bad=(1,), num=2)
        raise OSError("the disk is gone")

    trainer = make("raise", 4, loss=mse)
    with pytest.raises(tr.NonfiniteError) as caught:
        fit(trainer, mlp(), broken())
    assert isinstance(caught.value.__cause__ or caught.value.__context__, OSError)


@pytest.mark.parametrize("wrong", ["stop", True, 3])
def test_what_is_refused(wrong):
    with pytest.raises(ValueError, match=r"it is `'raise'`, `'skip'` or None"):
        tr.Trainer(mse, SGD, nonfinite=wrong)
