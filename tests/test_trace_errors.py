"""Where in the user's code an error of tracing is."""

import functools
import importlib.util
import inspect
import linecache
import textwrap
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mistakes import marked_line, MODEL

import trainer as tr
from trainer.mistakes._trace_errors import explained
from trainer.mistakes._user_code import defined_at, is_of_user, user_frame


FILTERING = ("off", "tracebackhide", "remove_frames", "quiet_remove_frames", "auto")


def python_if(model, batch, *, step):
    if step > 10:  # here
        return jnp.sum(model)
    return jnp.sum(model**2)


def numpy_sin(model, batch):
    return jnp.sum(np.sin(model))  # here


def mask_index(model, batch):
    return jnp.sum(model[model > 0])  # here


def while_loop(model, batch):
    start = jnp.sum(model)
    return jax.lax.while_loop(lambda x: x < 9, lambda x: x * 2, start)  # here


def wrong_shapes(model, batch):
    return jnp.sum(jnp.ones((2, 5)) @ model)  # here


def fit(loss, model=MODEL, data=None):
    trainer = tr.Trainer(loss, optax.sgd(0.1))
    trainer.fit(model, data, num_steps=2, progress=False)


def fails(loss, model=MODEL):
    with pytest.raises(tr.TraceError) as caught:
        fit(loss, model)
    return caught.value


# The innermost line of the user's.


class Wrong(tr.AbstractLoss):
    weight: float

    def __call__(self, model, batch, *, step):
        return self.weight * jnp.sum(model) if step else jnp.sum(model)  # here


