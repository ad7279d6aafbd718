"""`Trainer.check`: what it finds, what it leaves alone, and what it warns of."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import Counting, data, doubles, flat

import trainer as tr


X = np.linspace(-1, 1, 12, dtype=np.float32)
W = {"w": jnp.arange(1.0, 4.0)}
SGD = optax.sgd(0.1)


def square(model, batch):
    return jnp.sum(model["w"] ** 2)


def shift(model, batch):
    return jnp.mean((model["w"][0] * batch - 1) ** 2), {"first": model["w"][0]}


def layers():
    first = {"b": jnp.zeros(4), "w": jr.normal(jr.key(0), (10, 4))}
    last = {"b": jnp.zeros(()), "w": jr.normal(jr.key(1), (4,))}
    return {"act": jax.nn.relu, "layers": [first, last], "table": jnp.arange(3)}


def predicted(model, x):
    first, last = model["layers"]
    return model["act"](x @ first["w"] + first["b"]) @ last["w"] + last["b"]


def squared(model, batch, *, mask):
    x, y = batch
    return jnp.mean((predicted(model, x) - y) ** 2, where=mask)


def absolute(model, batch):
    x, y = batch
    return jnp.mean(jnp.abs(predicted(model, x) - y))


@pytest.fixture(scope="module")
def found():
    loss = tr.WeightedSum(
        fit=squared,
        late=(tr.Anneal(0.0, 1.0, 0.5), absolute),
        turns=(0.5, tr.alternate(squared, absolute, counts=(3, 1))),
    )
    adam = optax.inject_hyperparams(optax.adam)(1e-3)
    parts = tr.Parts(
        head=tr.Part(adam, lambda m: m["layers"][1]),
        body=tr.Part(SGD, lambda m: m["layers"][0], start=0.5, stop=900),
    )
    transforms = {"ema": tr.EMA(0.9)}
    trainer = tr.Trainer(loss, parts, transforms=transforms, nonfinite="skip")
    source = tr.Arrays(*data(), batch_size=16, shuffle=False)
    return trainer.check(layers(), source)


def test_the_program(found):
    assert found.choices["turns/branch"].names == ("squared", "absolute")
    assert found.choices["turns/branch"].active == "squared"
    weights = {name: tuple(weight) for name, weight in found.weights.items()}
    assert weights == {
        "weight/fit": (1.0, None),
        "weight/late": (0.0, "a schedule"),
        "weight/turns": (0.5, None),
    }
    head, body = found.owners["head"], found.owners["body"]
    assert head.paths == ("model['layers'][1]['b']", "model['layers'][1]['w']")
    assert (head.parameters, body.parameters) == (5, 44)
    assert "ScaleByAdam, learning rate 0.001" in head.optimizer
    assert body[:2] == ("keeps nothing", "from 0.5 of the run to step 900")
    assert found.settings["transform ema"].startswith("EMA(decay=0.9")
    assert found.settings["nonfinite"].startswith("'skip'")


def test_the_batch_and_the_model(found):
    y = data()[1][:16]
    assert found.batch["batch[0]"].form == "float32[16,10]"
    assert found.batch["batch[1]"][1:] == (y.min(), y.max(), 0)
    assert (found.num_examples, found.masked) == (16, True)
    layer = found.parameters["model['layers'][0]"]
    assert layer[:5] == (2, 44, 44, 176, ("float32",))
    size = np.linalg.norm(flat(layers()["layers"][0]))
    assert layer.norm == pytest.approx(size, rel=1e-5)
    expected = {"model['act']": "relu", "model['table']": "int32[3]"}
    assert found.not_trained == expected


def test_the_losses(found):
    model, batch = layers(), tuple(column[:16] for column in data())
    whole = squared(model, batch, mask=np.ones(16, bool)), absolute(model, batch)
    values = {name: seen.value for name, seen in found.losses.items()}
    assert list(values) == ["fit", "late", "turns/squared", "turns/absolute"]
    assert list(values.values()) == pytest.approx([*map(float, whole * 2)], rel=1e-5)
    active = [name for name, seen in found.losses.items() if seen.active]
    assert active == ["fit", "turns/squared"]
    grad = eqx.filter_grad(absolute)(model, batch)
    for name in ("late", "turns/absolute"):
        seen = found.losses[name]
        assert seen.norm == pytest.approx(np.linalg.norm(flat(grad)), rel=1e-5)
        part = np.linalg.norm(flat(grad["layers"][1]))
        assert seen.gradient["model['layers'][1]"] == pytest.approx(part, rel=1e-5)
        assert seen.place.startswith("test_preflight.py:")
    assert found.metrics["loss"] == pytest.approx(1.5 * values["fit"], rel=1e-5)
    assert found.metrics["weight/late"] == found.metrics["body/acts"] == 0


def test_the_step_and_the_table(found):
    assert found.ok, found.warnings
    assert found.compiles == found.compile_report.compiles == 1
    assert found.compile_report.peak_memory > 176
    text = str(found)
    assert repr(found) == text
    assert max(map(len, text.splitlines())) <= 92
    for words in ("turns/branch", "weight/late", "test_preflight.py:", "peak memory"):
        assert words in text


def critic_loss(model, batch):
    return jnp.sum(model["critic"] ** 2) + jnp.sum(model["generator"] ** 2)


def generator_loss(model, batch):
    return jnp.sum(model["generator"] ** 2), {"size": jnp.float32(2)}


def adversaries():
    critic = tr.Minimize(critic_loss, optax.sgd(0.1), where=lambda m: m["critic"])
    generator = tr.Minimize(
        tr.switch_every(2, critic_loss, generator_loss),
        optax.adam(0.1),
        where=lambda m: m["generator"],
    )
    return critic, generator


def test_updates_that_take_turns():
    critic, generator = adversaries()
    turns = {"critic": critic, "rest": None, "generator": generator}
    trainer = tr.Trainer(update=tr.SwitchUpdate(tr.Cycle((2, 1, 1)), turns))
    model = {"critic": jnp.ones(3), "generator": jnp.ones(2), "frozen": jnp.ones(4)}
    found = trainer.check(model, None)
    assert found.ok
    assert found.choices["branch"][:1] == (("critic", "rest", "generator"),)
    assert found.choices["branch"].active == "critic"
    assert found.choices["generator/branch"].active is None
    assert found.owners["critic/optimizer"].paths == ("model['critic']",)
    assert found.owners["generator/optimizer"].paths == ("model['generator']",)
    assert found.parameters["model['frozen']"].trained == 0
    names = ["critic/loss", "generator/critic_loss", "generator/generator_loss"]
    assert list(found.losses) == names
    assert [seen.active for seen in found.losses.values()] == [True, False, False]
    assert list(found.losses["critic/loss"].gradient) == ["model['critic']"]
    assert found.losses["generator/generator_loss"].metrics == {"size": 2}
    assert "rests at first" in str(found)
    assert not found.batch


def test_a_state_is_seen_where_it_is():
    ramp = optax.linear_schedule(0.0, 1.0, 10)
    loss = tr.piecewise({"a": square, "b": tr.WeightedSum(c=(ramp, shift))}, [3])
    trainer = tr.Trainer(loss, optax.sgd(0.0))
    result = trainer.fit(W, [X], num_steps=8, progress=False)
    found = trainer.check(result.state, [X])
    assert found.choices["branch"].active == "b"
    # The branch has had 5 steps.
    assert found.weights["b/weight/c"].value == found.metrics["weight/c"] == 0.5
    assert (found.compiles, found.ok) == (0, True)
    other = trainer.check(result.state, [X[:5]])
    assert other.compiles == 1
    assert "`batch` was float32[12] and is now float32[5]" in other.warnings[0]
    with pytest.raises(TypeError, match="has its key already"):
        trainer.check(result.state, [X], key=jr.key(0))


def test_another_form_is_no_fault_where_it_is_allowed():
    trainer = tr.Trainer(shift, optax.sgd(0.1), on_recompile="allow")
    trainer.fit(W, [X], num_steps=1, progress=False)
    found = trainer.check(W, [X[:5]])
    assert (found.compiles, found.ok) == (1, True)
    assert trainer.fit(W, [X], num_steps=1, progress=False).compiles == 1


class Own(tr.Trainer):
    def update(self, model, opt_state, batch):
        step = jax.tree.map(lambda w: w - 0.1, model)
        return step, opt_state, {"loss": jnp.mean(batch)}


class Points(tr.AbstractSampler):
    def init(self, key):
        return jnp.int32(0)

    def sample(self, carry, model, *, step, key):
        return jr.uniform(key, (6,)), carry + 1


def make(rate):
    return tr.Trainer(tr.alternate(square, shift), optax.sgd(rate))


PROGRAMS = {
    "own": (lambda: Own(), W, [X], "update"),
    "sampler": (lambda: tr.Trainer(shift, SGD), W, Points(), "6 examples, a mask"),
    "none": (lambda: tr.Trainer(square, SGD), W, None, "first batch: none"),
    "adaptive": (
        lambda: tr.Trainer(tr.AdaptiveSum(tr.GradNorm(), a=square, b=shift), SGD),
        W,
        [X],
        "changed by GradNorm",
    ),
    "chance": (
        lambda: tr.Trainer(tr.Switch(tr.Random((0, 1)), [square, shift]), SGD),
        W,
        [X],
        "first `shift`",
    ),
    "waits": (
        lambda: tr.Trainer(
            tr.Switch(tr.Plateau("val", patience=2, reported=True), [square, shift]),
            SGD,
        ),
        W,
        [X],
        "val from a callback",
    ),
    "float16": (
        lambda: tr.Trainer(
            update=tr.JointUpdate(
                [tr.Minimize(shift, SGD, compute="float16", micro_batches=2)]
            )
        ),
        W,
        [X],
        "0/loss_scale 3.277e+04",
    ),
    "ensemble": (
        lambda: tr.ensemble(make, rate=[0.1, 0.2]),
        {"w": jnp.ones((2, 3))},
        [X],
        "members    2, of which the first is shown",
    ),
    "debug": (lambda: tr.Trainer(shift, SGD, debug=True), W, [X], "compiles  1"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_kind_of_trainer(name):
    make_trainer, model, given, words = PROGRAMS[name]
    trainer = make_trainer()
    found = trainer.check(model, given)
    assert found.ok, found.warnings
    assert found.compile_report.compiles == 1
    assert words in str(found)
    assert bool(found.losses) == (name != "own")
    # It is not frozen, and has done nothing.
    trainer.steps_per_call = 3
    assert trainer.last_state is None


def test_a_model_with_a_state_of_its_own():
    model, state = eqx.nn.make_with_state(Counting)()
    found = tr.Trainer(doubles, SGD).check((model, state), None)
    assert found.ok
    assert found.losses["loss"].value == 2.0
    assert found.losses["loss"].metrics == {"seen": 1.0}
    assert float(state.get(model.index)) == 1.0
