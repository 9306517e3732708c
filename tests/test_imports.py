"""Importing the package costs next to nothing; its public names are whole, for people and type checkers alike."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import ecoffload
from ecoffload import errors

HEAVY = ["torch", "pydantic", "numpy", "pluggy", "xxhash", "importlib.metadata", "asyncio", "multiprocessing"]


def modules_after(code: str) -> set[str]:
    """What a fresh interpreter has loaded after ``code``."""
    code += "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True)
    return set(json.loads(answer.stdout))


def test_importing_the_package_loads_nothing_heavy_and_no_backend() -> None:
    plain = modules_after("")
    loaded = modules_after("import ecoffload") - plain
    assert loaded.isdisjoint(HEAVY)
    assert {name for name in loaded if name.startswith("ecoffload")} == {"ecoffload"}
    assert not {name for name in loaded if name.startswith("ecoffload_")}
    assert len(loaded) < 12, f"more than a handful of the standard library: {sorted(loaded)}"


def test_the_lowest_parts_need_no_torch() -> None:
    names = (
        "AddressError, as_addresses, ExtentAllocator, DescriptorPool, HostRegion, EntryIndex, OffloadScheduler, Plan"
    )
    loaded = modules_after(f"from ecoffload import {names}")
    assert "torch" not in loaded
    assert not {name for name in loaded if name.startswith("ecoffload_")}


@pytest.mark.parametrize("name", ecoffload.__all__)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(ecoffload, name)
    home = import_module(f"ecoffload.{ecoffload._HOME_OF[name]}")
    assert value is getattr(home, name)
    assert name in getattr(home, "__all__", [name])
    assert name in dir(ecoffload)


def test_the_names_for_type_checkers_are_the_names_at_run_time() -> None:
    tree = ast.parse(Path(ecoffload.__file__).read_text())
    (block,) = [
        node for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]
    typed = {
        alias.asname: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == {name: (f"ecoffload.{home}", name) for name, home in ecoffload._HOME_OF.items()}


def test_every_error_is_public() -> None:
    assert set(errors.__all__) <= set(ecoffload.__all__)
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.EcoffloadError)


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'EncoderCash'"):
        ecoffload.EncoderCash  # noqa: B018
