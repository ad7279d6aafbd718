"""Other forms of batches and models: refused, or compiled once each."""

import subprocess
import sys
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trainer as tr
from tests.helpers import batches, equal, masked_mse, mlp, mse


SGD = optax.sgd(0.1)


def padded_to(length, seed=0):
    x = np.random.default_rng(seed).normal(size=(4, length)).astype(np.float32)
    return {"x": x, "mask": np.arange(length) < length - 1}


def mean_of_rows(model, batch):
    row = jnp.sum(jnp.where(batch["mask"], batch["x"], 0), 1)
    return jnp.mean((model * row - 1) ** 2)


LENGTHS = [8, 8, 16, 8, 16, 16, 4, 8]


def buckets():
    return [padded_to(length, seed) for seed, length in enumerate(LENGTHS)]


def fit(trainer, data=None, num_steps=8, model=None, **options):
    model = jnp.float32(0.3) if model is None else model
    data = buckets() if data is None else data
    return trainer.fit(model, data, num_steps=num_steps, progress=False, **options)


@pytest.mark.parametrize("steps_per_call", [1, 3, "auto"])
def test_each_form_is_compiled_once_and_all_steps_are_made(
    steps_per_call, step_compiles
):
    calls = tr.Trainer(
        tr.switch_every(3, mean_of_rows, mean_of_rows),
        optax.adam(0.1),
        steps_per_call=steps_per_call,
        on_recompile="allow",
    )
    result = fit(calls, num_steps=30)
    assert result.compiles == step_compiles() == 3
    assert result.compile_report.traces == 3
    model, opt, losses = jnp.float32(0.3), optax.adam(0.1), []
    state, grad = opt.init(model), jax.value_and_grad(mean_of_rows)
    for step in range(30):
        loss, g = grad(model, buckets()[step % 8])
        updates, state = opt.update(g, state, model)
        model = optax.apply_updates(model, updates)
        losses.append(loss)
    np.testing.assert_allclose(result.history["loss"], losses, rtol=1e-5)
    assert result.history.steps("loss").tolist() == list(range(30))
    np.testing.assert_allclose(result.model, model, rtol=1e-5)
    again = fit(calls, model=result.state, num_steps=40)
    assert again.compiles == 3


def test_a_warning_says_why_and_callbacks_are_called_on_time():
    class Note(tr.AbstractCallback):
        def __call__(self, info):
            seen.append(info.step)

    seen = []
    trainer = tr.Trainer(mean_of_rows, SGD, on_recompile="warn")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(trainer, num_steps=24, callbacks=[Note(every=2)])
    texts = [str(warning.message).split(",")[0] for warning in found]
    assert texts == [
        "Compiling once more: `batch['mask']` was bool[8] and is now bool[16]",
        "Compiling once more: `batch['mask']` was bool[16] and is now bool[4]",
    ]
    assert seen == list(range(2, 25, 2))


def test_by_default_another_form_is_refused_and_the_state_is_kept():
    trainer = tr.Trainer(mean_of_rows, SGD)
    text = r"`batch\['mask'\]` was bool\[8\] and is now bool\[16\]"
    with pytest.raises(tr.RecompileError, match=text):
        fit(trainer)
    assert int(trainer.last_state.step) == 2


def test_a_short_batch_is_padded_by_mask_dropped_by_request_or_compiled():
    short = [*batches(size=16, n=48), tuple(a[:5] for a in batches()[0])]
    for loss, ragged, compiles in (
        (masked_mse, None, 1),
        (mse, "drop", 1),
        (mse, None, 2),
    ):
        trainer = tr.Trainer(loss, SGD, on_recompile="allow")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "A batch of 5 examples")
            data = tr.Loader(short, ragged=ragged)
            result = fit(trainer, data, model=mlp(), num_steps=8)
        assert result.compiles == compiles


def test_other_models_and_data_of_a_later_fit():
    trainer = tr.Trainer(mse, SGD, on_recompile="allow")
    first = fit(trainer, batches(), model=mlp(width=8))
    wide = fit(trainer, batches(), model=mlp(width=12))
    back = fit(trainer, batches(), model=mlp(width=8))
    assert (first.compiles, wide.compiles, back.compiles) == (1, 2, 2)
    assert equal(first.state, back.state)
    x, y = batches(size=64)[0]
    arrays = fit(trainer, tr.Arrays(x, y, batch_size=8), model=mlp(width=8))
    assert arrays.compiles == 3


class WithTable(eqx.Module):
    weight: jax.Array
    table: np.ndarray = eqx.field(static=True)


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_an_array_in_a_static_field_is_told_from_another_one():
    def product(model, batch):
        return jnp.sum(model.weight * model.table)

    make = lambda: WithTable(jnp.ones(3), np.arange(3, dtype=np.float32))
    trainer = tr.Trainer(product, SGD)
    state = fit(trainer, [np.float32(0)], model=make()).state
    assert fit(trainer, [np.float32(0)], model=state, num_steps=9).compiles == 1
    with pytest.raises(tr.RecompileError, match=r"`model\.table` was float32\[3\] and"):
        fit(trainer, [np.float32(0)], model=make())


def test_what_was_read_and_has_changed_is_refused_all_the_same():
    scale = {"value": 1.0}

    def scaled(model, batch):
        return scale["value"] * model**2

    trainer = tr.Trainer(scaled, SGD, on_recompile="allow")
    state = fit(trainer, [np.float32(0)]).state
    scale["value"] = 2.0
    with pytest.raises(tr.RecompileError, match="has changed"):
        fit(trainer, [np.float32(0)], model=state, num_steps=16)


def test_another_setting_of_jax_is_named():
    kept, refused = (
        tr.Trainer(mse, SGD, on_recompile=option) for option in ("allow", "error")
    )
    state = fit(kept, batches(), model=mlp()).state
    fit(refused, batches(), model=mlp())
    text = "`jax_default_matmul_precision` was None and is now 'float32'"
    with jax.default_matmul_precision("float32"):
        more = fit(kept, batches(), model=state, num_steps=12)
        assert more.compiles == 2
        with pytest.raises(tr.RecompileError, match=text):
            fit(refused, batches(), model=state, num_steps=12)
    assert fit(kept, batches(), model=state, num_steps=12).compiles == 2
    assert fit(refused, batches(), model=state, num_steps=12).compiles == 1


MESH = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, optax, trainer as tr
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ("data",))
trainer = tr.Trainer(lambda m, b: jnp.sum(m**2), optax.sgd(0.1))
trainer.fit(jnp.ones(4), None, num_steps=3, progress=False)
model = jax.device_put(jnp.ones(4), NamedSharding(mesh, P("data")))
try:
    trainer.fit(model, None, num_steps=3, progress=False)
except tr.RecompileError as error:
    print(error)
trainer = tr.Trainer(
    lambda m, b: jnp.sum(m**2), optax.sgd(0.1), on_recompile="allow"
)
for start in (jnp.ones(4), model, jnp.ones(4), model):
    result = trainer.fit(start, None, num_steps=3, progress=False)
print(result.compiles, "P" + str(tuple(result.model.sharding.spec)))
"""


def test_another_placement_is_named():
    run = subprocess.run([sys.executable, "-c", MESH], capture_output=True, text=True)
    said, last = run.stdout.strip().rsplit("\n", 1)
    assert said.startswith("`model` was on cpu:0 and is now on P('data') on the ")
    assert last == "2 P('data',)", run.stderr


def test_an_option_that_is_none_of_its_values():
    with pytest.raises(ValueError, match="`'error'`, `'warn'` or `'allow'`"):
        tr.Trainer(mse, SGD, on_recompile="never")
