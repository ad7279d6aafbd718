"""Every optimizer of Optax: trains, compiles once; and those that cannot, and why."""

import inspect
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import data, flat, mse
from optax import contrib

import trainer as tr


X, Y = data(32)
RATE = 0.02


def mlp():
    return eqx.nn.MLP(10, "scalar", 8, 1, key=jr.key(0))


def fit(optimizer: Any, loss=mse, model=None, num_steps=40, batches=((X, Y),)):
    trainer = tr.Trainer(loss, optimizer, steps_per_call=10)
    model = mlp() if model is None else model
    return trainer.fit(model, list(batches), num_steps=num_steps, progress=False)


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def is_there(params):
    """A mask that leaves out what is None: what a model has beside its parameters."""
    return jax.tree.map(lambda p: p is not None, params, is_leaf=lambda p: p is None)


def label(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "other", params)


def is_odd(step, **extra_args):
    return step % 2 == 1


def growing(updates: Any):
    return 1 + updates // 3


def of_fast(updates: Any, params: Any):
    return updates.fast


SGD, ADAM, LBFGS = optax.sgd(0.1), optax.adam(RATE), optax.lbfgs()
MOMO, SOPHIA = contrib.momo(), contrib.sophia(RATE)
ADVERSARY = optax.chain(contrib.normalize(), optax.sgd(0.01))
SAM = contrib.sam(SGD, ADVERSARY)
BACKTRACKING = optax.lbfgs(
    linesearch=optax.scale_by_backtracking_linesearch(10, store_grad=True)
)
SOME_MOMO = optax.MultiSteps(MOMO, 2)

# All that have a learning rate. A name alone: the rate is all that it needs.
NAMES = """
adabelief adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lion
nadam nadamw novograd optimistic_adam optimistic_adam_v2 optimistic_gradient_descent
radam rmsprop rprop sgd sign_sgd signum sm3 yogi
"""
OPTAX: dict[str, Any] = dict.fromkeys(NAMES.split()) | {
    "adadelta": optax.adadelta(10.0),
    "lars": optax.lars(1.0),
    "lbfgs": LBFGS,
    "noisy_sgd": optax.noisy_sgd(RATE, key=0),
    "polyak_sgd": optax.polyak_sgd(0.1),
}
CONTRIB_NAMES = (
    "acprop ademamix adopt madgrad momo_adam muon schedule_free_adamw sophia"
)
OF_CONTRIB: dict[str, Any] = dict.fromkeys(CONTRIB_NAMES.split()) | {
    "cocob": contrib.cocob(),
    "dadapt_adamw": contrib.dadapt_adamw(),
    "dog": contrib.dog(1.0, ("distance", 0.01)),
    "dowg": contrib.dowg(),
    "galore": optax.masked(contrib.galore(RATE, rank=4), is_there),
    "momo": MOMO,
    "prodigy": contrib.prodigy(),
    "schedule_free": contrib.schedule_free(optax.rmsprop(RATE), RATE),
    "schedule_free_sgd": contrib.schedule_free_sgd(0.1),
    "simplified_ademamix": contrib.simplified_ademamix(1e-3),
}
WRAPPED: dict[str, Any] = {
    "MultiSteps": optax.MultiSteps(ADAM, growing),
    "MultiSteps of momo": SOME_MOMO,
    "MultiSteps of lbfgs": optax.MultiSteps(LBFGS, 2).gradient_transformation(),
    "MultiSteps of finite steps": optax.MultiSteps(
        MOMO, 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "add_noise": optax.chain(optax.add_noise(1e-3, 0.55, key=0), ADAM),
    "apply_every": optax.chain(ADAM, optax.apply_every(3)),
    "apply_if_finite": optax.apply_if_finite(SOPHIA, 3),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.clip(1.0), SOPHIA),
    "conditionally_mask": optax.conditionally_mask(MOMO, is_odd, True),
    "conditionally_transform": optax.chain(
        ADAM, optax.conditionally_transform(optax.scale(0.5), is_odd)
    ),
    "flatten": optax.flatten(MOMO),
    "freeze": optax.chain(ADAM, optax.freeze(is_matrix)),
    "inject_hyperparams": optax.inject_hyperparams(contrib.momo)(1.0),
    "inject_hyperparams by a schedule": optax.inject_hyperparams(optax.adamw)(
        optax.cosine_decay_schedule(RATE, 40)
    ),
    "lbfgs, backtracking": BACKTRACKING,
    "masked": optax.chain(ADAM, optax.masked(optax.scale(0.5), is_matrix)),
    "mechanize": contrib.mechanize(optax.adam(1.0)),
    "named_chain": optax.named_chain(("zero", optax.zero_nans()), ("adam", ADAM)),
    "partition": optax.partition({"matrix": MOMO, "other": SGD}, label),
    "reduce_on_plateau": optax.chain(
        ADAM, contrib.reduce_on_plateau(patience=3, cooldown=2, accumulation_size=2)
    ),
    "sam": SAM,
    "sam, opaque": contrib.sam(SGD, ADVERSARY, opaque_mode=True),
    "snapshot": optax.chain(optax.snapshot("norm", optax.tree.norm), ADAM),
    "split_real_and_imaginary": contrib.split_real_and_imaginary(ADAM),
}
# What cannot train this model, and how it says so.
CANNOT: dict[str, tuple[Any, type[Exception], str]] = {
    # It takes the gradient of every example, which no step has. dpsgd begins with it.
    "differentially_private_aggregate": (
        contrib.differentially_private_aggregate(1.0, 0.1, key=0),
        ValueError,
        "to have a batch dimension in the 0th axis",
    ),
    # Its parameters are a pair of models: see below how to train one.
    "lookahead": (optax.lookahead(ADAM, 5, 0.5), AttributeError, "no attribute 'fast'"),
    # It takes a None for a parameter. Masked by `is_there` it can, as above.
    "galore": (contrib.galore(RATE, rank=4), AttributeError, "no attribute 'dtype'"),
    # Its state begins without measurements, and grows. `snapshot` can.
    "monitor": (
        optax.chain(ADAM, optax.monitor({"norm": optax.tree.norm})),
        TypeError,
        r"measurements\['norm'\]` is new",
    ),
    # They hand a line search other parameters than `value_fn` takes.
    "lbfgs in flatten": (optax.flatten(LBFGS), TypeError, "not a valid JAX array type"),
    "lbfgs in masked": (optax.masked(LBFGS, is_matrix), ValueError, "MaskedNode"),
    # A chain hands on everything, and it takes `grad_fn` alone.
    "sam in a chain": (optax.chain(SAM), TypeError, "keyword argument 'value'"),
    # A chain hands on nothing, because of its type. Around the chain it can.
    "MultiSteps in a chain": (optax.chain(SOME_MOMO), TypeError, "argument: 'value'"),
}