class Layer(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return x if self.w > 0 else -x  # here


class OddSelector(tr.AbstractSelector):
    def __call__(self, step, num):
        return (step, step) if step > 3 else (0 * step, step)  # here


def shouting(step):
    return 1.0 if step > 5 else 0.5  # here


def fine(model, batch):
    return jnp.sum(model**2)


WHERE = {
    "in a class": (Wrong(2.0), MODEL, Wrong.__call__),
    "in a switch": (tr.alternate(fine, python_if), MODEL, python_if),
    "in a sum": (
        tr.WeightedSum(a=fine, b=(lambda step: step, python_if)),
        MODEL,
        python_if,
    ),
    "in a partial": (functools.partial(python_if), MODEL, python_if),
    "under vmap": (
        lambda m, b: jnp.sum(jax.vmap(lambda v: mask_index(v[None], b))(m)),
        MODEL,
        mask_index,
    ),
    "under jit": (eqx.filter_jit(python_if), MODEL, python_if),
    "in a layer": (lambda m, b: m(jnp.float32(1)), Layer(MODEL[0]), Layer.__call__),
    "in a selector": (
        tr.Switch(OddSelector(), [fine, fine]),
        MODEL,
        OddSelector.__call__,
    ),
    "in the gradient": (while_loop, MODEL, while_loop),
}


@pytest.mark.parametrize("name", WHERE)
def test_the_innermost_line_of_the_user_is_named(name):
    loss, model, function = WHERE[name]
    assert marked_line(function) in str(fails(loss, model))


def test_a_mistake_in_a_schedule_is_explained():
    with pytest.raises(tr.TraceError) as caught:
        tr.WeightedSum(a=(shouting, fine))
    assert marked_line(shouting) in str(caught.value)


class Own(tr.Trainer):
    def update(self, model, opt_state, batch, *, step):
        scale = 0.5 if step > 3 else 0.1  # here
        return model * scale, opt_state, {}


def test_a_mistake_in_an_update_is_explained():
    with pytest.raises(tr.TraceError) as caught:
        Own().fit(MODEL, None, num_steps=2, progress=False)
    assert marked_line(Own.update) in str(caught.value)


def test_a_mistake_while_evaluating_is_explained():
    trainer = tr.Trainer(fine, optax.sgd(0.1))
    with pytest.raises(tr.TraceError) as caught:
        trainer.evaluate(MODEL, [jnp.zeros(2)], loss=numpy_sin)
    assert marked_line(numpy_sin) in str(caught.value)


def test_a_trainer_whose_trace_failed_fails_the_same_way_again():
    trainer = tr.Trainer(python_if, optax.sgd(0.1))
    for _ in range(2):
        with pytest.raises(tr.TraceError, match="if step > 10"):
            trainer.fit(MODEL, None, num_steps=2, progress=False)


@pytest.fixture(params=FILTERING)
def filtering(request):
    """How JAX shortens the tracebacks of what it raises."""
    name = "jax_traceback_filtering"
    before = getattr(jax.config, name)
    jax.config.update(name, request.param)
    yield
    jax.config.update(name, before)


@pytest.mark.usefixtures("filtering")
@pytest.mark.parametrize("loss", [python_if, numpy_sin, while_loop])
def test_the_line_is_found_however_jax_filters_tracebacks(loss):
    assert marked_line(loss) in str(fails(loss))


@pytest.mark.usefixtures("filtering")
def test_a_note_has_the_line_however_jax_filters_tracebacks():
    with pytest.raises(TypeError, match="dot_general") as caught:
        fit(wrong_shapes)
    assert marked_line(wrong_shapes) in caught.value.__notes__[0]


SOURCE = "def loss(model, batch, *, step):\n    return model.sum() if step else 0.0\n"
LINE = ", `return model.sum() if step else 0.0`:"
# The file that code is said to be of, whether its lines are known, and what is named.
WITHOUT_A_FILE = [
    ("<stdin>", False, " at <stdin>:2:"),
    ("<string>", False, " at <string>:2:"),
    ("<ipython-input-3-0f1>", True, f" at <ipython-input-3-0f1>:2{LINE}"),
    ("/tmp/ipykernel_7/2930.py", True, f" at notebook cell:2{LINE}"),
]


@pytest.mark.parametrize(("name", "is_known", "place"), WITHOUT_A_FILE)
def test_code_without_a_file_is_the_users(name, is_known, place, monkeypatch):
    lines = SOURCE.splitlines(keepends=True)
    if is_known:
        monkeypatch.setitem(linecache.cache, name, (len(SOURCE), None, lines, name))
    scope: dict[str, Any] = {}
    exec(compile(SOURCE, name, "exec"), scope)
    assert place in str(fails(scope["loss"]))
    assert defined_at(scope["loss"]) in (f" at {name}:1", " at notebook cell:1")


def test_an_error_outside_of_any_code_still_has_a_message():
    seen = []
    jax.make_jaxpr(lambda x: seen.append(x) or x)(1.0)
    error = explained(jax.errors.TracerBoolConversionError(seen[0]))
    assert str(error).startswith("A Python `if`, `while`, `and`, `not` or `assert` ")
    assert " looks at a traced value: the step, the batch" in str(error)


LIBRARY = """
    import jax
    import jax.numpy as jnp

    def relu(x):
        return x if x > 0 else 0 * x

    def old(x):
        return jax.relu(x)

    def loss(model, batch):
        return relu(jnp.sum(model))
    """


@pytest.fixture
def library(tmp_path):
    """A library that is installed, and not one that this package builds on."""
    path = tmp_path / "site-packages" / "layers.py"
    path.parent.mkdir()
    path.write_text(textwrap.dedent(LIBRARY))
    spec = importlib.util.spec_from_file_location("layers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_mistake_in_a_library_is_at_the_users_call_of_it(library):
    def loss(model, batch):
        return library.relu(jnp.sum(model))  # here

    assert marked_line(loss) in str(fails(loss))


def test_where_all_code_is_installed_the_innermost_line_is_named(library):
    assert " at layers.py:6, `return x if x > 0 else 0 * x`" in str(fails(library.loss))


def test_a_name_that_a_library_gets_wrong_is_not_the_users(library):
    def loss(model, batch):
        return library.old(jnp.sum(model))

    with pytest.raises(AttributeError, match="'jax' has no attribute 'relu'"):
        fit(loss)


def test_which_files_are_the_users():
    assert is_of_user(__file__)
    for module in (tr, jax, np, functools, pytest):
        assert not is_of_user(module.__file__)
    assert not is_of_user("<frozen importlib._bootstrap>")


def test_an_error_that_was_never_raised_is_nowhere():
    assert user_frame(ValueError()) is None


def test_where_functions_are_defined():
    line = inspect.getsourcelines(python_if)[1]
    place = f" at test_trace_errors.py:{line}"
    wrapped = functools.wraps(python_if)(lambda *given: python_if(*given))
    for function in (
        python_if,
        functools.partial(functools.partial(python_if), step=1),
        wrapped,
        eqx.filter_jit(python_if),
        jax.jit(python_if),
    ):
        assert defined_at(function) == place
    line = inspect.getsourcelines(Wrong.__call__)[1]
    for function in (Wrong(1.0), Wrong(1.0).__call__, functools.partial(Wrong(1.0))):
        assert defined_at(function) == f" at test_trace_errors.py:{line}"
    for function in (max, optax.l2_loss, tr.alternate(fine, python_if)):
        assert defined_at(function) == ""
