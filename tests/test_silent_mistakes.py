"""Mistakes in a loss that raise nothing are told at the first trace, and only those."""

import builtins
import inspect
import sys
import threading
import types
import warnings
from collections import defaultdict
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import trainer as tr
from trainer.mistakes._printed import traced_prints


kept, counts, handed = [], [], []
last = None
tables = {"losses": defaultdict(list), "plain": {}}
notes = types.SimpleNamespace(last=None)


class Recorder:
    latest: Any = None

    def __init__(self):
        self.values, self.calls = [], 0

    def note(self, value):
        self.calls += 1
        self.values.append(value)  # here


recorder = Recorder()


def fit(loss, model=None, data=None, num_steps=1, **kwargs):
    model = jnp.ones(3) if model is None else model
    trainer = loss if isinstance(loss, tr.Trainer) else tr.Trainer(loss, optax.sgd(0.1))
    return trainer.fit(model, data, num_steps=num_steps, progress=False, **kwargs)


def told(loss, *given, **kwargs):
    """What is told, of a kind that the suite makes an error: nothing is compiled."""
    with pytest.raises(tr.LossWarning) as caught:
        fit(loss, *given, **kwargs)
    return str(caught.value)


def line(*functions):
    """Number and text of the line that is marked, as messages name it."""
    for function in functions:
        lines, first = inspect.getsourcelines(function)
        for number, text in enumerate(lines):
            if "# here" in text:
                return f" at test_silent_mistakes.py:{first + number}, `{text.strip()}`"
    raise AssertionError("no line is marked")


@pytest.fixture(autouse=True)
def _forget():
    yield
    global last
    last = notes.last = Recorder.latest = None
    recorder.__init__()
    for container in (kept, counts, tables["losses"], tables["plain"], handed):
        container.clear()


def square(model):
    return jnp.sum(model**2)


def prints(model, batch):
    value = square(model)
    print("loss", value)  # here
    return value


def prints_text(model, batch):
    value = square(model)
    print(f"loss {value}", file=sys.stderr)  # here
    return value


class Chatty(eqx.Module):
    weight: jax.Array

    def __call__(self):
        print([self.weight])  # here
        return square(self.weight)


@pytest.mark.parametrize(
    ("loss", "model", "marked"),
    [
        (prints, None, prints),
        (prints_text, None, prints_text),
        (lambda m, b: m(), Chatty(jnp.ones(3)), Chatty),
    ],
    ids=["value", "text", "model"],
)
def test_a_print_of_a_traced_value_is_told(loss, model, marked, capsys):
    text = told(loss, model)
    assert text.startswith(f"`print` is given a traced value{line(marked)}: it prints")
    assert 'Write `jax.debug.print("{x}", x=x)`' in text
    assert "Tracer" in "".join(capsys.readouterr())
    assert builtins.print.__module__ == "builtins"


def test_print_is_as_it_was_after_an_error():
    def fails(model, batch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(fails)
    assert builtins.print.__module__ == "builtins"


def test_what_another_thread_prints_is_its_own(capsys):
    with traced_prints() as found:
        other = threading.Thread(target=print, args=("JitTracer(float32[])",))
        other.start()
        other.join()
        exec(compile("print('JitTracer()')", "<frozen library>", "exec"))
        assert not found
        print("JitTracer(float32[])")
    assert len(found) == 1
    assert capsys.readouterr().out.count("JitTracer") == 3


def appends(model, batch):
    kept.append(square(model))  # here
    return square(model)


def keeps_the_model(model, batch):
    tables["losses"]["model"].append({"model": model})  # here
    return square(model)


def sets_an_item(model, batch):
    tables["plain"]["last"] = square(model)  # here
    return square(model)


def sets_a_global(model, batch):
    global last
    last = square(model)  # here
    return last.at[()].add(1.0)


def sets_a_name(model, batch):
    notes.last = square(model)  # here
    return notes.last


def sets_a_class(model, batch):
    Recorder.latest = square(model)  # here
    return Recorder.latest


def calls_a_method(model, batch):
    recorder.note(square(model))
    return square(model)


def keeps(model, batch, seen=handed):
    seen.append(square(model))  # here
    return square(model)


class Remembers(tr.Trainer):
    def loss(self, model, batch):
        self.last_loss = square(model)  # here
        return self.last_loss


remembers = Remembers(optimizer=optax.sgd(0.1))


class Layer(eqx.Module):
    weight: jax.Array
    seen: list = eqx.field(static=True)

    def __call__(self):
        self.seen.append(self.weight)  # here
        return square(self.weight)


def in_a_closure():
    last = None

    def loss(model, batch):
        nonlocal last
        last = square(model)  # here
        return last

    return loss


@pytest.mark.parametrize(
    ("loss", "name", "marked"),
    [
        (appends, "Global `kept`", appends),
        (keeps_the_model, "Global `tables`", keeps_the_model),
        (sets_an_item, "Global `tables`", sets_an_item),
        (sets_a_global, "Global `last`", sets_a_global),
        (sets_a_name, "Attribute `last` of `SimpleNamespace`", sets_a_name),
        (sets_a_class, "Attribute `latest` of `Recorder`", sets_a_class),
        (calls_a_method, "Attribute `values` of `Recorder`", Recorder),
        (keeps, "Default `seen` of `keeps`", keeps),
        (remembers, "Attribute `last_loss` of `Remembers`", Remembers),
        (in_a_closure(), "Variable `last`", in_a_closure),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_traced_value_kept_outside_is_told(loss, name, marked):
    text = told(loss)
    assert text.startswith(f"{name} is given a traced value{line(marked)}")
    assert "Return it as a metric" in text


def test_what_a_layer_keeps_is_told():
    text = told(lambda model, batch: model(), Layer(jnp.ones(3), []))
    assert text.startswith(
        f"Attribute `seen` of `Layer` is given a traced value{line(Layer)}"
    )


def counts_itself(model, batch):
    counts.append(1)
    recorder.calls += 1
    tables["plain"]["traces"] = len(counts)
    return square(model)


def prints_shapes(model, batch):
    print("tracing", model.shape, f"{model.dtype}")
    print(Chatty(model))
    return square(model)


def test_each_function_of_one_kind_is_looked_at():
    def made(seen, keeps):
        def loss(model, batch):
            if keeps:
                seen.append(model)  # here
            return square(model)

        return loss

    off, on = made([], False), made([], True)
    text = told(tr.alternate(off, on, off))
    assert text.startswith("Variable `seen` is given a traced value at test_silent")


@pytest.mark.parametrize("loss", [counts_itself, prints_shapes])
def test_what_is_no_mistake_is_not_told(loss):
    with warnings.catch_warnings(action="error"):
        result = fit(loss, num_steps=2)
    assert result.compiles == 1