def cases():
    found = {}
    for module, table in ((optax, OPTAX), (contrib, OF_CONTRIB)):
        for name, optimizer in table.items():
            if hasattr(module, name):  # Optax deprecates names, and drops them
                make = partial(getattr(module, name), RATE)
                found[name] = make if optimizer is None else lambda it=optimizer: it
    return found | {name: lambda it=it: it for name, it in WRAPPED.items()}


CASES = cases()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_trains_and_compiles_once(name):
    result = fit(CASES[name]())
    assert result.compiles == 1
    history = result.history["loss"]
    assert history[0] == pytest.approx(float(mse(mlp(), (X, Y))), rel=1e-5)
    assert history[-1] < 0.95 * history[0]
    assert np.isfinite(flat(result.model)).all()


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_train_says_so(name):
    optimizer, error, text = CANNOT[name]
    with pytest.raises(error, match=text):
        fit(optimizer)


def is_optimizer(name, constructor):
    """Whether it has a learning rate and, given one, makes a transformation."""
    is_function = inspect.isfunction(constructor) or isinstance(constructor, partial)
    if not is_function or name.startswith(("_", "scale_by_")):
        return False
    names = inspect.signature(constructor).parameters
    rates = [name for name in names if name.endswith("learning_rate")]
    try:
        made = constructor(**{rates[0]: RATE}) if rates else None
    except TypeError:  # it needs more than that
        return False
    return isinstance(made, optax.GradientTransformation)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "table"), [(optax, OPTAX), (contrib, OF_CONTRIB)])
def test_no_optimizer_is_left_out(module, table):
    found = {name for name, it in vars(module).items() if is_optimizer(name, it)}
    assert len(found) > 15
    unknown = found - table.keys() - CANNOT.keys()
    assert not unknown, f"new in Optax {optax.__version__}: add {unknown} to the table"


