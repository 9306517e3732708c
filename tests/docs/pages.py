"""The commands of the documentation, and where each of them runs.

A fenced block of bash or Python runs as it stands, page by page and in order: in `test_pages.py`, and what the line
before it marks as unpublished in `make test-dist`, which calls this file with an empty environment. A block in another
language holds no command, unless it is marked.

    python tests/docs/pages.py VENV CLONE      # what is unpublished, with VENV's programs, in a copy of the tree
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted(ROOT.glob("backends/*/README.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
]
MARKS = {
    "hardware": "needs a device, or more memory than a test may take",
    "service": "needs what runs elsewhere: an engine that serves, a CI's runners, a cluster",
    "unpublished": "installs packages that are not published yet: runs in make test-dist",
}
_FENCE = re.compile(
    r"(?:^ *<!-- (?P<mark>\w+) -->\n+)?^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.M | re.S,
)
_INDENTED = re.compile(r"(?:\A|\n\n)((?: {4}[^\n]*\n)+)")
_BEFORE = re.compile(r"^(\$ |- run: (>$)?|- |sudo |[A-Z_]+=\S+ )*")
_PROGRAM = re.compile(
    r"\.|apt(-get)?|bash|cat|cd|clinfo|cp|curl|docker|ecoffload|export|git|helm|kubectl|ls|make|mkdir|mkdocs|mooncake_\w+|"
    r"nvidia-smi|pip3?|pytest|python3?|rm|rocminfo|sh|source|vllm|\S+\.(sh|py)"
)


class Block(NamedTuple):
    """A fenced block; `line` is that of its first line of code, from 0."""

    mark: str | None
    language: str
    code: str
    line: int

    @property
    def runs(self) -> bool:
        return self.language in ("bash", "python")

    @property
    def commands(self) -> list[str]:
        """The lines that look like commands."""
        return [line for line in self.code.splitlines() if _is_command(line)]


def _is_command(line: str) -> bool:
    words = _BEFORE.sub("", line.strip()).split()
    return bool(words) and _PROGRAM.fullmatch(words[0]) is not None


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            found["mark"],
            found["language"],
            textwrap.dedent(found["code"]),
            text.count("\n", 0, found.start("code")),
        )
        for found in _FENCE.finditer(text)
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def indented(page: Path) -> list[str]:
    """Blocks that are code only by their indent: no mark can tell where those run."""
    return [block.strip() for block in _INDENTED.findall(prose(page) + "\n")]


def run_bash(code: str, folder: Path, *, programs: Path, timeout: float = 200, **environment: str) -> None:
    """Run a block in `folder`, with what lies in `programs` first on the path. Raises AssertionError if it fails."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env={**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"exit {done.returncode}\n{code}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")


def _unpublished(venv: Path, clone: Path) -> None:
    """Every unpublished block, page by page."""
    environment = {
        "PIP_FIND_LINKS": f"{ROOT / 'dist'} {os.environ.get('PIP_FIND_LINKS', '')}",
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "PIP_NO_COMPILE": "1",  # most of what is installed is never imported
        "VIRTUAL_ENV": str(venv),
    }
    for page in PAGES:
        found = [each for each in blocks(page) if each.mark == "unpublished"]
        place = page.relative_to(ROOT)
        # A package's own page speaks of its own folder, the others of the clone.
        folder = clone / place.parent if place.parts[0] in ("backends", "examples") else clone
        for each in found:
            start = time.monotonic()
            run_bash(each.code, folder, programs=venv / "bin", timeout=600, **environment)
            sys.stdout.write(f"{place}:{each.line}: {time.monotonic() - start:.0f} s\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _unpublished(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute())
