"""Caches on one fake store, as if each were on a machine of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ecoffload import EncoderCache
from ecoffload.testing.tiers.fake import FakeStore, FakeTier
from ecoffload.tiers import TierLink, TierOptions

BASE = Path(os.environ.get("ECOFFLOAD_TEST_SHM", "/dev/shm"))


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ecoffload-test-", dir=BASE))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def node(shm: Path, store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EncoderCache]]:
    """`node(wait=..., deadline=..., namespace=...)`: a cache of 256 KiB with the store behind it."""
    made: list[EncoderCache] = []

    def make(capacity: int | str = "256KiB", *, namespace: str = "model", **options: Any) -> EncoderCache:
        known = {name: options.pop(name) for name in list(options) if name in TierOptions.model_fields}
        chosen = TierOptions(**{"wait": 20.0, "deadline": 20.0, "absent": 0.0, **known})
        monkeypatch.setattr(
            "ecoffload.cache.open_tier", lambda tier, *, namespace: TierLink(tier, chosen, namespace=namespace)
        )
        made.append(EncoderCache(capacity, directory=shm, namespace=namespace, tier=FakeTier(store=store), **options))
        return made[-1]

    yield make
    store.up.set()
    for cache in made:
        cache.close()
    # A fault of the link's own is contained: the tests must not miss it, but for the one that plants it.
    reasons = [cache.stats().tier["off"] for cache in made]
    assert not [reason for reason in reasons if "Error:" in reason and "a bug of ours" not in reason]


@pytest.fixture
def eventually() -> Callable[..., None]:
    def wait(ready: Callable[[], Any], limit: float = 20.0) -> None:
        end = time.monotonic() + limit
        while not ready():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.001)

    return wait
