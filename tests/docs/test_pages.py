"""The documentation does what it says: its code runs, its links lead somewhere, its tables are complete.

`pages.py` says which blocks run here, and which where else.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
from pages import DOCS, MARKS, PAGES, ROOT, blocks, indented, prose, run_bash

import ecoffload.errors
from ecoffload.cli.app import app

_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
_EXTRAS = re.compile(r"(?:ecoffload|'\.|\"\.)\[([\w,]+)\]")
_INLINE = re.compile(r"`(ecoffload [a-z][^`]*)`")


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


RUNNING = [page for page in PAGES if any(each.runs and each.mark is None for each in blocks(page))]


@pytest.mark.parametrize("page", RUNNING, ids=names(RUNNING))
def test_the_code_of_a_page_runs_as_it_stands(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tests", "examples", "benchmarks"):  # what a reader has beside them in a clone
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    variables: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if not block.runs or block.mark is not None:
            continue
        if block.language == "bash":
            run_bash(block.code, tmp_path, programs=Path(sys.executable).parent)
        else:
            tree = ast.increment_lineno(ast.parse(block.code), block.line)
            exec(compile(tree, str(page), "exec"), variables)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_command_of_a_page_runs_or_is_marked(page: Path) -> None:
    for block in blocks(page):
        where = f"{page}:{block.line}"
        assert block.mark is None or block.mark in MARKS, f"{where}: no such mark; those are {', '.join(MARKS)}"
        assert block.language, f"{where}: say the language: bash if it is to run, text if it is not code"
        if not block.runs and block.mark is None:
            assert block.commands == [], f"{where}: commands run only in a block of bash"
    assert indented(page) == [], f"{page}: code belongs into fenced blocks"


@pytest.mark.parametrize(
    "line",
    [
        "pip install x",
        "$ ecoffload demo",
        "      - run: pytest --pyargs x",
        "VLLM=1 make test-vllm",
        "tests/vllm.sh",
        ". .venv/bin/activate",
    ],
)
def test_a_line_that_is_a_command_is_seen_in_a_block_of_any_language(tmp_path: Path, line: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        f"# A page\n\n```text\nhit rate 36%\n{line}\n```\n\n- list\n\n  <!-- service -->\n  ```sh\n  {line}\n  ```\n"
    )
    first, second = blocks(page)
    assert (first.mark, first.runs, first.commands) == (None, False, [line])
    assert (second.mark, second.runs, len(second.commands)) == ("service", False, 1)


def test_code_that_only_an_indent_makes_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n    ecoffload demo\n\n```bash\nif true; then\n\n    ls\nfi\n```\n")
    assert indented(page) == ["ecoffload demo"]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_extras_and_commands_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {extra for group in _EXTRAS.findall(text) for extra in group.split(",")}
    assert named <= extras.keys()
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert set(re.findall(r"`make ([a-z0-9-]+)", text)) <= set(targets)
    group: Any = typer.main.get_command(app)
    for line in _INLINE.findall(prose(page)):
        words = line.split()[1:]
        command = group.commands.get(words[0])
        assert command is not None, line
        options = {name for option in command.params for name in option.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("-")} <= options, line


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_a_link_leads_to_a_file_that_is_there(page: Path) -> None:
    broken = [target for target in _LINK.findall(prose(page)) if not (page.parent / target).exists()]
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
