"""Callbacks: when they run, what they see, and what they may do."""

import io

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batches, data, equal, mae, masked_mse, mlp, mse, net, net_mse

import trainer as tr
from trainer.callbacks import Progress


SGD = optax.sgd(0.1)


class Call(tr.AbstractCallback):
    def __init__(self, fn, every=None):
        super().__init__(every)
        self.fn = fn

    def __call__(self, info):
        return self.fn(info)


def half(model, batch):
    return model**2 / 2


def fit(loss, model, *callbacks, num_steps=10, source=None, **kwargs):
    trainer = tr.Trainer(loss, SGD)
    result = trainer.fit(
        model,
        source,
        num_steps=num_steps,
        callbacks=callbacks,
        progress=False,
        **kwargs,
    )
    return trainer, result


def test_a_callback_sees_the_model_after_each_update_and_may_keep_it():
    kept = []
    fit(half, jnp.float32(1), Call(lambda i: kept.append(i.model), 1), num_steps=3)
    np.testing.assert_allclose(kept, [0.9, 0.81, 0.729], rtol=1e-6)


def test_a_callback_cannot_assign_to_what_it_sees():
    def write(info):
        info.step = 3

    with pytest.raises(AttributeError, match="cannot assign to field 'step'"):
        fit(half, jnp.float32(1), Call(write, 1))
    with pytest.raises(AttributeError):
        fit(half, jnp.float32(1), Call(lambda i: setattr(i.state, "model", 0), 1))


def test_callbacks_run_at_multiples_in_order_and_once_at_the_end():
    calls = []
    note = lambda name: lambda info: calls.append((name, info.step))
    callbacks = [Call(note("a"), 3), Call(note("b"), 6), Call(note("end"))]
    trainer, first = fit(half, jnp.float32(1), *callbacks, num_steps=7)
    assert calls == [("a", 3), ("a", 6), ("b", 6), ("end", 7)]
    calls.clear()
    trainer.fit(
        first.state, None, num_steps=12, callbacks=callbacks[:2], progress=False
    )
    assert calls == [("a", 9), ("a", 12), ("b", 12)]


def test_what_a_callback_returns_is_recorded_and_seen_by_the_next():
    seen = []
    _, result = fit(
        half,
        jnp.float32(1),
        Call(lambda info: {"double": 2 * info.step}, 4),
        Call(lambda info: seen.append(info.metrics["double"]), 4),
    )
    assert seen == [8, 16]
    assert result.history["double"].tolist() == [8, 16]
    assert result.history.steps("double").tolist() == [4, 8]


def test_stop_ends_the_run_with_its_reason():
    def enough(info):
        return tr.Stop("low") if info.metrics["loss"] < 0.3 else None

    _, result = fit(half, jnp.float32(1), Call(enough, 1), num_steps=100)
    assert result.stop_reason == "low"
    losses = result.history["loss"]
    assert losses[-1] < 0.3 <= losses[-2]
    assert int(result.state.step) == len(losses)


def test_an_absent_metric_is_not_in_what_a_callback_sees():
    def first(model, batch):
        return model**2, {"only": model}

    keys = []
    loss = tr.alternate(first, half)
    note = Call(lambda i: keys.append("only" in i.metrics), 1)
    fit(loss, jnp.float32(1), note, num_steps=4)
    assert keys == [True, False, True, False]


def test_an_exception_in_a_callback_keeps_the_state_and_the_run_goes_on():
    def stop(info):
        raise KeyboardInterrupt

    whole = fit(mse, mlp(), num_steps=10, source=batches())[1]
    trainer = tr.Trainer(mse, SGD)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(
            mlp(), batches(), num_steps=10, callbacks=[Call(stop, 5)], progress=False
        )
    assert int(trainer.last_state.step) == 5
    more = trainer.fit(trainer.last_state, batches(), num_steps=10, progress=False)
    assert equal(more.state, whole.state)
    assert more.compiles == 1


def test_evaluating_while_training_changes_nothing_and_compiles_once():
    check = tr.Evaluate(batches(), every=2)
    last = tr.Evaluate(batches(), loss=net_mse, name="test")
    plain = fit(net_mse, net(), num_steps=6, source=batches())[1]
    _, result = fit(net_mse, net(), check, last, num_steps=6, source=batches())
    assert equal(result.state, plain.state)
    assert result.compiles == 1
    assert result.history.steps("validation/loss").tolist() == [2, 4, 6]
    assert result.history["test/loss"][0] == result.history["validation/loss"][2]


