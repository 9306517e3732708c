"""One scheduler's connection to one store: what is published, what is fetched, and what happens when nobody answers.

The scheduler calls the methods from its one thread; they give jobs to the couriers and take back what became of them,
and never wait. Owns what that means for entries: pins, extents, counts, what is not to be asked for again. Every
failure of the store is a miss. Where it is unknown whether a fetch still writes, its extents are kept aside until the
transport has given up.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ecoffload.tiers.couriers import Call, Couriers, Fetch, Publication
from ecoffload.tiers.header import HEADER_BYTES
from ecoffload.tiers.interface import Answer, RemoteTier
from ecoffload.tiers.options import TierOptions

if TYPE_CHECKING:
    from ecoffload.index import Entry, EntryIndex
    from ecoffload.region import HostRegion

__all__ = ["FETCH_RESULTS", "PUBLISH_RESULTS", "TierLink"]

_log = logging.getLogger("ecoffload.tiers")

Method = TypeVar("Method", bound=Callable[..., Any])

FETCH_RESULTS = ("hits", "misses", "failed", "late", "corrupt", "no_room", "skipped")
"""What becomes of a fetch, by the names of :meth:`TierLink.stats`."""
PUBLISH_RESULTS = ("published", "already_there", "not_kept", "publish_failed", "dropped", "withheld")
"""What becomes of an entry that was committed."""
_CLOSING = 15.0  # seconds to wait for calls that are under way
_LOOK_AGAIN = 0.02  # seconds
_REMEMBERED = 1 << 16  # keys that were not there


def _contained(call: Method) -> Method:
    """A fault of the link's own turns the link off; the scheduler that called goes on as if nothing had come."""

    @functools.wraps(call)
    def contained(self: TierLink, *args: Any) -> Any:
        try:
            return call(self, *args)
        except Exception as exc:
            _log.debug("what turned the tier off", exc_info=exc)
            self.turn_off(f"{call.__name__}: {type(exc).__name__}: {exc}")
            return False

    return cast("Method", contained)


