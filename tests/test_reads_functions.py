"""What a step reads: functions, and what they close over."""

import functools
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from reading import loss_of, said, Thing, traced


FROM_1_TO_2 = " has changed from `1.0` to `2.0`"


def wrapped(function):
    @functools.wraps(function)
    def wrapper(x):
        return function(x)

    return wrapper


def around(options):
    """A decorator that reads something itself."""
    return lambda function: functools.wraps(function)(
        lambda x: function(x) * options["k"]
    )


def held(wrap):
    """A function within something, and what it reads."""
    options = {"k": 1.0}
    made = wrap(lambda x: x * options["k"])
    return types.SimpleNamespace(of=made, options=options)


def with_rule(function):
    made = jax.custom_vjp(lambda x: x)
    made.defvjp(lambda x: (function(x), None), lambda _, grad: (grad,))
    return lambda x: jax.grad(made)(x)


WRAPPERS = {
    "plain": lambda function: function,
    "jit": jax.jit,
    "filter_jit": eqx.filter_jit,
    "wraps": wrapped,
    "vmap": functools.partial(jax.vmap, in_axes=None, axis_size=2),
    "checkpoint": jax.checkpoint,
    "filter_grad": eqx.filter_grad,
    "custom_vjp": with_rule,
    "schedule": lambda function: optax.join_schedules([function, function], [3]),
}
IN_THINGS = {
    "list": (lambda f: [f], "return thing.of[0](x)"),
    "dict": (lambda f: {"f": f}, "return thing.of['f'](x)"),
    "object": (lambda f: Thing(f=f), "return thing.of.f(x)"),
    "partial": (functools.partial, "return thing.of(x)"),
    "module": (eqx.nn.Lambda, "return thing.of(x)"),
    "sequential": (
        lambda f: eqx.nn.Sequential([eqx.nn.Lambda(f)]),
        "return thing.of(x)",
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_a_wrapped_function_reads_is_noticed(name):
    thing = held(WRAPPERS[name])
    baked = traced(lambda model, batch: jnp.sum(thing.of(jnp.sum(model))))
    thing.options["k"] = 2.0
    text = "Variable `options['k']` of `<lambda>` (test_reads_functions.py)"
    assert baked.changed() == text + FROM_1_TO_2


@pytest.mark.parametrize("name", IN_THINGS)
def test_what_a_function_reads_that_something_holds_is_noticed(name):
    wrap, expression = IN_THINGS[name]
    thing = held(wrap)
    baked = traced(loss_of(expression, thing, is_closure=True))
    thing.options["k"] = 2.0
    assert "`options['k']` of `<lambda>`" in said(baked)


def test_what_a_decorator_reads_is_noticed():
    options = {"k": 1.0}
    decorated = around(options)(lambda x: x)
    baked = traced(lambda model, batch: decorated(jnp.sum(model)))
    options["k"] = 2.0
    assert "Variable `options['k']`" in said(baked)


def by_from(model, batch):
    from own_settings import k  # pyright: ignore[reportMissingImports]

    return k * jnp.sum(model)


def by_import(model, batch):
    import own_settings as own  # pyright: ignore[reportMissingImports]

    return own.k * jnp.sum(model)


@pytest.mark.parametrize("loss", [by_from, by_import], ids=lambda loss: loss.__name__)
def test_a_module_imported_in_the_loss_is_read_under_its_name(loss, monkeypatch):
    settings = types.ModuleType("own_settings")
    vars(settings).update(k=1.0)
    monkeypatch.setitem(sys.modules, "own_settings", settings)
    baked = traced(loss)
    vars(settings).update(k=2.0)
    where = f"of `{loss.__name__}` (test_reads_functions.py)"
    assert baked.changed() == f"Import `own_settings.k` {where}{FROM_1_TO_2}"


@pytest.mark.parametrize(
    ("now", "text"),
    [
        ("jnp.zeros(2)", "Global `thing` of `loss` (losses.py) has changed"),
        ("jnp.ones(3)", "Global `thing` of `loss` (losses.py) has changed from "),
        ("jnp.ones(2, int)", "Global `thing` of `loss` (losses.py) has changed from "),
        ("jnp.ones(2)", None),
    ],
)
def test_another_array_is_noticed_unless_it_is_the_same(now, text):
    loss = loss_of("return jnp.sum(model * thing)", jnp.ones(2), is_closure=False)
    baked = traced(loss)
    loss.__globals__["thing"] = eval(now)
    found = baked.changed()
    assert (found is None) if text is None else found.startswith(text)


def test_another_function_is_noticed_unless_it_is_the_same():
    source = "def helper(x): return {} * x"
    for other, is_noticed in (("2", False), ("3", True)):
        shared = {}
        exec(source.format(2), shared)
        exec("def loss(model, batch): return helper(model).sum()", shared)
        baked = traced(shared["loss"])
        exec("\n\n" + source.format(other), shared)
        found = baked.changed()
        assert (found is not None) == is_noticed
    assert found == "Global `helper` of `loss` (<string>) has changed"


def test_another_method_and_another_field_are_noticed(monkeypatch):
    thing = Thing(activation=jnp.tanh)
    loss = loss_of("return thing.activation(thing.scaled(x))", thing, is_closure=True)
    baked = traced(loss)
    thing.activation = jnp.sin
    assert "has changed from `tanh` to `sin`" in said(baked)
    thing.activation = jnp.tanh
    assert baked.changed() is None
    monkeypatch.setattr(Thing, "scaled", lambda self, x: 2 * x)
    assert said(baked).startswith("Variable `thing.scaled` of `loss`")


def test_another_network_is_noticed_unless_it_is_the_same():
    make = lambda seed: eqx.nn.MLP(2, "scalar", 2, 1, key=jax.random.key(seed))
    teacher = make(0)

    def loss(model, batch):
        return teacher(model)

    baked = traced(loss)
    teacher = make(0)
    assert baked.changed() is None
    teacher = make(1)
    assert said(baked).startswith("Variable `teacher` of `loss`")
