"""The examples of the gallery, for a few steps each."""

import importlib.util
import pathlib
import sys
import tomllib

import jax.random as jr
import numpy as np
import pytest

import trainer as tr


ROOT = pathlib.Path(__file__).parents[1]

STEPS = 12

# What makes each of them small.
SMALL = {
    "vae": {"seeds": [0], "schedules": ["linear", "cyclical"], "width": 8},
    "gan": {"seeds": [0], "batch_size": 16, "width": 8},
    "pinn": {"points": 16, "edges": 4, "width": 4, "depth": 1, "every": 6, "renew": 2},
    "curriculum": {"seeds": [0], "examples": 64, "longest": 6, "every": 6},
    "finetune": {"seeds": [0], "pretrain_steps": 4, "width": 8, "every": 6},
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


def run(name, monkeypatch, capsys):
    """Run it as its user does; what its experiment returned, and what it printed."""
    module, found = load(name), []
    experiment = module.experiment
    text = (ROOT / "configs" / f"{name}.toml").read_text()
    config = Watched(tomllib.loads(text) | SMALL[name])

    def watched(given):
        assert given["num_steps"] == STEPS
        config["num_steps"] = given["num_steps"]
        found.append(experiment(config, progress=False))
        return found[0]

    monkeypatch.setattr(module, "experiment", watched)
    monkeypatch.setattr(sys, "argv", [name, "--num-steps", str(STEPS)])
    module.main()
    assert config.used == set(config)
    return found[0], capsys.readouterr().out.splitlines()


@pytest.fixture
def run_example(monkeypatch, capsys):
    return lambda name: run(name, monkeypatch, capsys)


@pytest.mark.slow
def test_vae_weighs_the_kl_term_as_its_schedule_says(run_example):
    runs, lines = run_example("vae")
    assert list(runs) == ["linear", "cyclical"]
    assert [line.split()[-1] for line in lines[1:]] == ["1", "1"]
    for ((result, measured),) in runs.values():
        assert result.compiles == 1
        assert measured["loss"] > measured["kl"] > 0
        assert 0 <= measured["units"] <= 8
    # 80 % of 12 steps are rounded down to 9: four cycles of 3 steps, rounded up.
    weight_of = lambda name: runs[name][0][0].history["weight/kl"][:4].tolist()
    np.testing.assert_allclose(weight_of("linear"), np.arange(4) / 6, atol=1e-6)
    np.testing.assert_allclose(weight_of("cyclical"), [0, 4 / 3, 1.5, 0], atol=1e-6)


def test_vae_can_have_a_constant_weight():
    assert load("vae").weight_of_kl("constant", {"beta": 4.0, "over": 0.5}) == 4.0


@pytest.mark.slow
def test_gan_makes_five_critic_steps_for_one_of_the_generator(run_example):
    runs, lines = run_example("gan")
    result, averaged, measured = runs[0]
    assert result.compiles == 1
    assert lines[-1] == "compiles: 1"
    assert lines[0].split() == ["good", "modes", "spread", "distance"]
    assert result.history["branch"].tolist() == [0, 0, 0, 0, 0, 1] * 2
    assert result.history.branches["branch"] == ("critic", "generator")
    assert list(measured) == ["trained", "averaged"]
    bias_of = lambda part: np.asarray(part.layers[0].bias)
    assert np.any(bias_of(averaged.generator) != bias_of(result.model.generator))
    assert np.all(bias_of(averaged.critic) == bias_of(result.model.critic))


def test_gan_finds_real_samples_good():
    gan = load("gan")
    measured = gan.measure(gan.ring, jr.key(0))
    assert measured["good"] == pytest.approx(1 - np.exp(-4.5), abs=0.01)
    assert measured["modes"] == 8
    assert measured["spread"] == pytest.approx(1, abs=0.05)
    assert measured["distance"] < 0.05


@pytest.mark.slow
def test_pinn_follows_adam_by_lbfgs(run_example):
    result, lines = run_example("pinn")
    assert result.compiles == 1
    assert lines[-1] == "compiles: 1"
    assert result.history["branch"].tolist() == [0] + [1] * 11
    assert result.history["lbfgs/residual"][-1] < result.history["lbfgs/residual"][1]
    assert result.history["lbfgs/weight/values"][-1] != 1
    assert result.history.steps("test/loss").tolist() == [6, 12]


def test_pinn_balances_its_terms_or_not():
    make_loss = load("pinn").make_loss
    assert isinstance(make_loss({"balance": True, "renew": 10}), tr.AdaptiveSum)
    assert isinstance(make_loss({"balance": False}), tr.WeightedSum)


def test_exact_solution_of_pinn_is_one():
    """By finite differences where the front is not, and by the initial values."""
    exact = load("pinn").exact
    x, h = np.linspace(-0.9, -0.1, 9), 1e-3
    t = np.full_like(x, 0.5)
    np.testing.assert_allclose(exact(0 * x, x), -np.sin(np.pi * x), atol=1e-12)
    u, above, below = (exact(t, x + d) for d in (0, h, -h))
    u_t = (exact(t + h, x) - exact(t - h, x)) / (2 * h)
    u_x, u_xx = (above - below) / (2 * h), (above - 2 * u + below) / h**2
    np.testing.assert_allclose(u_t + u * u_x, 0.01 / np.pi * u_xx, atol=1e-4)


@pytest.mark.slow
def test_curriculum_says_when_a_level_was_reached(run_example):
    runs, lines = run_example("curriculum")
    assert list(runs) == ["uniform", "curriculum"]
    assert lines[1::2] == ["compiles: 1"] * 2
    for (result,) in runs.values():
        assert result.compiles == 1
        assert result.history.steps("test/loss").tolist() == [6, 12]
        assert load("curriculum").steps_to(0.0, result) == 6
        assert load("curriculum").steps_to(1.1, result) is None


def test_curriculum_draws_the_shortest_rows_first():
    curriculum = load("curriculum")
    data = curriculum.make_rows(64, 6, seed=0)
    sampler = curriculum.FromTheEasiest(data, tr.Anneal(0.25, 1.0, over=0.5), 100)
    for step, rows in ((0, 16), (4, 64)):
        at = {"step": step, "key": jr.key(0), "num_steps": 8}
        (_, length, _), _ = sampler.sample(None, None, **at)
        assert set(length.tolist()) == set(data[1][:rows].tolist())


def test_finetune_leaves_the_body_alone_until_it_is_its_turn(run_example):
    runs, lines = run_example("finetune")
    assert lines[1::2] == ["compiles: 1"] * 4
    for ((result, correct),) in runs.values():
        assert result.compiles == 1
        assert 0 <= correct <= 1
    assert (
        runs["head, then all"][0][0].history["body/acts"].tolist() == [0] * 6 + [1] * 6
    )
    assert "body/acts" not in runs["all from the start"][0][0].history
