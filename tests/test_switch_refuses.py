"""Switch: selectors and losses that cannot work."""

from typing import Any

import jax.numpy as jnp
import optax
import pytest

import trainer as tr


THREE: Any = 3
DAY: Any = "day"


def near(model, batch):
    return jnp.abs(model)


def far(model, batch):
    return model**2


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: tr.Switch(THREE, [near]),
            TypeError,
            "`3` is not a selector. Use `tr.E",
        ),
        (lambda: tr.switch_every(2), ValueError, "`Switch` was given no losses"),
        (lambda: tr.switch_every(near, far), TypeError, "in the place of a period"),
        (lambda: tr.switch_every(2, [near, far]), TypeError, "Give several one by one"),
        (lambda: tr.switch_every(2, near, 4.0), TypeError, "`4.0` is not a loss"),
        (lambda: tr.switch_every(2, near, by=DAY), ValueError, "`by` is `'day'`"),
        (
            lambda: tr.Switch(tr.Every(1), {"a/b": near}),
            ValueError,
            "named `a/b`. The h",
        ),
        (lambda: tr.switch_every(0, near), ValueError, "`every` of `Every` is `0`"),
        (lambda: tr.alternate(near, counts=(1, 2)), ValueError, "drives 1 branches"),
        (lambda: tr.piecewise([near], [3]), ValueError, "makes 2 phases, but drives 1"),
    ],
)
def test_what_is_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_a_selector_out_of_range_records_the_branch_that_ran():
    class Wild(tr.AbstractSelector):
        def __call__(self, step, num):
            return step * 3 - 1, step

    a = lambda model, batch: jnp.sum(model)
    trainer = tr.Trainer(tr.Switch(Wild(), {"a": a, "b": a}), optax.sgd(0.1))
    result = trainer.fit(jnp.ones(2), None, num_steps=3, progress=False)
    assert result.history["branch"].tolist() == [0, 1, 1]


def test_a_selector_that_returns_no_pair_is_refused():
    class Index(tr.AbstractSelector):
        def __call__(self, step, num):
            return step % num

    a = lambda model, batch: jnp.sum(model)
    trainer = tr.Trainer(tr.Switch(Index(), [a, a]), optax.sgd(0.1))
    with pytest.raises(TypeError, match="returns the branch's index and how many"):
        trainer.fit(jnp.ones(2), None, num_steps=3, progress=False)


def test_losses_of_one_name_are_all_kept():
    def a(model, batch):
        return model

    def a_2(model, batch):
        return 2 * model

    switch = tr.switch_every(1, a, a_2, a)
    assert len(switch.losses) == len(set(switch.names)) == 3
    assert [int(switch(jnp.float32(1), None, step=s)[0]) for s in range(3)] == [1, 2, 1]
