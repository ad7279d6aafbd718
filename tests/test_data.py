"""Data: every example counted right, whatever it comes from."""

import itertools
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batches, data, equal, masked_mse, mlp, mse

import trainer as tr


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: tr.Arrays(batch_size=2), TypeError, "given no arrays"),
        (
            lambda: tr.Arrays(np.ones(3), np.ones(4), batch_size=2),
            ValueError,
            r"`arrays\[0\]` has 3, `arrays\[1\]` has 4",
        ),
        (lambda: tr.Arrays(np.float32(3), batch_size=1), ValueError, "has none"),
        (lambda: tr.Arrays(np.ones(3), batch_size=4), ValueError, "there are 3 examp"),
        (lambda: tr.Arrays(np.ones(3), batch_size=0), ValueError, "from 1"),
        (lambda: tr.Arrays(np.array(["a"]), batch_size=1), TypeError, "dtype `<U1`"),
        (lambda: tr.Loader((np.ones(3), np.ones(3))), TypeError, "Use `tr.Arrays"),
        (lambda: tr.Loader(np.ones((3, 2))), TypeError, "of arrays, and not batches"),
        (lambda: tr.Loader({"x": np.ones(3)}), TypeError, "of arrays, and not batches"),
        (lambda: tr.Loader(3), TypeError, "cannot be iterated"),
        (lambda: tr.Loader([1], ragged="keep"), ValueError, "`ragged` is `'keep'`"),
    ],
)
def test_data_that_cannot_work_is_refused_at_construction(make, error, message):
    with pytest.raises(error, match=message):
        make()


def train(loss, source, trainer=None, **ends):
    trainer = trainer or tr.Trainer(loss, optax.sgd(0.1), steps_per_call=3)
    return trainer.fit(mlp(), source, progress=False, **(ends or {"num_epochs": 2}))


def test_ragged_batches_are_padded_to_the_true_mean_where_the_loss_takes_mask():
    x, y = data(10)
    ragged = [(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]
    with pytest.warns(UserWarning, match="is padded and masked"):
        result = train(masked_mse, ragged)
    by_hand = hand_loop(ragged, 6)
    np.testing.assert_allclose(result.history["loss"], by_hand, rtol=1e-6)
    assert result.compiles == 1


def hand_loop(feed, n):
    """Plain SGD on batches of any size."""
    model, values = mlp(), []
    for step in range(n):
        value, grad = eqx.filter_value_and_grad(mse)(model, feed[step % len(feed)])
        values.append(float(value))
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grad))
    return values


def test_a_padded_run_is_continued_without_a_second_compile():
    x, y = data(10)
    ragged = tr.Loader([(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)], ragged="pad")
    trainer = tr.Trainer(masked_mse, optax.sgd(0.1), steps_per_call=2)
    whole = trainer.fit(mlp(), ragged, num_steps=9, progress=False)
    first = trainer.fit(mlp(), ragged, num_steps=4, progress=False)
    again = trainer.fit(first.state, ragged, num_steps=9, progress=False)
    assert equal(again.state, whole.state)
    assert again.compiles == 1


