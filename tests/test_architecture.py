"""Rules about the code itself."""

import ast
import inspect
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import equinox as eqx
import pytest

import trainer


PACKAGE = Path(trainer.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ROOT = Path(__file__).parent.parent


def modules():
    for found in pkgutil.walk_packages(trainer.__path__, "trainer."):
        yield import_module(found.name)


OTHERS = [
    p for d in ("tests", "examples", "benchmarks") for p in (ROOT / d).rglob("*.py")
]


@pytest.mark.parametrize("path", [*FILES, *OTHERS], ids=lambda p: p.name)
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno:
            body = [n for n in node.body if not _is_docstring(n)]
            assert node.end_lineno - body[0].lineno < 60 if body else True, node.name


def _is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def test_every_module_class_is_abstract_or_final():
    classes = {
        value
        for module in modules()
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, eqx.Module)
        and value.__module__.startswith("trainer")
    }
    assert len(classes) > 8
    for cls in classes:
        assert inspect.isabstract(cls) != getattr(cls, "__final__", False), cls
        assert inspect.isabstract(cls) == cls.__name__.startswith("Abstract"), cls


def test_only_public_names_of_jax_and_equinox_are_used():
    for path in FILES:
        for private in ("jax._src", "equinox._", "equinox.internal", "eqx.internal"):
            assert private not in path.read_text(), path


def test_importing_costs_little_more_than_what_it_stands_on():
    code = (
        "import sys, jax, equinox, optax; before = set(sys.modules); import trainer; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.split() == ["tqdm", "trainer"], run.stderr