def test_lookahead_trains_a_pair_of_models():
    # It takes the gradient of the fast model, and updates both.
    optimizer = optax.chain(optax.stateless(of_fast), optax.lookahead(ADAM, 5, 0.5))
    pair = optax.LookaheadParams.init_synced(mlp())
    result = fit(optimizer, lambda model, batch: mse(model.fast, batch), pair)
    assert result.compiles == 1
    assert mse(result.model.slow, (X, Y)) < 0.5 * mse(mlp(), (X, Y))
    slow, fast = flat(result.model.slow), flat(result.model.fast)
    np.testing.assert_allclose(slow, fast, atol=1e-6)  # 40 is a multiple of 5


class Mixed(eqx.Module):
    """Complex and real parameters beside what is none."""

    z: jax.Array
    w: jax.Array
    table: jax.Array
    key: jax.Array
    act: Any
    bias: None = None

    def __init__(self):
        self.z, self.w = jnp.full(3, 0.1 + 0.1j), jnp.zeros(3)
        self.table, self.key, self.act = jnp.array([2, 0, 1]), jr.key(3), jnp.sinh


TARGET = jnp.array([1 + 2j, -1 - 1j, 0.5j])
MATRIX = jnp.array([[2, 1j, 0], [-1j, 2, 0.5], [0, 0.5, 1 + 1j]])


def distance(model, batch):
    z = MATRIX @ (model.z[model.table] - TARGET)
    return jnp.sum(jnp.abs(z) ** 2) + jnp.sum((model.act(model.w) - 1) ** 2)


COMPLEX = {
    "sgd": optax.sgd(0.05, momentum=0.5),
    "adam": optax.adam(0.1),
    "lbfgs": LBFGS,
    "lbfgs, backtracking": BACKTRACKING,
    "polyak_sgd": optax.polyak_sgd(0.1),
    "rprop of pairs": contrib.split_real_and_imaginary(optax.rprop(0.05)),
    "sam": contrib.sam(optax.sgd(0.05), optax.sgd(1e-3), opaque_mode=True),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_parameters_converge_and_what_is_none_stays(name):
    old = Mixed()
    result = fit(COMPLEX[name], distance, old, num_steps=150)
    new = result.model
    assert result.compiles == 1
    np.testing.assert_allclose(new.z[new.table], TARGET, atol=0.1)
    assert (new.z.dtype, new.w.dtype) == (jnp.complex64, jnp.float32)
    np.testing.assert_array_equal(new.table, old.table)
    assert (new.table.dtype, new.act, new.bias) == (old.table.dtype, old.act, None)
    assert new.key == old.key


def weights_by_name(model):
    none = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(lambda m: [layer.weight for layer in m.layers], none, [True] * 2)


@pytest.mark.parametrize("mask", [is_matrix, weights_by_name])
def test_a_mask_is_a_function_of_the_model(mask):
    # The gradient is zero, so all that changes is what decays.
    optimizer = optax.adamw(0.1, weight_decay=1.0, mask=mask)
    new = fit(optimizer, lambda model, batch: 0.0 * model(batch[0][0])).model
    for old, layer in zip(mlp().layers, new.layers, strict=True):
        np.testing.assert_allclose(layer.weight, old.weight * 0.9**40, rtol=1e-4)
        np.testing.assert_array_equal(layer.bias, old.bias)


def test_small_batches_accumulated_equal_a_big_one():
    optimizer, models = optax.adamw(0.01), [mlp()]
    cut = lambda size: [(X[i : i + size], Y[i : i + size]) for i in range(0, 16, size)]
    for num_steps in (1, 2, 3, 4):
        accumulated = optax.MultiSteps(optimizer, 2)
        odd = num_steps % 2  # what is left over is said
        with pytest.warns(match="ends 1 micro") if odd else nullcontext():
            result = fit(accumulated, num_steps=num_steps, batches=cut(4))
        models.append(result.model)
    moved = [(flat(a) != flat(b)).any() for a, b in pairwise(models)]
    assert moved == [0, 1, 0, 1]
    big = fit(optimizer, num_steps=2, batches=cut(8)).model
    np.testing.assert_allclose(flat(models[-1]), flat(big), atol=1e-6)
