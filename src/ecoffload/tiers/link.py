"""One scheduler's connection to one store: what is published, what is fetched, and what happens when nobody answers.

The scheduler calls the methods from its one thread; they take queue entries and give queue entries, and never wait.
The store is called from threads that this link owns: some publish, some fetch. They see memory and names,
never the index. Every failure of the store is a miss. Where it is unknown whether a fetch still writes, its extents
are kept aside until the transport has given up, long after its own limit.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import mmap
import os
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ecoffload.checksums import checksum_of
from ecoffload.errors import EcoffloadError
from ecoffload.tiers.breaker import Breaker
from ecoffload.tiers.header import HEADER_BYTES, Header, object_name, pack, unpack
from ecoffload.tiers.interface import Answer, RemoteTier, TierObject
from ecoffload.tiers.options import TierOptions

if TYPE_CHECKING:
    from ecoffload.index import Entry, EntryIndex
    from ecoffload.region import HostRegion

__all__ = ["FETCH_RESULTS", "PUBLISH_RESULTS", "TierLink"]

_log = logging.getLogger("ecoffload.tiers")

T = TypeVar("T")
Call = TypeVar("Call", bound=Callable[..., Any])

BATCH = 16
"""Objects of one call at most."""
GRACE = 10.0
"""Seconds that an unconfirmed fetch's extents are kept aside after its call has returned: no transport writes on after
its connection has made no progress for so long."""
FETCH_RESULTS = ("hits", "misses", "failed", "late", "corrupt", "no_room", "skipped")
"""What becomes of a fetch, by the names of :meth:`TierLink.stats`."""
PUBLISH_RESULTS = ("published", "already_there", "not_kept", "publish_failed", "dropped", "withheld")
"""What becomes of an entry that was committed."""
_CLOSING = 15.0  # seconds to wait for calls that are under way
_REMEMBERED = 1 << 16  # keys that were not there


def _contained(call: Call) -> Call:
    """A fault of the link's own turns the link off; the scheduler that called goes on as if nothing had come."""

    @functools.wraps(call)
    def contained(self: TierLink, *args: Any) -> Any:
        try:
            return call(self, *args)
        except Exception as exc:
            _log.debug("what turned the tier off", exc_info=exc)
            self.turn_off(f"{call.__name__}: {type(exc).__name__}: {exc}")
            return False

    return cast("Call", contained)


class _Publication:
    """An entry on its way out, pinned."""

    __slots__ = ("bytes_sent", "entry", "outcome")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.outcome = "dropped"
        self.bytes_sent = 0


