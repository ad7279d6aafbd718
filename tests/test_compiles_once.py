"""Every feature alone, and several together: the step is compiled once."""

import operator
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from optax import contrib

import trainer as tr


SGD, ADAM = optax.sgd(0.05), optax.adam(0.05)
BATCHES = list(np.random.default_rng(3).normal(size=(3, 4, 2)).astype(np.float32))
SPOILED = [*BATCHES, np.full((4, 2), np.nan, np.float32)]


def model():
    """Parts `a` and `b`, and `t`, which follows `a`."""
    ones = np.ones(2, np.float32)
    return {"a": jnp.array(ones), "b": jnp.array(-ones), "t": jnp.array(ones)}


of_a, of_b, of_t = (operator.itemgetter(name) for name in "abt")


def fit(model, batch):
    return jnp.mean((model["a"] * batch + model["b"] - 1) ** 2)


def size(model, batch, *, step):
    return jnp.sum(model["a"] ** 2 + model["b"] ** 2), {"seen": step}


def noisy(model, batch, *, key, epoch):
    noise = jr.normal(key, batch.shape)
    return jnp.mean((model["b"] * batch - noise) ** 2) + 0.0 * epoch


MISSES = {
    "near": tr.MeanSquare(lambda m, x: m["a"] * x - 1),
    "far": tr.MeanSquare(lambda m, x: m["b"] * x + 1),
}
LOSSES = {"fit": fit, "size": size}
A, B = tr.Minimize(fit, ADAM, where=of_a), tr.Minimize(noisy, SGD, where=of_b)
VALIDATION = {"metric": "validation/loss", "reported": True}
REPORTED = {"callbacks": [tr.Evaluate(BATCHES, every=2)]}
REPORTED_FIT = {"callbacks": [tr.Evaluate(BATCHES, every=2, loss=fit)]}


def of(loss=fit, optimizer=SGD, more=None, **options):
    """A case: how the Trainer is made, and what its fits are given."""
    return (lambda: tr.Trainer(loss, optimizer, **options)), more or {}


def by(update, more=None, **options):
    return (lambda: tr.Trainer(update=update, **options)), more or {}


def growing(updates: Any):
    return 1 + updates // 2


def halves(step, *, num_steps):
    return step / num_steps


class Points(tr.AbstractSampler):
    """Batches made in the step, from a place that it carries along."""

    def init(self, key):
        return {"place": jnp.zeros((), int), "noise": jr.normal(key, (4, 2))}

    def sample(self, carry, model, *, step, key):
        batch = carry["noise"] + jr.normal(key, (4, 2)) + 0 * model["a"]
        return batch, {**carry, "place": carry["place"] + 1}


class Coin(tr.AbstractSelector):
    """A selector of the user's own, with a memory."""

    def init(self, num):
        return jnp.zeros(num)

    def __call__(self, step, num, *, memory, key):
        return jnp.argmin(memory + jr.uniform(key, (num,))), step

    def after(self, memory, outcome):
        return memory.at[outcome.branch].add(outcome.metrics["loss"].value)


class Last(tr.AbstractRule):
    """A rule of the user's own."""

    every: int = 2

    def renew(self, memory, seen, *, key):
        return {"weights": 1 / (1 + seen.values)}


