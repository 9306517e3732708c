"""In which order entries leave a full region: small strategy objects, chosen by name.

The index owns one policy and tells it what happens to entries; the policy answers with candidates, best victim first.
It knows keys, sizes and costs, never bytes, extents or pins, and it evicts nothing by itself. The caller skips a
candidate that is pinned:

    for key in policy.victims():
        if pinned(key):
            continue                    # parked: not offered again before policy.unpin(key)
        policy.evict(key)
        ...                             # free its extents; stop as soon as the new entry fits

A candidate that was skipped is *parked*, so that many pinned entries at the cold end are walked over once and not at
every eviction; the caller therefore says `unpin` when the last pin of an entry goes. Every operation takes constant
time (logarithmic in `gdsf`), amortised. Not thread-safe: the index's lock guards it.

Which policy: chat returns to an image after minutes, so whoever demotes new entries quickly loses them before the next
turn, while LRU lets one batch job flush everything. `auto` does neither; `benchmarks/eviction.py` prints the figures.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from typing import Any, Generic, TypeVar

from ecoffload.errors import ConfigError

__all__ = [
    "AutoPolicy",
    "EvictionPolicy",
    "FifoPolicy",
    "GdsfPolicy",
    "LruPolicy",
    "S3FifoPolicy",
    "make_policy",
    "policy_names",
]

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(ABC, Generic[K]):
    """What the index tells a policy, and what it asks. A key that is not held raises KeyError everywhere."""

    @abstractmethod
    def add(self, key: K, nbytes: int, cost: float = 0.0) -> None:
        """Take in an entry, not held so far, of `nbytes` bytes that took `cost` to make (one unit for all entries)."""

    @abstractmethod
    def touch(self, key: K) -> None:
        """The entry was used."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """Forget the entry: it was invalidated, or its save failed."""

    def evict(self, key: K) -> None:
        """Forget the entry because its room was needed; policies with a memory note it as a ghost."""
        self.remove(key)

    @abstractmethod
    def unpin(self, key: K) -> None:
        """The entry may be evicted again: offer it if it was parked. Harmless for any other entry."""

    @abstractmethod
    def victims(self) -> Iterator[K]:
        """Candidates, best victim first. The caller evicts or removes the one it was given, or skips it by going on.

        Ends when every entry has left or is parked. Between two steps only that one entry may be changed; an iteration
        that is left early changes nothing about the last candidate.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Entries held, parked ones included."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether the entry is held, parked or not."""


class _Queue(Generic[K]):
    """Keys with sizes from cold to hot; parked ones wait aside, colder than all others."""

    def __init__(self) -> None:
        self.nbytes = 0  # parked ones included
        self._keys: OrderedDict[K, int] = OrderedDict()
        self._parked: OrderedDict[K, int] = OrderedDict()

    def push(self, key: K, nbytes: int) -> None:
        self._keys[key] = nbytes
        self.nbytes += nbytes

    def pop(self, key: K) -> int:
        nbytes = self._keys.pop(key, None)
        if nbytes is None:
            nbytes = self._parked.pop(key)
        self.nbytes -= nbytes
        return nbytes

    def pop_coldest(self) -> tuple[K, int]:
        key, nbytes = self._keys.popitem(last=False)
        self.nbytes -= nbytes
        return key, nbytes

    def renew(self, key: K) -> None:
        """Make it the hottest."""
        if key in self._keys:
            self._keys.move_to_end(key)
        else:
            self._keys[key] = self._parked.pop(key)

    def unpark(self, key: K) -> None:
        if key in self._parked:
            self._keys[key] = self._parked.pop(key)
            self._keys.move_to_end(key, last=False)
        elif key not in self._keys:
            raise KeyError(key)

    def coldest(self) -> K | None:
        return next(iter(self._keys), None)

    def park(self, key: K) -> None:
        """Set the coldest aside, unless it has left."""
        if key in self._keys:
            self._parked[key] = self._keys.pop(key)

    def victims(self) -> Iterator[K]:
        """From cold to hot; one that has not left by the next step is parked."""
        keys = self._keys
        while keys:
            yield (key := next(iter(keys)))
            self.park(key)

    def __len__(self) -> int:
        return len(self._keys) + len(self._parked)

    def __contains__(self, key: object) -> bool:
        return key in self._keys or key in self._parked


