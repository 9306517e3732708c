"""What is shipped: the core's archive holds the core alone, and says that it is typed."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import ecoffload

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source archive, and the wheel that is built from nothing but it."""
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONWARNINGS": ""},
    )
    return out


@pytest.fixture(scope="module")
def in_sdist(built: Path) -> set[str]:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        return {name.partition("/")[2] for name in tar.getnames()}


@pytest.fixture(scope="module")
def in_wheel(built: Path) -> set[str]:
    (archive,) = built.glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        return set(wheel.namelist())


def test_the_source_archive_holds_the_core_alone(in_sdist: set[str]) -> None:
    assert {name.partition("/")[0] for name in in_sdist} == {
        *("src", "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "PKG-INFO"),
        *({".gitignore"} & in_sdist),
    }
    assert {name.split("/")[1] for name in in_sdist if name.startswith("src/")} == {"ecoffload"}


def test_the_wheel_holds_the_core_alone_and_is_typed(in_wheel: set[str]) -> None:
    info = f"ecoffload-{ecoffload.__version__}.dist-info"
    assert {name.partition("/")[0] for name in in_wheel} == {"ecoffload", info}
    assert "ecoffload/py.typed" in in_wheel
    assert f"{info}/licenses/LICENSE" in in_wheel
    assert f"{info}/entry_points.txt" in in_wheel


def test_every_module_is_in_the_wheel_and_no_leftover_is(in_wheel: set[str]) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "src/ecoffload"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    missing = {name.removeprefix("src/") for name in tracked if (ROOT / name).exists()} - in_wheel
    assert missing == set()
    assert not [name for name in in_wheel if "__pycache__" in name or name.endswith((".pyc", ".so"))]


def test_the_installed_conformance_suite_travels_with_the_core(in_wheel: set[str]) -> None:
    assert "ecoffload/testing/conformance/conftest.py" in in_wheel
    assert "ecoffload/testing/plugin.py" in in_wheel