def test_ragged_batches_are_left_out_where_a_loss_takes_no_mask():
    x, y = data(10)
    ragged = [(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]
    with pytest.warns(UserWarning, match="is left out"):
        result = train(tr.alternate(mse, masked_mse), ragged)
    assert int(result.state.step) == 4
    full = train(tr.alternate(mse, masked_mse), ragged[:2])
    assert equal(result.state, full.state)
    silent = train(mse, tr.Loader(ragged, ragged="drop"))
    assert int(silent.state.step) == 4


def test_ragged_error_and_pad_without_mask_are_refused():
    x, y = data(10)
    ragged = [(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]
    trainer = tr.Trainer(mse, optax.sgd(0.1))
    with pytest.raises(ValueError, match="has 2 examples and the first had 4"):
        train(mse, tr.Loader(ragged, ragged="error"), trainer)
    assert int(trainer.last_state.step) == 2
    with pytest.raises(TypeError, match="needs every loss to take `mask`"):
        train(mse, tr.Loader(ragged, ragged="pad"))


def test_a_one_tuple_reaches_the_loss_as_its_array():
    def loss(model, batch):
        return mse(model, (batch, batch[:, 0]))

    x = data(8)[0]
    results = [train(loss, d) for d in ([(x,)], [[x]], [x])]
    assert equal(results[0].state, results[1].state)
    assert equal(results[0].state, results[2].state)


def test_a_generator_that_runs_dry_says_so_and_keeps_the_state():
    trainer = tr.Trainer(mse, optax.sgd(0.1))
    generator = (b for b in batches())
    with pytest.raises(ValueError, match="used up: 4 steps are done, and epoch 1 has"):
        trainer.fit(mlp(), generator, num_steps=9, progress=False)
    assert int(trainer.last_state.step) == 4
    with pytest.raises(ValueError, match="used up: 4 steps are done"):
        train(mse, (b for b in batches()), num_epochs=3)
    once = train(mse, (b for b in batches()), num_epochs=1)
    assert equal(once.state, trainer.last_state)


def test_endless_iterators_factories_and_lists_train_alike():
    def endless():
        while True:
            yield from batches()

    ways = [
        lambda: train(mse, batches(), num_steps=12),
        lambda: train(mse, batches, num_epochs=3),
        lambda: train(mse, endless(), num_steps=12),
        lambda: train(mse, tr.Loader(endless(), steps_per_epoch=4), num_epochs=3),
        lambda: train(mse, tr.Loader(endless, steps_per_epoch=4), num_epochs=3),
    ]
    results = [way() for way in ways]
    for result in results[1:]:
        assert equal(result.model, results[0].model)
    assert [int(r.state.epoch) for r in results] == [2, 2, 0, 2, 2]


def test_an_iterator_is_continued_by_a_second_fit():
    trainer, feed = tr.Trainer(mse, optax.sgd(0.1), steps_per_call=3), iter(batches())
    first = trainer.fit(mlp(), feed, num_steps=2, progress=False)
    second = trainer.fit(first.state, feed, num_steps=4, progress=False)
    assert equal(second.state, train(mse, batches(), num_steps=4).state)


def test_an_epoch_of_no_batches_is_an_error():
    for empty in ([], lambda: iter(())):
        with pytest.raises(ValueError, match="Epoch 0 has no batches"):
            train(mse, empty)


def test_a_loader_may_write_its_batch_over_the_last_one():
    def reusing():
        x, y = (np.empty_like(a) for a in batches()[0])
        for a, b in batches():
            x[:], y[:] = a, b
            yield x, y

    for steps_per_call in (1, 3):
        ways = [
            tr.Trainer(mse, optax.sgd(0.1), steps_per_call=steps_per_call).fit(
                mlp(width=256), source, num_steps=40, progress=False
            )
            for source in (batches(), reusing)
        ]
        assert equal(ways[0].state, ways[1].state)


def test_batches_on_the_device_and_of_other_precision_train_alike():
    sources = [
        batches(),
        [jax.tree.map(jnp.asarray, b) for b in batches()],
        [jax.tree.map(lambda a: a.astype(np.float64), b) for b in batches()],
    ]
    for steps_per_call in (1, 3):
        trainer = tr.Trainer(mse, optax.sgd(0.1), steps_per_call=steps_per_call)
        results = [train(mse, source, trainer) for source in sources]
        assert equal(results[0].state, results[1].state)
        assert equal(results[0].state, results[2].state)
        assert results[2].compiles == 1


def test_jax_dataloader_is_used_as_it_is():
    import jax_dataloader as jdl

    x, y = data(10)
    kwargs = {"backend": "jax", "batch_size": 4, "shuffle": False}
    loader = jdl.DataLoader(jdl.ArrayDataset(x, y), drop_last=True, **kwargs)
    by_list = [(x[:4], y[:4]), (x[4:8], y[4:8])]
    result = train(mse, loader)
    assert equal(result.state, train(mse, by_list).state)
    short = jdl.DataLoader(
        jdl.ArrayDataset(x, y), backend="jax", batch_size=20, drop_last=True
    )
    with pytest.raises(ValueError, match="Epoch 0 has no batches"):
        train(mse, short)


def test_the_package_does_not_import_jax_dataloader():
    code = "import sys, trainer; print('jax_dataloader' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "False", run.stderr


def test_a_loss_may_need_no_batch():
    def loss(model, batch):
        assert batch is None
        return jnp.sum(model**2)

    trainer = tr.Trainer(loss, optax.sgd(0.25), steps_per_call=3)
    for ends in ({"num_steps": 4}, {"num_epochs": 4}):
        result = trainer.fit(jnp.ones(2), None, progress=False, **ends)
        assert result.model.tolist() == [0.5**4] * 2
    assert trainer.evaluate(result.model, None) == {"loss": 2 * 0.5**8}


def test_batches_that_are_all_shorter_than_the_compiled_ones_are_refused():
    for loss in (mse, masked_mse):
        trainer = tr.Trainer(loss, optax.sgd(0.1))
        first = trainer.fit(mlp(), batches(16), num_steps=4, progress=False)
        loader = tr.Loader(batches(8), ragged="drop")
        with pytest.raises(tr.RecompileError, match=r"`batch\[0\]` was float32\[16,10"):
            trainer.fit(first.state, loader, num_steps=8, progress=False)


def test_an_endless_iterator_is_continued_at_its_place_in_the_epoch():
    seen = []

    def loss(model, batch, *, epoch):
        return mse(model, batch), {"epoch": epoch}

    feed = tr.Loader(itertools.cycle(batches()), steps_per_epoch=4)
    trainer = tr.Trainer(loss, optax.sgd(0.1), steps_per_call=3)
    state = mlp()
    for num_steps in (6, 7, 13):
        result = trainer.fit(state, feed, num_steps=num_steps, progress=False)
        state = result.state
        seen += result.history["epoch"].tolist()
    assert seen == [step // 4 for step in range(13)]


def test_a_loader_that_is_its_own_iterator_starts_anew_each_epoch():
    class Old:
        def __iter__(self):
            self.place = 0
            return self

        def __next__(self):
            if self.place == 4:
                raise StopIteration
            self.place += 1
            return batches()[self.place - 1]

    assert equal(train(mse, Old()).state, train(mse, batches()).state)


def test_a_dropped_batch_does_not_end_an_epoch_of_given_length():
    x, y = data(10)
    ragged = [(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]
    feed = tr.Loader(itertools.cycle(ragged), ragged="drop", steps_per_epoch=3)
    result = train(mse, feed, num_epochs=2)
    assert int(result.state.step) == 6
    assert equal(result.model, train(mse, ragged[:2], num_steps=6).model)


@pytest.mark.parametrize(
    ("loss", "feed", "error", "message"),
    [
        (
            mse,
            tr.Loader(batches(), steps_per_epoch=5),
            ValueError,
            "end after 4 of the 5",
        ),
        (
            masked_mse,
            [{"x": np.ones((4, 10)), "scale": np.ones(1)}],
            ValueError,
            r"have \[1, 4\] examples, and the loss takes a `mask`",
        ),
        (
            mse,
            [(np.ones((4, 10)), np.ones(4, "timedelta64[s]"))],
            TypeError,
            r"`batch\[1\]` has dtype `timedelta64\[s\]`",
        ),
    ],
)
def test_batches_that_cannot_be_used_say_why(loss, feed, error, message):
    with pytest.raises(error, match=message):
        train(loss, feed)
