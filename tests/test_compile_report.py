"""What a fit says of its compiles."""

import subprocess
import sys

import optax
import pytest

import trainer as tr
from tests.helpers import batches, mlp, mse
from trainer.recompiles._report import amount


SGD = optax.sgd(0.1)


def report_of(steps_per_call="auto", model=None, data=None, **options):
    trainer = tr.Trainer(mse, SGD, steps_per_call=steps_per_call)
    model, data = model or mlp(), data or batches()
    result = trainer.fit(model, data, num_steps=8, progress=False, **options)
    return result.compile_report


def test_counts_stages_and_what_xla_says():
    wide, narrow = report_of(model=mlp(width=64)), report_of(model=mlp(width=16))
    for report in (wide, narrow):
        assert (report.traces, report.compiles, report.cache_hits) == (1, 1, 0)
        assert list(report.seconds) == ["trace", "lower", "compile"]
        assert min(report.seconds.values()) > 0
    # Two matrices, multiplied once forward and at least once backward.
    assert wide.flops
    assert narrow.flops
    assert wide.flops > 2 * 2 * 16 * (10 * 64 + 64)
    assert 2 < wide.flops / narrow.flops < 5
    for name in ("bytes_accessed", "peak_memory"):
        assert getattr(wide, name) > getattr(narrow, name) > 4 * 10 * 16


@pytest.mark.parametrize(
    ("options", "steps", "why"),
    [
        ({"steps_per_call": 7}, 7, "as given"),
        ({}, 100, "more would not be faster"),
        ({"callbacks": [tr.Evaluate(batches(), every=20)]}, 20, "a callback every 20"),
        (
            {"data": batches(size=20000, n=20000)},
            9,
            "a batch has 0.88 MB",
        ),
    ],
    ids=["given", "most", "callback", "bytes"],
)
def test_it_says_why_a_call_has_so_many_steps(options, steps, why):
    report = report_of(**options)
    assert report.steps_per_call == steps
    assert why in str(report)


def test_a_fit_without_a_step_has_compiled_nothing():
    state = tr.Trainer(mse, SGD).fit(mlp(), batches(), num_steps=8, progress=False)
    again = tr.Trainer(mse, SGD).fit(state.state, batches(), num_steps=8)
    report = again.compile_report
    assert (again.compiles, report.traces, report.compiles) == (0, 0, 0)
    assert report.why == "there was no step to run"
    assert "not known" in str(report)


SCRIPT = """
import sys, jax.numpy as jnp, optax, trainer as tr
square = lambda model, batch: jnp.sum(model**2)
trainer = tr.Trainer(square, optax.sgd(0.1), compile_cache=sys.argv[1])
result = trainer.fit(jnp.ones(3), None, num_steps=20, progress=False)
report = result.compile_report
print(report.traces, result.compiles, report.compiles, report.cache_hits)
"""


def test_what_is_found_on_disk_is_not_a_compile(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    found = [subprocess.check_output(command, text=True).split() for _ in range(2)]
    assert found == [["1", "1", "1", "0"], ["1", "0", "0", "1"]]


def test_amounts_have_prefixes():
    assert [amount(x, "B") for x in (999, 1000, 2.5e9, None)] == [
        "999 B",
        "1 kB",
        "2.5 GB",
        "not known",
    ]
    assert [amount(x) for x in (12, 12345.0)] == ["12", "12.3 k"]
