"""A scheduler here, two workers in processes of their own on the cpu backend; one is killed in the middle of a save."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from engine_kit import GRANULE, eventually

from ecoffload.region import HostRegion
from ecoffload.scheduler import OffloadScheduler

CAPACITY = 16 * GRANULE


class Process:
    def __init__(self, directory: Path, rank: int) -> None:
        script = str(Path(__file__).with_name("worker_process.py"))
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", script, str(directory), "p", str(CAPACITY), str(rank), "2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def give(self, message: bytes, how: str = "do") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{how} {message.hex()}\n")
        self.process.stdin.flush()

    def loaded(self) -> dict[bytes, int]:
        """Keys and checksums of what it loaded."""
        return {bytes.fromhex(key): int(value) for key, _, value in (w.partition(":") for w in self.line().split())}

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.end()

    def end(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.poll() is None:
            self.process.stdin.write("end\n")
        self.process.stdin.close() if self.process.poll() is None else None
        code = self.process.wait(30)
        self.process.stdout.close()
        return code


def truth(key: bytes, nbytes: int) -> int:
    return crc32(np.random.default_rng([*key]).integers(0, 256, nbytes, dtype=np.uint8).tobytes())


@pytest.fixture
def start(shm: Path) -> Iterator[Callable[[int], Process]]:
    started: list[Process] = []

    def start(rank: int) -> Process:
        started.append(Process(shm, rank))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()
        for stream in (each.process.stdin, each.process.stdout):
            if stream is not None:
                stream.close()


def test_a_worker_killed_in_mid_save_tears_nothing_and_comes_back(shm: Path, start: Callable[[int], Process]) -> None:
    region = HostRegion.open("p", capacity=CAPACITY, granule=GRANULE, directory=shm)
    scheduler = OffloadScheduler(region, world=2)
    ranks = [start(0), start(1)]
    assert [each.line() for each in ranks] == ["ready", "ready"]

    def step() -> list[dict[bytes, int]]:
        message = pickle.dumps(scheduler.take_plan())
        for each in ranks:
            each.give(message)
        return [each.loaded() for each in ranks]

    def settle() -> None:
        def idle() -> bool:
            scheduler.poll()
            scheduler.index.check()
            return not scheduler.has_pending()

        eventually(idle, "the end of what is in flight")

    def save(*keys: bytes, nbytes: int = 3 * GRANULE - 1) -> None:
        for key in keys:
            assert scheduler.plan_save(key, nbytes, "uint8", (nbytes,)) is not None

    # All is well: one saves, both load.
    save(b"a", b"b")
    step()
    settle()
    assert scheduler.plan_load(b"a") is not None
    assert step() == [{b"a": truth(b"a", 3 * GRANULE - 1)}] * 2
    settle()

    # Killed with half of an entry written: nobody finds it, nobody gets its room.
    save(b"torn", nbytes=6 * GRANULE)
    message = pickle.dumps(scheduler.take_plan())
    ranks[0].give(message, "hang")
    ranks[1].give(message)
    assert (ranks[0].line(), ranks[1].loaded()) == ("half", {})
    assert not scheduler.lookup(b"torn")
    ranks[0].kill()
    eventually(lambda: scheduler.poll() or not scheduler.known(b"torn"), "notice of the death")
    assert scheduler.index.quarantined_bytes == 6 * GRANULE
    save(b"nobody's", nbytes=GRANULE)  # told while nobody saves
    message = pickle.dumps(scheduler.take_plan())
    ranks[1].give(message)
    assert ranks[1].loaded() == {}
    scheduler.poll()
    assert not scheduler.lookup(b"nobody's")

    # A new one of its rank: what was there is there, and new saves evict only what may go.
    ranks[0] = start(0)
    assert ranks[0].line() == "ready"
    save(b"c")
    for key in (b"a", b"b"):
        assert scheduler.plan_load(key) is not None
    assert step() == [{key: truth(key, 3 * GRANULE - 1) for key in (b"a", b"b")}] * 2
    settle()
    assert not scheduler.known(b"nobody's")
    assert scheduler.plan_load(b"c") is not None
    assert step() == [{b"c": truth(b"c", 3 * GRANULE - 1)}] * 2
    settle()
    assert scheduler.index.quarantined_bytes == 0, "everybody left has carried out a later plan, and writes none of it"
    assert scheduler.index.pinned == 0

    assert [each.end() for each in ranks] == [0, 0]
    scheduler.index.check()
    scheduler.close()
    region.close()
    assert os.listdir(shm) == []
