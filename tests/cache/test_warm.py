"""A warm cache after a restart: every entry that had landed, none that had not, none that was forgotten."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ecoffload import EncoderCache

Open = Callable[..., EncoderCache]


def random(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


@pytest.fixture
def warm(open_cache: Open) -> Callable[..., EncoderCache]:
    """Opens the warm cache; verified entries are there when it returns."""

    def start(**options: Any) -> EncoderCache:
        cache = open_cache(**{"warm": True, "namespace": "n", "id": "w"} | options)
        assert cache.flush(30)
        return cache

    return start


def test_what_was_put_is_found_after_a_restart(warm: Open) -> None:
    with warm() as cache:
        for seed in range(5):
            cache.put(f"{seed}", random(3000 + seed, seed).view(torch.uint8))
        cache.put("halves", torch.arange(60.0, dtype=torch.bfloat16).reshape(3, 4, 5))
        cache.put("empty", torch.empty(0, 4))
        cache.put("one", torch.tensor(5))
        assert cache.flush(30)
    cache = warm()
    assert cache.stats().start["how"] == "warm"
    assert cache.stats().recovered == len(cache) == 8
    for seed in range(5):
        got = cache.get(f"{seed}")
        assert got is not None
        assert torch.equal(got, random(3000 + seed, seed))
    halves = cache.get("halves")
    assert halves is not None
    assert torch.equal(halves, torch.arange(60.0, dtype=torch.bfloat16).reshape(3, 4, 5))
    for key, shape in (("empty", (0, 4)), ("one", ())):
        found = cache.get(key)
        assert found is not None
        assert tuple(found.shape) == shape
    cache._scheduler.index.check()


@pytest.mark.parametrize("device", ["cpu", "sim-int64", "sim-uint64", "sim-top"])
def test_what_was_in_flight_at_the_close_is_found_as_well(warm: Open, device: str) -> None:
    with warm(backend=device) as cache:
        tensor = cache._backend.ops.empty(3000).copy_(random(3000))
        cache.put("a", tensor)
    got = warm().get("a")
    assert got is not None
    assert torch.equal(got, random(3000))


def test_a_byte_that_changed_between_is_a_miss(warm: Open, shm: Path) -> None:
    with warm() as cache:
        for key in ("a", "b"):
            cache.put(key, random(3000))
        assert cache.flush(30)
        entry = cache._scheduler.index.lookup(b"a")
        assert entry is not None
        view = cache.region.view(entry.extents)[0]
        view[2999] ^= 0x80
        view.release()
    cache = warm()
    assert cache.get("a") is None
    assert cache.get("b") is not None
    assert (cache.stats().recovered, cache._scheduler.recovery_dropped) == (1, 1)
    cache._scheduler.index.check()


@pytest.mark.parametrize("trust", [False, True])
def test_keys_that_a_client_chose_live_on_only_if_they_are_trusted(warm: Open, trust: bool) -> None:
    with warm(trust_uuids=trust) as cache:
        cache.put("uuid", random(100), client_key=True)
        cache.put("hash", random(100))
        assert cache.get("uuid") is not None or cache.flush(30)
        assert cache.flush(30)
        assert cache.get("uuid") is not None
    cache = warm(trust_uuids=trust)
    assert (cache.get("uuid") is not None) is trust
    assert cache.get("hash") is not None


def test_what_was_invalidated_stays_away_even_where_somebody_was_reading_it(warm: Open) -> None:
    with warm() as cache:
        for key in ("a", "b", "c"):
            cache.put(key, random(100))
        assert cache.flush(30)
        entry = cache._scheduler.index.lookup(b"a")
        assert entry is not None
        cache._scheduler.index.pin(entry)  # a reader that never ends, as after a kill
        assert cache.invalidate("a") == 1
    cache = warm()
    assert cache.get("a") is None
    assert cache.get("b") is not None


def test_what_was_evicted_stays_away(warm: Open) -> None:
    with warm(capacity="16KiB", policy="lru") as cache:
        for seed in range(6):
            cache.put(f"{seed}", random(4096, seed))
            assert cache.flush(30)
    cache = warm(capacity="16KiB")
    assert [key for key in "012345" if cache.get(key) is not None] == list("2345")


@pytest.mark.parametrize("other", [{"namespace": "m"}, {"granule": 8192}, {"capacity": "128KiB"}])
def test_another_namespace_or_geometry_finds_nothing(warm: Open, other: dict[str, Any]) -> None:
    with warm(id=None) as cache:
        cache.put("a", random(100))
        assert cache.flush(30)
    try:
        cache = warm(id=None, **other)
    except Exception as exc:
        assert type(exc).__module__ == "ecoffload.errors"  # noqa: PT017 - a clear refusal is as good
    else:
        assert cache.get("a") is None


def test_a_shape_that_the_journal_cannot_hold_is_not_kept_and_leaves_no_room_taken(warm: Open) -> None:
    cache = warm()
    assert not cache.put("a", torch.zeros([1] * 9))
    assert cache.get_or_encode("b", lambda: torch.ones([1] * 9)).shape == (1,) * 9
    cache._scheduler.index.check()
    assert cache.stats().used_bytes == 0
    assert cache.put("a", torch.zeros([1] * 8))


CHILD = """
import sys, threading
import numpy as np, torch
from ecoffload import EncoderCache
import ecoffload.cpu.backend as cpu

def random(nbytes, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))

cache = EncoderCache("64KiB", warm=True, namespace="n", id="w", directory=sys.argv[1])
for seed in range(4):
    cache.put(f"{seed}", random(3000, seed))
assert cache.flush(30)
copy = cpu.copy_descriptors

def half(src, dst, size):
    copy(src, dst, size // np.uint64(2))
    print("half", flush=True)
    threading.Event().wait()

cpu.copy_descriptors = half
cache.put("torn", random(9000, 9))
"""


def test_a_process_killed_in_mid_save_leaves_what_had_landed_and_nothing_torn(warm: Open, shm: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(CHILD), str(shm)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    cache = warm()
    assert cache.stats().start["how"] == "warm"
    for seed in range(4):
        got = cache.get(f"{seed}")
        assert got is not None
        assert torch.equal(got, random(3000, seed))
    assert cache.get("torn") is None
    assert cache.stats().quarantined_bytes == 0, "nobody is left who could write"
    assert cache.put("torn", random(9000, 9))
    cache._scheduler.index.check()
    assert len(os.listdir(shm)) == 1
