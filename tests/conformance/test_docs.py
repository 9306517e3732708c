"""That the guide for authors says what is so: its code runs, its declarations are valid, its numbers are the core's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ecoffload import BackendSpec, SwapBackend, hookspecs
from ecoffload.backend import Capabilities
from ecoffload.testing import plugin

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "write-a-backend.md").read_text()
VERSIONING = (DOCS / "versioning.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(block, "write-a-backend.md", "exec"), names)
    return names


def test_the_declaration_of_the_guide_is_valid_and_speaks_the_current_number() -> None:
    (names,) = (run(block) for block in BLOCKS if "@hookimpl" in block)
    assert isinstance(names["ecoffload_register_backend"](), BackendSpec)
    assert names["ECOFFLOAD_HOOK_API"] == hookspecs.ECOFFLOAD_HOOK_API


@pytest.mark.parametrize("name", ["BlockingAcme", "AcmeBackend"])
def test_each_backend_of_the_guide_is_complete(name: str) -> None:
    (names,) = (run(block) for block in BLOCKS if f"class {name}" in block)
    cls = names[name]
    assert issubclass(cls, SwapBackend)
    assert not cls.__abstractmethods__
    assert cls.availability().reason


def test_the_guide_explains_every_capability() -> None:
    for field in Capabilities.model_fields:
        assert f"| `{field}` |" in GUIDE, field


def test_the_guide_explains_every_option_of_the_suite() -> None:
    parser = pytest.Parser(_ispytest=True)
    plugin.pytest_addoption(parser)
    options = {name for group in parser._groups for option in group.options for name in option.names()}
    assert options
    assert {name for name in options if name not in GUIDE} == set()


def test_versioning_states_the_numbers_that_are_served() -> None:
    assert f"`ECOFFLOAD_HOOK_API`, now **{hookspecs.ECOFFLOAD_HOOK_API}**" in VERSIONING
    assert f"version of its own, now **{plugin.SUITE}**" in VERSIONING