class _Ghosts(Generic[K]):
    """Keys evicted of late: at most `limit` bytes' worth, and at most a few times as many as there are entries."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sizes: OrderedDict[K, int] = OrderedDict()
        self.nbytes = 0

    def add(self, key: K, nbytes: int, entries: int) -> None:
        sizes = self._sizes
        sizes[key] = nbytes
        self.nbytes += nbytes
        while self.nbytes > self._limit or len(sizes) > 4 * entries + 64:
            self.nbytes -= sizes.popitem(last=False)[1]

    def take(self, key: K) -> bool:
        """Whether the key was a ghost; it no longer is."""
        nbytes = self._sizes.pop(key, None)
        if nbytes is None:
            return False
        self.nbytes -= nbytes
        return True

    def __len__(self) -> int:
        return len(self._sizes)


class FifoPolicy(EvictionPolicy[K]):
    """Oldest entry first, used or not."""

    def __init__(self, capacity: int) -> None:
        self._queue: _Queue[K] = _Queue()

    def add(self, key: K, nbytes: int, cost: float = 0.0) -> None:
        self._queue.push(key, nbytes)

    def touch(self, key: K) -> None:
        if key not in self._queue:
            raise KeyError(key)

    def remove(self, key: K) -> None:
        self._queue.pop(key)

    def unpin(self, key: K) -> None:
        self._queue.unpark(key)

    def victims(self) -> Iterator[K]:
        return self._queue.victims()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, key: object) -> bool:
        return key in self._queue


class LruPolicy(FifoPolicy[K]):
    """Least recently used entry first."""

    def touch(self, key: K) -> None:
        self._queue.renew(key)


class S3FifoPolicy(EvictionPolicy[K]):
    """New entries pass a small FIFO queue; only those used there, or evicted of late, reach the main one.

    `small` is the small queue's share of `capacity`. An entry of the main queue goes round once for each use, at most
    three (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023; sizes in bytes here). The default
    of a half is for chat, where an image is used again after minutes; a tenth, the paper's, loses it before.
    """

    _MOST_USES = 3

    def __init__(self, capacity: int, small: float = 0.5) -> None:
        self._small_limit = _share("small", small) * capacity
        self._small: _Queue[K] = _Queue()
        self._main: _Queue[K] = _Queue()
        self._queue_of: dict[K, _Queue[K]] = {}
        self._uses: dict[K, int] = {}  # since it entered its queue, less its rounds
        self._ghosts: _Ghosts[K] = _Ghosts(capacity)

    def add(self, key: K, nbytes: int, cost: float = 0.0) -> None:
        queue = self._main if self._ghosts.take(key) else self._small
        queue.push(key, nbytes)
        self._queue_of[key] = queue
        self._uses[key] = 0

    def touch(self, key: K) -> None:
        self._uses[key] = min(self._MOST_USES, self._uses[key] + 1)

    def remove(self, key: K) -> None:
        del self._uses[key]
        self._queue_of.pop(key).pop(key)

    def evict(self, key: K) -> None:
        del self._uses[key]
        queue = self._queue_of.pop(key)
        nbytes = queue.pop(key)
        if queue is self._small:
            self._ghosts.add(key, nbytes, len(self._uses))

    def unpin(self, key: K) -> None:
        self._queue_of[key].unpark(key)

    def victims(self) -> Iterator[K]:
        small, main, uses = self._small, self._main, self._uses
        while True:
            cold, settled = small.coldest(), main.coldest()
            if cold is not None and (small.nbytes > self._small_limit or settled is None):
                if uses[cold]:
                    main.push(cold, small.pop(cold))
                    self._queue_of[cold] = main
                    uses[cold] = 0
                else:
                    yield cold
                    small.park(cold)
            elif settled is not None:
                if uses[settled]:
                    uses[settled] -= 1
                    main.renew(settled)
                else:
                    yield settled
                    main.park(settled)
            else:
                return

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, key: object) -> bool:
        return key in self._uses


class AutoPolicy(EvictionPolicy[K]):
    """LRU that a scan cannot flush, with nothing to set: a quarter of the region is kept for entries that were used
    again.

    New entries enter *probation*, an LRU queue, and victims come from its cold end. A use moves an entry to
    *protected*, another LRU queue; what overflows its quarter returns to the hot end of probation. A key that comes
    back soon after its eviction (a ghost; two regions' worth are remembered) was evicted too early: it enters protected
    at once. So entries used once, however many, pass through probation alone. A use right after the entry's own last
    one is the same use.

    Three quarters of probation is what keeps this at LRU or above wherever LRU is right (an image is used again after
    minutes, or never). Smaller shares gain more under scans and lose on plain chat.
    """

    _PROTECTED = 0.25  # of capacity
    _REMEMBERED = 2  # times capacity

    def __init__(self, capacity: int) -> None:
        self._protected_limit = self._PROTECTED * capacity
        self._probation: _Queue[K] = _Queue()
        self._protected: _Queue[K] = _Queue()
        self._queue_of: dict[K, _Queue[K]] = {}
        self._ghosts: _Ghosts[K] = _Ghosts(self._REMEMBERED * capacity)
        self._latest: K | None = None  # added or used last

    def add(self, key: K, nbytes: int, cost: float = 0.0) -> None:
        self._latest = key
        if self._ghosts.take(key):
            self._protect(key, nbytes)
        else:
            self._put_on_probation(key, nbytes)

    def touch(self, key: K) -> None:
        queue = self._queue_of[key]
        if key == self._latest:
            return
        self._latest = key
        if queue is self._protected:
            queue.renew(key)
        else:
            self._protect(key, queue.pop(key))

    def remove(self, key: K) -> None:
        self._queue_of.pop(key).pop(key)

    def evict(self, key: K) -> None:
        nbytes = self._queue_of.pop(key).pop(key)
        self._ghosts.add(key, nbytes, len(self._queue_of))

    def unpin(self, key: K) -> None:
        self._queue_of[key].unpark(key)

    def victims(self) -> Iterator[K]:
        return chain(self._probation.victims(), self._protected.victims())

    def _put_on_probation(self, key: K, nbytes: int) -> None:
        self._probation.push(key, nbytes)
        self._queue_of[key] = self._probation

    def _protect(self, key: K, nbytes: int) -> None:
        protected = self._protected
        protected.push(key, nbytes)
        self._queue_of[key] = protected
        while protected.nbytes > self._protected_limit and protected.coldest() is not None:
            self._put_on_probation(*protected.pop_coldest())

    def __len__(self) -> int:
        return len(self._queue_of)

    def __contains__(self, key: object) -> bool:
        return key in self._queue_of


class _Valued(Generic[K]):
    """An entry of `GdsfPolicy`: what one use of it is worth, how often it was used, and its place in the heap."""

    __slots__ = ("place", "priority", "uses", "worth")

    def __init__(self, worth: float, priority: float) -> None:
        self.worth = worth
        self.uses = 1
        self.priority = priority
        self.place: tuple[float, int, K] | None = None  # None: parked


class GdsfPolicy(EvictionPolicy[K]):
    """Greedy dual size frequency: lowest `clock + uses * cost / nbytes` first; the clock is the last victim's priority.

    (Cherkasova, HP Labs 1998.) Right where costs differ and popularity lasts; entries that were hot for an hour stay
    long after (agents), so it is not what `auto` does. Without costs every byte is taken to cost the same.
    """

    def __init__(self, capacity: int) -> None:
        self._clock = 0.0
        self._entries: dict[K, _Valued[K]] = {}
        # One place an entry, (priority when placed, serial, key). A use only raises the priority, so a place too low is
        # found out, and mended, when it comes to the top.
        self._heap: list[tuple[float, int, K]] = []
        self._serial = 0

    def add(self, key: K, nbytes: int, cost: float = 0.0) -> None:
        worth = cost / max(nbytes, 1) if cost else 1.0
        entry: _Valued[K] = _Valued(worth, self._clock + worth)
        self._entries[key] = entry
        self._place(key, entry)

    def touch(self, key: K) -> None:
        entry = self._entries[key]
        entry.uses += 1
        entry.priority = self._clock + entry.uses * entry.worth

    def remove(self, key: K) -> None:
        del self._entries[key]
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [place for place in self._heap if self._is_current(place)]
            heapq.heapify(self._heap)

    def evict(self, key: K) -> None:
        self._clock = max(self._clock, self._entries[key].priority)
        self.remove(key)

    def unpin(self, key: K) -> None:
        entry = self._entries[key]
        if entry.place is None:
            self._place(key, entry)

    def victims(self) -> Iterator[K]:
        while self._heap:
            place = self._heap[0]
            if not self._is_current(place):
                heapq.heappop(self._heap)
                continue
            key = place[2]
            entry = self._entries[key]
            if entry.priority > place[0]:
                heapq.heappop(self._heap)
                self._place(key, entry)
                continue
            yield key
            if self._is_current(place):
                heapq.heappop(self._heap)
                entry.place = None

    def _place(self, key: K, entry: _Valued[K]) -> None:
        self._serial += 1
        entry.place = (entry.priority, self._serial, key)
        heapq.heappush(self._heap, entry.place)

    def _is_current(self, place: tuple[float, int, K]) -> bool:
        entry = self._entries.get(place[2])
        return entry is not None and entry.place is place

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries


_POLICIES: dict[str, Callable[..., EvictionPolicy[Any]]] = {
    "fifo": FifoPolicy,
    "lru": LruPolicy,
    "s3-fifo": S3FifoPolicy,
    "gdsf": GdsfPolicy,
    "auto": AutoPolicy,
}


def policy_names() -> tuple[str, ...]:
    """The names that `make_policy` knows."""
    return tuple(_POLICIES)


def make_policy(name: str, capacity: int, **params: Any) -> EvictionPolicy[Any]:
    """A new policy for a region of `capacity` bytes; `params` are its own (`s3-fifo`: `small`, a share between 0 and
    1).

    ConfigError for an unknown name (it lists the known ones) or parameter, and for a value out of range.
    """
    factory = _POLICIES.get(name)
    if factory is None:
        known = ", ".join(_POLICIES)
        raise ConfigError(f"unknown eviction policy {name!r}; known are {known}", option="policy", value=name)
    try:
        return factory(capacity, **params)
    except TypeError as error:
        raise ConfigError(f"eviction policy {name!r}: {error}", option="policy", value=params) from error


def _share(option: str, value: float) -> float:
    if not 0 < value < 1:
        raise ConfigError(
            f"{option} is {value}; it is a share of the region, between 0 and 1", option=option, value=value
        )
    return value
