"""The documents: their code runs and prints what they say; no public name is left out.

The ```python blocks of a page share one namespace, in order. A ```text block after one
is what it prints, or the message of the error that it shows. A block that shows one
says which: `# raises RecompileError`. A place in its message, such as `train.py:12`,
may be any.
"""

import builtins
import contextlib
import io
import pathlib
import re
import types
from typing import NamedTuple

import pytest

import trainer as tr


ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n+```text\n(?P<shown>.*?)^```$)?", re.M | re.S
)
RAISES = re.compile(r"# raises (\w+)$", re.M)
# Where a message points to: in a page that is the page, and moves with each edit.
PLACE = re.compile(r"\b\w+\.(?:md|py)(?::\d+)?\b")


class Block(NamedTuple):
    line: int
    code: str
    shown: str | None

    @property
    def error(self) -> type[Exception] | None:
        name = RAISES.search(self.code)
        return name and (getattr(tr, name[1], None) or getattr(builtins, name[1]))


def blocks_of(page: pathlib.Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(text.count("\n", 0, found.start("code")), *found.group("code", "shown"))
        for found in BLOCK.finditer(text)
    ]


def run(block: Block, page: pathlib.Path, namespace: dict) -> str:
    """Run a block; return what it printed, or the message of the error it shows."""
    # The empty lines make a traceback name the line of the page.
    code = compile("\n" * block.line + block.code, str(page), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        if block.error is None:
            exec(code, namespace)
            return printed.getvalue()
        with pytest.raises(block.error) as raised:
            exec(code, namespace)
    assert type(raised.value) is block.error
    return str(raised.value.args[0])


def in_one_line(text: str) -> str:
    """Without line breaks, and with one name for every place in a file."""
    return " ".join(PLACE.sub("FILE:LINE", text).split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_a_page(page):
    namespace = {"__name__": f"docs_{page.stem}"}
    for block in blocks_of(page):
        got = run(block, page, namespace)
        if block.shown is None:
            assert block.error or not got, f"{page.name}:{block.line} prints:\n{got}"
        elif block.error:
            assert in_one_line(got) == in_one_line(block.shown)
        else:
            assert got.strip() == block.shown.strip(), f"{page.name}:{block.line}"


def test_every_block_is_found():
    for page in PAGES:
        assert page.read_text().count("```python") == len(blocks_of(page)), page.name


def test_api_page_has_every_public_name_in_order():
    documented = re.findall(
        r"^::: trainer\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.M
    )
    public = [
        name
        for name, value in vars(tr).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]
    assert documented == public


def test_changelog_has_the_version():
    assert f"\n## [{tr.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_to_files(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (ROOT / target).exists(), target


def test_readme_has_one_line_for_the_tests():
    """The script that checks everything looks for it after this comment."""
    after = (ROOT / "README.md").read_text().split("<!-- tests -->\n")[1]
    found = re.match(r"```bash\n(python3.*-m pytest -m 'not slow')\n```", after)
    assert found is not None
