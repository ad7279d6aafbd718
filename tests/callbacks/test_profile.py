"""Where the time goes: the split of the wall time, the trace, and what is said."""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batches, mlp, mse

import trainer as tr


SGD = optax.sgd(0.1)
PARTS = ("data", "dispatch", "device", "callbacks", "other")


class Call(tr.AbstractCallback):
    def __init__(self, fn, every=None):
        super().__init__(every)
        self.fn = fn

    def __call__(self, info):
        return self.fn(info)


def half(model, batch):
    return jnp.sum(model**2) / 2


def fit(*callbacks, num_steps=20, model=None, trainer=None):
    trainer = tr.Trainer(half, SGD) if trainer is None else trainer
    model = jnp.ones(3) if model is None else model
    return trainer.fit(
        model, None, num_steps=num_steps, callbacks=callbacks, progress=False
    )


def recorded(history):
    """One row a window, one column a part."""
    return np.stack([history[f"seconds/{part}"] for part in PARTS], axis=1)


def is_tracing():
    """Whether a trace is under way; it is ended."""
    try:
        jax.profiler.stop_trace()
    except RuntimeError:
        return False
    return True


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by one tick each time it is read; sums of it are exact."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * 2.0**-20)


def trained_ensemble(*callbacks):
    rates = tr.ensemble(lambda rate: tr.Trainer(half, optax.sgd(rate)), rate=[0.1, 0.2])
    return fit(*callbacks, model=jnp.ones((2, 3)), trainer=rates)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("run", [fit, trained_ensemble])
def test_the_parts_add_up_to_the_wall_time(run):
    seen, watch = [], tr.profile(every=5)
    result = run(watch, Call(lambda info: seen.append(info), 5))
    rows = recorded(result.history)
    assert result.history.steps("seconds/data").tolist() == [5, 10, 15, 20]
    assert (rows[1:] > 0).all()
    assert (rows[0] > 0).tolist() == [part != "callbacks" for part in PARTS]
    # What is recorded at a step is what a callback sees there, less what it saw before.
    # Its own time is in the next.
    totals = np.array([[info.seconds[part] for part in PARTS] for info in seen])
    assert (rows.cumsum(0) <= totals).all()
    untold = totals.sum(1) - rows.cumsum(0).sum(1)
    assert (untold > 0).all()
    assert (untold < 100 * 2.0**-20).all()
    assert rows.sum() < totals[-1].sum() < result.seconds
    assert result.seconds - totals[-1].sum() < 100 * 2.0**-20
    assert result.compiles == 1


def test_seconds_can_only_be_read_and_begin_with_each_fit():
    def write(info):
        info.seconds["data"] = 0.0

    with pytest.raises(TypeError, match="does not support item assignment"):
        fit(Call(write, 5))
    seen = []
    trainer = tr.Trainer(half, SGD)
    first = fit(Call(seen.append, 2), num_steps=4, trainer=trainer)
    fit(Call(seen.append, 2), num_steps=6, model=first.state, trainer=trainer)
    assert [info.first_step for info in seen] == [0, 0, 4]
    spent = [info.seconds["callbacks"] for info in seen]
    assert spent[0] == spent[2] == 0 < spent[1]


def slow_batches():
    for batch in batches():
        time.sleep(0.01)
        yield batch


def much(model, batch):
    """About 20 ms."""
    turn = lambda _, a: jnp.sin(a @ a.T @ a) * 0.01
    return jnp.sum(jax.lax.fori_loop(0, 30, turn, jnp.ones((128, 128)) * model[0]))


@pytest.mark.parametrize(
    ("loss", "model", "data", "others", "part", "said"),
    [
        (mse, mlp(), slow_batches, [], "data", "Waiting for batches bounds the run"),
        (
            half,
            jnp.ones(3),
            None,
            [Call(lambda info: time.sleep(0.05), 5)],
            "callbacks",
            "Callbacks bound the run",
        ),
        (
            lambda model, batch: jax.lax.stop_gradient(much(model, batch)) * model[0],
            jnp.ones(3),
            None,
            [],
            "device",
            "The steps themselves bound the run",
        ),
    ],
)
def test_what_takes_longest_is_found_and_said(loss, model, data, others, part, said):
    watch = tr.profile(every=10)
    result = tr.Trainer(loss, SGD).fit(
        model, data, num_steps=30, callbacks=[*others, watch], progress=False
    )
    rows = recorded(result.history)[1:]
    assert PARTS[rows.sum(0).argmax()] == part
    assert said in str(watch)


def test_the_second_window_is_traced(tmp_path):
    seen, folder = [], tmp_path / "new" / "folder"
    watch = tr.profile(folder, every=5)
    note = Call(lambda info: seen.append((info.step, len(files(folder)))), 5)
    trainer = tr.Trainer(half, SGD)
    result = fit(watch, note, num_steps=15, trainer=trainer)
    assert not is_tracing()
    # Written at the end of the second window, and not again.
    assert [step for step, count in seen if count] == [10, 15]
    assert seen[1][1] == seen[2][1] == len(files(folder))
    assert f"Steps 5 to 10 were traced into `{folder}`." in str(watch)
    more = fit(watch, num_steps=27, model=result.state, trainer=trainer)
    assert more.history.steps("seconds/device").tolist() == [20, 25]
    assert len(files(folder)) == seen[-1][1]
    shown = [line.split()[0] for line in str(watch).splitlines()[1:6]]
    assert shown == ["0..5", "5..10", "10..15", "15..20", "20..25"]


