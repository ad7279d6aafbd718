"""Selectors against their plain-Python meaning."""

from bisect import bisect_right

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import trainer as tr


FAR = 2**24
INT32_MAX = 2**31 - 1
SIZE = 64  # one shape for every vectorised call

fast = settings(max_examples=40)
steps_upto = lambda last: st.lists(st.integers(0, last), min_size=1, max_size=SIZE)
small_counts = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@st.composite
def boundaries(draw, last=FAR):
    return sorted(draw(st.sets(st.integers(1, last), max_size=4)))


def both(selector, num, steps):
    """Index and count at each step, from one vectorised call."""
    padded = jnp.asarray([*steps, *[0] * (SIZE - len(steps))], jnp.int32)
    index, count = jax.vmap(lambda s: selector(s, num))(padded)
    assert index.dtype == count.dtype == jnp.int32
    assert not index.weak_type
    assert not count.weak_type
    pairs = zip(index.tolist(), count.tolist(), strict=True)
    return list(pairs)[: len(steps)]


def simulated(indices):
    """How often the same index came before, by counting."""
    seen = {}
    pairs = []
    for index in indices:
        pairs.append((index, seen.get(index, 0)))
        seen[index] = seen.get(index, 0) + 1
    return pairs


def around(places, last=FAR):
    near = [p + d for p in places for d in (-1, 0, 1)]
    return [s for s in near if 0 <= s <= last][:SIZE]


@fast
@given(every=st.integers(1, FAR), num=st.integers(1, 5), steps=steps_upto(FAR))
def test_every_is_a_floor_division(every, num, steps):
    steps = (steps + around([every, every * num, FAR]))[:SIZE]
    expected = [
        (s // every % num, s // (every * num) * every + s % every) for s in steps
    ]
    assert both(tr.Every(every), num, steps) == expected


@fast
@given(counts=st.lists(st.integers(1, FAR), min_size=1, max_size=4), data=st.data())
def test_cycle_is_a_place_in_a_round(counts, data):
    steps = data.draw(steps_upto(FAR))
    ends = np.cumsum(counts).tolist()
    steps = (steps + around([*ends, FAR]))[:SIZE]
    expected = []
    for step in steps:
        turn, place = divmod(step, ends[-1])
        index = bisect_right(ends, place)
        before = turn * counts[index]
        expected.append((index, before + place - (ends[index] - counts[index])))
    assert both(tr.Cycle(counts), len(counts), steps) == expected


@fast
@given(boundaries=boundaries(), steps=steps_upto(FAR))
def test_at_is_the_number_of_boundaries_passed(boundaries, steps):
    steps = (steps + around([*boundaries, FAR]))[:SIZE]
    starts = [0, *boundaries]
    expected = [
        (bisect_right(boundaries, s), s - starts[bisect_right(boundaries, s)])
        for s in steps
    ]
    assert both(tr.At(boundaries), len(starts), steps) == expected


@fast
@given(every=st.integers(1, 7), num=st.integers(1, 4))
def test_every_counts_the_steps_of_its_branch(every, num):
    expected = simulated([s // every % num for s in range(SIZE)])
    assert both(tr.Every(every), num, range(SIZE)) == expected


@fast
@given(counts=small_counts)
def test_cycle_counts_the_steps_of_its_branch(counts):
    turn = [index for index, count in enumerate(counts) for _ in range(count)]
    expected = simulated([turn[s % len(turn)] for s in range(SIZE)])
    assert both(tr.Cycle(counts), len(counts), range(SIZE)) == expected


@fast
@given(boundaries=boundaries(last=SIZE + 5))
def test_at_counts_the_steps_of_its_branch(boundaries):
    expected = simulated([sum(s >= b for b in boundaries) for s in range(SIZE)])
    assert both(tr.At(boundaries), len(boundaries) + 1, range(SIZE)) == expected


def test_the_largest_int32_step_does_not_overflow():
    last = [INT32_MAX]
    assert both(tr.Every(1), 1, last) == [(0, INT32_MAX)]
    assert both(tr.Every(INT32_MAX), 1, last) == [(0, INT32_MAX)]
    assert both(tr.Every(2**30 - 1), 2, last) == [(0, 2**30)]
    assert both(tr.Cycle((INT32_MAX - 1, 1)), 2, last) == [(0, INT32_MAX - 1)]
    assert both(tr.At((INT32_MAX,)), 2, last) == [(1, 0)]


@pytest.mark.parametrize(
    ("selector", "num"), [(tr.Every(3), 2), (tr.Cycle((2, 1)), 2), (tr.At((4,)), 2)]
)
def test_output_is_int32_under_x64_as_well(selector, num):
    with jax.enable_x64(True):
        index, count = selector(jnp.int32(5), num)
    assert index.dtype == count.dtype == jnp.int32


@pytest.mark.parametrize(
    "make",
    [tr.Every, lambda v: tr.Cycle((1, v)), lambda v: tr.At((v,))],
    ids=["Every", "Cycle", "At"],
)
@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0, ValueError, r"it must be from 1 to 2\*\*31 - 1"),
        (-3, ValueError, r"is `-3`; it must be from 1"),
        (2**31, ValueError, "because the step is an int32"),
        (True, TypeError, "is `True`, which is not a whole number"),
        ("2", TypeError, "is `'2'`, which is not a whole number"),
        (None, TypeError, "Steps are counted in Python ints"),
    ],
)
def test_a_period_is_a_whole_number_from_1(make, value, error, text):
    with pytest.raises(error, match=text):
        make(value)


