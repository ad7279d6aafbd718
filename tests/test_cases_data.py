"""Cases of data: short batches, loaders, order, columns, iterators."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import jax.random as jr
import jax_dataloader as jdl
import numpy as np
import optax
import pytest
from test_cases import by_hand, close, counted, fit, linear, mse, rows, same

import trainer as tr


def cut(x, y, size=4):
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def masked_mse(model, batch, *, mask):
    x, y = batch
    errors = (jax.vmap(model)(x) - y) ** 2
    return jnp.sum(jnp.where(mask, errors, 0.0)) / jnp.sum(mask)


def hand_mse(batches, optimizer=None):
    calls = [{"batch": batch} for batch in batches]
    return by_hand(mse, optimizer or optax.sgd(0.1), linear(), calls)[0]


def test_case_01_a_short_batch_is_left_out_aloud():
    batches = cut(*rows(10))
    with pytest.warns(UserWarning, match="2 examples.*first had 4, is left out"):
        result = fit(mse, optax.sgd(0.1), linear(), batches, num_epochs=2)
    same(result.model, hand_mse(batches[:2] * 2))
    close(result.model, [1.000926, 0.846378, 0.094271])


def test_case_01_a_short_batch_counts_its_real_rows_with_a_mask():
    batches = cut(*rows(10))
    with pytest.warns(UserWarning, match="2 examples.*first had 4, is padded and mask"):
        result = fit(masked_mse, optax.sgd(0.1), linear(), batches, num_epochs=2)
    close(result.model, hand_mse(batches * 2))
    close(result.model, [1.097692, 1.15631, 0.36229])


def test_case_01_arrays_fill_the_last_batch_from_the_next_epoch():
    x, y = rows(10)
    data = tr.Arrays(x, y, batch_size=4, shuffle=False)
    result = fit(mse, optax.sgd(0.1), linear(), data, num_epochs=2)
    same(result.model, hand_mse(cut(np.tile(x, (2, 1)), np.tile(y, 2))))
    assert int(result.state.step) == 5


def force_errors(model, batch):
    x, _ = batch
    slope = jax.vmap(jax.grad(model))(x)
    return jnp.mean((slope - jnp.array([1.0, 2.0])) ** 2, axis=1)


def force(model, batch, *, mask):
    return jnp.mean(force_errors(model, batch), where=mask)


def force_weight(epoch):
    return jnp.where(epoch < 2, 0.99, 0.01)


def by_epoch(model, batch, *, epoch, mask):
    weight = jax.lax.cond(epoch < 2, lambda: 0.99, lambda: 0.01)
    value = weight * force(model, batch, mask=mask)
    value += (1 - weight) * masked_mse(model, batch, mask=mask)
    return value, {"weight_of_force": weight}


def hand_by_epoch(batches):
    def loss(model, batch, epoch):
        weight = force_weight(epoch)
        forces = jnp.mean(force_errors(model, batch))
        return weight * forces + (1 - weight) * mse(model, batch)

    calls = [{"batch": b, "epoch": jnp.int32(e)} for e in range(4) for b in batches]
    return by_hand(loss, optax.sgd(0.05), linear(), calls)[0]


@pytest.mark.parametrize(("ragged", "per_epoch"), [("pad", 3), ("drop", 2)])
def test_case_10_weights_swap_at_the_epoch_whatever_its_steps(ragged, per_epoch):
    batches = cut(*rows(10))
    loader = tr.Loader(batches, ragged=ragged)
    expected = hand_by_epoch(batches[:per_epoch])
    weights = [0.99] * 2 * per_epoch + [0.01] * 2 * per_epoch

    result = fit(by_epoch, optax.sgd(0.05), linear(), loader, num_epochs=4)
    close(result.model, expected)
    close(result.history["weight_of_force"], weights)

    (forces, traces), (energies, more) = counted(force), counted(masked_mse)
    loss = tr.WeightedSum(
        by="epoch",
        force=(force_weight, forces),
        energy=(lambda epoch: 1 - force_weight(epoch), energies),
    )
    trainer = tr.Trainer(loss, optax.sgd(0.05))
    result = trainer.fit(linear(), loader, num_epochs=4, progress=False)
    close(result.model, expected)
    if ragged == "pad":
        close(result.model, [0.795063, 1.112827, 0.200834])
    close(result.history["weight/force"], weights)
    close(result.history["weight/energy"], [1 - w for w in weights])
    assert (result.compiles, len(traces), len(more)) == (1, 1, 1)


def reconstruct(model, batch):
    return jnp.mean((jax.vmap(model)(batch) - batch[:, 0]) ** 2)


def loader(x, size):
    return jdl.DataLoader(
        jdl.ArrayDataset(x), backend="jax", batch_size=size, drop_last=True
    )


def test_case_27_a_batch_of_one_array_reaches_the_loss_as_that_array():
    x, _ = rows(10)
    assert [type(batch) for batch in loader(x, 4)] == [tuple, tuple]
    result = fit(reconstruct, optax.sgd(0.1), linear(), loader(x, 4), num_epochs=1)
    calls = [{"batch": x[:4]}, {"batch": x[4:8]}]
    same(result.model, by_hand(reconstruct, optax.sgd(0.1), linear(), calls)[0])
    close(result.model, [0.498767, 0.310297, -0.12555])


def test_case_27_an_epoch_without_batches_says_why():
    trainer = tr.Trainer(reconstruct, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"Epoch 0 has no batches.*drop_last"):
        trainer.fit(linear(), loader(rows(10)[0], 20), num_epochs=1, progress=False)
    with pytest.raises(ValueError, match="no batches"):
        trainer.evaluate(linear(), loader(rows(10)[0], 20))


def test_case_27_jax_dataloader_need_not_be_importable():
    script = """