@pytest.mark.usefixtures("clock")
def test_beginning_and_ending_the_trace_is_in_no_window(tmp_path, monkeypatch):
    def slow(*args, before=jax.profiler.stop_trace):
        for _ in range(10_000):
            time.perf_counter()
        return before(*args)

    monkeypatch.setattr(jax.profiler, "stop_trace", slow)
    result = fit(tr.profile(tmp_path, every=5))
    assert recorded(result.history)[:, 3].max() < 1_000 * 2.0**-20
    assert result.seconds > 10_000 * 2.0**-20


def test_a_fit_that_ends_or_raises_ends_the_trace(tmp_path):
    def fail(info):
        raise OSError("gone")

    trainer = tr.Trainer(half, SGD)
    # An error in the window, and no warning that would hide it.
    with pytest.raises(OSError, match="gone"):
        fit(tr.profile(tmp_path / "a", every=5), Call(fail, 8), trainer=trainer)
    assert files(tmp_path / "a")
    assert not is_tracing()
    for num_steps in (4, 5, 8):
        folder = tmp_path / str(num_steps)
        watch = tr.profile(folder, every=5)
        with pytest.warns(UserWarning, match="had traced 5 steps into") as caught:
            result = fit(watch, num_steps=num_steps, trainer=trainer)
        assert caught[0].filename == __file__
        assert not is_tracing()
        # It is traced by the next fit instead.
        fit(watch, num_steps=20, model=result.state, trainer=trainer)
        assert "were traced into" in str(watch)
        assert files(folder)


def test_a_trace_that_is_under_way_is_an_error_where_ours_begins(tmp_path):
    trainer = tr.Trainer(half, SGD)
    jax.profiler.start_trace(tmp_path / "other")
    with pytest.raises(RuntimeError, match="cannot begin its trace at step 5: Profile"):
        fit(tr.profile(tmp_path / "own", every=5), trainer=trainer)
    # The other one is left alone.
    assert is_tracing()
    assert int(trainer.last_state.step) == 5


def test_callbacks_are_told_when_a_fit_is_over_also_if_it_raises():
    told = []

    class Told(Call):
        def __init__(self, name, fn=lambda info: None, every=None):
            super().__init__(fn, every)
            self.name = name

        def after_fit(self):
            told.append(self.name)
            if self.name == "a":
                raise OSError("cannot close")

    with pytest.raises(OSError, match="cannot close"):
        fit(Told("a"), Told("b"), num_steps=2)
    assert told == ["a", "b"]
    with pytest.raises(ZeroDivisionError):
        fit(Told("c", lambda info: 1 / 0, 1), Told("d"))
    assert told == ["a", "b", "c", "d"]


def test_what_every_and_folder_may_be(tmp_path):
    for bad, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="`every` of `Profile`"):
            tr.profile(every=bad)
    with pytest.raises(TypeError, match=r"`100`.*Write `tr.profile\(every=100\)`"):
        tr.profile(100)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        tr.profile(tmp_path / "file")


def told(watch, step, **spent):
    seconds = dict.fromkeys(PARTS, 0.0) | spent
    return watch(tr.StepInfo(step, {}, None, None, 0, seconds))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("data", "Waiting for batches bounds the run (90%): make the loader faster"),
        ("dispatch", "Handing calls over bounds the run (90%): let a call have more"),
        ("device", "The steps themselves bound the run (90%): compute less"),
        ("callbacks", "Callbacks bound the run (90%): call them less often"),
        ("other", "What the loop itself does on the host bounds the run (90%): it is"),
    ],
)
def test_the_sentence_says_what_to_do_and_leaves_out_the_first_window(part, said):
    watch = tr.profile(every=10)
    before = {"data": 70.0, "device": 30.0}
    told(watch, 10, **before)
    first = str(watch).splitlines()
    assert first[1].split() == ["0..10", "10", "s", "70%", "0%", "30%", "0%", "0%"]
    assert first[2].startswith("Waiting for batches bounds the run (70%)")
    rest = "other" if part != "other" else "data"
    after = {p: before.get(p, 0.0) + {part: 9.0, rest: 1.0}.get(p, 0.0) for p in PARTS}
    told(watch, 20, **after)
    assert str(watch).splitlines()[-1].startswith(said)


def test_the_sentence_leaves_out_the_steps_that_are_traced(tmp_path, monkeypatch):
    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, lambda *args: None)
    watch = tr.profile(tmp_path, every=10)
    told(watch, 10, data=1.0)
    told(watch, 20, data=1.0, device=50.0)
    assert "The steps themselves bound the run (100%)" in str(watch)
    told(watch, 30, data=4.0, device=51.0)
    assert "Waiting for batches bounds the run (75%)" in str(watch)


def test_a_long_table_shows_its_last_rows():
    watch = tr.profile(every=10)
    total = 0.0
    for number in range(1, 26):
        total += 3.3e-3 if number == 25 else 4.2e-4
        told(watch, 10 * number, device=total)
    lines = str(watch).splitlines()
    assert "... 5 more before" in lines[1]
    for line, steps, size in ((2, "50..60", 42), (21, "240..250", 330)):
        label, number, unit = lines[line].split()[:3]
        assert (label, unit) == (steps, "us")
        assert float(number) == pytest.approx(size, rel=0.01)
    assert len(lines) == 23