@pytest.mark.parametrize(
    ("callbacks", "error", "message"),
    [
        (Call(print, 1), TypeError, "is not a list"),
        ([print], TypeError, "is not a callback. Subclass"),
        ([Call(lambda i: {"a": "x"}, 1)], TypeError, "returned `'x'` as `a`"),
        ([Call(lambda i: 3, 1)], TypeError, "Callback `Call` returned `3`"),
        ([Call(lambda i: {"loss": 3.0}, 1)], ValueError, "`loss`, which every step"),
        ([Call(lambda i: i.metrics.update(a=1), 1)], AttributeError, "update"),
    ],
)
def test_what_a_callback_may_not_be_or_return(callbacks, error, message):
    with pytest.raises(error, match=message):
        tr.Trainer(half, SGD).fit(
            jnp.float32(1), None, num_steps=2, callbacks=callbacks, progress=False
        )


def test_two_evaluations_of_one_name_and_a_wrong_signature_are_refused():
    twice = [tr.Evaluate(batches()[:1], 2), tr.Evaluate(batches()[1:], 2)]
    with pytest.raises(ValueError, match="different things as `validation`"):
        fit(mse, mlp(), *twice, source=batches())

    class Old(tr.AbstractCallback):
        def __call__(self, step, model):
            raise AssertionError

    with pytest.raises(TypeError, match=r"`Old` takes `\(step, model\)`"):
        fit(half, jnp.float32(1), Old(1))


def test_a_metric_that_is_not_there_is_an_error_with_the_nearest():
    with pytest.raises(KeyError, match=r"No metric `los` here\. Did you mean `loss`"):
        fit(half, jnp.float32(1), Call(lambda i: i.metrics["los"], 1))


def test_every_is_a_whole_number():
    for bad, error in ((0, ValueError), (True, TypeError), (1.5, TypeError)):
        with pytest.raises(error, match="`every` of `Evaluate`"):
            tr.Evaluate(batches(), every=bad)


def test_progress_shows_loss_branch_and_rate(capsys):
    tr.Trainer(tr.alternate(mse, mae), SGD).fit(mlp(), batches(), num_steps=8)
    shown = capsys.readouterr().err
    assert "8/8" in shown
    assert "branch=mae" in shown
    assert "loss=" in shown
    assert "step/s" in shown


def test_no_progress_prints_nothing(capfd):
    tr.Trainer(mse, SGD).fit(mlp(), batches(), num_steps=8, progress=False)
    assert capfd.readouterr() == ("", "")


def test_the_time_to_compile_is_not_in_the_rate(monkeypatch):
    import tqdm.std

    now = [0.0]
    monkeypatch.setattr("sys.stderr", io.StringIO())
    bar = Progress(0, 100, {}, silent=False)
    monkeypatch.setattr(bar._bar, "_time", lambda: now[0])
    bar._bar.start_t = bar._bar.last_print_t = 0.0
    now[0] = 50.0
    bar.compiled()
    now[0] = 51.0
    bar.update(10, {"loss": 1.0})
    assert bar._bar.format_dict["elapsed"] == pytest.approx(1.0)
    assert isinstance(bar._bar, tqdm.std.tqdm)
    bar.close()


def test_padding_in_validation_gives_the_mean_over_examples():
    found = {}
    for size in (5, 16, 64):
        trainer = tr.Trainer(masked_mse, SGD)
        found[size] = trainer.evaluate(mlp(), batches(size))["loss"]
    expected = float(mse(mlp(), batches(64)[0]))
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-6)


def test_a_callback_runs_once_a_step_also_where_an_epoch_ends():
    for source in (batches(32), tr.Arrays(*data(), batch_size=32)):
        seen = []
        note = Call(lambda info, seen=seen: seen.append(info.step), 2)
        tr.Trainer(mse, SGD).fit(
            mlp(), source, num_epochs=2, callbacks=[note], progress=False
        )
        assert seen == [2, 4]


def test_a_stop_without_a_reason_stops():
    stop = Call(lambda info: tr.Stop(""), 2)
    _, result = fit(half, jnp.float32(1), stop, num_steps=4)
    assert int(result.state.step) == 2
    assert result.stop_reason == ""


def test_a_step_info_that_was_kept_does_not_show_another_step():
    kept = []
    fit(half, jnp.float32(1), Call(kept.append, 1), num_steps=3)
    with pytest.raises(RuntimeError, match="A StepInfo of step 1 is asked"):
        _ = kept[0].model
    assert kept[0].metrics["loss"] == 0.5


def test_a_period_may_be_an_attribute_of_the_class():
    seen = []

    class Often(tr.AbstractCallback):
        every = 2

        def __call__(self, info):
            seen.append(info.step)

    fit(half, jnp.float32(1), Often(), num_steps=5)
    assert seen == [2, 4]