SELECTORS = {
    "every": tr.Every(2),
    "cycle": tr.Cycle((2, 1)),
    "at": tr.At((3,)),
    "at a fraction": tr.At((0.5,)),
    "random": tr.Random((0.5, 0.5)),
    "random, annealed": tr.Random((tr.Anneal(1, 0, over=0.9), 0.5)),
    "random by schedules": tr.Random((halves, optax.linear_schedule(1.0, 0.0, 5))),
    "plateau": tr.Plateau(patience=1, min_delta=0.1, smoothing=0.5),
    "plateau of a metric": tr.Plateau("loss", patience=2, mode="max"),
    "plateau, reported": tr.Plateau(patience=1, **VALIDATION),
    "threshold": tr.Threshold(below=1.5),
    "threshold, above": tr.Threshold(above=0.1),
    "threshold, reported": tr.Threshold(below=2.0, **VALIDATION),
    "own": Coin(),
}
RULES = {
    "soft adapt": tr.SoftAdapt(normalized=True, loss_weighted=True),
    "soft adapt, every": tr.SoftAdapt(every=3),
    "relobralo": tr.ReLoBRaLo(lookback=0.5),
    "grad norm": tr.GradNorm(),
    "grad norm, where": tr.GradNorm(where=of_a, every=2),
    "learning rate annealing": tr.LearningRateAnnealing(every=2),
    "gradient balance": tr.GradientBalance(every=2),
    "uncertainty": tr.Uncertainty(),
    "uncertainty, sgd": tr.Uncertainty(SGD, every=2),
    "traces": tr.NTKTrace(every=2),
    "own": Last(),
}
WEIGHTS = {
    "number": 0.5,
    "zero": 0.0,
    "array": jnp.array(0.5),
    "python": lambda step: 1.0 * (step > 2),
    "optax": optax.linear_schedule(0.0, 1.0, 4),
    "anneal": tr.Anneal(0.0, 1.0, over=8, cycles=2, ramp=0.5, shape="cosine"),
    "anneal, fraction": tr.Anneal(1.0, 0.0, over=0.5, shape="sqrt"),
    "asks num_steps": halves,
}
TRANSFORMS = {
    "ema": tr.EMA(0.9),
    "ema, biased": tr.EMA(0.9, debias=False, where=of_a, every=2),
    "ema, schedule": tr.EMA(lambda step: jnp.minimum(0.9, step / 10)),
    "swa": tr.SWA(2, every=2),
    "copies": tr.Target(of_a, of_t, every=3),
    "tau": tr.Target(of_a, of_t, tau=0.1),
    "tau, every": tr.Target(of_a, of_t, tau=0.1, every=2),
    "project": tr.Project(lambda w: jnp.clip(w, -0.5, 0.5), where=of_b),
}
OPTIMIZERS: dict[str, Any] = {
    "injected": optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0, 9)),
    "injected, number": optax.inject_hyperparams(optax.adam)(0.1),
    "schedule": optax.adam(tr.Anneal(0.1, 0.01, over=9)),
    "schedule-free": contrib.schedule_free_sgd(0.1),
    "multi steps": optax.MultiSteps(ADAM, 3),
    "multi steps, growing": optax.MultiSteps(ADAM, growing),
    "lbfgs": optax.lbfgs(),
    "plateau of optax": optax.chain(SGD, contrib.reduce_on_plateau(patience=2)),
    "parts": tr.Parts(a=tr.Part(ADAM, of_a), b=tr.Part(SGD, of_b)),
    "parts, start and stop": tr.Parts(
        a=tr.Part(ADAM, of_a, start=3), b=tr.Part(SGD, of_b, stop=1, by="epoch")
    ),
    "parts, fractions": tr.Parts(a=tr.Part(ADAM, start=0.2, stop=0.7)),
}
MINIMIZE = {
    "where": {"where": of_a},
    "where, list": {"where": lambda m: [m["a"], m["b"]]},
    "micro": {"micro_batches": 2},
    "micro, rest": {"micro_batches": 3},
    "bfloat16": {"compute": "bfloat16"},
    "float16": {"compute": "float16"},
    "all": {"where": of_a, "micro_batches": 3, "compute": "float16"},
}
SWITCH_OF_SUMS = tr.Switch(
    tr.Random((0.5, 0.5)),
    {
        "sum": tr.WeightedSum(fit=fit, size=(tr.Anneal(0, 1, over=0.3), size)),
        "rule": tr.AdaptiveSum(
            tr.GradNorm(every=2), noisy=noisy, inner=tr.switch_every(2, fit, size)
        ),
    },
)
DEEP = tr.SwitchUpdate(
    tr.Plateau(patience=2, **VALIDATION),
    {
        "all": tr.Minimize(SWITCH_OF_SUMS, OPTIMIZERS["parts, start and stop"]),
        "half": tr.Minimize(
            tr.AdaptiveSum(tr.Uncertainty(), fit=fit, size=size),
            OPTIMIZERS["injected"],
            where=of_b,
            micro_batches=3,
            compute="float16",
        ),
        "turns": tr.JointUpdate(
            {"a": A, "b": tr.SwitchUpdate(tr.Cycle((1, 1)), [None, B])},
            order="sequential",
        ),
    },
)
NESTED = tr.Minimize(SWITCH_OF_SUMS, ADAM, where=lambda m: [m["a"], m["b"]])
ADAM_THEN_LBFGS = tr.SwitchUpdate(
    tr.At((0.5,)),
    {"adam": tr.Minimize(fit, ADAM), "lbfgs": tr.Minimize(fit, optax.lbfgs())},
)
CASES = {
    "plain": of(),
    "sampler": of(noisy, more={"data": Points()}),
    "arrays": of(more={"data": tr.Arrays(np.concatenate(BATCHES), batch_size=4)}),
    "raise": of(nonfinite="raise"),
    "skip": of(nonfinite="skip", more={"data": SPOILED}),
    "skip with parts": of(
        optimizer=OPTIMIZERS["parts, start and stop"],
        nonfinite="skip",
        more={"data": SPOILED},
    ),
    "auto": of(steps_per_call="auto"),
    "one step a call": of(SWITCH_OF_SUMS, ADAM, steps_per_call=1),
    "nested": by(NESTED, transforms=TRANSFORMS, nonfinite="raise"),
    "adam then lbfgs": by(ADAM_THEN_LBFGS, nonfinite="skip"),
    "joint": by(tr.JointUpdate({"a": A, "b": B})),
    "joint, sequential": by(tr.JointUpdate([A, B], order="sequential")),
    "idle": by(tr.SwitchUpdate(tr.Cycle((2, 1)), [None, A])),
    "by epoch": by(tr.SwitchUpdate(tr.Every(1), [A, B], by="epoch")),
    "shared": by(tr.SwitchUpdate(tr.Every(2), [A, A], overlap=True)),
    "deep": by(DEEP, transforms=TRANSFORMS, nonfinite="skip", more=REPORTED_FIT),
}
for name, it in SELECTORS.items():
    more, other = (REPORTED, REPORTED_FIT) if "reported" in name else ({}, {})
    whole = [tr.Minimize(fit, ADAM), tr.Minimize(fit, OPTIMIZERS["injected"])]
    updates = whole if it.in_phases else [A, B]
    CASES[f"switch: {name}"] = of(tr.Switch(it, LOSSES), more=more)
    CASES[f"update: {name}"] = by(tr.SwitchUpdate(it, updates), more=other)
