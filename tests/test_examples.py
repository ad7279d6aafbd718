"""The examples and the benchmark, run as a reader would run them."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest


ROOT = pathlib.Path(__file__).parents[1]


def lines_of(script, *args, cwd):
    """What a script prints. Its directory is another, so that paths are not by luck."""
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / script, *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def load(script):
    spec = importlib.util.spec_from_file_location("example", ROOT / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_of(name):
    return tomllib.loads((ROOT / "configs" / f"{name}.toml").read_text())


def test_digits_prints_its_accuracy_and_compiles_once(tmp_path):
    lines = lines_of("examples/digits.py", cwd=tmp_path)
    accuracy = re.fullmatch(r"test accuracy: (0\.\d{4})", lines[-3])
    speed = re.fullmatch(r"steps per second: (\d+)", lines[-2])
    assert accuracy, lines
    assert float(accuracy[1]) > 0.95
    assert speed, lines
    assert int(speed[1]) > 0
    assert lines[-1] == "compiles: 1"


def test_digits_takes_a_config_and_a_number_of_steps(tmp_path):
    text = (ROOT / "configs" / "digits.toml").read_text()
    path = tmp_path / "small.toml"
    path.write_text(text.replace("width = 128", "width = 8"))
    args = ("--config", path, "--num-steps", "20")
    lines = lines_of("examples/digits.py", *args, cwd=tmp_path)
    assert float(lines[-3].removeprefix("test accuracy: ")) < 0.9
    assert lines[-1] == "compiles: 1"


def test_digits_uses_both_losses_in_turn():
    digits = load("examples/digits.py")
    config = config_of("digits") | {"num_steps": 30, "switch_every": 10}
    result, _ = digits.experiment(config, progress=False)
    turns = np.repeat([0, 1, 0], 10)
    assert result.history.branches["branch"] == ("cross_entropy", "Consistency")
    np.testing.assert_array_equal(result.history["branch"], turns)
    distance = result.history["distance"]
    np.testing.assert_array_equal(distance.mask, turns == 0)
    assert np.all(distance.compressed() > 0)


def test_digits_is_repeatable():
    digits = load("examples/digits.py")
    config = config_of("digits") | {"num_steps": 30, "switch_every": 10}
    runs = [digits.experiment(config, progress=False) for _ in range(2)]
    first, second = (result.history["loss"] for result, _ in runs)
    np.testing.assert_array_equal(first, second)
    assert runs[0][1] == runs[1][1]


@pytest.mark.slow
def test_recompile_compiles_once_against_once_a_step(tmp_path):
    lines = lines_of("examples/recompile.py", "--epochs", "1", cwd=tmp_path)
    header, by_hand, by_trainer, difference, ratio = lines
    assert header.split() == ["steps", "compiles", "seconds", "held-out", "mse"]
    # 352 of the 440 examples used are trained on: 11 batches of 32 in each of 5 folds.
    assert by_hand.split()[:3] == ["eqx.filter_jit", "55", "11"]
    assert by_trainer.split()[:3] == ["tr.Trainer", "55", "1"]
    assert by_hand.split()[-1] == by_trainer.split()[-1]
    assert float(difference.split()[-1]) < 1e-5
    assert re.fullmatch(r"the hand-written loop takes [\d.]+ times as long", ratio)


def test_recompile_agrees_past_the_switch_of_the_loss():
    recompile = load("examples/recompile.py")
    config = config_of("recompile") | {"folds": 2, "epochs": 1, "switch_every": 3}
    ((by_hand, _, _), (by_trainer, compiles, _)), folds = recompile.compare(config)
    assert [len(batches) for batches, _ in folds] == [6, 6]
    assert recompile.largest_difference(by_hand, by_trainer) < 1e-5
    assert compiles == 1


@pytest.mark.slow
def test_a_quick_comparison_shows_ratios_and_writes_where_it_is_told(tmp_path):
    path = tmp_path / "readings.json"
    args = ("--quick", "--works", "tiny", "--loops", "fit-arrays", "hand")
    args += ("--rounds", "2", "--seconds", "0.01", "--json", path)
    lines = lines_of("benchmarks/compare.py", *args, cwd=tmp_path)
    assert any(line.startswith("| eqx.filter_jit loop |") for line in lines)
    reading = json.loads(path.read_text())["tiny"]
    assert reading["missing"] == {}
    assert set(reading["loops"]) == {"fit-arrays", "hand"}
    for found in reading["loops"].values():
        assert len(found["us"]) == 2
        assert all(us > 0 for us in found["us"])


@pytest.mark.slow
def test_growth_measures_its_parts(tmp_path):
    path = tmp_path / "growth.json"
    lines_of("benchmarks/growth.py", "cache", "--json", path, cwd=tmp_path)
    rows = json.loads(path.read_text())["cache"]
    assert [row["process"] for row in rows] == ["no cache", "first with it", "second"]
    assert rows[2]["to the first step s"] < rows[0]["to the first step s"]