class _Fetch:
    """A key on its way in: first located (``entry`` None), then fetched into the extents of ``entry``."""

    __slots__ = ("answer", "begun", "deadline", "entry", "header", "key", "late", "problem", "size")

    def __init__(self, key: bytes, begun: float, deadline: float) -> None:
        self.key = key
        self.begun = begun
        self.deadline = deadline
        self.entry: Entry | None = None
        self.size: int | None = None
        self.answer = Answer.REFUSED
        self.header: Header | None = None
        self.problem = ""
        self.late = False


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
        self._breakers = {"publish": Breaker(clock=clock), "fetch": Breaker(clock=clock)}
        self._counts: Counter[str] = Counter()
        self._seconds = [0, 0.0, 0.0]  # of fetches that hit: how many, their sum, the longest
        self._durations: deque[float] = deque(maxlen=4096)  # of the latest of them, until somebody takes them
        self._outgoing: SimpleQueue[_Publication | None] = SimpleQueue()
        self._incoming: SimpleQueue[_Fetch | None] = SimpleQueue()
        self._published: deque[_Publication] = deque()
        self._answered: deque[_Fetch] = deque()
        self._queued = self._queued_bytes = 0  # publications not yet settled
        self._flights: dict[bytes, _Fetch] = {}  # by key, oldest first
        self._fetching_bytes = 0  # in extents of fetches, those kept aside included
        self._open = 0  # fetches that a thread has, or will take
        self._aside: deque[tuple[float, Entry]] = deque()
        self._aside_bytes = 0
        self._waiting: deque[_Fetch] = deque()  # located, until fewer bytes are being fetched
        self._absent: OrderedDict[bytes, float] = OrderedDict()
        self._forgotten: set[bytes] = set()
        self._threads: list[threading.Thread] = []
        self._connected = False
        self._connecting = threading.Lock()
        self._closing = False
        self._closed = False
        self._hold: Any = None

    # -- the scheduler's side: nothing here waits --------------------------------------------------------------------

    def attach(self, region: HostRegion, index: EntryIndex) -> None:
        """Begin, for the entries of ``index`` in ``region``."""
        self._region, self._index = region, index
        self._limit = int(region.capacity * self.options.share)
        workers: list[Callable[[int], None]] = []
        if self.options.publish:
            workers += [self._publish_all] * self.options.publishers
        if self.options.fetch:
            workers += [self._fetch_all] * self.options.fetchers
        # Headers lie in memory of their own, which the store is told of as well: BATCH slots for each thread.
        self._headers = mmap.mmap(-1, max(1, len(workers)) * BATCH * HEADER_BYTES)
        self._header_base = ctypes.addressof(ctypes.c_char.from_buffer(self._headers))
        self._memory = ((region.address, region.nbytes), (self._header_base, len(self._headers)))
        for number, work in enumerate(workers):
            thread = threading.Thread(target=work, args=(number * BATCH,), name=f"ecoffload-tier-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()
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
        self._outgoing.put(_Publication(entry))

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
        if not self._breakers["fetch"].ready():
            self._counts["skipped"] += 1
            return False
        if self._open >= self.options.queue:
            self._counts["skipped"] += 1
            return False
        flight = self._flights[key] = _Fetch(key, now, now + self.options.deadline)
        self._hand_over(flight)
        return True

    def coming(self, key: bytes) -> bool:
        """Whether ``key`` is on its way."""
        return key in self._flights and not self.off

    def answering(self) -> bool:
        """Whether the store answers, as far as is known: only then is it worth waiting for what is on its way."""
        return not self.off and self._breakers["fetch"].state == "closed"

    def pending(self) -> bool:
        """Whether ``settle`` has something to wait for."""
        return bool(self._open or self._queued or self._aside or self._waiting)

    @_contained
    def settle(self) -> bool:
        """Take what the threads have done, and give up what took too long; True if an entry came or went."""
        while self._published:
            self._sent(self._published.popleft())
        changed = False
        while self._answered:
            changed |= self._heard(self._answered.popleft())
        for _ in range(len(self._waiting)):  # in their order; who has no room yet waits again, until its deadline
            flight = self._waiting.popleft()
            changed |= self._flights.get(flight.key) is flight and self._located(flight)
        if self._flights or self._aside:
            now = self._clock()
            while self._aside and self._aside[0][0] <= now:
                self._take_back()
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
        if key is None or len(self._forgotten) >= _REMEMBERED:
            self.turn_off("the entries were invalidated, and the store may hold them still")
        elif not self.off:
            self._forgotten.add(key)
        for flight in [f for f in self._flights.values() if key is None or f.key == key]:
            self._leave(flight)

    def turn_off(self, reason: str) -> None:
        """Publish and fetch nothing more. Said once."""
        if not self.off:
            self.off = reason
            _log.warning("tier %s is left out from now on: %s", self.tier.scheme, reason)

    def stats(self) -> dict[str, Any]:
        """Plain data. Bytes are entries' own; ``seconds`` are of fetches that hit, from asking to ready."""
        count, total, longest = self._seconds
        return {
            "scheme": self.tier.scheme,
            "off": self.off,
            "connected": self._connected,
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
        self._closed = self._closing = True
        atexit.unregister(self.close)
        _links.discard(self)
        for _ in self._threads:  # one for each thread of either kind, and some to spare
            self._outgoing.put(None)
            self._incoming.put(None)
        end = time.monotonic() + _CLOSING
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            # Its memory has to outlive it: the region stays mapped for as long as somebody holds a view.
            self._hold = self._region.view([(0, self._region.nbytes)])
            _stuck.append(self)
            _log.warning("tier %s: a call is stuck; the region stays mapped until the process ends", self.tier.scheme)
            return False
        self.settle()
        for flight in list(self._flights.values()):
            self._leave(flight)
            if flight.entry is not None:
                self._drop(flight.entry)
        while self._aside:
            self._take_back()
        try:
            self.tier.close()
        except Exception as exc:  # whatever it is, the region has to be closed next
            _log.warning("tier %s: closing failed: %s", self.tier.scheme, exc)
        return True

    def _sent(self, job: _Publication) -> None:
        entry = job.entry
        self._queued -= 1
        self._queued_bytes -= entry.held_bytes
        self._counts[job.outcome] += 1
        self._counts["bytes_published"] += job.bytes_sent
        self._index.unpin(entry)

    def _heard(self, flight: _Fetch) -> bool:
        self._open -= 1
        entry = flight.entry
        if entry is None:
            return self._flights.get(flight.key) is flight and self._located(flight)
        wanted = entry.listed and self._flights.get(flight.key) is flight
        if flight.answer is Answer.UNCONFIRMED:
            self._counts["failed"] += wanted
            self._miss(flight)
            self._leave(flight)
            self._aside.append((self._clock() + GRACE, entry))
            self._aside_bytes += entry.held_bytes
            return True
        header = flight.header
        if header is not None and wanted:
            del self._flights[flight.key]
            entry.dtype, entry.shape = header.dtype, header.shape
            self._fetching_bytes -= entry.held_bytes
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
        self._miss(flight)
        self._leave(flight)
        self._drop(entry)
        return True

    def _located(self, flight: _Fetch) -> bool:
        key = flight.key
        if flight.size is None or flight.size <= HEADER_BYTES:
            absent = flight.answer is Answer.ABSENT
            self._counts["corrupt" if flight.size is not None else "misses" if absent else "failed"] += 1
            if absent or flight.size is not None:
                self._miss(flight)
            del self._flights[key]
            return True
        nbytes = flight.size - HEADER_BYTES
        flying = self._fetching_bytes - self._aside_bytes
        if flying and flying + nbytes > self._limit and not self._closing:
            self._waiting.append(flight)
            return False
        if self._closing or self._aside_bytes > self._limit:
            entry = None
        else:
            # Not durable: it comes back from the store, and what it depends on is not this process's to vouch for.
            entry = self._index.reserve(key, nbytes, "uint8", (nbytes,), cost=float(nbytes), durable=False)
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

    def _hand_over(self, flight: _Fetch) -> None:
        self._open += 1
        self._incoming.put(flight)

    def _give_up(self, flight: _Fetch) -> None:
        flight.late = True
        self._counts["late"] += 1
        self._failed("fetch", f"no answer within {self.options.deadline:g} s")
        self._miss(flight)
        self._leave(flight)

    def _leave(self, flight: _Fetch) -> None:
        """Nobody waits for it or finds its entry any more. Its extents stay taken until its call has ended."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        if flight.entry is not None:
            self._index.unlist(flight.entry)

    @_contained
    def give_way(self, entry: Entry) -> None:
        """The key of this entry, which is on its way, is saved here: the bytes at hand count."""
        flight = self._flights.get(entry.key)
        if flight is not None:
            self._leave(flight)

    def _take_back(self) -> None:
        entry = self._aside.popleft()[1]
        self._aside_bytes -= entry.held_bytes
        self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        self._fetching_bytes -= entry.held_bytes
        self._index.drop(entry)

    def _miss(self, flight: _Fetch) -> None:
        absent = self._absent
        absent[flight.key] = self._clock() + self.options.absent
        if len(absent) > _REMEMBERED:
            absent.popitem(last=False)

    # -- the threads' side: no index here ----------------------------------------------------------------------------

    def _failed(self, kind: str, why: str) -> None:
        if self._breakers[kind].failure():
            _log.warning("tier %s: no more %s for a while: %s", self.tier.scheme, kind, why)

    def _ask(self, kind: str, call: Callable[[], T]) -> T | None:
        """What the store answers; None, told to the breaker, if it does not."""
        try:
            if not self._connected:
                with self._connecting:
                    if not self._connected:
                        self.tier.connect(self._memory)
                        self._connected = True
            return call()
        except Exception as exc:  # a store's client may raise anything at all; no answer is a miss
            self._failed(kind, f"{type(exc).__name__}: {exc}")
            return None

    def _slot(self, number: int) -> tuple[int, memoryview]:
        at = number * HEADER_BYTES
        return self._header_base + at, memoryview(self._headers)[at : at + HEADER_BYTES]

    def _parts(self, slot: int, entry: Entry) -> tuple[tuple[int, int], ...]:
        parts, left = [(self._header_base + slot * HEADER_BYTES, HEADER_BYTES)], entry.nbytes
        for offset, length in entry.extents:
            parts.append((self._region.address + offset, min(length, left)))
            left -= parts[-1][1]
        return tuple(parts)

    def _publish_all(self, slots: int) -> None:
        while jobs := _take(self._outgoing):
            try:
                if not self._closing and self._breakers["publish"].allow():
                    self._publish(jobs, slots)
            except Exception as exc:  # likewise
                self._failed("publish", repr(exc))
            finally:
                self._published.extend(jobs)

    def _publish(self, jobs: list[_Publication], slots: int) -> None:
        names = [object_name(self.namespace, job.entry.key) for job in jobs]
        there = self._ask("publish", lambda: self.tier.exists(names))
        if there is None:
            for job in jobs:
                job.outcome = "publish_failed"
            return
        new: list[tuple[_Publication, TierObject]] = []
        for i, (job, name, size) in enumerate(zip(jobs, names, there, strict=True)):
            if size is not None:
                job.outcome = "already_there"
                continue
            entry = job.entry
            checksum = entry.checksum
            if checksum is None:
                checksum = checksum_of(self._region, entry.extents, entry.nbytes)
            header = Header(entry.dtype, entry.shape, entry.nbytes, checksum)
            try:
                data = pack(self.namespace, entry.key, header)
            except EcoffloadError as exc:
                _log.warning("not published: %s", exc)
                continue
            self._slot(slots + i)[1][:] = data
            new.append((job, TierObject(name, self._parts(slots + i, entry))))
        self._breakers["publish"].answered()
        if not new:
            return
        answers = self._ask("publish", lambda: self.tier.publish([each for _, each in new]))
        if answers is not None:
            if Answer.UNCONFIRMED in answers:
                self._failed("publish", "unconfirmed")
            else:
                self._breakers["publish"].success()
        for i, (job, _) in enumerate(new):
            answer = Answer.UNCONFIRMED if answers is None else answers[i]
            if answer is Answer.DONE:
                job.outcome, job.bytes_sent = "published", job.entry.nbytes
            else:
                job.outcome = "publish_failed" if answer is Answer.UNCONFIRMED else "not_kept"

    def _fetch_all(self, slots: int) -> None:
        while jobs := _take(self._incoming):
            try:
                self._locate([job for job in jobs if job.entry is None])
                self._load([job for job in jobs if job.entry is not None], slots)
            except Exception as exc:  # the thread has to live on, and whoever waits has to hear
                self._failed("fetch", repr(exc))
            finally:
                self._answered.extend(jobs)

    def _locate(self, jobs: list[_Fetch]) -> None:
        now = self._clock()
        jobs = [job for job in jobs if not job.late and now < job.deadline]
        if not jobs or self._closing or not self._breakers["fetch"].allow():
            return
        names = [object_name(self.namespace, job.key) for job in jobs]
        sizes = self._ask("fetch", lambda: self.tier.exists(names))
        if sizes is None:
            return
        self._breakers["fetch"].answered()
        for job, size in zip(jobs, sizes, strict=True):
            job.size = size
            job.answer = Answer.ABSENT if size is None else Answer.DONE

    def _load(self, jobs: list[_Fetch], slots: int) -> None:
        now = self._clock()
        jobs = [job for job in jobs if not job.late and now < job.deadline]
        if not jobs or self._closing:
            return
        objects = []
        for i, job in enumerate(jobs):
            entry = job.entry
            if entry is None:
                continue
            job.answer = Answer.UNCONFIRMED
            self._slot(slots + i)[1][:] = bytes(HEADER_BYTES)
            objects.append(TierObject(object_name(self.namespace, job.key), self._parts(slots + i, entry)))
        answers = self._ask("fetch", lambda: self.tier.fetch_many(objects))
        if answers is None:
            return
        if Answer.UNCONFIRMED in answers:
            self._failed("fetch", "unconfirmed")
        else:
            self._breakers["fetch"].success()
        for i, (job, answer) in enumerate(zip(jobs, answers, strict=True)):
            job.answer = answer
            entry = job.entry
            if answer is not Answer.DONE or entry is None:
                continue
            header = unpack(self.namespace, job.key, entry.nbytes, bytes(self._slot(slots + i)[1]))
            if isinstance(header, str):
                job.problem = header
            elif checksum_of(self._region, entry.extents, entry.nbytes) != header.checksum:
                job.problem = "the checksum of its bytes is wrong"
            else:
                job.header = header


def _take(queue: SimpleQueue[T | None]) -> list[T]:
    """What waits in the queue, up to a batch, waiting for the first; empty at the end. One None ends one thread."""
    jobs: list[T] = []
    job = queue.get()
    while job is not None:
        jobs.append(job)
        if len(jobs) == BATCH:
            return jobs
        try:
            job = queue.get_nowait()
        except Empty:
            return jobs
    if jobs:
        queue.put(None)
    return jobs


_links: weakref.WeakSet[TierLink] = weakref.WeakSet()
_stuck: list[TierLink] = []


def _after_fork() -> None:
    """The child has none of the threads, and must neither use nor destroy a client whose sockets are its parent's."""
    for link in list(_links):
        link._closed = link._closing = True
        link._connecting = threading.Lock()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(link.tier))
    _links.clear()


os.register_at_fork(after_in_child=_after_fork)