for name, it in RULES.items():
    CASES[f"rule: {name}"] = of(tr.AdaptiveSum(it, **MISSES), ADAM)
for name, it in WEIGHTS.items():
    CASES[f"weight: {name}"] = of(tr.WeightedSum(fit=fit, size=(it, size)))
for name, it in TRANSFORMS.items():
    CASES[f"transform: {name}"] = by(A, transforms={"it": it})
for name, it in OPTIMIZERS.items():
    CASES[f"optimizer: {name}"] = of(optimizer=it)
for name, it in MINIMIZE.items():
    CASES[f"minimize: {name}"] = by(tr.Minimize(fit, ADAM, **it))


@pytest.mark.parametrize("name", CASES)
def test_a_feature_compiles_once_over_several_fits(name, step_compiles):
    make, more = CASES[name]
    trainer = make()
    trainer.steps_per_call = 3 if trainer.steps_per_call == "auto" else 1
    options = {"progress": False, "callbacks": more.get("callbacks", ())}
    data = more.get("data", BATCHES)
    start = model()
    # A model, what became of it, that again with a larger total, and another model.
    for num_steps in (5, 12, 1012, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of steps left out, of what is left over
            result = trainer.fit(start, data, num_steps=num_steps, **options)
        assert int(result.state.step) == num_steps
        assert result.compiles == 1
        start = model() if num_steps == 1012 else result.state
    assert step_compiles() == 1


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import jax
names = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **more: names.append(more.get("fun_name"))
    if event == "/jax/core/compile/backend_compile_duration" else None
)
import test_compiles_once as its
make, more = its.CASES["deep"]
trainer, state = make(), its.model()
for num_steps in (300, 1_000):
    callbacks = [its.tr.Evaluate(its.BATCHES, every=70, loss=its.fit)]
    result = trainer.fit(
        state, its.BATCHES, num_steps=num_steps, callbacks=callbacks, progress=False
    )
    state = result.state
ran = sorted({int(b) for b in result.history["branch"]})
steps = sum("trainer_step_" in str(name) for name in names)
print(int(state.step), result.compiles, steps, len(names) > steps, ran)
"""


def test_a_thousand_steps_of_everything_compile_once_in_a_fresh_process():
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout.split(" ", 4)[:4] == ["1000", "1", "1", "True"], run.stderr
    assert run.stdout.strip().endswith("2]")
