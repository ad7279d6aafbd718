"""The examples of the gallery, for a few steps each."""

import importlib.util
import pathlib
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest


ROOT = pathlib.Path(__file__).parents[1]

# What makes each of them small.
SMALL = {
    "vae": {"seeds": [0], "num_steps": 8, "batch_size": 16, "width": 8},
    "gan": {"seeds": [0], "num_steps": 12, "batch_size": 16, "width": 8},
    "pinn": {"num_steps": 8, "points": 16, "edges": 4, "width": 4, "depth": 1},
    "curriculum": {"seeds": [0], "num_steps": 8, "examples": 64, "longest": 6},
    "finetune": {"seeds": [0], "pretrain_steps": 4, "num_steps": 8, "width": 8},
}


class Watched(dict):
    """A config that knows which of its keys were asked for."""

    def __init__(self, values):
        super().__init__(values)
        self.used = set()

    def __getitem__(self, key):
        self.used.add(key)
        return super().__getitem__(key)


def load(name):
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(name):
    text = (ROOT / "configs" / f"{name}.toml").read_text()
    every = {"every": 4} if "\nevery = " in text else {}
    return Watched(tomllib.loads(text) | SMALL[name] | every)


def run(name):
    """What a small experiment returns. All of its config is used."""
    config = small(name)
    found = load(name).experiment(config, progress=False)
    assert config.used == set(config)
    return found


def test_vae_weighs_the_kl_term_as_each_schedule_says():
    runs = run("vae")
    assert list(runs) == ["constant", "linear", "cyclical"]
    for ((result, measured),) in runs.values():
        assert result.compiles == 1
        assert measured["loss"] > measured["kl"] > 0
        assert 0 <= measured["units"] <= 8
    weight_of = lambda name: runs[name][0][0].history["weight/kl"].tolist()
    np.testing.assert_allclose(weight_of("linear")[:3], [0, 0.25, 0.5], atol=1e-6)
    # 80 % of 8 steps are rounded down to 6: 4 cycles in 6 steps are of 2 steps each.
    cyclical = [0, 1.5, 0, 1.5, 0, 1.5, 1.5, 1.5]
    np.testing.assert_allclose(weight_of("cyclical"), cyclical, atol=1e-6)


def test_gan_makes_five_critic_steps_for_one_of_the_generator():
    ((result, averaged, (share, modes, distance)),) = run("gan")
    assert result.compiles == 1
    assert result.history["branch"].tolist() == [0, 0, 0, 0, 0, 1] * 2
    assert result.history.branches["branch"] == ("critic", "generator")
    assert not np.array_equal(
        *(m.generator.layers[0].bias for m in (result.model, averaged))
    )
    np.testing.assert_array_equal(
        *(m.critic.layers[0].bias for m in (result.model, averaged))
    )
    assert 0 <= share <= 1
    assert 0 <= modes <= 8
    assert distance > 0


def test_gan_measures_real_samples_as_good():
    gan = load("gan")
    share, modes, distance = gan.measure(gan.ring, gan.jr.key(0))
    assert share == pytest.approx(1 - np.exp(-4.5), abs=0.01)
    assert modes == 8
    assert distance < 0.05


def test_pinn_follows_adam_by_lbfgs():
    result = run("pinn")
    assert result.compiles == 1
    assert result.history["branch"].tolist() == [0] + [1] * 7
    assert result.history["loss"][-1] < result.history["loss"][1]
    assert result.history.steps("test/loss").tolist() == [4, 8]


@pytest.mark.parametrize("balance", [True, False])
def test_pinn_has_weights_if_it_balances_its_terms(balance):
    pinn, config = load("pinn"), small("pinn") | {"balance": balance, "num_steps": 1}
    trainer = pinn.make_trainer(config)
    points = [pinn.make_points(config)]
    model = pinn.Solution(4, 1, key=pinn.jr.key(0))
    result = trainer.fit(model, points, num_steps=2, progress=False)
    assert ("adam/weight/values" in result.history) == balance


def test_exact_solution_of_pinn_is_one():
    """By finite differences where the front is not; and as the initial values say."""
    exact = load("pinn").exact
    x, h = np.linspace(-0.9, -0.1, 9), 1e-3
    t = np.full_like(x, 0.5)
    np.testing.assert_allclose(exact(0 * x, x), -np.sin(np.pi * x), atol=1e-12)
    u, up, down = (exact(t, x + d) for d in (0, h, -h))
    u_t = (exact(t + h, x) - exact(t - h, x)) / (2 * h)
    u_xx = (up - 2 * u + down) / h**2
    left = u_t + u * (up - down) / (2 * h) - 0.01 / np.pi * u_xx
    np.testing.assert_allclose(left, 0, atol=1e-4)


def test_curriculum_draws_the_shortest_rows_first():
    runs = run("curriculum")
    assert list(runs) == ["uniform", "curriculum"]
    for (result,) in runs.values():
        assert result.compiles == 1
        assert result.history.steps("test/loss").tolist() == [4, 8]
    curriculum = load("curriculum")
    data = curriculum.make_rows(64, 6, seed=0)
    sampler = curriculum.FromTheEasiest(data, lambda _: 0.25, batch_size=100)
    (_, length, _), _ = sampler.sample(None, None, step=0, key=curriculum.jr.key(0))
    assert set(length.tolist()) == set(data[1][:16].tolist())


def test_curriculum_says_when_a_level_was_reached():
    curriculum = load("curriculum")
    results = run("curriculum")["uniform"]
    assert curriculum.steps_to(0.0, results[0]) == 4
    assert curriculum.steps_to(1.1, results[0]) is None


def test_finetune_leaves_the_body_alone_until_it_is_its_turn():
    runs = run("finetune")
    for ((result, correct),) in runs.values():
        assert result.compiles == 1
        assert 0 <= correct <= 1
    acts = runs["head, then all"][0][0].history["body/acts"]
    assert acts.tolist() == [0] * 4 + [1] * 4
    body_of = lambda way: runs[way][0][0].model.body.layers[0].weight
    assert not np.array_equal(body_of("head alone"), body_of("head, then all"))


@pytest.mark.parametrize("name", SMALL)
def test_each_prints_what_it_found(name, tmp_path):
    lines = (
        f"{k} = {str(v).lower()}" for k, v in small(name).items() if k != "schedules"
    )
    text = "\n".join(lines) + ("\nschedules = ['constant']" if name == "vae" else "")
    config = tmp_path / "small.toml"
    config.write_text(text)
    command = [sys.executable, "-W", "error", ROOT / "examples" / f"{name}.py"]
    done = subprocess.run(
        [*command, "--config", config, "--num-steps", "8"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.search(r"(compiles: |  )1$", last), last
