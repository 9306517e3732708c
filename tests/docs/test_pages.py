"""The documentation does what it says: its code runs, its links lead somewhere, its tables are complete.

A block of Python or bash runs as it stands, unless the line before it is `<!-- hardware -->` (it needs a device or a
large machine) or `<!-- unpublished -->` (it needs packages that are not published yet).
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import ecoffload.errors

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
_BLOCK = re.compile(
    r"(?P<mark><!-- (?:hardware|unpublished) -->\n+)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.M | re.S
)
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


class Block(NamedTuple):
    """A fenced block that is to run."""

    language: str
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["language"], found["code"], text.count("\n", 0, found.start("code")))
        for found in _BLOCK.finditer(text)
        if found["mark"] is None and found["language"] in ("python", "bash")
    ]


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def run_bash(code: str, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"


RUNNING = [page for page in PAGES if blocks(page)]


@pytest.mark.parametrize("page", RUNNING, ids=names(RUNNING))
def test_the_code_of_a_page_runs_as_it_stands(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tests", "examples", "benchmarks"):  # what a reader has beside them in a clone
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    variables: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "bash":
            run_bash(block.code, tmp_path)
        else:
            tree = ast.increment_lineno(ast.parse(block.code), block.line)
            exec(compile(tree, str(page), "exec"), variables)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_a_link_leads_to_a_file_that_is_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    broken = [target for target in _LINK.findall(text) if not (page.parent / target).exists()]
    assert broken == []


def test_pages_made_from_the_code_are_as_it_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    import make_reference

    for page, text in make_reference.PAGES.items():
        assert (DOCS / page).read_text(encoding="utf-8") == text(), "run docs/make_reference.py"


def test_the_navigation_names_pages_that_exist() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = re.findall(r"\S+\.md", nav)
    assert "start.md" in pages
    assert [page for page in pages if not (DOCS / page).is_file()] == []


def test_every_error_is_explained() -> None:
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `(\w+)` \|", page, re.M)
    assert sorted([*explained, "EcoffloadError"]) == sorted(ecoffload.errors.__all__)


@pytest.mark.parametrize("script", ["what_moves_when", "pointer_problem", "life_of_an_entry"])
def test_a_picture_is_made_by_its_script(script: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, DOCS / "pictures" / f"{script}.py", tmp_path], check=True, timeout=100)
    assert (tmp_path / f"{script}.svg").read_text(encoding="utf-8").rstrip().endswith("</svg>")
    assert (DOCS / "pictures" / f"{script}.svg").is_file()