import sys
sys.modules["jax_dataloader"] = None
import jax.numpy as jnp, numpy as np, optax
import trainer as tr
loss = lambda model, batch: jnp.mean((batch @ model) ** 2)
for data in ([(np.ones((4, 2)),)], tr.Arrays(np.ones((4, 2)), batch_size=4)):
    fitted = tr.Trainer(loss, optax.sgd(0.1)).fit(
        jnp.ones(2), data, num_steps=3, progress=False
    )
    print(fitted.history["loss"].tolist(), fitted.compiles)
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    one, other = ran.stdout.splitlines()
    assert one == other
    assert one.startswith("[4.0, ")
    assert one.endswith(" 1")


def numbered(model, batch):
    return model**2, {f"row{i}": batch[i] for i in range(4)}


def orders(seed):
    data = tr.Arrays(np.arange(12), batch_size=4)
    key, model = jr.key(seed), jnp.ones(())
    history = fit(numbered, optax.sgd(0.1), model, data, num_epochs=3, key=key).history
    seen = np.stack([history[f"row{i}"] for i in range(4)], axis=1)
    return seen.reshape(3, 12).tolist()


def test_case_28_every_epoch_has_its_own_order_and_a_seed_repeats_them():
    zero = orders(0)
    assert [sorted(order) for order in zero] == [list(range(12))] * 3
    assert len({tuple(order) for order in zero}) == 3
    assert orders(0) == zero
    other = orders(1)
    assert all(order not in zero for order in other)


def labelled(dtype, names="abcdefgh"):
    return [
        {"x": x, "y": y, "id": np.array(list(names[4 * i : 4 * i + 4]), dtype)}
        for i, (x, y) in enumerate(cut(*rows(8)))
    ]


def columns_mse(model, batch):
    return mse(model, (batch["x"], batch["y"]))


@pytest.mark.parametrize("dtype", ["<U1", "S1", object])
def test_case_29_a_text_column_is_named_before_the_first_step(dtype):
    loss, traces = counted(columns_mse)
    trainer = tr.Trainer(loss, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"`batch\['id'\]` has dtype") as error:
        trainer.fit(linear(), labelled(dtype), num_epochs=1, progress=False)
    assert str(np.dtype(dtype)) in str(error.value)
    assert traces == []

    numeric = [{n: v for n, v in b.items() if n != "id"} for b in labelled(dtype)]
    result = trainer.fit(linear(), numeric, num_epochs=1, progress=False)
    same(result.model, hand_mse([(b["x"], b["y"]) for b in numeric]))
    close(result.model, [0.734735, 0.605177, -0.009442])
    assert (result.compiles, len(traces)) == (1, 1)


def generate():
    yield from cut(*rows(12))


def test_case_30_a_used_up_generator_is_an_error_in_the_second_epoch():
    trainer = tr.Trainer(mse, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"used up: 3 steps .* epoch 1 .*function"):
        trainer.fit(linear(), generate(), num_epochs=3, progress=False)
    state = trainer.last_state
    assert state is not None
    assert int(state.step) == 3
    same(state.model, hand_mse(generate()))


def test_case_30_a_function_that_makes_the_generator_is_called_each_epoch():
    result = fit(mse, optax.sgd(0.1), linear(), generate, num_epochs=3)
    assert int(result.state.step) == 9
    same(result.model, hand_mse([*generate()] * 3))
    close(result.model, [1.098077, 1.488616, 0.519097])


def test_case_30_an_endless_generator_stops_after_its_steps_per_epoch():
    taken = []

    def endless():
        while True:
            for batch in generate():
                taken.append(batch)
                yield batch

    data = tr.Loader(endless(), steps_per_epoch=3)
    result = fit(mse, optax.sgd(0.1), linear(), data, num_epochs=3)
    assert int(result.state.step) == len(taken) == 9
    same(result.model, hand_mse(taken))
    close(result.model, [1.098077, 1.488616, 0.519097])
