"""What a step reads: each way in which a loss comes to a value, and a change there."""

import argparse
import functools
import types

import numpy as np
import pytest
from reading import by_key, change_after_tracing, Fixed, Heir, Layer, Slots, Thing


def deep(space=types.SimpleNamespace):
    return space(a=space(b=space(c=space(d=Thing()))))


def module(**names):
    made = types.ModuleType("own_settings")
    vars(made).update(names)
    exec("def scaled(x): return x * k", vars(made))
    return made


def partials():
    first, second = {"k": 1.0}, {"k": 1.0}
    fns = [functools.partial(by_key, first), functools.partial(by_key, thing=second)]
    return types.SimpleNamespace(fns=fns, first=first, second=second)


class Configuration:
    """What `ml_collections` calls a ConfigDict: attributes that it looks up itself."""

    def __init__(self, **values):
        vars(self).update(_values=values)

    def __getattr__(self, name):
        return self._values[name]

    __getitem__ = __getattr__

    def __setattr__(self, name, value):
        self._values[name] = value

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)

    def get(self, name, default=None):
        return self._values.get(name, default)

    def keys(self):
        return self._values.keys()


Configuration.__module__ = "ml_collections.own"
SET = "thing.k = 2.0"
FROM_1_TO_2 = " has changed from `1.0` to `2.0`"
CASES = {
    "attribute": (Thing, "return x * thing.k", SET),
    "local": (Thing, "own = thing; return x * own.k", SET),
    "method": (Thing, "return thing.scaled(x)", SET),
    "bound method": (Thing, "f = thing.scaled; return f(x)", SET),
    "property": (Thing, "return x * thing.doubled", SET),
    "call": (Thing, "return thing(x)", SET),
    "super": (Heir, "return thing.scaled(x)", SET),
    "jitted method": (Thing, "return thing.jitted(x)", SET),
    "handed on": (Thing, "return handed_on(thing, x)", SET),
    "hands itself on": (Thing, "return thing.itself(x)", SET),
    "getattr": (Thing, "return x * getattr(thing, 'k', 0.0)", SET),
    "slots": (Slots, "return x * thing.k", SET),
    "namespace": (lambda: argparse.Namespace(k=1.0), "return x * thing.k", SET),
    "configuration": (
        lambda: Configuration(k=1.0, j=1.0),
        "return x * thing.k + handed_on(thing, x)",
        SET,
    ),
    "frozen": (Fixed, "return x * thing.k", "object.__setattr__(thing, 'k', 2.0)"),
    "all fields": (
        Fixed,
        "return x * sum(dataclasses.asdict(thing).values())",
        "object.__setattr__(thing, 'j', 2.0)",
    ),
    "deep": (deep, "return x * thing.a.b.c.d.k", "thing.a.b.c.d.k = 2.0"),
    "deep in dicts": (
        lambda: {"a": {"b": {"c": {"d": {"k": 1.0}}}}},
        "return by_key(thing['a']['b']['c']['d'], x)",
        "thing['a']['b']['c']['d']['k'] = 2.0",
    ),
    "in a list": (
        lambda: [Thing(), Thing()],
        "return sum(each.scaled(x) for each in thing)",
        "thing[1].k = 2.0",
    ),
    "two of a class": (
        lambda: [Thing(), Thing()],
        "return thing[0].scaled(thing[1].scaled(x))",
        "thing[0].k = 2.0",
    ),
    "module of equinox": (
        lambda: Layer(Thing()),
        "return thing(x)",
        "thing.options.k = 2.0",
    ),
    "array": (
        lambda: Thing(numbers=np.ones(3)),
        "return x * thing.numbers[0]",
        "thing.numbers.fill(2.0)",
    ),
    "cached": (Thing, "return x * thing.table[0]", "thing.table.fill(2.0)"),
    "class": (lambda: Thing, "return x * thing.kind", "thing.kind += 1.0"),
    "class method": (lambda: Thing, "return thing.of_class(x)", "thing.kind += 1.0"),
    "class above": (lambda: Heir, "return x * thing.kind", "Thing.kind += 1.0"),
    "class of an object": (Thing, "return x * thing.kind", "Thing.kind += 1.0"),
    "module": (lambda: module(k=1.0), "return x * thing.k", SET),
    "function of a module": (lambda: module(k=1.0), "return thing.scaled(x)", SET),
    "dict of a module": (
        lambda: module(options={"k": 1.0}),
        "return by_key(thing.options, x)",
        "thing.options['k'] = 2.0",
    ),
    "partials": (
        partials,
        "return sum(each(x=x) for each in thing.fns)",
        "thing.second['k'] = 2.0",
    ),
    "first partial": (
        partials,
        "return sum(each(x=x) for each in thing.fns)",
        "thing.first['k'] = 2.0",
    ),
    "arguments by name": (
        lambda: {"k": 1.0},
        "return by_name(x, **thing)",
        "thing['k'] = 2.0",
    ),
    "default in the loss": (
        lambda: {"k": 1.0},
        "f = lambda x, options=thing: x * options['k']; return f(x)",
        "thing['k'] = 2.0",
    ),
}


@pytest.mark.parametrize("is_closure", [False, True], ids=["global", "closure"])
@pytest.mark.parametrize("case", CASES)
def test_a_change_is_noticed_wherever_it_is(case, is_closure, monkeypatch):
    monkeypatch.setattr(Thing, "kind", 1.0)
    make, expression, change = CASES[case]
    found = change_after_tracing(make(), expression, change, is_closure)
    assert FROM_1_TO_2 in found
