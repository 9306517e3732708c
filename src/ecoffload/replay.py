"""Playing an access trace through the real index, allocator and policies, and through Belady's bound.

``ecoffload replay`` and ``ecoffload size`` call it; no bytes are moved except by :func:`move`, which plays the same
trace through an :class:`EncoderCache` and compares every tensor that comes back.

Every trace is played twice. ``object_hit`` and ``byte_hit`` count bytes, as published tables and Belady's bound do:
every free byte is of use. ``region_byte_hit`` is what a region of that size gives: entries take whole granules and lie
in at most a few extents, so some more are evicted to make room (up to half a point less on the traces of
tests/data/traces). An entry larger than the cache is not kept, and not missed.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ecoffload.errors import ConfigError
from ecoffload.eviction import make_policy
from ecoffload.extents import Extent, ExtentAllocator
from ecoffload.index import EntryIndex
from ecoffload.sizes import parse_size
from ecoffload.traces import Trace

if TYPE_CHECKING:
    from ecoffload.backend import SwapBackend

__all__ = ["GRANULE", "Moved", "Outcome", "belady", "move", "parse_capacity", "replay"]

GRANULE = 4096  # an EncoderCache's default

Progress = Callable[[int], None]  # told the rows done since the last call
_STEP = 1024  # rows between two reports of progress


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one policy at one capacity. Hit ratios are shares of 1, cold misses counted.

    Of the region: ``region_byte_hit``, ``evictions``, ``extents_per_entry``, ``refused`` (no room, or too large) and
    ``us_per_op``, wall time of one lookup with what it leads to (a touch, or a save with its evictions).
    """

    capacity_bytes: int
    object_hit: float
    byte_hit: float
    belady_byte_hit: float
    region_byte_hit: float
    evictions: int
    extents_per_entry: float
    refused: int
    us_per_op: float

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Moved:
    """Of the same trace with real bytes: what was loaded, and how many loads held exactly what was saved."""

    backend: str
    registered: bool
    object_hit: float
    byte_hit: float
    verified: int
    mismatched: int
    bytes_saved: int
    bytes_loaded: int
    seconds: float

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def parse_capacity(text: str, footprint: int) -> int:
    """Bytes of a size ("8GiB") or of a percentage of the footprint ("5%"). Raises :class:`ConfigError`."""
    if not text.strip().endswith("%"):
        return parse_size(text, option="capacity")
    try:
        share = float(text.strip()[:-1]) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 10:
        raise ConfigError(
            f"capacity {text!r} is no percentage of the distinct objects' bytes; write for example 5% or 8GiB",
            option="capacity",
            value=text,
        )
    return int(share * footprint)


class _Bytes(ExtentAllocator):
    """An allocator in which only the sum of bytes matters: any entry fits wherever so many are free."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, 1)

    def fits(self, nbytes: int) -> bool:
        return nbytes <= self._capacity

    def allocate(self, nbytes: int) -> tuple[Extent, ...] | None:
        if nbytes > self._free:
            return None
        self._free -= nbytes
        return (Extent(0, nbytes),)

    def free(self, extents: Iterable[Extent]) -> None:
        self._free += sum(length for _, length in extents)


@dataclass(slots=True)
class _Pass:
    """One way through a trace."""

    index: EntryIndex
    hits: int = 0
    hit_bytes: int = 0
    saved: int = 0
    extents: int = 0
    refused: int = 0
    seconds: float = 0.0

    def play(self, objects: list[int], sizes: list[int], keys: list[bytes], progress: Progress | None) -> _Pass:
        index = self.index
        lookup, reserve, commit, touch = index.lookup, index.reserve, index.commit, index.touch
        for first in range(0, len(objects), _STEP):
            start = time.perf_counter()
            for number in objects[first : first + _STEP]:
                key = keys[number]
                entry = lookup(key)
                if entry is not None:
                    touch(entry)
                    self.hits += 1
                    self.hit_bytes += entry.nbytes
                    continue
                nbytes = sizes[number]
                entry = reserve(key, nbytes, "uint8", (nbytes,), cost=float(nbytes))
                if entry is None:
                    self.refused += 1
                    continue
                self.saved += 1
                self.extents += len(entry.extents)
                commit(entry)
            self.seconds += time.perf_counter() - start
            if progress is not None:
                progress(min(_STEP, len(objects) - first))
        return self


def replay(
    trace: Trace,
    policy: str,
    capacity: int,
    *,
    granule: int = GRANULE,
    bound: float | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Play ``trace`` with ``policy`` at ``capacity`` bytes. ``bound``: Belady's byte-hit, if it is known already.

    ``progress`` is called with the rows done since its last call, ``2 * len(trace)`` in all. Raises
    :class:`ConfigError` for an unknown policy, or a capacity below one granule.
    """
    if capacity < granule:
        raise ConfigError(
            f"capacity {capacity} bytes is less than one granule of {granule}", option="capacity", value=capacity
        )
    objects: list[int] = trace.objects.tolist()
    sizes: list[int] = trace.sizes.tolist()
    keys = [b"%d" % number for number in range(len(sizes))]
    counted, region = (
        _Pass(EntryIndex(allocator, make_policy(policy, capacity))).play(objects, sizes, keys, progress)
        for allocator in (_Bytes(capacity), ExtentAllocator(capacity, granule))
    )
    return Outcome(
        capacity_bytes=capacity,
        object_hit=counted.hits / len(objects),
        byte_hit=counted.hit_bytes / trace.total_bytes,
        belady_byte_hit=belady(trace, capacity) if bound is None else bound,
        region_byte_hit=region.hit_bytes / trace.total_bytes,
        evictions=region.index.evictions,
        extents_per_entry=region.extents / region.saved if region.saved else 0.0,
        refused=region.refused,
        us_per_op=1e6 * region.seconds / len(objects),
    )


