"""Makes the engine kit importable for the tests of this folder, and gives each test its own corner of /dev/shm."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine_kit import Engine

from ecoffload import slots

BASE = Path(os.environ.get("ECOFFLOAD_TEST_SHM", "/dev/shm"))


@pytest.fixture
def shm() -> Iterator[Path]:
    """An empty directory in shared memory."""
    path = Path(tempfile.mkdtemp(prefix="ecoffload-test-", dir=BASE))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def engine(shm: Path) -> Iterator[Callable[..., Engine]]:
    """`engine(world=2, ...)`: a scheduler with its workers, closed and looked through at the end."""
    made: list[Engine] = []

    def start(**options: Any) -> Engine:
        made.append(Engine(shm, id=f"e{len(made)}", **options))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deaths are noticed at the next poll, so that no test has to wait."""
    monkeypatch.setattr(slots, "_PROBE_SECONDS", -1.0)