class TierLink:
    """Publishes what its scheduler saved and fetches what it misses; see :class:`TierOptions`.

    Not thread-safe: the scheduler's thread (or its caller's lock) uses it. Does nothing in a forked child.
    """

    def __init__(
        self,
        tier: RemoteTier,
        options: TierOptions | None = None,
        *,
        namespace: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self.options = options = options or TierOptions()
        self.namespace = namespace
        self.off = ""
        """Why nothing is published or fetched any more; "" while all is well."""
        self._clock = clock
        self._couriers = Couriers(tier, options, namespace, clock)
        self._breakers = self._couriers.breakers
        self._counts: Counter[str] = Counter()
        self._seconds = [0, 0.0, 0.0]  # of fetches that hit: how many, their sum, the longest
        self._durations: deque[float] = deque(maxlen=4096)  # of the latest of them, until somebody takes them
        self._queued = self._queued_bytes = 0  # publications not yet settled
        self._flights: dict[bytes, Fetch] = {}  # by key, oldest first
        self._fetching_bytes = 0  # in extents of fetches, those kept aside included
        self._open = 0  # fetches that the couriers have
        self._blamed: list[Call] = []  # calls that took too long and have perhaps not ended yet
        self._aside: deque[tuple[float, Entry]] = deque()
        self._aside_bytes = 0
        self._waiting: deque[Fetch] = deque()  # located, until fewer bytes are being fetched
        self._absent: OrderedDict[bytes, float] = OrderedDict()
        self._forgotten: set[bytes] = set()
        self._closed = False
        self._hold: Any = None

    # -- the scheduler's side: nothing here waits --------------------------------------------------------------------

    def attach(self, region: HostRegion, index: EntryIndex) -> None:
        """Begin, for the entries of ``index`` in ``region``."""
        self._region, self._index = region, index
        self._limit = int(region.capacity * self.options.share)
        self._couriers.start(region)
        _links.add(self)
        atexit.register(self.close)

    @_contained
    def offer(self, entry: Entry) -> None:
        """An entry was committed: publish it, unless it came from the store or is not to leave this process."""
        if self._closed or self.off or not self.options.publish or entry.fetched or not entry.listed:
            return
        if not entry.durable or not entry.nbytes or entry.key in self._forgotten:
            self._counts["withheld"] += 1
            return
        full = self._queued >= self.options.queue or (
            self._queued and self._queued_bytes + entry.held_bytes > self._limit
        )
        if full or not self._breakers["publish"].ready():
            self._counts["dropped"] += 1
            return
        self._index.pin(entry)  # its bytes must stay what they are until they have been sent
        self._queued += 1
        self._queued_bytes += entry.held_bytes
        self._couriers.publish(Publication(entry))

    @_contained
    def fetch(self, key: bytes) -> bool:
        """See to it that ``key``, which the region does not have, is fetched; whether it is on its way."""
        if self.coming(key):
            return True
        if self._closed or self.off or not self.options.fetch or key in self._forgotten:
            return False
        now = self._clock()
        until = self._absent.get(key)
        if until is not None:
            if now < until:
                return False
            del self._absent[key]
        if not self._breakers["fetch"].ready() or self._stuck():
            self._counts["skipped"] += 1
            return False
        if self._open + len(self._waiting) >= self.options.queue:
            self._counts["skipped"] += 1
            return False
        flight = self._flights[key] = Fetch(key, now, now + self.options.deadline)
        self._hand_over(flight)
        return True

    def coming(self, key: bytes) -> bool:
        """Whether ``key`` is on its way."""
        return key in self._flights and not self.off and not self._closed

    @property
    def news(self) -> int:
        """Changes when ``settle`` may have a fetch to take."""
        return self._couriers.news

    def await_news(self, seen: int, limit: float) -> None:
        """Wait until ``news`` is no longer ``seen``, for a caller that has nothing else to do: any thread, without the
        lock. Never long, for what is late only ``settle`` finds out."""
        self._couriers.await_news(seen, min(limit, _LOOK_AGAIN))

    def answering(self) -> bool:
        """Whether the store answers, as far as is known: only then is it worth waiting for what is on its way."""
        return not self.off and self._breakers["fetch"].state == "closed" and not self._stuck()

    def _stuck(self) -> bool:
        """Whether every thread that fetches is in a call that has taken too long: then nothing is fetched, and whoever
        waited would wait in vain, though it is one failure and not yet the breaker's number."""
        if self._blamed:
            self._blamed = [call for call in self._blamed if not call.ended]
        return len(self._blamed) >= self.options.fetchers

    def pending(self) -> bool:
        """Whether ``settle`` has something to wait for."""
        return bool(self._open or self._queued or self._aside or self._waiting)

    @_contained
    def settle(self) -> bool:
        """Take what the threads have done, and give up what took too long; True if an entry came or went."""
        published, answered = self._couriers.published, self._couriers.answered
        while published:
            self._sent(published.popleft())
        changed = False
        while answered:
            changed |= self._heard(answered.popleft())
        for _ in range(len(self._waiting)):  # in their order; who has no room yet waits again, until its deadline
            flight = self._waiting.popleft()
            changed |= self._flights.get(flight.key) is flight and self._located(flight)
        if self._flights or self._aside:
            now = self._clock()
            while self._aside and self._aside[0][0] <= now:
                self._take_back(self._aside.popleft()[1])
                changed = True
            for flight in list(self._flights.values()):
                if now < flight.deadline:
                    break
                self._give_up(flight)
                changed = True
        return changed

    @_contained
    def forget(self, key: bytes | None) -> None:
        """That key's bytes, or all, are not to be trusted: neither fetched nor published from now on.

        All: the namespace no longer says what bytes depend on, so the link does nothing any more.
        """
        if self._closed:  # in a forked child too, where the couriers' locks may be held for good
            return
        if key is None or len(self._forgotten) >= _REMEMBERED:
            what = "the entries" if key is None else f"over {_REMEMBERED} keys"
            self.turn_off(f"{what} were invalidated, and the store may hold them still")
        elif not self.off:
            self._forgotten.add(key)
        for flight in [f for f in self._flights.values() if key is None or f.key == key]:
            self._leave(flight)

    def turn_off(self, reason: str) -> None:
        """Publish and fetch nothing more. Said once."""
        if not self.off:
            self.off = reason
            if not self._closed:
                self._couriers.tell()
            _log.warning("tier %s is left out from now on: %s", self.tier.scheme, reason)

    def stats(self) -> dict[str, Any]:
        """Plain data. Bytes are entries' own; ``seconds`` are of fetches that hit, from asking to ready."""
        count, total, longest = self._seconds
        return {
            "scheme": self.tier.scheme,
            "off": self.off,
            "connected": self._couriers.connected,
            **{name: self._counts[name] for name in (*FETCH_RESULTS, *PUBLISH_RESULTS)},
            "bytes_fetched": self._counts["bytes_fetched"],
            "bytes_published": self._counts["bytes_published"],
            "fetching": len(self._flights),
            "publish_queue": self._queued,
            "aside_bytes": self._aside_bytes,
            "breakers": {name: each.state for name, each in self._breakers.items()},
            "breakers_opened": {name: each.opened for name, each in self._breakers.items()},
            "fetch_seconds": {"count": count, "sum": total, "max": longest},
        }

    def take_durations(self) -> list[float]:
        """Seconds of the fetches that hit since the last call, the latest 4096 at most."""
        taken = list(self._durations)
        self._durations.clear()
        return taken

    def close(self) -> bool:
        """Stop, and let the store go; False if a call is stuck in it, which then may still write into the region.

        Waits for calls that are under way, not for what is queued. Idempotent.
        """
        if self._closed:
            return self._hold is None
        self._closed = True
        atexit.unregister(self.close)
        _links.discard(self)
        if not self._couriers.stop(_CLOSING):
            # Its memory has to outlive it: the region stays mapped for as long as somebody holds a view.
            self._hold = self._region.view([(0, self._region.nbytes)])
            _stuck.append(self)
            _never_destroy(self.tier)
            _log.warning("tier %s: a call is stuck; the region stays mapped until the process ends", self.tier.scheme)
            return False
        self.settle()
        while self._aside:
            self._take_back(self._aside.popleft()[1])
        try:
            self.tier.close()
        except Exception as exc:  # whatever it is, the region has to be closed next
            _log.warning("tier %s: closing failed: %s", self.tier.scheme, exc)
        return True

    def _sent(self, job: Publication) -> None:
        entry = job.entry
        self._queued -= 1
        self._queued_bytes -= entry.held_bytes
        self._counts[job.outcome] += 1
        self._counts["bytes_published"] += job.bytes_sent
        self._index.unpin(entry)

    def _heard(self, flight: Fetch) -> bool:
        self._open -= 1
        entry = flight.entry
        wanted = self._flights.get(flight.key) is flight
        if entry is None:
            return wanted and self._located(flight)
        header = flight.header
        if header is not None and wanted:
            del self._flights[flight.key]
            self._fetching_bytes -= entry.held_bytes
            self._index.shorten(entry, header.nbytes, header.dtype, header.shape)
            self._index.commit(entry, header.checksum)
            took = self._clock() - flight.begun
            self._seconds = [self._seconds[0] + 1, self._seconds[1] + took, max(self._seconds[2], took)]
            self._durations.append(took)
            self._counts["hits"] += 1
            self._counts["bytes_fetched"] += entry.nbytes
            return True
        if flight.problem:
            self._counts["corrupt"] += 1
            _log.warning("tier %s: key %r is a miss: %s", self.tier.scheme, flight.key, flight.problem)
        elif wanted:
            self._counts["misses" if flight.answer is Answer.ABSENT else "failed"] += 1
        if wanted:
            self._miss(flight)
            self._leave(flight)
        if flight.answer is Answer.UNCONFIRMED:
            self._aside.append((self._clock() + self.tier.grace, entry))
        else:
            self._take_back(entry)
        return True

    def _located(self, flight: Fetch) -> bool:
        key, size = flight.key, flight.size
        if size is None or size <= HEADER_BYTES:
            absent = flight.answer is Answer.ABSENT
            self._counts["corrupt" if size is not None else "misses" if absent else "failed"] += 1
            if absent or size is not None:
                self._miss(flight)
            del self._flights[key]
            return True
        if self._index.lookup(key) is not None:  # saved here meanwhile: the bytes at hand count
            del self._flights[key]
            return True
        flying = self._fetching_bytes - self._aside_bytes
        # After a failure one at a time, until bytes have moved again: whatever fails next is kept aside as well.
        limit = self._limit if self._breakers["fetch"].sound else 0
        if flying and flying + size > limit and not self._closed:
            self._waiting.append(flight)
            return False
        if self._closed or self._aside_bytes > 2 * self._limit:
            entry = None
        else:
            # Header and all, until it is there. Not durable: it comes back from the store, and what it depends on is
            # not this process's to vouch for.
            entry = self._index.reserve(key, size, "uint8", (size,), cost=float(size - HEADER_BYTES), durable=False)
        if entry is None:
            self._counts["no_room"] += 1
            self._miss(flight)
            del self._flights[key]
            return True
        entry.fetched = True
        self._index.writing(entry)
        self._fetching_bytes += entry.held_bytes
        flight.entry, flight.answer = entry, Answer.REFUSED
        self._hand_over(flight)
        return False

    def _hand_over(self, flight: Fetch) -> None:
        self._open += 1
        self._couriers.fetch(flight)

    def _give_up(self, flight: Fetch) -> None:
        flight.late = True
        self._counts["late"] += 1
        call = flight.call  # None: it waited here, which says nothing of the store
        if call is not None and not call.blamed:
            call.blamed = True
            self._blamed.append(call)
            self._couriers.failed("fetch", f"no answer within {self.options.deadline:g} s")
        self._miss(flight)
        self._leave(flight)

    def _leave(self, flight: Fetch) -> None:
        """Nobody waits for it or finds its entry any more. Its extents are aside until its call ends, or longer."""
        del self._flights[flight.key]
        self._couriers.tell()
        if flight.entry is not None:
            self._index.unlist(flight.entry)
            self._aside_bytes += flight.entry.held_bytes

    @_contained
    def give_way(self, entry: Entry) -> None:
        """The key of this entry, which is on its way, is saved here: the bytes at hand count."""
        flight = self._flights.get(entry.key)
        if flight is not None:
            self._leave(flight)

    def _take_back(self, entry: Entry) -> None:
        """Its extents are nobody's any more."""
        self._aside_bytes -= entry.held_bytes
        self._fetching_bytes -= entry.held_bytes
        self._index.drop(entry)

    def _miss(self, flight: Fetch) -> None:
        absent = self._absent
        absent.pop(flight.key, None)  # its place is at the end
        absent[flight.key] = self._clock() + self.options.absent
        if len(absent) > _REMEMBERED:
            absent.popitem(last=False)


_links: weakref.WeakSet[TierLink] = weakref.WeakSet()
_stuck: list[TierLink] = []


def _never_destroy(tier: RemoteTier) -> None:
    """Not even when the interpreter ends: a client's destructor stops threads, and these are not there or stuck."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(tier))


def _after_fork() -> None:
    """The child has none of the threads, and must neither use nor destroy a client whose sockets are its parent's."""
    for link in list(_links):
        link._closed = True
        _never_destroy(link.tier)
    _links.clear()


os.register_at_fork(after_in_child=_after_fork)
