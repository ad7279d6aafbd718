"""Records of calls, and explanations: what they hold, say and refuse."""

import functools
import gc
import operator
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from helpers import mse
from jax.interpreters import pxla

import trainer as tr
from trainer.recompiles._call import called
from trainer.recompiles._context import Context
from trainer.recompiles._differences import differences


X = np.ones((4, 2), np.float32)


def step(model, batch, *, rate=0.1):
    return model, batch, rate


def test_it_works_on_arrays_that_were_donated():
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(w, key):
        return w + 1, jr.split(key)[0]

    state = (jnp.ones(2), jr.key(0))
    new = step(*state)
    assert all(leaf.is_deleted() for leaf in state)
    assert not tr.explain(step, state, new)
    (found,) = tr.explain(step, state, (new[0][:1], new[1]))
    assert (found.path, found.was, found.now) == ("w", "float32[2]", "float32[1]")


def test_a_record_of_a_call_holds_no_arrays():
    host, model = X.copy(), {"w": jnp.ones(3), "name": "m"}
    gone = [weakref.ref(x) for x in (host, model["w"])]
    call = tr.Call(model, host, rate=0.5)
    del host, model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert repr(call) == "Call({'name': 'm', 'w': float32[3]}, float32[4,2], rate=0.5)"
    (found,) = tr.explain(
        step, call, tr.Call({"w": jnp.ones(3), "name": "n"}, X, rate=0.5)
    )
    assert str(found).startswith("`model['name']` was 'm' and is now 'n'. ")


def test_a_record_remembers_the_settings_of_its_time():
    with jax.default_matmul_precision("highest"):
        before = tr.Call(X)
    (found,) = tr.explain(jnp.sum, before, tr.Call(X))
    assert found.path == "jax_default_matmul_precision"
    assert (found.was, found.now) == ("'highest'", "None")
    assert not tr.explain(jnp.sum, before, before)


def test_an_explanation_is_a_sequence_that_can_be_read():
    found = tr.explain(step, (1, X), (2, X[:1]))
    assert isinstance(found, tr.Explanation)
    assert len(found) == 2
    assert [each.path for each in found] == ["model", "batch"]
    assert found[1] == found.differences[1]
    assert isinstance(found[1], tr.Difference)
    assert repr(found) == str(found)
    assert str(found).splitlines() == [
        "`step` compiles again:",
        "* `model` was 1 and is now 2. Give it as an array, with `jnp.asarray(...)`, "
        "or the same at every call.",
        "* `batch` was float32[4,2] and is now float32[1,2]. Give every call one "
        "shape: pad what is short, and mask the rest.",
    ]


def test_many_differences_are_not_all_shown():
    found = tr.explain(lambda xs: xs, (list(range(30)),), (list(range(1, 31)),))
    assert len(found) == 30
    *_, last, rest = str(found).splitlines()
    assert last.startswith("* `xs[19]` ")
    assert rest == "* and 10 more"


def test_without_a_difference_it_says_what_arguments_do_not_show():
    found = tr.explain(step, (1, X), (1, X))
    assert not found
    lines = str(found).splitlines()
    assert lines[0] == (
        "No argument makes `step` compile again. What else may, and no argument shows:"
    )
    for line, word in zip(
        lines[1:], ("made anew", "tr.Call", "clear_caches"), strict=True
    ):
        assert word in line
    told = str(tr.explain((step, step), tr.Call(1, X), tr.Call(1, X)))
    assert "made anew" not in told
    assert "tr.Call" not in told


@pytest.mark.parametrize(
    ("fn", "before", "after", "message"),
    [
        (3, (1,), (1,), "`3` is not a function"),
        (tr.Trainer(mse, optax.sgd(0.1)), (1,), (1,), "is not a function"),
        (step, X, (X,), r"`args_before` is `float32\[4,2\]`, but is to be"),
        (step, (1, X), [1, X], r"`args_after` is `\[1, float32\[4,2\]\]`, but is"),
        (step, (1, X), (1,), r"`step` cannot be called as `Call\(1\)`: missing a "),
        (step, (1, X), tr.Call(1, X, r=1), "unexpected keyword argument 'r'"),
    ],
)
def test_what_cannot_be_explained_is_refused(fn, before, after, message):
    with pytest.raises(TypeError, match=message):
        tr.explain(fn, before, after)


