"""What `where` picks, optimizers for parts of a model, and freezing them for a time."""

import re
from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batches, equal, flat, mlp, mse, net, net_mse, Twins

import trainer as tr


SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
of_a, of_b = (lambda m: m.a), (lambda m: m.b)
head, body = (lambda m: m.layers[-1]), (lambda m: m.layers[:-1])


def twins():
    return Twins(jnp.float32(5.0), jnp.arange(1.0, 4.0))


def fit(update, model, data=None, num_steps=6, **options):
    trainer = tr.Trainer(update=update, steps_per_call=4)
    options |= {} if "num_epochs" in options else {"num_steps": num_steps}
    return trainer.fit(model, data, progress=False, **options)


def squares(model, batch):
    return (model.a - 1) ** 2 + jnp.sum((model.b - 2) ** 2)


WHERES = {
    "node": (lambda m: m.layers[1], [2, 3]),
    "leaf": (lambda m: m.layers[0].bias, [1]),
    "list": (lambda m: [m.layers[0].weight, m.layers[1].bias], [0, 3]),
    "tuple of nodes": (lambda m: m.layers, [0, 1, 2, 3]),
    "none": (None, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", WHERES)
def test_where_trains_what_it_picks_and_freezes_the_rest(name):
    where, picked = WHERES[name]
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    update, model = tr.Minimize(mse, optimizer, where=where), mlp()
    opt_state = update.init(model)
    adam = jax.tree.leaves(opt_state[0].mu)
    assert [m.shape for m in adam] == [
        jax.tree.leaves(params(model))[i].shape for i in picked
    ]
    found = fit(update, model, batches()).model
    old, new = jax.tree.leaves(params(model)), jax.tree.leaves(params(found))
    same = [np.array_equal(x, y) for x, y in zip(old, new, strict=True)]
    assert same == [i not in picked for i in range(4)]


def params(model):
    return eqx.filter(model, eqx.is_inexact_array)


def by_hand(model, optimizers, acts, num_steps):
    """One gradient, an optimizer for each part, and a Python `if` for when it acts."""
    parts, rest = split(model), eqx.filter(model, eqx.is_inexact_array, inverse=True)
    states = [o.init(p) for o, p in zip(optimizers, parts, strict=True)]

    @eqx.filter_jit
    def gradients(parts, batch):
        loss = lambda parts: mse(eqx.combine(*parts, rest), batch)
        return eqx.filter_value_and_grad(loss)(parts)

    values = []
    for i in range(num_steps):
        value, grads = gradients(parts, batches()[i % 4])
        values.append(float(value))
        for n, act in enumerate(acts):
            if act(i):
                move = eqx.filter_jit(optimizers[n].update)
                updates, states[n] = move(grads[n], states[n], parts[n])
                parts[n] = eqx.apply_updates(parts[n], updates)
    return eqx.combine(*parts, rest), states, values


def split(model):
    none = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(head, none, jax.tree.map(lambda _: True, head(model)))
    keep = lambda flag, leaf: flag and eqx.is_inexact_array(leaf)
    top, rest = eqx.partition(model, jax.tree.map(keep, spec, model))
    return [top, params(rest)]


@pytest.mark.parametrize(
    ("start", "stop", "by"),
    [(0, None, "step"), (3, 7, "step"), (0.25, 0.7, "step"), (1, 2, "epoch")],
)
def test_parts_are_a_loop_with_two_optimizers(start, stop, by):
    adamw, momentum = optax.adamw(1e-2), optax.sgd(1e-2, momentum=0.9)
    part = tr.Part(momentum, body, start=start, stop=stop, by=by)
    parts = tr.Parts(head=tr.Part(adamw, head), body=part)
    first, last = {0: (0, 99), 3: (3, 7), 0.25: (3, 8), 1: (4, 8)}[start]
    acts = [lambda i: True, lambda i: first <= i < last]
    model, states, values = by_hand(mlp(), [adamw, momentum], acts, 12)
    result = fit(tr.Minimize(mse, parts), mlp(), batches(), 12)
    np.testing.assert_allclose(flat(result.model), flat(model), atol=1e-6)
    for name, state in zip(parts.names, states, strict=True):
        found = flat(result.state.opt_state[name])
        np.testing.assert_allclose(found, flat(state), atol=1e-6)
    np.testing.assert_allclose(result.history["loss"], values, rtol=1e-5)
    assert ("body/acts" in result.history) == (stop is not None)
    if stop is not None:
        expected = [int(acts[1](i)) for i in range(12)]
        assert result.history["body/acts"].tolist() == expected
    assert result.compiles == 1


def test_a_part_that_stops_is_left_alone_by_decay_and_momentum():
    optimizer = optax.chain(
        optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9)
    )
    parts = tr.Parts(a=tr.Part(optimizer, of_a, stop=3), b=tr.Part(ADAM, of_b, start=5))
    trainer = tr.Trainer(squares, parts)
    run = lambda model, to: trainer.fit(model, None, num_steps=to, progress=False).state
    states = [trainer.init(twins())]
    for to in (3, 5, 9):
        states.append(run(states[-1], to))
    for (old, new), changes in zip(pairwise(states), ["a", "", "b"], strict=True):
        for name in ("a", "b"):
            same = equal(getattr(old.model, name), getattr(new.model, name))
            still = equal(old.opt_state[name], new.opt_state[name])
            assert same == still == (name != changes)
    assert states[-1].opt_state["b"][0].count == 4


def test_what_no_part_owns_is_frozen_and_takes_no_memory():
    parts = tr.Parts(top=tr.Part(optax.adamw(1e-2, weight_decay=0.5), head))
    result = fit(tr.Minimize(mse, parts), mlp(), batches())
    assert equal(body(result.model), body(mlp()))
    assert not equal(head(result.model), head(mlp()))
    count = sum(x.size for x in jax.tree.leaves(result.state.opt_state))
    assert count == 2 * (16 + 1) + 1


def test_each_part_follows_its_own_schedule():
    inject = optax.inject_hyperparams(optax.sgd)
    falling, rising = (lambda count: 0.1 / (1 + count)), (lambda count: 0.01 * count)
    parts = tr.Parts(
        a=tr.Part(inject(learning_rate=falling), of_a, start=2),
        b=tr.Part(inject(learning_rate=rising), of_b),
    )
    history = fit(tr.Minimize(squares, parts), twins(), num_steps=5).history
    expected = [falling(count) for count in range(3)]
    np.testing.assert_allclose(history["a/learning_rate"][2:], expected, rtol=1e-6)
    expected = [rising(count) for count in range(5)]
    np.testing.assert_allclose(history["b/learning_rate"], expected, rtol=1e-6)


def test_a_part_that_does_not_act_reports_no_learning_rate():
    inject = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    parts = tr.Parts(a=tr.Part(inject, of_a, start=2))
    history = fit(tr.Minimize(squares, parts), twins(), num_steps=4).history
    masked = np.ma.getmaskarray(history["a/learning_rate"])
    assert masked.tolist() == [True, True, False, False]


def test_one_part_may_be_a_line_search():
    parts = tr.Parts(a=tr.Part(optax.lbfgs(), of_a), b=tr.Part(optax.sgd(0.0), of_b))
    result = fit(tr.Minimize(squares, parts), twins())
    np.testing.assert_allclose(result.model.a, 1.0, atol=1e-5)
    assert equal(result.model.b, twins().b)


def test_parts_with_a_state_and_a_key():
    parts = tr.Parts(
        first=tr.Part(ADAM, lambda m: (m.first, m.norm), start=1),
        last=tr.Part(SGD, lambda m: m.last),
    )
    result = fit(tr.Minimize(net_mse, parts), net(), batches())
    assert np.isfinite(result.history["loss"]).all()
    assert result.state.opt_state["first"][0].count == 5


@pytest.mark.parametrize("fraction", [0.5, np.float64(0.5)], ids=["float", "numpy"])
def test_fractions_are_of_the_whole_run(fraction):
    parts = tr.Parts(a=tr.Part(SGD, of_a, start=fraction), b=tr.Part(SGD, of_b))
    acts = fit(tr.Minimize(squares, parts), twins(), num_steps=4).history["a/acts"]
    assert acts.tolist() == [0, 0, 1, 1]
    a, b = (tr.Minimize(squares, SGD, where=where) for where in (of_a, of_b))
    update = tr.SwitchUpdate(tr.At([fraction]), [a, b])
    branch = fit(update, twins(), num_steps=4).history["branch"]
    assert branch.tolist() == [0, 0, 1, 1]


def test_a_fraction_needs_a_total():
    parts = tr.Parts(a=tr.Part(SGD, of_a, start=0.5))
    unsized = iter([jnp.zeros(1)] * 3)
    with pytest.raises(ValueError, match="how many steps the epochs have is not known"):
        fit(tr.Minimize(squares, parts), twins(), lambda: unsized, num_epochs=1)


def test_parts_within_a_switch_count_local_steps():
    parts = tr.Parts(a=tr.Part(SGD, of_a, start=2), b=tr.Part(optax.adam(0.1), of_b))
    both = tr.Minimize(lambda m, _: m.a**2 + jnp.sum(m.b**2), parts)
    update = tr.SwitchUpdate(tr.Cycle((1, 1)), {"idle": None, "both": both})
    result = fit(update, twins(), num_steps=8)
    alone = fit(both, twins(), num_steps=4)
    assert result.history["both/a/acts"].compressed().tolist() == [0, 0, 1, 1]
    assert equal(result.model, alone.model)
    assert equal(result.state.opt_state["both"], alone.state.opt_state)


REFUSED = [
    (lambda: tr.Part(0.1), TypeError, "`0.1` is not an optimizer"),
    (lambda: tr.Part(SGD, mlp()), TypeError, "such as `lambda m: m.critic`"),
    (lambda: tr.Part(SGD, start=5, stop=5), ValueError, "which is not after its start"),
    (lambda: tr.Part(SGD, start=0.5, stop=0.25), ValueError, "so that it never acts"),
    (lambda: tr.Part(SGD, start=2.0), ValueError, "or `2` for steps"),
    (lambda: tr.Part(SGD, start=True), TypeError, "`start` of `Part` is `True`"),
    (lambda: tr.Part(SGD, stop=0), ValueError, "`stop` of `Part` is `0`; it must be"),
    (lambda: tr.Part(SGD, by="batch"), ValueError, "`by` is `'batch'`; it is `'step'"),
    (lambda: tr.Part(SGD, start=0.5, by="epoch"), ValueError, "`Part` counts epochs"),
    (lambda: tr.Parts(), ValueError, "`Parts` was given no parts"),
    (lambda: tr.Parts(x=SGD), TypeError, "Write `x=tr.Part(optimizer, where="),
    (lambda: tr.Parts(**{"x/y": tr.Part(SGD)}), ValueError, "A part is named `x/y`"),
    (
        lambda: tr.Minimize(squares, tr.Parts(x=tr.Part(SGD)), where=of_a),
        ValueError,
        "Each part has a `where` of its own",
    ),
]


@pytest.mark.parametrize(
    ("make", "error", "text"), REFUSED, ids=[r[2] for r in REFUSED]
)
def test_what_is_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


@pytest.mark.parametrize(
    ("where", "error", "text"),
    [
        (lambda m: m.c, TypeError, "does not pick a part of the model `Twins` (Attri"),
        (lambda m: 3, TypeError, "It returns nodes of the model as they are"),
        (lambda m: [], ValueError, "What `where` picks has no floating array, so `x`"),
        (lambda m: m.b, ValueError, "has nothing to work on. Pick a part"),
    ],
)
def test_a_where_that_picks_nothing_is_refused(where, error, text):
    parts = tr.Parts(x=tr.Part(SGD, where))
    with pytest.raises(error, match=re.escape(text)):
        tr.Trainer(squares, parts).init(Twins(jnp.float32(1), jnp.arange(3)))