def test_a_float_is_no_number_of_steps():
    for make in (tr.Every, lambda v: tr.Cycle((1, v))):
        with pytest.raises(TypeError, match=r"is `1.0`, which is not a whole number"):
            make(1.0)
    for wrong in (1.0, 0.0, -0.5, 20.0, float("nan")):
        with pytest.raises(ValueError, match=r"A float is a fraction of the run"):
            tr.At((wrong,))


@pytest.mark.parametrize("value", [np.int64(3), np.uint8(3), jnp.int32(3)])
def test_a_period_may_be_any_whole_number(value):
    assert type(tr.Every(value).every) is int
    assert tr.Every(value) == tr.Every(3)
    assert tr.Cycle((value, 1)).counts == (3, 1)
    assert tr.At([value]).boundaries == (3,)


@pytest.mark.parametrize("wrong", [(3, 2), (2, 2), (1, 4, 3)])
def test_boundaries_increase(wrong):
    with pytest.raises(ValueError, match="each must be above the one before it"):
        tr.At(wrong)


def test_a_round_that_never_ends_is_refused():
    with pytest.raises(ValueError, match="an int32 step never completes"):
        tr.Cycle((2**30, 2**30))
    with pytest.raises(ValueError, match="with 2 branches has a round of"):
        tr.Every(2**30).check(2)
    tr.Every(2**30).check(1)
    tr.Cycle((2**30, 2**30 - 1)).check(2)


def test_the_number_of_branches_must_fit():
    two = [lambda m, b: m, lambda m, b: m]
    with pytest.raises(ValueError, match="makes 3 phases, but drives 2 branches"):
        tr.Switch(tr.At((1, 2)), two)
    with pytest.raises(ValueError, match=r"has 3 counts, `\(1, 2, 3\)`, but"):
        tr.Switch(tr.Cycle((1, 2, 3)), two)
    with pytest.raises(ValueError, match="`Every` drives 0 branches"):
        tr.AbstractSelector.check(tr.Every(1), 0)
    tr.Switch(tr.Every(1), two)
    tr.Switch(tr.At(()), two[:1])
    tr.Switch(tr.Cycle((5,)), two[:1])


def test_a_selector_of_ones_own():
    class Odd(tr.AbstractSelector):
        def __call__(self, step, num):
            return step % 2, step // 2

    plus, minus = (lambda m, b: m), (lambda m, b: -m)
    loss = tr.Switch(Odd(), [plus, minus])
    run = eqx.filter_jit(lambda s: loss(jnp.float32(1), None, step=s)[0])
    assert [int(run(jnp.int32(s))) for s in range(4)] == [1, -1, 1, -1]
