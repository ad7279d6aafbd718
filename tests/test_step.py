"""The compiled step: equal for every K, equal to a loop by hand, compiled once."""

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import batches, data, equal, mae, mlp, mse, pull, Twins

import trainer as tr
from trainer._executable import _forget


class Note(tr.AbstractCallback):
    def __init__(self, every):
        super().__init__(every)
        self.seen = []

    def __call__(self, info):
        self.seen.append((info.step, float(info.metrics["loss"])))


def fit(loss, model, source, steps_per_call, num_steps=333, callbacks=()):
    trainer = tr.Trainer(loss, optax.adam(1e-2), steps_per_call=steps_per_call)
    return trainer.fit(
        model,
        source,
        num_steps=num_steps,
        key=jr.key(0),
        callbacks=callbacks,
        progress=False,
    )


@pytest.mark.parametrize("source", ["arrays", "loader"])
def test_every_steps_per_call_gives_equal_bits(source, step_compiles):
    # 333 is divided by none of 7 and 100; neither are the callback's periods.
    sources = {"arrays": tr.Arrays(*data(), batch_size=24), "loader": batches()}
    loss = tr.switch_every(5, mse, mae)
    notes = {k: Note(13) for k in (1, 7, 100)}
    results = {
        k: fit(loss, mlp(), sources[source], k, callbacks=[notes[k], Note(31)])
        for k in notes
    }
    for k in (7, 100):
        assert equal(results[k].state, results[1].state)
        assert np.array_equal(results[k].history["loss"], results[1].history["loss"])
        assert notes[k].seen == notes[1].seen
    assert [step for step, _ in notes[7].seen] == list(range(13, 334, 13))
    assert [r.compiles for r in results.values()] == [1, 1, 1]
    assert step_compiles() == 3


def test_nested_schedule_of_a_thousand_steps_compiles_and_traces_once():
    traces = []

    def count(name, loss):
        def counted(model, batch):
            traces.append(name)
            return loss(model, batch)

        return counted

    def norm(model, batch):
        traces.append("norm")
        return sum(
            jnp.sum(w**2) for w in jax.tree.leaves(eqx.filter(model, eqx.is_array))
        )

    warm = optax.linear_schedule(0.0, 1e-3, 50)
    inner = tr.WeightedSum(
        fit=tr.alternate(count("a", mse), count("b", mae), counts=(2, 1)),
        size=(warm, norm),
    )
    loss = tr.piecewise([count("c", mse), inner], boundaries=[100])
    result = fit(loss, mlp(), batches(), "auto", num_steps=1200)
    assert result.compiles == 1
    assert sorted(traces) == ["a", "b", "c", "norm"]
    history = result.history
    assert np.ma.count(history["size"]) == 1099
    assert np.array_equal(history["weight/size"].mask, np.arange(1200) < 100)
    assert history["WeightedSum/fit/branch"].compressed()[:4].tolist() == [0, 0, 1, 0]


def test_one_array_in_two_places_is_donated_once_and_the_model_stays_usable():
    shared = jnp.ones(3)
    model = Twins(shared, shared)
    for steps_per_call in (1, 4):
        trainer = tr.Trainer(pull, optax.sgd(0.1), steps_per_call=steps_per_call)
        result = trainer.fit(model, None, num_steps=2, progress=False)
        np.testing.assert_allclose(result.model.a, 0.64, rtol=1e-6)
        np.testing.assert_allclose(result.model.b, 1.72, rtol=1e-6)
        assert shared.tolist() == [1, 1, 1]
        later = trainer.fit(result.state, None, num_steps=4, progress=False)
        assert result.model.a.tolist() != later.model.a.tolist()


def test_an_average_that_starts_as_the_model_does_not_share_its_buffers():
    def keep_average(decay):
        def init(params):
            return params  # the very arrays of the model

        def update(updates, average, params=None):
            step = lambda a, p, u: decay * a + (1 - decay) * (p + u)
            return updates, jax.tree.map(step, average, params, updates)

        return optax.GradientTransformation(init, update)

    optimizer = optax.chain(optax.sgd(0.1), keep_average(0.5))
    trainer = tr.Trainer(pull, optimizer)
    model = Twins(jnp.ones(3), jnp.ones(3))
    result = trainer.fit(model, None, num_steps=1, progress=False)
    np.testing.assert_allclose(result.state.opt_state[1].a, 0.9, rtol=1e-6)
    assert result.compiles == 1