def belady(trace: Trace, capacity: int) -> float:
    """Byte-hit of evicting what comes back last, a new entry included: no policy without the future gets past it.

    (For entries of different sizes it is a close bound, not an exact one.) Counts bytes, without granules.
    """
    objects: list[int] = trace.objects.tolist()
    sizes: list[int] = trace.sizes.tolist()
    never = len(objects)
    following = [never] * len(objects)
    last: dict[int, int] = {}
    for at in range(len(objects) - 1, -1, -1):
        following[at] = last.get(objects[at], never)
        last[objects[at]] = at
    due: dict[int, int] = {}  # held -> position of its next lookup
    latest: list[tuple[int, int]] = []  # (-next lookup, object); outdated ones are skipped
    used = hit_bytes = 0
    for at, number in enumerate(objects):
        if number in due:
            hit_bytes += sizes[number]
        else:
            used += sizes[number]
        due[number] = following[at]
        heapq.heappush(latest, (-following[at], number))
        while used > capacity:
            position, victim = heapq.heappop(latest)
            if due.get(victim) == -position:
                del due[victim]
                used -= sizes[victim]
    return hit_bytes / trace.total_bytes


def move(
    trace: Trace,
    policy: str,
    capacity: int,
    *,
    backend: SwapBackend,
    granule: int = GRANULE,
    directory: str = "/dev/shm",
    progress: Progress | None = None,
) -> Moved:
    """Play ``trace`` with real tensors through an :class:`EncoderCache` on ``backend``; compare every one that returns.

    ``capacity`` bytes of host memory are reserved. Raises what :class:`EncoderCache` raises.
    """
    import torch

    from ecoffload.cache import EncoderCache

    ops = backend.ops
    sizes: list[int] = trace.sizes.tolist()
    # Each object's bytes are a window of one random block, at a start of its own.
    spread = 1 << 20
    largest = max((nbytes for nbytes in sizes if nbytes <= capacity), default=0)
    block = torch.randint(0, 256, (spread + largest,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    hits = hit_bytes = verified = 0
    start = time.perf_counter()
    with EncoderCache(capacity, backend=backend, policy=policy, granule=granule, directory=directory) as cache:
        for number in trace.objects.tolist():
            nbytes = sizes[number]
            first = (number * 0x9E3779B1) % spread
            truth = block[first : first + nbytes]
            key = b"%d" % number
            tensor = cache.get(key)
            if tensor is None:
                if nbytes <= largest:  # others are never kept, and memory may not hold them either
                    cache.put(key, ops.empty(nbytes).copy_(truth))
            else:
                hits += 1
                hit_bytes += nbytes
                ops.synchronize()
                verified += torch.equal(tensor.cpu(), truth)
            if progress is not None:
                progress(1)
        cache.flush()
        seconds = time.perf_counter() - start
        stats = cache.stats()
    return Moved(
        backend=backend.spec.name,
        registered=stats.worker["registered"],
        object_hit=hits / len(trace),
        byte_hit=hit_bytes / trace.total_bytes,
        verified=verified,
        mismatched=hits - verified,
        bytes_saved=stats.bytes_saved,
        bytes_loaded=stats.bytes_loaded,
        seconds=seconds,
    )
