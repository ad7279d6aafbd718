"""When the host reads the device, and that nothing depends on it."""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import batches, equal, mlp, mse
from test_cases_host import host_reads  # noqa: F401

import trainer as tr
from trainer import _loop
from trainer._executable import Executable
from trainer.callbacks import Progress


class Recorder:
    """Stands for the progress bar, and notes what it is shown."""

    def __init__(self):
        self.shown = []

    def update(self, steps, metrics):
        self.shown.append((steps, metrics["loss"]))


@pytest.fixture
def always_late(monkeypatch):
    """Every call is followed by a report."""
    monkeypatch.setattr(_loop, "_SECONDS_PER_REPORT", -1.0)


@pytest.fixture
def never_late(monkeypatch):
    """No report is made because of the time."""
    monkeypatch.setattr(_loop, "_SECONDS_PER_REPORT", 1e9)


def test_nothing_is_read_between_reports(never_late, host_reads):  # noqa: F811
    trainer = tr.Trainer(mse, optax.sgd(0.01), steps_per_call=10)
    fit = lambda steps: trainer.fit(
        mlp(), batches(), num_steps=steps, key=jr.key(0), progress=False
    )
    fit(20)
    counts = []
    for steps in (40, 400, 800, 830):
        host_reads.clear()
        fit(steps)
        counts.append(len(host_reads))
    # The metric buffer holds 820 steps: it is read once more when it was full.
    assert counts[0] == counts[1] == counts[2] == counts[3] - 1, counts


@pytest.mark.parametrize("steps_per_call", [1, 3, 7])
def test_what_is_recorded_does_not_depend_on_when_it_is_read(
    steps_per_call, monkeypatch
):
    found = []
    for seconds in (-1.0, 1e9):
        monkeypatch.setattr(_loop, "_SECONDS_PER_REPORT", seconds)
        trainer = tr.Trainer(mse, optax.adam(0.01), steps_per_call=steps_per_call)
        result = trainer.fit(mlp(), batches(), num_steps=50, progress=False)
        assert np.array_equal(result.history.steps("loss"), np.arange(50))
        found.append((result.model, result.history["loss"]))
    assert equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])


def test_metrics_are_shown_one_report_late_at_most_and_in_order(
    always_late, monkeypatch
):
    reads, begun, recorder = [], [], Recorder()
    trainer = tr.Trainer(mse, optax.sgd(0.01), steps_per_call=5)
    trainer.fit(mlp(), batches(), num_steps=5, progress=False)
    compiled: Any = trainer._steps.current
    call, read = type(compiled).__call__, type(compiled).read

    def watched_call(self, *args):
        begun.append(len(args[-1]))
        return call(self, *args)

    def watched_read(self, buffers, rows):
        reads.append(sum(begun))
        return read(self, buffers, rows)

    monkeypatch.setattr(type(compiled), "__call__", watched_call)
    monkeypatch.setattr(type(compiled), "read", watched_read)
    monkeypatch.setattr(Progress, "update", lambda _, n, m: recorder.update(n, m))
    result = trainer.fit(mlp(), batches(), num_steps=43, progress=False)
    steps = np.cumsum([n for n, _ in recorder.shown])
    assert steps[-1] == 43
    losses = result.history["loss"]
    assert [loss for _, loss in recorder.shown] == [losses[s - 1] for s in steps]
    # Each call's rows are read when just one more call has begun.
    ends = np.cumsum(begun)
    assert reads == [*ends[1:], ends[-1]]


@pytest.mark.parametrize("steps_per_call", [1, 2, 5])
@pytest.mark.parametrize("bad", [0, 1, 4, 11])
def test_a_step_that_is_not_finite_is_found_however_late(
    steps_per_call, bad, always_late
):
    def loss(model, batch, *, step):
        return mse(model, batch) * jnp.where(step == bad, jnp.nan, 1.0)

    trainer = tr.Trainer(
        loss, optax.adam(0.01), nonfinite="raise", steps_per_call=steps_per_call
    )
    with pytest.raises(tr.NonfiniteError, match=f"Step {bad} "):
        trainer.fit(mlp(), batches(), num_steps=12, progress=False)
    assert int(trainer.last_state.step) == bad
    assert trainer.last_history is not None
    assert len(trainer.last_history["loss"]) == bad + 1
    plain = tr.Trainer(mse, optax.adam(0.01))
    want = plain.init(mlp())
    if bad:
        want = plain.fit(want, batches(), num_steps=bad, progress=False).state
    assert equal(trainer.last_state.model, want.model)
    assert equal(trainer.last_state.opt_state, want.opt_state)