def test_weak_leaves_are_strong_before_the_first_step_and_after_the_last():
    class Scaled(eqx.Module):
        w: jax.Array
        s: jax.Array

    def loss(model, batch):
        return jnp.sum((model.s * model.w - 1) ** 2)

    trainer = tr.Trainer(loss, optax.adamw(0.1))
    model = Scaled(jnp.ones(2), jnp.asarray(0.5))
    assert model.s.weak_type
    state = trainer.init(model)
    result = trainer.fit(model, None, num_steps=5, progress=False)
    for leaf in jax.tree.leaves(eqx.filter((state, result.state), eqx.is_array)):
        assert not getattr(leaf, "weak_type", False)
    assert result.compiles == 1


def test_an_update_that_changes_a_dtype_is_refused_by_path_before_compiling(
    step_compiles,
):
    class Half(tr.Trainer):
        def update(self, model, opt_state, batch):
            return Twins(model.a.astype(jnp.bfloat16), model.b), opt_state, {}

    with pytest.raises(
        TypeError, match=r"`model\.a` was float32\[3\] and is now bfloat"
    ):
        Half().fit(Twins(jnp.ones(3), jnp.ones(3)), None, num_steps=2, progress=False)
    assert step_compiles() == 0


def test_large_arrays_in_a_closure_are_arguments_of_the_step():
    x, y = map(jnp.asarray, data(4096))

    def loss(model, batch):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    trainer = tr.Trainer(loss, optax.adam(1e-2), steps_per_call=3)
    result = trainer.fit(mlp(), None, num_steps=7, progress=False)
    same = fit(mse, mlp(), [(x, y)], 3, num_steps=7)
    np.testing.assert_allclose(result.history["loss"], same.history["loss"], rtol=1e-6)
    assert trainer._steps is not None
    assert trainer._steps.current is not None
    shapes = [leaf.shape for leaf in trainer._steps.current._kept]
    assert sorted(shapes) == [(4096,), (4096, 10)]


def test_a_state_on_a_mesh_compiles_once():
    code = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import trainer as tr
mesh = Mesh(np.array(jax.devices()), ("d",))
model = jax.device_put(jnp.ones((4, 3)), NamedSharding(mesh, P("d")))
def loss(model, batch): return jnp.mean((batch @ model.T) ** 2)
trainer = tr.Trainer(loss, optax.adam(0.1), steps_per_call=2)
result = trainer.fit(model, [np.ones((5, 3))], num_steps=3, progress=False)
again = trainer.fit(result.state, [np.ones((5, 3))], num_steps=8, progress=False)
print(again.compiles, *again.model.sharding.spec, *again.state.step.sharding.spec)
model = {"a": jnp.ones((8, 3)), "b": jnp.ones(8), "c": jnp.ones((1, 8))}
specs = {"a": P("d"), "b": P(), "c": P()}
place = lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec))
model = jax.tree.map(place, model, specs)
def loss(m, x): return jnp.mean((jax.nn.relu(x @ m["a"].T + m["b"]) @ m["c"].T) ** 2)
trainer = tr.Trainer(loss, optax.adam(0.1), steps_per_call=4)
result = trainer.fit(model, [np.ones((5, 3))], num_steps=9, progress=False)
found = {n: tuple(leaf.sharding.spec) for n, leaf in result.model.items()}
print(result.compiles, found == {n: tuple(spec) for n, spec in specs.items()})
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.split() == ["1", "d", "1", "True"], run.stderr


def test_what_equinox_caches_of_the_step_is_dropped():
    cleared = []

    class Cached:
        def clear_cache(self):
            cleared.append(True)

    class Jitted:
        _cached = Cached()

    _forget(Jitted())
    _forget(object())
    assert cleared == [True]
    assert hasattr(eqx.filter_jit(lambda x: x), "_cached")
