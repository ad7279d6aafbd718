"""Second compiles by what a function is given, and by what it hands on to itself."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from recompiles import again, once, target


class Net(eqx.Module):
    w: jax.Array
    scale: float = 1.0
    power: int = eqx.field(static=True, default=1)

    def __call__(self, x):
        return self.scale * (x @ self.w) ** self.power


class Settings:
    """Without `__eq__`: each is another one."""


@dataclasses.dataclass(frozen=True)
class Equal:
    """Equal if it holds the same."""

    width: int


def net(**kwargs):
    return Net(jnp.ones(2), **kwargs)


def total(x, how):
    """A function of an array that looks at another argument in no way."""
    del how
    return jnp.sum(x)


X = np.ones((4, 2), np.float32)


def two(run, one, other):
    """Call a function with an array and one of two other values."""
    step = target(lambda x, how: total(x, how))
    run(step, X, one)
    run(step, X, other)


@again([("x", "float32[4,2]", "float32[3,2]")])
def a_short_last_batch(run):
    step = target(lambda x: jnp.sum(x))
    run(step, X)
    run(step, X[:3])


@again([("x", "float32[4,2]", "float16[4,2]")])
def another_dtype(run):
    step = target(lambda x: jnp.sum(x))
    run(step, X)
    run(step, X.astype(np.float16))


@again([("how", "0", "1")], [("how", "1", "2")])
def the_step_as_a_python_int(run):
    step = target(lambda x, how: total(x, how))
    for i in range(3):
        run(step, X, i)


@again([("how", "1.0", "0.9")])
def an_annealed_weight_as_a_python_float(run):
    two(run, 1.0, 0.9)


@again([("how", "True", "False")])
def a_flag(run):
    two(run, True, False)


@again([("how", "'mean'", "'sum'")])
def a_word(run):
    two(run, "mean", "sum")


@again([("how", "0", "int32[]")])
def a_python_number_and_then_an_array(run):
    two(run, 0, jnp.int32(1))


@again([("how", "float32[]", "1.0")])
def an_array_and_then_a_python_number(run):
    two(run, jnp.float32(1), 1.0)


@again([("how", "weakly typed float32[]", "float32[]")])
def a_weak_scalar(run):
    step = target(lambda x, how: jnp.sum(x) * how)
    run(step, X, jnp.asarray(1.0))
    run(step, X, jnp.float32(1.0))


@again([("key", "key<fry>[]", "uint32[2]")])
def a_raw_key(run):
    step = target(lambda key: jr.uniform(key))
    run(step, jr.key(0))
    run(step, jr.PRNGKey(0))


@again([("key", "key<fry>[]", "key<rbg>[]")])
def a_key_of_another_kind(run):
    step = target(lambda key: jr.uniform(key))
    run(step, jr.key(0))
    run(step, jr.key(0, impl="rbg"))


@again([("batch['mask']", "not there", "float32[4,2]")])
def one_more_entry_of_a_dict(run):
    step = target(lambda batch: jnp.sum(batch["x"]))
    run(step, {"x": X})
    run(step, {"x": X, "mask": X})


@again([("batch", "of class `tuple`", "of class `list`")])
def a_list_for_a_tuple(run):
    step = target(lambda batch: jnp.sum(batch[0]))
    run(step, (X, X))
    run(step, [X, X])


@again([("how", "None", "float32[4,2]")])
def an_array_for_none(run):
    two(run, None, X)


@again([("how", "left to its default `None`", "given as None")])
def a_default_that_is_given(run):
    step = target(lambda x, how=None: total(x, how))
    run(step, X)
    run(step, X, None)


@again([("xs[2]", "not there", "float32[4,2]")])
def one_more_argument(run):
    step = target(lambda *xs: sum(map(jnp.sum, xs)))
    run(step, X, X)
    run(step, X, X, X)


@again([("how", *["<function a_lambda.<locals>.<lambda>>"] * 2)])
def a_lambda(run):
    step = target(lambda x, how: jnp.sum(how(x)))
    for _ in range(2):
        run(step, X, lambda x: jnp.maximum(x, 0))


@again([("how", *["<recompile_by_arguments.Settings object>"] * 2)])
def an_object_without_equality(run):
    two(run, Settings(), Settings())


@again([("how", "nan", "nan")])
def another_nan(run):
    two(run, float("nan"), float("nan"))


@again([("model.power", "1", "2")])
def a_static_field(run):
    step = target(lambda model, x: jnp.sum(model(x)))
    run(step, net(), X)
    run(step, net(power=2), X)


@again([("model.scale", "1.0", "0.5")])
def a_python_float_in_the_model(run):
    step = target(lambda model, x: jnp.sum(model(x)))
    run(step, net(), X)
    run(step, eqx.tree_at(lambda m: m.scale, net(), 0.5), X)


@again(
    [
        ("model.layers[0].weight", "float32[3,2]", "float32[5,2]"),
        ("model.layers[0].bias", "float32[3]", "float32[5]"),
        ("model.layers[0].out_features", "3", "5"),
        ("model.layers[1].weight", "float32[1,3]", "float32[1,5]"),
        ("model.layers[1].in_features", "3", "5"),
        ("model.width_size", "3", "5"),
    ]
)
def a_wider_model(run):
    step = target(lambda model, x: jnp.sum(jax.vmap(model)(x)))
    for width in (3, 5):
        run(step, eqx.nn.MLP(2, 1, width, 1, key=jr.key(0)), X)


@again([("model.inference", "False", "True")])
def inference_mode(run):
    step = target(lambda model, x: model(x, key=jr.key(0)))
    model = eqx.nn.Dropout(0.5)
    run(step, model, X)
    run(step, eqx.nn.inference_mode(model), X)


@once
def values_that_are_equal(run):
    step = target(lambda x, how: total(x, how))
    run(step, X, Equal(2))
    run(step, jnp.asarray(X), Equal(2))
    run(step, X.astype(np.float64), how=Equal(2))
    run(step, how=Equal(2), x=2 * X)


@once
def a_model_made_anew(run):
    step = target(lambda model, x: model(x), donate="all")
    for _ in range(3):
        run(step, net(), X)
