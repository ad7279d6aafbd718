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
    terms: list
    rate: float

    def __init__(self, **attributes):
        vars(self).update(attributes)
        self.seen = []
        super().__init__(optimizer=optax.sgd(0.1))

    def loss(self, model, batch):
        return jnp.sum(model**2) * self.scale() * sum(self.terms) * self.rate

    def scale(self):
        return self.cfg["beta"] + self.table[0] + self.options.gamma


def run(trainer, model=None, num_steps=3, **kwargs):
    model = jnp.ones(2) if model is None else model
    return trainer.fit(model, None, num_steps=num_steps, progress=False, **kwargs)


def holder():
    options = types.SimpleNamespace(gamma=1.0)
    parts = {"options": options, "terms": [1.0], "rate": 1.0}
    return Holder(cfg={"beta": 0.0}, table=np.zeros(2), **parts)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.cfg.update(beta=1.0), "`cfg['beta']` of `Holder`"),
        (lambda t: t.table.fill(2.0), "`table[0]` of `Holder`"),
        (lambda t: setattr(t.options, "gamma", 2), "`options.gamma` of `Holder`"),
        (lambda t: vars(t).update(rate=2.0), "`rate` of `Holder`"),
        (lambda t: object.__setattr__(t, "rate", 2.0), "`rate` of `Holder`"),
        (lambda t: object.__delattr__(t, "rate"), "`rate` of `Holder`"),
        (lambda t: t.terms.append(2.0), "`terms` of `Holder`"),
    ],
    ids=["dict", "array", "object", "vars", "setattr", "delattr", "list"],
)
def test_an_attribute_changed_in_place_raises(change, text):
    trainer = holder()
    result = run(trainer)
    change(trainer)
    with pytest.raises(tr.RecompileError, match=f"^Attribute {re.escape(text)}, read"):
        run(trainer, result.state, 6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda t: setattr(t, "rate", 2.0),
            "is set to `2.0`, but its step was compiled with `1.0`",
        ),
        (lambda t: setattr(t, "other", 2.0), "compiled without it"),
        (lambda t: delattr(t, "rate"), "is deleted"),
    ],
    ids=["set", "new", "deleted"],
)
def test_an_attribute_is_not_set_after_compiling(change, text):
    trainer = holder()
    change(trainer)
    run(trainer := holder())
    with pytest.raises(tr.RecompileError, match=re.escape(text)):
        change(trainer)


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
        with pytest.raises(
            tr.RecompileError, match=r"Global `SETTINGS\['beta'\]` of `hel"
        ):
            run(trainer, result.state, 6)


def test_a_change_by_a_callback_raises_and_keeps_the_state():
    class Anneal(tr.AbstractCallback):
        def __call__(self, info):
            trainer.cfg["beta"] = 1.0

    trainer = holder()
    with pytest.raises(tr.RecompileError, match=r"Attribute `cfg\['beta'\]` of `Hol"):
        run(trainer, num_steps=6, callbacks=[Anneal(every=2)])
    assert int(trainer.last_state.step) == 6


class Record(tr.AbstractCallback):
    def __init__(self, records):
        super().__init__(every=1)
        self.records = records

    def __call__(self, info):
        self.records.append(info.step)


def test_a_list_that_the_loss_reads_may_not_grow_and_one_that_it_does_not_may():
    layers, seen = [1.0], []

    def loss(model, batch):
        seen.append("trace")
        return sum(layer * jnp.sum(model) for layer in layers)

    trainer = tr.Trainer(loss, optax.sgd(0.1))
    run(trainer, callbacks=[Record(seen)])
    text = (
        r"Variable `layers` of `loss` \(test_baked\.py\) has changed from 1 to 2 items"
    )
    with pytest.raises(tr.RecompileError, match=text):
        run(trainer, num_steps=1, callbacks=[Record(layers)])
    assert int(trainer.last_state.step) == 1
    assert len(seen) == 4


def test_a_large_array_is_looked_at_where_a_fit_begins_and_ends():
    table = np.ones((64, 1024))

    class Change(tr.AbstractCallback):
        def __call__(self, info):
            table[3, 5] += 1.0

    trainer = tr.Trainer(
        lambda model, batch: jnp.sum(model) * jnp.asarray(table)[0, 0], optax.sgd(0.1)
    )
    for callbacks in ([Change(every=2)], []):
        with pytest.raises(tr.RecompileError, match="Variable `table` of `<lambda>`"):
            run(trainer, callbacks=callbacks)


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
