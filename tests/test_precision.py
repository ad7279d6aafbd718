"""Computing in bfloat16 and float16: what is narrow, what is not, and loss scaling."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batches, equal, flat, mlp, mse, net, net_mse, Twins

import trainer as tr
from trainer._precision import LossScale


ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1)
NARROW = ["bfloat16", "float16"]


def fit(loss, compute, optimizer=SGD, model=None, data=None, num_steps=8, **options):
    update = tr.Minimize(loss, optimizer, compute=compute, **options)
    trainer = tr.Trainer(update=update, steps_per_call=4)
    model = mlp() if model is None else model
    data = batches() if data is None else data
    return trainer.fit(model, data, num_steps=num_steps, progress=False)


def dtypes(tree):
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    return {str(leaf.dtype) for leaf in leaves}


@functools.cache
def in_full():
    return fit(net_mse, None, ADAM, net())


@pytest.mark.parametrize("compute", NARROW)
def test_only_the_computation_is_narrow(compute):
    seen = {}

    def loss(model, batch, *, state, key):
        seen["model"], seen["batch"] = dtypes(model), dtypes(batch)
        value, state = net_mse(model, batch, state=state, key=key)
        seen["value"] = value.dtype
        return value, {"twice": 2 * value}, state

    result = fit(loss, compute, ADAM, net())
    wide = in_full()
    assert (seen["model"], seen["batch"]) == ({compute}, {compute})
    state = result.state
    for tree in (state.model, state.opt_state, state.model_state):
        assert dtypes(tree) == {"float32"}
    assert jax.tree.structure(state.model) == jax.tree.structure(wide.state.model)
    assert result.history["loss"].dtype == np.float32
    assert result.history["twice"].dtype == np.float32
    found, expected = result.history["loss"], wide.history["loss"]
    np.testing.assert_allclose(found, expected, rtol=0.05)
    assert not np.array_equal(found, expected)
    mean = lambda state: flat(state.model_state)
    np.testing.assert_allclose(mean(state), mean(wide.state), rtol=0.1, atol=0.02)
    assert result.compiles == 1


def test_small_updates_are_not_lost():
    """In bfloat16 itself 1 - 1e-4 is 1."""
    loss = lambda model, batch: jnp.sum(model)
    result = fit(loss, "bfloat16", optax.sgd(1e-4), jnp.ones(2), [jnp.zeros(1)], 100)
    np.testing.assert_allclose(result.model, 0.99, rtol=1e-5)


def test_integers_keys_and_tables_are_left_alone():
    def loss(model, batch):
        x, index = batch
        assert (x.dtype, index.dtype) == (jnp.bfloat16, jnp.int32)
        assert (model["w"].dtype, model["t"].dtype) == (jnp.bfloat16, jnp.int32)
        assert jnp.issubdtype(model["key"].dtype, jax.dtypes.prng_key)
        return jnp.mean(model["w"][index] * x)

    model = {"w": jnp.ones(3), "t": jnp.arange(3), "key": jax.random.key(0)}
    batch = (np.ones(2, np.float32), np.array([0, 2], np.int32))
    result = fit(loss, "bfloat16", model=model, data=[batch], num_steps=1)
    np.testing.assert_allclose(result.model["w"], [0.95, 1, 0.95])


@pytest.mark.parametrize("compute", NARROW)
def test_a_line_search_computes_in_the_same_type(compute):
    loss = lambda model, batch: jnp.sum((model - 1) ** 2 * batch)
    search = optax.scale_by_backtracking_linesearch(5)
    weights = [jnp.array([1.0, 4.0])]
    result = fit(loss, compute, optax.lbfgs(linesearch=search), jnp.zeros(2), weights)
    assert dtypes((result.model, result.state.opt_state)) == {"float32"}
    assert result.history["loss"][-1] < 0.5 * result.history["loss"][0]


def steep(model, batch):
    """Its gradient by `a` is `batch`; the loss is small whatever that is."""
    there = jax.lax.stop_gradient(model.a)
    return jnp.sum((model.a - there) * batch) + 0.5 * jnp.sum(model.b**2)


TWINS = Twins(jnp.ones(2), jnp.ones(3))


def test_a_step_that_overflows_is_left_out_and_halves_the_scale():
    """2**15 times 3 is more than float16 holds; 2**14 times 3 is not."""
    three = [jnp.float32(v) for v in (1, 3, 3, 1)]
    ema = {"ema": tr.EMA(0.5)}
    update = tr.Minimize(steep, ADAM, compute="float16")
    trainer = tr.Trainer(update=update, transforms=ema, steps_per_call=3)
    run = lambda model, to: trainer.fit(model, three, num_steps=to, progress=False)
    one = run(TWINS, 1)
    two = run(one.state, 2)
    assert equal(one.state.model, two.state.model)
    assert equal(one.state.opt_state, two.state.opt_state)
    assert int(two.state.step) == 2
    rest = run(two.state, 4)
    history = one.history + two.history + rest.history
    assert history["loss_scale"].tolist() == [2**15, 2**15, 2**14, 2**14]
    assert np.isfinite(history["loss"]).all()
    assert rest.state.opt_state[0].count == 3
    assert rest.nonfinite is None


def test_the_state_of_a_model_is_as_before_a_step_that_is_left_out():
    """The gradient overflows, and the loss does not."""
    big = [(x, 100 * y) for x, y in batches()]
    result = fit(net_mse, "float16", ADAM, net(), big, num_steps=1)
    start = tr.Trainer(net_mse, ADAM).init(net())
    assert result.state.memory.program.own.scale == 2**14
    assert equal(result.model_state, start.model_state)
    assert equal(result.model, start.model)
    assert equal(result.state.opt_state, start.opt_state)


def test_the_gradient_does_not_depend_on_the_scale():
    update = tr.Minimize(mse, SGD, compute="float16")
    trainer = tr.Trainer(update=update)
    found = []
    for scale in (2.0**6, 2.0**10):
        state = trainer.init(mlp())
        where = lambda s: s.memory.program.own.scale
        state = eqx.tree_at(where, state, jnp.float32(scale))
        found.append(trainer.fit(state, batches(), num_steps=3, progress=False).model)
    np.testing.assert_allclose(flat(found[0]), flat(found[1]), atol=1e-4)


def test_a_loss_scale_by_itself():
    ok, bad = jnp.asarray(True), jnp.asarray(False)
    scale = LossScale(jnp.float32(2.0**15), jnp.int32(0))
    step = jax.jit(lambda s, n: jax.lax.fori_loop(0, n, lambda _, s: s.renewed(ok), s))
    scale = step(scale, 1_999)
    assert (float(scale.scale), int(scale.finite)) == (2.0**15, 1_999)
    scale = scale.renewed(bad)
    assert (float(scale.scale), int(scale.finite)) == (2.0**14, 0)
    scale = step(scale, 1_999)
    assert float(scale.scale) == 2.0**14
    scale = scale.renewed(ok)
    assert (float(scale.scale), int(scale.finite)) == (2.0**15, 0)
    assert step(scale, 100_000).scale == 2.0**24
    for _ in range(30):
        scale = scale.renewed(bad)
    assert scale.scale == 1


def test_narrow_updates_take_turns_and_keep_scales_of_their_own():
    a = tr.Minimize(steep, SGD, where=lambda m: m.a, compute="float16")
    b = tr.Minimize(steep, SGD, where=lambda m: m.b, compute="float16")
    update = tr.SwitchUpdate(tr.Cycle((1, 1)), {"a": a, "b": b})
    trainer = tr.Trainer(update=update)
    three = [jnp.float32(3)]
    result = trainer.fit(TWINS, three, num_steps=6, progress=False)
    history = result.history
    assert history["a/loss_scale"].compressed().tolist() == [2**15, 2**14, 2**14]
    assert history["b/loss_scale"].compressed().tolist() == [2**15] * 3


def test_micro_batches_and_parts_in_a_narrow_type():
    parts = tr.Parts(
        head=tr.Part(ADAM, lambda m: m.layers[-1]),
        body=tr.Part(SGD, lambda m: m.layers[:-1], start=2),
    )
    found = fit(mse, "float16", parts, micro_batches=3)
    wide = fit(mse, None, parts)
    np.testing.assert_allclose(flat(found.model), flat(wide.model), atol=5e-3)
    assert dtypes((found.model, found.state.opt_state)) == {"float32"}


@pytest.mark.parametrize("given", [jnp.bfloat16, jnp.dtype("float16"), "bfloat16"])
def test_the_type_may_be_given_as_one(given):
    assert tr.Minimize(mse, SGD, compute=given).compute == jnp.dtype(given).name


@pytest.mark.parametrize("wrong", ["float32", "narrow", 3, jnp.int8, True])
def test_another_type_is_refused(wrong):
    text = "It is `'bfloat16'`, `'float16'`, or None to compute in the types that the"
    with pytest.raises(ValueError, match=text):
        tr.Minimize(mse, SGD, compute=wrong)
