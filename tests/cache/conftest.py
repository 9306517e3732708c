"""Caches for the tests of this folder, each in its own corner of /dev/shm, closed at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ecoffload import EncoderCache
from ecoffload.testing.devices import simulated

BASE = Path(os.environ.get("ECOFFLOAD_TEST_SHM", "/dev/shm"))
DEVICES = ["cpu", "sim-int64", "sim-uint64", "sim-top"]


@pytest.fixture
def shm() -> Iterator[Path]:
    """An empty directory in shared memory, empty again but for warm regions at the end."""
    path = Path(tempfile.mkdtemp(prefix="ecoffload-test-", dir=BASE))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def open_cache(shm: Path) -> Iterator[Callable[..., EncoderCache]]:
    made: list[EncoderCache] = []

    def make(capacity: int | str = "64KiB", *, backend: Any = "cpu", **options: Any) -> EncoderCache:
        if isinstance(backend, str) and backend.startswith("sim-"):
            backend = simulated(backend)
        made.append(EncoderCache(capacity, backend=backend, directory=shm, **options))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


@pytest.fixture(params=DEVICES)
def cache(request: pytest.FixtureRequest, open_cache: Callable[..., EncoderCache]) -> EncoderCache:
    """One of 64 KiB on each kind of device."""
    return open_cache(backend=request.param)
