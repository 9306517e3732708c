"""The page for engine authors says what is so: each of its code blocks runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "engine-authors.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_code_block_of_the_page_runs(block):
    names: dict[str, object] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    assert names


def test_the_page_has_code():
    assert len(BLOCKS) >= 6
