"""A warm cache over restarts after SIGKILL: what comes back is what was there, and what must not come back does not."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ecoffload import EncoderCache
from ecoffload.checksums import checksum_of
from ecoffload.regions import reclaim

N = 1000  # words of an entry: some granules, and not whole ones
Fork = Callable[..., Any]


def tensor(seed: int) -> torch.Tensor:
    return torch.arange(N, dtype=torch.int64) * 7919 + seed


def cache(shm: Path, **options: Any) -> EncoderCache:
    options = {"warm": True, "namespace": "model a", "id": "x", "granule": 4096} | options
    return EncoderCache("512KiB", directory=shm, **options)


def eventually(ready: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.001)


@contextmanager
def opened(shm: Path, **options: Any) -> Iterator[EncoderCache]:
    """A cache whose entries of an earlier process are verified."""
    it = cache(shm, **options)
    try:
        eventually(lambda: not it._scheduler.poll() and not it._scheduler.has_pending(), "the verification")
        yield it
    finally:
        it.close()


def engine(pipe: socket.socket, shm: Path, work: Callable[[EncoderCache], None], options: dict[str, Any]) -> None:
    """An engine that does its work, says so, and waits for its end."""
    it = cache(shm, **options)
    end = time.monotonic() + 30
    while it._scheduler.has_pending() and time.monotonic() < end:
        it._scheduler.poll()
    work(it)
    it.flush()
    pipe.send(b"done")
    signal.pause()


@pytest.fixture
def killed(fork: Fork, shm: Path) -> Callable[..., None]:
    """`killed(work, **options)`: an engine that did `work(cache)` and got SIGKILL."""

    def run(work: Callable[[EncoderCache], None], **options: Any) -> None:
        process = fork(engine, shm, work, options)
        assert process.hear() == b"done"
        process.kill()

    return run


def put_three(it: EncoderCache) -> None:
    for seed, key in enumerate(("a", "b", "c")):
        assert it.put(key, tensor(seed))


def test_after_a_kill_every_entry_comes_back_with_its_bytes(shm: Path, killed: Callable[..., None]) -> None:
    killed(put_three)
    with opened(shm) as it:
        assert it.region.start == "warm"
        found = it.get_many(["a", "b", "c"])
        assert list(found) == ["a", "b", "c"]
        assert all(torch.equal(found[key], tensor(seed)) for seed, key in enumerate(found))
        assert it._scheduler.recovered == 3


def test_nothing_is_promised_before_it_was_verified(
    shm: Path, killed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(put_three)
    monkeypatch.setattr("ecoffload.checksums.Checksums.take", lambda self: [])
    with cache(shm) as it:
        assert it.get("a") is None
        assert not it.contains("a")


def test_who_waits_for_the_verification_finds_everything_at_once(shm: Path, killed: Callable[..., None]) -> None:
    killed(put_three)
    with cache(shm) as it:
        assert it._scheduler.await_recovered(30) == 0
        assert list(it.get_many(["a", "b", "c"])) == ["a", "b", "c"]


def test_the_wait_for_the_verification_ends_when_its_time_is_over(
    shm: Path, killed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(put_three)
    with monkeypatch.context() as patch:
        patch.setattr("ecoffload.checksums.Checksums.take", lambda self: [])
        it = cache(shm)
        assert it._scheduler.await_recovered(0.01) == 3
    it.close()


def test_that_time_also_ends_while_one_entry_after_the_other_is_verified(
    shm: Path, killed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(put_three)
    it = cache(shm)
    checksums: Any = it._scheduler._checksums
    eventually(lambda: len(checksums._done) == 3, "the verification")
    found = [[each] for each in checksums.take()]
    monkeypatch.setattr(checksums, "take", lambda: found.pop(0) if found else [])
    assert it._scheduler.await_recovered(-1) == 2
    it.close()


class Held:
    """Holds back the checksums of what ``put_three`` left, until ``go`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun = 0
        monkeypatch.setattr("ecoffload.checksums.checksum_of", self)

    def __call__(self, region: Any, extents: Any, nbytes: int) -> int:
        if nbytes == 8 * N:
            self.begun += 1
            self.go.wait()
        return checksum_of(region, extents, nbytes)


def test_what_is_saved_does_not_wait_until_the_region_was_verified(
    shm: Path, killed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(put_three)
    held = Held(monkeypatch)
    it = cache(shm)
    try:
        assert it.put("new", torch.ones(7))
        eventually(lambda: it.contains("new"), "the save")
        assert not it.contains("a")
        assert it._scheduler.unsettled() == 0
    finally:
        held.go.set()
        it.close()


def test_closing_does_not_wait_until_the_region_was_verified_and_loses_nothing(
    shm: Path, killed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(put_three)
    with monkeypatch.context() as patch:
        held = Held(patch)
        it = cache(shm)
        eventually(lambda: held.begun == 1, "the verification of the first")
        closing = threading.Thread(target=it.close)
        closing.start()
        checksums: Any = it._scheduler._checksums
        eventually(lambda: checksums._closing, "the call of close")
        held.go.set()
        closing.join(30)
        assert held.begun == 1
    with opened(shm) as it:
        assert list(it.get_many(["a", "b", "c"])) == ["a", "b", "c"]


def test_a_byte_that_changed_meanwhile_costs_its_entry_and_no_other(
    shm: Path, killed: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    killed(put_three)
    path = shm / "ecoffload.x"
    at = path.read_bytes().index(tensor(1).numpy().tobytes())
    with path.open("r+b") as file:
        file.seek(at + 8 * N - 1)
        (last,) = file.read(1)
        file.seek(at + 8 * N - 1)
        file.write(bytes([last ^ 1]))
    with opened(shm) as it:
        assert it.get("b") is None
        assert torch.equal(it.get("a"), tensor(0))
        assert torch.equal(it.get("c"), tensor(2))
        assert it._scheduler.recovery_dropped == 1
        assert it.put("b", tensor(1))
        it.flush()
        assert torch.equal(it.get("b"), tensor(1))
    assert "entry b'b' is dropped: its bytes are not those that were saved" in caplog.text


def test_a_byte_behind_an_entry_in_its_last_granule_is_nobodys(shm: Path, killed: Callable[..., None]) -> None:
    killed(put_three)
    path = shm / "ecoffload.x"
    at = path.read_bytes().index(tensor(1).numpy().tobytes()) + 8 * N
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")
    with opened(shm) as it:
        assert torch.equal(it.get("b"), tensor(1))


def test_keys_that_clients_chose_live_and_die_with_the_process(shm: Path, killed: Callable[..., None]) -> None:
    def put(it: EncoderCache) -> None:
        assert it.put("hash", tensor(1))
        assert it.put("uuid", tensor(2), client_key=True)
        it.flush()
        assert torch.equal(it.get("uuid"), tensor(2))

    killed(put)
    with opened(shm) as it:
        assert not it.contains("uuid")
        assert it.get("uuid") is None
        assert torch.equal(it.get("hash"), tensor(1))


def test_keys_that_clients_chose_are_kept_where_they_are_trusted(shm: Path, killed: Callable[..., None]) -> None:
    killed(lambda it: it.put("uuid", tensor(2), client_key=True), trust_uuids=True)
    with opened(shm, trust_uuids=True) as it:
        assert torch.equal(it.get("uuid"), tensor(2))


@pytest.mark.parametrize("key", ["b", None])
def test_what_was_invalidated_does_not_come_back(shm: Path, killed: Callable[..., None], key: str | None) -> None:
    def work(it: EncoderCache) -> None:
        put_three(it)
        it.flush()
        it.invalidate(key)

    killed(work)
    with opened(shm) as it:
        assert [each for each in "abc" if it.get(each) is not None] == ([] if key is None else ["a", "c"])


def test_the_newest_value_of_a_key_comes_back(shm: Path, killed: Callable[..., None]) -> None:
    def work(it: EncoderCache) -> None:
        for seed in range(5):
            it.invalidate("a")
            assert it.put("a", tensor(seed))
            it.flush()

    killed(work)
    with opened(shm) as it:
        assert torch.equal(it.get("a"), tensor(4))


def test_another_namespace_finds_nothing_and_says_so_once(
    shm: Path, killed: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    killed(put_three)
    with caplog.at_level(logging.WARNING), opened(shm, namespace="model b") as it:
        assert it.region.start == "cold"
        assert all(it.get(key) is None for key in "abc")
    assert [each.getMessage() for each in caplog.records if "starting cold" in each.getMessage()] == [
        f"region {shm}/ecoffload.x: starting cold: the region found belongs to the namespace 'model a', not 'model b'"
    ]


def test_the_third_takeover_within_ten_minutes_starts_cold_and_says_so(
    shm: Path, killed: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    killed(put_three)
    killed(lambda it: None)
    killed(lambda it: None)
    with caplog.at_level(logging.WARNING), opened(shm) as it:
        assert it.region.start == "cold"
        assert "3 takeovers within 600 s" in it.region.start_reason
        assert all(it.get(key) is None for key in "abc")
        assert it.put("a", tensor(9))
        it.flush()
        assert torch.equal(it.get("a"), tensor(9))
    assert [each for each in caplog.messages if "3 takeovers within 600 s" in each], "it must be said"


def test_a_full_region_of_an_earlier_process_makes_room_as_any_other(shm: Path, killed: Callable[..., None]) -> None:
    def fill(it: EncoderCache) -> None:
        for seed in range(200):
            assert it.put(f"old {seed}", tensor(seed))
            it.flush()

    killed(fill)
    with opened(shm) as it:
        held = it._scheduler.recovered
        assert held >= 60
        for seed in range(100):
            assert it.put(f"new {seed}", tensor(seed))
            it.flush()
            assert torch.equal(it.get(f"new {seed}"), tensor(seed))
        it._scheduler.index.check()
        assert it._scheduler.stats().pinned_entries == 0


def test_a_journal_full_of_small_entries_evicts_although_there_are_bytes_left(shm: Path) -> None:
    with EncoderCache("8MiB", directory=shm, warm=True, namespace="small", id="s", granule=256) as it:
        records = it.region.journal.capacity
        for number in range(2 * records):
            assert it.put(f"{number}", torch.full((8,), number)), f"{number} of {records} records"
            it.flush()
        stats = it._scheduler.stats()
        assert stats.entries == records
        assert stats.used_bytes < stats.capacity_bytes / 2
        assert stats.evictions == records
        assert torch.equal(it.get(f"{2 * records - 1}"), torch.full((8,), 2 * records - 1))
        it._scheduler.index.check()


def test_kept_regions_are_all_that_is_left(shm: Path, killed: Callable[..., None]) -> None:
    killed(put_three)
    assert os.listdir(shm) == ["ecoffload.x"]
    assert [each.id for each in reclaim(shm)] == ["x"]
    assert os.listdir(shm) == []
