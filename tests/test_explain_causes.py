"""Each cause of a second compile, in a process of its own: compiled, and named."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from recompile_causes import AGAIN, ONCE


SERVER = pathlib.Path(__file__).parent / "recompile_causes.py"


@pytest.fixture(scope="module")
def ask():
    """Runs a cause in a process of its own, with four devices."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, str(SERVER)], text=True, env=env, **pipes
    ) as server:

        def ask(name):
            server.stdin.write(f"{name}\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield ask


def test_there_are_many():
    assert len(AGAIN) >= 50
    assert len(ONCE) >= 10


@pytest.mark.parametrize("name", AGAIN)
def test_what_compiles_again_is_named(name, ask):
    report = ask(name)
    assert "error" not in report
    assert set(report["compiles"]) == {1}
    expected = [[list(each) for each in call] for call in AGAIN[name][1]]
    assert report["found"] == expected
    for text, call in zip(report["texts"], expected, strict=True):
        _, *lines = text.splitlines()
        for line, (path, _, now) in zip(lines, call, strict=True):
            assert line.startswith(f"* `{path}` ")
            assert line.endswith(".")
            assert now.split(" at ")[0].rstrip(">") in line


@pytest.mark.parametrize("name", ONCE)
def test_what_does_not_compile_again_is_not_named(name, ask):
    report = ask(name)
    assert "error" not in report
    first, *others = report["compiles"]
    assert first == 1
    assert others
    assert not any(others)
    assert not any(report["found"])