class Linear(eqx.Module):
    w: np.ndarray

    def __call__(self, x):
        return x @ self.w


class Plain:
    @jax.jit
    def by_jax(self, x):
        return x

    @eqx.filter_jit
    def by_equinox(self, x):
        return x


@pytest.mark.parametrize(
    ("fn", "name", "by", "static", "num_held"),
    [
        (step, "step", "eqx.filter_jit", (), 0),
        (eqx.filter_jit(step), "step", "eqx.filter_jit", (), 0),
        (jax.jit(step, static_argnums=0), "step", "jax.jit", (0, "model"), 0),
        (functools.partial(jax.jit(step), 1), "step", "jax.jit", (), 1),
        (functools.partial(step, 1), "step", "eqx.filter_jit", (), 0),
        (eqx.filter_jit(functools.partial(step, 1)), "step", "eqx.filter_jit", (), 0),
        (Plain().by_jax, "by_jax", "jax.jit", (), 1),
        (Plain().by_equinox, "by_equinox", "eqx.filter_jit", (), 1),
        (eqx.filter_jit(Linear(X)), "Linear", "eqx.filter_jit", (), 0),
        (operator.itemgetter(0), "itemgetter", "eqx.filter_jit", (), 0),
    ],
)
def test_what_is_called_is_read(fn, name, by, static, num_held):
    found = called(fn)
    assert (found.name, found.by, found.static) == (name, by, static)
    assert len(found.held) == num_held


def test_arguments_that_a_partial_holds_are_compared_as_well():
    (found,) = tr.explain(
        functools.partial(jax.jit(step), X, rate=1),
        (1.0,),
        tr.Call(1.0, rate=1.0),
    )
    assert (found.path, found.was, found.now) == ("rate", "int32[]", "float32[]")


def test_a_function_without_a_signature_is_explained():
    (found,) = tr.explain(max, (1, 2), (1, 3))
    assert (found.path, found.was, found.now) == ("args[1]", "2", "3")


def test_a_model_that_is_called_is_compared_by_its_leaves():
    was, same, now = (
        eqx.filter_jit(Linear(np.full(n, n, np.float32))) for n in (2, 2, 3)
    )
    assert not tr.explain((was, same), (X,), (X,))
    (found,) = tr.explain((was, now), (X,), (X,))
    assert (found.path, found.was, found.now) == (
        "Linear.w",
        "float32[2]",
        "float32[3]",
    )


def test_no_name_that_jax_does_not_promise_is_needed(monkeypatch):
    """Without what is private or deprecated, a cause is not named, and all else is."""
    monkeypatch.setattr(pxla, "__getattr__", _missing)
    assert Context().meshes["with mesh"] == ()

    class Other:
        """What `jax.jit` may return one day."""

        __wrapped__ = staticmethod(step)

        def __call__(self):
            pass

    monkeypatch.setattr(
        "trainer.recompiles._call._compiled_by", lambda: (Other, type(None))
    )
    found = called(Other())
    assert (found.name, found.by, found.static) == ("step", "jax.jit", ())
    assert set(found.options.values()) == {None}


def _missing(name):
    raise AttributeError(name)


def test_settings_are_read_while_a_function_is_traced():
    seen = []
    before = Context()

    @jax.jit
    def traced(x):
        seen.extend(before.differences(Context()))
        seen.extend(tr.explain(step, (1, X), (1, x)))
        seen.extend(differences("x", x, X))
        return x

    traced(X)
    assert seen == []


def test_functions_with_other_arguments_are_compared_by_what_both_take():
    other = lambda model, data: (model, data)
    found = tr.explain((step, other), (1, X), (2, X))
    assert [(d.path, d.was, d.now) for d in found[1:]] == [
        ("model", "1", "2"),
        ("batch", "given as float32[4,2]", "not an argument"),
        ("data", "not an argument", "given as float32[4,2]"),
    ]
    assert found[0].what == "function"
