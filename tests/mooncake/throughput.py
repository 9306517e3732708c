"""Bytes a second through the tier and through Mooncake's own batch calls: in turns, on memory of the same kind.

Both move shared memory that was written a moment ago (publishing), or last used some turns ago (fetching), through the
same two clients, one that puts and one that gets: clients that do the same work differ by up to 15 % for as long as
they live (measured with nothing of ours in the process). Who goes first changes from turn to turn, and what counts is
the median of the ratios of neighbours: a shared machine has good and bad seconds. The tier's times hold all that it
adds: asking what is there, headers, checksums, the index, threads. Processor time of this process is compared as well,
which other processes disturb less than the clock.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from ecoffload import EncoderCache
from ecoffload.tiers.header import object_name

CAPACITY = 160 << 20
NAMESPACE = "throughput"


class Took(NamedTuple):
    """Seconds by the clock, and of this process's processor time."""

    clock: float
    cpu: float


class Figures(NamedTuple):
    """Of one kind and size. ``ratios``: the tier's speed by Mooncake's own, one a turn; speeds in bytes a second."""

    kind: str
    ratios: list[float]
    own: float
    tier: float
    cpu: float
    """Median of the ratios of processor time."""
    checksum: float
    """Share of the tier's time that a checksum over the same bytes takes."""

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def describe(self) -> dict[str, Any]:
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return {
            "ratio": f"{self.ratio:.2f} (half of {len(self.ratios)} turns within {low:.2f}-{high:.2f})",
            "MB/s": f"{self.tier / 1e6:.0f} of {self.own / 1e6:.0f}",
            "by processor time": f"{self.cpu:.2f}",
            "checksum": f"{self.checksum:.0%} of the time",
        }


def took(call: Callable[[], Any]) -> Took:
    clock, cpu = time.perf_counter(), time.process_time()
    call()
    return Took(time.perf_counter() - clock, time.process_time() - cpu)


class Own:
    """Mooncake's calls alone, over a file in shared memory."""

    def __init__(self, putting: Any, getting: Any, directory: Path) -> None:
        self.putting, self.getting = putting, getting
        with open(directory / "own", "w+b") as file:
            file.truncate(CAPACITY)
            self.memory = mmap.mmap(file.fileno(), CAPACITY)
        self.memory[:] = bytes(CAPACITY)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for store in (putting, getting):
            assert store.register_buffer(self.base, CAPACITY) == 0

    def turn(self, turn: int, values: torch.Tensor) -> tuple[Took, Took]:
        """Putting and getting."""
        count, size = values.shape
        names, sizes = [f"own-{turn}-{i}" for i in range(count)], [size] * count
        slots = [(2 * turn + i) % (CAPACITY // (count * size)) * count * size for i in (0, 1)]
        source, target = ([self.base + at + i * size for i in range(count)] for at in slots)
        self.memory[slots[0] : slots[0] + count * size] = values.numpy().tobytes()
        put = took(lambda: self.putting.batch_put_from(names, source, sizes))
        assert self.putting.batch_is_exist(names) == [1] * count
        answers: list[int] = []
        got = took(lambda: answers.extend(self.getting.batch_get_into(names, target, sizes)))
        assert answers == sizes
        self.putting.batch_remove(names, True)
        return put, got


class Tiered:
    """One cache that publishes and one that fetches."""

    def __init__(self, url: str, directory: Path) -> None:
        url += "?wait=20&deadline=20&absent=0&share=0.25"
        self.one, self.two = (
            EncoderCache(CAPACITY, namespace=NAMESPACE, tier=url, directory=directory) for _ in range(2)
        )
        self.stores: list[Any] = []
        for cache in (self.one, self.two):
            while not cache.stats().tier["connected"]:
                time.sleep(0.01)
            link = cache._scheduler.tier
            assert link is not None
            self.stores.append(link.tier._store)  # type: ignore[attr-defined]

    def turn(self, turn: int, values: torch.Tensor) -> tuple[Took, Took]:
        """Publishing and fetching."""
        keys = [b"%d-%d-%d" % (turn, *values.shape[1:], i) for i in range(len(values))]
        names = [object_name(NAMESPACE, key) for key in keys]
        for key, value in zip(keys, values, strict=True):
            self.one.put(key, value)
        self._settle()
        # Once more, with all of it in the region: the time of publishing, not of the puts.
        self.stores[0].batch_remove(names, True)
        link = self.one._scheduler.tier
        assert link is not None
        before = link.stats()["published"]
        entries = [self.one._scheduler.index.lookup(key) for key in keys]

        def publish() -> None:
            for entry in entries:
                assert entry is not None
                link.offer(entry)
            while len(link._couriers.published) < len(entries):  # no stats(): what they cost is not the tier's
                time.sleep(0.0002)
            link.settle()

        sent = took(publish)
        assert link.stats()["published"] == before + len(keys)
        before = self.two.stats().tier["hits"]
        fetched = took(lambda: self.two._await_tier(keys))
        assert self.two.stats().tier["hits"] == before + len(keys)
        self.stores[0].batch_remove(names, True)
        return sent, fetched

    def _settle(self) -> None:
        while self.one.stats().tier["publish_queue"]:
            time.sleep(0.0002)

    def close(self) -> None:
        self.one.close()
        self.two.close()


def measure(url: str, directory: Path, size: int, count: int, turns: int) -> list[Figures]:
    """Publishing and fetching ``count`` objects of ``size`` bytes in one go, ``turns`` times."""
    values = torch.randint(0, 256, (count, size), dtype=torch.uint8)
    tiered = Tiered(url, directory)
    own = Own(*tiered.stores, directory)
    rows = []
    for turn in range(-1, turns):  # the first one warms up
        if turn % 2:
            ours = tiered.turn(turn + 1, values)
            theirs = own.turn(turn + 1, values)
        else:
            theirs = own.turn(turn + 1, values)
            ours = tiered.turn(turn + 1, values)
        hashed = took(lambda: [xxhash.xxh3_64_intdigest(value.numpy()) for value in values])
        rows.append((theirs, ours, hashed))
    tiered.close()
    figures = []
    for i, kind in enumerate(("publish", "fetch")):
        pairs = [(theirs[i], ours[i]) for theirs, ours, _ in rows[1:]]
        own_clock, tier_clock = (
            statistics.median(each.clock for each in column) for column in zip(*pairs, strict=True)
        )
        figures.append(
            Figures(
                kind,
                [a.clock / b.clock for a, b in pairs],
                own=size * count / own_clock,
                tier=size * count / tier_clock,
                cpu=statistics.median(a.cpu / b.cpu for a, b in pairs),
                checksum=statistics.median(hashed.clock for _, _, hashed in rows[1:]) / tier_clock,
            )
        )
    return figures
