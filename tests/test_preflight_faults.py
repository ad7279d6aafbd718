"""What `Trainer.check` warns of, and that it changes nothing."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax_dataloader as jdl
import numpy as np
import optax
import pytest
from helpers import equal

import trainer as tr


X = np.linspace(-1, 1, 12, dtype=np.float32)
SGD = optax.sgd(0.1)


class Net(eqx.Module):
    w: jax.Array
    idle: jax.Array | None = None
    rate: float | jax.Array | None = None


def bad(place, value=np.nan):
    array = X.copy()
    array[place] = value
    return array


def fit(model, batch):
    return jnp.mean((model.w * batch - 1) ** 2)


def logarithm(model, batch):
    return jnp.log(-jnp.sum(model.w**2)) + jnp.sum(batch)


def endless(model, batch):
    return jnp.sum(model.w) / jnp.sum(0 * batch)


def root(model, batch):
    return jnp.sum(jnp.sqrt(0 * model.w)) + jnp.mean(batch)


def talks(model, batch):
    print("the batch is", batch)
    return fit(model, batch)


def wide(model, batch):
    return jnp.mean((model.w * batch["x"] - batch["y"]) ** 2)


def not_continuous(model, batch):
    return jnp.sum(jnp.round(model.w))


class Explodes(tr.Trainer):
    def update(self, model, opt_state, batch):
        new = eqx.tree_at(lambda m: m.w, model, model.w / 0)
        return new, opt_state, {"loss": jnp.mean(batch)}


def trainer_of(*losses, rate=0.1):
    return tr.Trainer(tr.alternate(*losses), optax.sgd(rate))


PAIR = {"x": X, "y": X[:, None]}
INF = jnp.float32(jnp.inf)
ONE, NET = jnp.ones(()), Net(jnp.ones(()))
FAULTS = {
    "parameter": (
        trainer_of(fit),
        Net(jnp.float32(jnp.inf)),
        X,
        "`model.w` has 1 of 1",
    ),
    "batch": (trainer_of(fit), NET, bad([1, 2]), "`batch` has 2 of 12 numbers"),
    "loss": (
        trainer_of(fit, logarithm),
        NET,
        X,
        r"The loss `logarithm` at test_preflight_faults.py:\d+ is nan.*debug_nans",
    ),
    "infinite": (trainer_of(endless), NET, X, "The loss `endless` .* is inf.*infs"),
    "gradient": (
        trainer_of(fit, root),
        NET,
        X,
        r"The gradient of `root` at test_preflight_faults.py:\d+ by `model.w` is not",
    ),
    "step": (trainer_of(fit, rate=np.inf), NET, X, "first step makes `model.w` not fi"),
    "own update": (Explodes(), NET, X, "first step makes `model.w` not finite"),
    "own loss": (Explodes(), NET, bad(0), "`batch` has 1 of 12 numbers"),
    "guard": (
        tr.Trainer(fit, optax.sgd(np.inf), nonfinite="skip"),
        NET,
        X,
        "Step 0 made `model.w` not finite",
    ),
    "unused": (trainer_of(fit), Net(ONE, ONE), X, "`model.idle` gets no gradient"),
    "print": (trainer_of(talks), NET, X, r"jax.debug.print"),
    "float": (trainer_of(fit), Net(ONE, rate=0.5), X, "`model.rate` is the Python flo"),
    "broadcast": (trainer_of(wide), NET, PAIR, r"\(12, 1\)"),
    "flat": (
        trainer_of(fit, not_continuous),
        NET,
        X,
        "`not_continuous`.* is 0 at e",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_with_its_place(name):
    trainer, model, batch, words = FAULTS[name]
    found = trainer.check(model, [batch])
    told = [text for text in found.warnings if re.search(words, text)]
    assert len(told) == 1, found.warnings
    assert not found.ok
    shown = " ".join(str(found).split())
    assert " ".join(told[0].split()) in shown


def test_what_finds_nothing_is_not_hidden_from_the_loss():
    """A loss may know of gaps in the data; and a zero may be a beginning."""

    def knows(model, batch):
        x = jnp.where(jnp.isnan(batch["x"]), 0, batch["x"])
        return jnp.mean((model.w * x + model.idle * model.w) ** 2)

    model = Net(jnp.zeros(()), jnp.ones(()))
    found = tr.Trainer(knows, SGD).check(model, [{"x": bad(3)}])
    assert found.ok
    assert found.batch["batch['x']"].bad == 1
    assert found.nonfinite == ("batch['x']",)
    assert found.zero_gradients == ("model.w", "model.idle")
    assert "with a gradient of 0 on this batch: model.w, model.idle" in str(found)


def test_all_that_is_not_finite_is_named():
    found = trainer_of(fit, root).check(NET, [bad(0, np.inf)])
    names = {"batch", "fit", "root", "gradient of fit by model.w"}
    assert names < {*found.nonfinite}


def test_an_error_is_the_one_that_a_fit_raises():
    def looks(model, batch):
        return model.w if batch[0] > 0 else -model.w

    trainer, messages = tr.Trainer(looks, SGD), []
    for call in (trainer.check, lambda *a: trainer.fit(*a, num_steps=1)):
        with pytest.raises(tr.TraceError, match="test_preflight_faults") as raised:
            call(NET, [X])
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert trainer.last_history is not None


@pytest.mark.parametrize("wrap", [iter, tr.Loader, lambda data: tr.Loader(iter(data))])
def test_an_iterator_is_refused(wrap):
    given = wrap([X])
    trainer = tr.Trainer(fit, SGD)
    if isinstance(given, tr.Loader) and not given.is_used_up:
        assert trainer.check(NET, given).ok
        return
    with pytest.raises(TypeError, match=r"`check` would take a batch.*lambda"):
        trainer.check(NET, given)
    assert trainer.fit(NET, given, num_steps=1, progress=False).compiles == 1


def drops(model, batch, *, key):
    return fit(model, batch) + jnp.mean(model.w * jr.normal(key, (3,)))


def test_a_later_fit_is_what_it_would_have_been():
    results, columns = [], jdl.ArrayDataset(X)
    for looks in (False, True):
        trainer = tr.Trainer(drops, optax.adam(0.1))
        loader = jdl.DataLoader(columns, "jax", batch_size=4, shuffle=True)
        if looks:
            assert trainer.check(NET, loader).compiles == 1
            assert trainer.last_state is trainer.last_history is None
        result = trainer.fit(NET, loader, num_steps=7, progress=False)
        assert result.compiles == result.compile_report.traces == 1
        results.append(result)
    assert equal(results[0].state, results[1].state)
    assert np.array_equal(results[0].history["loss"], results[1].history["loss"])


def test_a_callback_may_look():
    trainer = tr.Trainer(fit, SGD)

    class Looks(tr.AbstractCallback):
        def __call__(self, info):
            return {"ok": trainer.check(info.state, [X]).ok}

    looks = [Looks(every=2)]
    result = trainer.fit(NET, [X], num_steps=4, callbacks=looks, progress=False)
    assert result.history["ok"].tolist() == [1, 1]
    assert result.compiles == 1


def test_what_is_given_is_checked():
    trainer = tr.Trainer(fit, SGD)
    with pytest.raises(ValueError, match="`num_steps` is `0`"):
        trainer.check(NET, [X], num_steps=0)
    with pytest.raises(TypeError, match="not one random key"):
        trainer.check(NET, [X], key=3)
    with pytest.raises(ValueError, match="no batches"):
        trainer.check(NET, [])
    with pytest.raises(TypeError, match=r"`Mine` overrides `Trainer.check`"):
        type("Mine", (tr.Trainer,), {"check": None})


def test_many_parts_are_cut_short():
    def total(model, batch):
        return sum(jnp.sum(w**2) for w in model.values())

    model = {f"w{place:02}": jnp.ones(()) for place in range(30)}
    lines = str(tr.Trainer(total, SGD).check(model, None)).splitlines()
    assert sum("... and 10 more" in line for line in lines) == 2
