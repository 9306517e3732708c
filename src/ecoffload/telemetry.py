"""What a running scheduler tells the outside: a few words of the region's header, which anybody may read.

The scheduler's :class:`Reporter` writes them once a second at most, while it polls; ``ecoffload regions --watch`` and
``ecoffload size --live`` read them from the file, without mapping the region or taking a lock. Nothing in the engine
reads them back. A reader that comes in the middle of a write sees an odd number in front, and looks again.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ecoffload import layout
from ecoffload.regions import PREFIX
from ecoffload.sizing import Curve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ecoffload.index import EntryIndex

__all__ = ["Activity", "Reporter", "activity", "read"]

_FIELDS = (
    "entries",
    "used_bytes",
    "pinned_entries",
    "hits",
    "misses",
    "bytes_saved",
    "bytes_loaded",
    "evictions",
    "evicted_bytes",
)
_POINTS = 48  # of the curve, two words each
_HIT = 1 << 40  # a hit ratio as a whole number
_PERIOD = 1.0


@dataclass(frozen=True, slots=True)
class Activity:
    """A scheduler's counts, in the words of :class:`CacheStats`. ``at``: when it told them, seconds since the epoch;
    ``oldest``: seconds since the oldest entry was saved, 0.0 if there is none; ``curve``: of its ghost statistics, None
    if they are off."""

    at: float
    entries: int
    used_bytes: int
    pinned_entries: int
    hits: int
    misses: int
    bytes_saved: int
    bytes_loaded: int
    evictions: int
    evicted_bytes: int
    oldest: float
    curve: Curve | None

    @property
    def hit_rate(self) -> float:
        """Hits over lookups; 0.0 before the first."""
        total = self.hits + self.misses
        return self.hits / total if total else 0.0

    def asdict(self) -> dict[str, Any]:
        """As plain data; the curve as ``ecoffload size --json`` gives it."""
        plain = {name: value for name, value in asdict(self).items() if name != "curve"}
        return plain | {"hit_rate": self.hit_rate, "curve": self.curve and self.curve.asdict()}


class _Region(Protocol):
    def publish(self, first: int, values: Sequence[int]) -> None: ...


class _Scheduler(Protocol):
    index: EntryIndex

    def stats(self) -> Any: ...


class Reporter:
    """Writes a scheduler's counts into its region's header; :meth:`tick` is for every poll, and cheap."""

    def __init__(self, region: _Region, scheduler: _Scheduler) -> None:
        self._region = region
        self._scheduler = scheduler
        self._number = 0
        self._due = 0.0
        self.tick()  # what an earlier scheduler told of this region holds no longer

    def tick(self) -> None:
        """Tell the counts, if the last time was long enough ago."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _PERIOD
        self.tell()

    def tell(self) -> None:
        """Tell the counts now."""
        stats, index = self._scheduler.stats(), self._scheduler.index
        oldest = next(iter(index), None)
        age = 0.0 if oldest is None else time.monotonic() - oldest.since
        words = [int(time.time() * 1e3), *(getattr(stats, name) for name in _FIELDS), int(age * 1e3)]
        if index.reuse is not None:
            curve = index.reuse.curve()
            points = curve.points(_POINTS)
            words += [1, curve.lookups, curve.footprint, len(points)]
            words += [word for capacity, hit in points for word in (capacity, int(hit * _HIT))]
        else:
            words += [0]
        self._number += 2
        self._region.publish(layout.W_ACTIVITY, [self._number - 1])
        self._region.publish(layout.W_ACTIVITY + 1, words)
        self._region.publish(layout.W_ACTIVITY, [self._number])


def read(page: bytes) -> Activity | None:
    """From a region's first page; None if no scheduler told anything, or one is just telling it."""
    if layout.version_of(page) != layout.VERSION:
        return None
    number, *words = (layout.word_of(page, word) for word in range(layout.W_ACTIVITY, layout.HEADER_BYTES // 8))
    if not number or number % 2:
        return None
    told, counts, (age, has_curve, *rest) = words[0], words[1 : 1 + len(_FIELDS)], words[1 + len(_FIELDS) :]
    curve = None
    if has_curve:
        lookups, footprint, count = rest[:3]
        flat = rest[3 : 3 + 2 * min(count, _POINTS)]
        curve = Curve(tuple(flat[::2]), tuple(hit / _HIT for hit in flat[1::2]), footprint, lookups)
    return Activity(at=told / 1e3, **dict(zip(_FIELDS, counts, strict=True)), oldest=age / 1e3, curve=curve)


def activity(directory: str | os.PathLike[str], id: str) -> Activity | None:
    """What the scheduler of region ``id`` told last; None if there is no such region, or nothing was told.

    Opens the file to read, maps nothing, takes no lock.
    """
    try:
        fd = os.open(Path(directory, PREFIX + id), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        for _ in range(20):
            page = os.pread(fd, layout.HEADER_BYTES, 0)
            found = read(page)
            # The same number before and after: nobody wrote in between.
            if found is not None and _number(page) == _number(os.pread(fd, layout.HEADER_BYTES, 0)):
                return found
            if layout.version_of(page) != layout.VERSION or not _number(page):
                return None
            time.sleep(1e-4)
        return None
    finally:
        os.close(fd)


def _number(page: bytes) -> int:
    return layout.word_of(page, layout.W_ACTIVITY) if len(page) >= layout.HEADER_BYTES else 0