@pytest.mark.parametrize("steps_per_call", [1, 2, 4])
def test_data_may_end_where_a_report_was(steps_per_call, always_late):
    trainer = tr.Trainer(mse, optax.sgd(0.01), steps_per_call=steps_per_call)
    every = tr.Evaluate(batches(), every=4)
    result = trainer.fit(
        mlp(), batches(), num_epochs=2, callbacks=[every], progress=False
    )
    assert len(result.history["loss"]) == 8
    assert result.stop_reason == "num_epochs"


def test_a_callback_sees_its_own_steps_metrics(always_late):
    seen = []

    class Look(tr.AbstractCallback):
        every: int | None = 3

        def __call__(self, info):
            seen.append((info.step, float(info.metrics["loss"])))

    trainer = tr.Trainer(mse, optax.sgd(0.01), steps_per_call=2)
    result = trainer.fit(
        mlp(), batches(), num_steps=10, callbacks=[Look()], progress=False
    )
    losses = result.history["loss"]
    assert seen == [(s, losses[s - 1]) for s in (3, 6, 9)]


def test_the_step_is_called_through_equinox_where_its_order_is_another(monkeypatch):
    fit = lambda: tr.Trainer(mse, optax.adam(0.01), steps_per_call=3).fit(
        mlp(), batches(), num_steps=10, progress=False
    )
    want = fit()
    monkeypatch.setattr("trainer._executable._inner", lambda *_: None)
    found = fit()
    assert equal(found.state, want.state)
    assert np.array_equal(found.history["loss"], want.history["loss"])


def test_an_executable_donates_its_second_argument_alone():
    kept, donated = [jnp.ones(3)], {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    add = lambda kept, donated: {"a": donated["a"] + kept[0], "b": donated["b"] + 1}
    executable = Executable(add, kept, donated)
    assert executable._inner is not None
    out = executable(kept, jax.tree.leaves(donated))
    assert out["a"].tolist() == [1, 1, 1]
    assert out["b"].tolist() == [1, 1]
    assert donated["a"].is_deleted()
    assert not kept[0].is_deleted()


def test_a_typed_key_in_the_model_comes_through():
    model = {"w": jnp.ones(()), "key": jr.key(3), "keys": jr.split(jr.key(1), 2)}

    def loss(model, batch):
        return model["w"] ** 2 * jr.uniform(model["key"]) + 0 * batch

    trainer = tr.Trainer(loss, optax.sgd(0.1), steps_per_call=3)
    result = trainer.fit(model, [jnp.zeros(())], num_steps=5, progress=False)
    for name in ("key", "keys"):
        assert result.model[name].dtype == model[name].dtype
        assert np.array_equal(jr.key_data(result.model[name]), jr.key_data(model[name]))
    rate = 1 - 0.2 * float(jr.uniform(jr.key(3)))
    np.testing.assert_allclose(result.model["w"], rate**5, rtol=1e-5)


def test_a_second_process_finds_what_the_first_has_compiled(tmp_path):
    code = """
import sys
import jax, jax.numpy as jnp, optax
import trainer as tr

hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None
)
trainer = tr.Trainer(
    lambda m, b: jnp.sum((m - b) ** 2), optax.adam(0.1), compile_cache=sys.argv[1]
)
result = trainer.fit(jnp.zeros(3), [jnp.ones(3)], num_steps=5, progress=False)
print(len(hits), result.model.tolist())
"""
    folder = tmp_path / "new" / "folder"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    runs = [
        subprocess.run(
            [sys.executable, "-c", code, str(folder)],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        ).stdout.split(maxsplit=1)
        for _ in range(2)
    ]
    assert any(path.name.startswith("jit_trainer_step") for path in folder.iterdir())
    assert int(runs[0][0]) == 0 < int(runs[1][0])
    assert runs[0][1] == runs[1][1]
