"""Values that the compiled step has read: a change is never ignored without a word."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trainer as tr


SETTINGS = {"beta": 0.0}
traces = []


def helper():
    return SETTINGS["beta"]


def reads_global(model, batch):
    return jnp.sum(model**2) + helper()


class Holder(tr.Trainer):
    cfg: dict
    table: np.ndarray
    options: types.SimpleNamespace

    def __init__(self, **attributes):
        vars(self).update(attributes)
        self.seen = []
        super().__init__(optimizer=optax.sgd(0.1))

    def loss(self, model, batch):
        return jnp.sum(model**2) * self.scale()

    def scale(self):
        return self.cfg["beta"] + self.table[0] + self.options.gamma


def run(trainer, model=None, num_steps=3, **kwargs):
    model = jnp.ones(2) if model is None else model
    return trainer.fit(model, None, num_steps=num_steps, progress=False, **kwargs)


def holder():
    options = types.SimpleNamespace(gamma=1.0)
    return Holder(cfg={"beta": 0.0}, table=np.zeros(2), options=options)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.cfg.update(beta=1.0), "Attribute `cfg` of `Holder` has changed"),
        (lambda t: t.table.fill(2.0), "Attribute `table` of `Holder`"),
        (lambda t: setattr(t.options, "gamma", 2), "Attribute `options` of `Holder`"),
    ],
    ids=["dict", "array", "object"],
)
def test_an_attribute_changed_in_place_raises(change, text):
    trainer = holder()
    result = run(trainer)
    change(trainer)
    with pytest.raises(tr.RecompileError, match=re.escape(text)):
        run(trainer, result.state, 6)


def test_a_variable_of_a_closure_raises():
    beta = 0.0

    def loss(model, batch):
        return jnp.sum(model**2) + beta * jnp.sum(model)

    trainer = tr.Trainer(loss, optax.sgd(0.1))
    result = run(trainer)
    beta = 1.0
    text = r"Variable `beta` of `loss` \(test_baked\.py\) has changed from `0\.0` to `1"
    with pytest.raises(tr.RecompileError, match=text):
        run(trainer, result.state, 6)


def test_a_global_that_a_helper_reads_raises_also_in_a_schedule(monkeypatch):
    def fixed(model, batch):
        return jnp.sum(model**2)

    for loss in (reads_global, tr.WeightedSum(a=(lambda s: 1.0 + helper() + s, fixed))):
        monkeypatch.setitem(SETTINGS, "beta", 0.0)
        trainer = tr.Trainer(loss, optax.sgd(0.1))
        result = run(trainer)
        monkeypatch.setitem(SETTINGS, "beta", 0.5)
        with pytest.raises(tr.RecompileError, match="Global `SETTINGS` of `helper`"):
            run(trainer, result.state, 6)


def test_a_change_by_a_callback_raises_and_keeps_the_state():
    class Anneal(tr.AbstractCallback):
        def __call__(self, info):
            trainer.cfg["beta"] = 1.0

    trainer = holder()
    with pytest.raises(tr.RecompileError, match="Attribute `cfg` of `Holder`"):
        run(trainer, num_steps=6, callbacks=[Anneal(every=2)])
    assert int(trainer.last_state.step) == 6


class Config:
    beta = 1.0

    def __init__(self):
        self.gamma = 1.0

    def weight(self):
        return self.gamma


def changed_after(loss, change):
    """Whether a change is noticed after the loss was compiled into a step."""
    trainer = tr.Trainer(loss, optax.sgd(0.1))
    result = run(trainer)
    change()
    with pytest.raises(tr.RecompileError, match="has changed"):
        run(trainer, result.state, 6)


def test_arrays_classes_methods_and_jitted_helpers_are_read_too(monkeypatch):
    config, box = Config(), {"beta": jnp.float32(1.0)}

    @jax.jit
    def jitted(value):
        return value * box["beta"]

    changed_after(
        lambda model, batch: jnp.sum(model) * Config.beta,
        lambda: monkeypatch.setattr(Config, "beta", 2.0),
    )
    changed_after(
        lambda model, batch: jnp.sum(model) * config.weight(),
        lambda: monkeypatch.setattr(config, "gamma", 2.0),
    )
    changed_after(
        lambda model, batch: jitted(jnp.sum(model)),
        lambda: box.update(beta=jnp.float32(2.0)),
    )


def test_a_record_that_only_grows_is_free():
    seen, table = [], {}

    class Record(tr.AbstractCallback):
        def __call__(self, info):
            seen.append(info.step)
            table[info.step] = 0.0

    def loss(model, batch):
        return jnp.sum(model) * (1.0 + 0 * len(seen) + 0 * len(table))

    trainer = tr.Trainer(loss, optax.sgd(0.1))
    result = run(trainer, callbacks=[Record(1)])
    assert run(trainer, result.state, 6).compiles == 1


class Scaled(tr.AbstractLoss):
    cfg: dict

    def __call__(self, model, batch):
        return jnp.sum(model**2) * self.cfg["beta"]


class Plain:
    def __init__(self, cfg):
        self.cfg = cfg

    def __call__(self, model, batch):
        return jnp.sum(model**2) * self.cfg["beta"]


def by_argument(cfg, model, batch):
    return jnp.sum(model**2) * cfg["beta"]


def by_default(cfg):
    def loss(model, batch, cfg=cfg):
        return by_argument(cfg, model, batch)

    return loss


WAYS = [Scaled, Plain, lambda cfg: functools.partial(by_argument, cfg), by_default]


@pytest.mark.parametrize("make", WAYS, ids=["field", "object", "partial", "default"])
def test_a_setting_that_a_loss_carries_raises_in_fit_and_is_seen_by_evaluate(make):
    cfg = {"beta": 1.0}
    trainer = tr.Trainer(tr.WeightedSum(a=make(cfg)), optax.sgd(0.1))
    assert trainer.evaluate(jnp.ones(2), None)["loss"] == 2.0
    result = run(trainer)
    cfg["beta"] = 3.0
    assert trainer.evaluate(jnp.ones(2), None)["loss"] == 6.0
    with pytest.raises(tr.RecompileError, match="has changed from"):
        run(trainer, result.state, 6)


def test_evaluate_sees_a_changed_closure_and_class_attribute():
    class Rated(tr.Trainer):
        rate = 1.0

        def loss(self, model, batch):
            return jnp.sum(model) * self.rate

    trainer, threshold = Rated(optimizer=optax.sgd(0.1)), 0.0

    def share(model, batch):
        return jnp.mean(model > threshold) * 1.0

    model, found = jnp.linspace(0.05, 0.95, 10), []
    for threshold in (0.1, 0.5, 0.5, 0.9):  # noqa: B007
        found.append(round(trainer.evaluate(model, None, loss=share)["loss"], 3))
    assert found == [0.9, 0.5, 0.5, 0.1]
    before = trainer.evaluate(model, None)["loss"]
    Rated.rate = 2.0
    assert trainer.evaluate(model, None)["loss"] == 2 * before


heard = []


def hear(value):
    heard.append(float(value))


def test_what_a_host_callback_writes_is_free():
    total = [0.0]

    def loss(model, batch):
        value = jnp.sum(model**2)
        jax.debug.callback(lambda v: total.append(float(v)), value)
        jax.debug.callback(hear, value)
        return value

    trainer = tr.Trainer(loss, optax.sgd(0.1))
    result = run(trainer)
    assert run(trainer, result.state, 6).compiles == 1
    jax.effects_barrier()
    assert len(total) == 7
    assert len(heard) == 6


def test_what_the_loss_itself_writes_and_what_it_does_not_read_is_free():
    count = [0]

    def loss(model, batch):
        count[0] += 1
        traces.append("loss")
        return jnp.sum(model**2)

    class Note(tr.AbstractCallback):
        def __call__(self, info):
            trainer.seen.append(info.step)
            trainer.cfg["unread"] = info.step
            trainer.options.place = info.step

    plain = tr.Trainer(loss, optax.sgd(0.1))
    result = run(plain)
    plain.evaluate(result.state, None)
    traces.append("script")
    assert run(plain, result.state, 6).compiles == 1

    trainer = holder()
    result = run(trainer, callbacks=[Note(every=1)])
    assert trainer.seen == [1, 2, 3]
    assert run(trainer, result.state, 6).compiles == 1
