"""The threads that call a store for one link: jobs go in, and come out again with what became of them.

Owns the tier's calls, the breakers that forgo them, the memory for headers of what is published and all checking of
what arrived. Sees memory and names, never the index: what an outcome means for an entry is the link's. Only the link
uses it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from ecoffload.checksums import checksum_of
from ecoffload.errors import EcoffloadError
from ecoffload.tiers.breaker import Breaker
from ecoffload.tiers.header import HEADER_BYTES, Header, object_name, pack, unpack
from ecoffload.tiers.interface import Answer, RemoteTier, TierObject
from ecoffload.tiers.options import TierOptions

if TYPE_CHECKING:
    from ecoffload.index import Entry
    from ecoffload.region import HostRegion

__all__ = ["Call", "Couriers", "Fetch", "Publication"]

_log = logging.getLogger("ecoffload.tiers")

T = TypeVar("T")

BATCH = 16
"""Objects of one call at most."""


class Publication:
    """An entry on its way out, pinned by the link. ``outcome``: one of the names that its counts have."""

    __slots__ = ("bytes_sent", "entry", "outcome")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.outcome = "dropped"
        self.bytes_sent = 0


class Call:
    """A call of the store's that may serve several fetches. ``blamed``: the breaker was told that it does not end."""

    __slots__ = ("blamed", "ended")

    def __init__(self) -> None:
        self.blamed = False
        self.ended = False


class Fetch:
    """A key on its way in: first located (``entry`` None gives ``size``), then fetched into the extents of ``entry``,
    which have room for the whole object: the entry's bytes and the header behind them.

    ``answer`` REFUSED stands for whatever left the extents alone, a call that was never made included. ``header``: of
    bytes that are all there and right. ``problem``: why bytes that came are not.
    """

    __slots__ = ("answer", "begun", "call", "deadline", "entry", "header", "key", "late", "problem", "size")

    def __init__(self, key: bytes, begun: float, deadline: float) -> None:
        self.key = key
        self.begun = begun
        self.deadline = deadline
        self.entry: Entry | None = None
        self.size: int | None = None
        self.answer = Answer.REFUSED
        self.header: Header | None = None
        self.problem = ""
        self.call: Call | None = None
        """The call of the store's that is under way for it."""
        self.late = False
        """Set by the link, which has given it up: no call is to be made for it any more."""


class Couriers:
    """Some threads that publish and some that fetch. ``publish`` and ``fetch`` never wait; nor do the deques
    ``published`` and ``answered``, in which every job comes back exactly once."""

    def __init__(
        self, tier: RemoteTier, options: TierOptions, namespace: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.breakers = {"publish": Breaker(clock=clock), "fetch": Breaker(clock=clock)}
        self.published: deque[Publication] = deque()
        self.answered: deque[Fetch] = deque()
        self.news = 0
        """Counts up when something has been added to ``answered``, and with ``tell``."""
        self._news = threading.Condition()
        self.connected = False
        self.threads: list[threading.Thread] = []
        self._tier = tier
        self._options = options
        self._namespace = namespace
        self._clock = clock
        self._outgoing: SimpleQueue[Publication | None] = SimpleQueue()
        self._incoming: SimpleQueue[Fetch | None] = SimpleQueue()
        self._connecting = threading.Lock()
        self._stopping = False

    def start(self, region: HostRegion) -> None:
        """Begin, with the entries' bytes in ``region``, which has to outlive the threads. The first thread connects at
        once: what that costs is better paid before an engine's first step than in it."""
        options = self._options
        publishers = options.publishers if options.publish else 0
        work = [self._publish_all] * publishers + [self._fetch_all] * (options.fetchers if options.fetch else 0)
        # What is published has its header in memory of its own, which the store is told of as well: BATCH slots for
        # each thread. (What is fetched has room for one behind it, see Fetch.)
        self._headers = mmap.mmap(-1, max(1, publishers) * BATCH * HEADER_BYTES)
        self._header_base = ctypes.addressof(ctypes.c_char.from_buffer(self._headers))
        self._region = region
        for number, run in enumerate(work):
            name = f"ecoffload-tier-{number}"
            self.threads.append(threading.Thread(target=run, args=(number,), name=name, daemon=True))
            self.threads[-1].start()

    def publish(self, job: Publication) -> None:
        """Send it, some time."""
        self._outgoing.put(job)

    def fetch(self, job: Fetch) -> None:
        """Locate it, or fetch it if it has an entry, some time."""
        self._incoming.put(job)

    def tell(self) -> None:
        """Wake everybody who waits for news."""
        with self._news:
            self.news += 1
            self._news.notify_all()

    def await_news(self, seen: int, limit: float) -> bool:
        """Wait until ``news`` is no longer ``seen``, ``limit`` seconds at most; whether it is not. Any thread, and
        several at once."""
        with self._news:
            return self._news.wait_for(lambda: self.news != seen, limit)

    def failed(self, kind: str, why: str) -> None:
        """Tell the breaker, and the log if that opened it."""
        if self.breakers[kind].failure():
            _log.warning("tier %s: no more %s for a while: %s", self._tier.scheme, kind, why)

    def stop(self, limit: float) -> bool:
        """Make no further calls, and wait ``limit`` seconds at most for those under way; False if one is stuck."""
        self._stopping = True
        for _ in self.threads:  # one for each thread of either kind, and some to spare
            self._outgoing.put(None)
            self._incoming.put(None)
        end = time.monotonic() + limit
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    # -- what the threads do -----------------------------------------------------------------------------------------

    def _connect(self) -> None:
        with self._connecting:
            if self._stopping:  # or each thread would try in its turn, and closing wait for all of them
                raise ConnectionError("it is being closed")
            if not self.connected:
                region, headers = self._region, (self._header_base, len(self._headers))
                self._tier.connect(((region.address, region.nbytes), headers))
                self.connected = True

    def _ask(self, kind: str, call: Callable[[], list[T]], count: int, sane: Callable[[T], bool]) -> list[T] | None:
        """The store's ``count`` answers, all ``sane``; None, told to the breaker, if it does not give them."""
        try:
            self._connect()
            answers = call()
            if len(answers) != count:
                raise ValueError(f"{len(answers)} answers for {count} objects")
            for each in answers:
                if not sane(each):
                    raise ValueError(f"{each!r} is no answer that a tier may give")
        except BaseException as exc:  # a client may raise anything at all, a panic of its Rust included: it is a miss
            self.failed(kind, f"{type(exc).__name__}: {exc}")
            return None
        return answers

    def _moved(self, kind: str, answers: list[Answer]) -> None:
        """Tell the breaker how a call that should move bytes has ended."""
        if Answer.UNCONFIRMED in answers:
            self.failed(kind, "unconfirmed")
        else:
            self.breakers[kind].success()

    def _parts(self, entry: Entry, start: int = 0) -> list[tuple[int, int]]:
        """(address, bytes) of the entry's bytes from ``start`` on, in their order."""
        parts, left = [], entry.nbytes
        for offset, length in entry.extents:
            length = min(length, left)
            left -= length
            if start < length:
                parts.append((self._region.address + offset + start, length - start))
            start = max(0, start - length)
        return parts

    def _publish_all(self, number: int) -> None:
        if not number:
            self._ask("publish", list, 0, _is_answer)
        while jobs := _take(self._outgoing):
            try:
                if not self._stopping and self.breakers["publish"].allow():
                    self._publish(jobs, number * BATCH)
            except Exception as exc:  # the thread has to live on
                self.failed("publish", repr(exc))
            finally:
                self.published.extend(jobs)

    def _publish(self, jobs: list[Publication], slots: int) -> None:
        names = [object_name(self._namespace, job.entry.key) for job in jobs]
        there = self._ask("publish", lambda: self._tier.exists(names), len(names), _is_size)
        if there is None:
            for job in jobs:
                job.outcome = "publish_failed"
            return
        self.breakers["publish"].answered()
        new: list[tuple[Publication, TierObject]] = []
        for i, (job, size) in enumerate(zip(jobs, there, strict=True)):
            entry = job.entry
            if not entry.listed:  # invalidated since: nobody is to have these bytes
                job.outcome = "withheld"
            elif size is not None:
                job.outcome = "already_there"
            else:
                checksum = entry.checksum
                if checksum is None:
                    checksum = checksum_of(self._region, entry.extents, entry.nbytes)
                try:
                    header = pack(self._namespace, entry.key, Header(entry.dtype, entry.shape, entry.nbytes, checksum))
                except EcoffloadError as exc:
                    job.outcome = "withheld"
                    _log.warning("not published: %s", exc)
                    continue
                at = (slots + i) * HEADER_BYTES
                self._headers[at : at + HEADER_BYTES] = header
                parts = (*self._parts(entry), (self._header_base + at, HEADER_BYTES))
                new.append((job, TierObject(names[i], parts)))
        if not new or self._stopping:
            return
        answers = self._ask("publish", lambda: self._tier.publish([each for _, each in new]), len(new), _is_answer)
        if answers is None:
            answers = [Answer.UNCONFIRMED] * len(new)
        else:
            self._moved("publish", answers)
        for (job, _), answer in zip(new, answers, strict=True):
            if answer is Answer.DONE:
                job.outcome, job.bytes_sent = "published", job.entry.nbytes
            else:
                job.outcome = "publish_failed" if answer is Answer.UNCONFIRMED else "not_kept"

    def _fetch_all(self, number: int) -> None:
        if not number:
            self._ask("fetch", list, 0, _is_answer)
        while jobs := _take(self._incoming):
            self._in_time([job for job in jobs if job.entry is None], self._locate)
            self._in_time([job for job in jobs if job.entry is not None], self._load)

    def _in_time(self, jobs: list[Fetch], work: Callable[[list[Fetch]], None]) -> None:
        """Do it for those that somebody still waits for, and answer all."""
        try:
            now = self._clock()
            due = [job for job in jobs if not job.late and now < job.deadline]
            if due and not self._stopping:
                work(due)
        except Exception as exc:  # the thread has to live on, and whoever waits has to hear
            self.failed("fetch", repr(exc))
        finally:
            for job in jobs:
                if job.call is not None:
                    job.call.ended = True
                    job.call = None
            if jobs:
                self.answered.extend(jobs)
                self.tell()

    def _locate(self, jobs: list[Fetch]) -> None:
        if not self.breakers["fetch"].allow():
            return
        names = [object_name(self._namespace, job.key) for job in jobs]
        call = Call()
        for job in jobs:
            job.call = call
        sizes = self._ask("fetch", lambda: self._tier.exists(names), len(names), _is_size)
        if sizes is None:
            return
        self.breakers["fetch"].answered()
        for job, size in zip(jobs, sizes, strict=True):
            job.size = size
            job.answer = Answer.ABSENT if size is None else Answer.DONE

    def _load(self, jobs: list[Fetch]) -> None:
        objects = [
            TierObject(object_name(self._namespace, job.key), tuple(self._parts(job.entry)))
            for job in jobs
            if job.entry is not None
        ]
        call = Call()
        for job in jobs:
            job.call, job.answer = call, Answer.UNCONFIRMED
        answers = self._ask("fetch", lambda: self._tier.fetch_many(objects), len(objects), _is_answer)
        if answers is None:
            return
        self._moved("fetch", answers)
        for job, answer in zip(jobs, answers, strict=True):
            job.answer = answer
            if answer is Answer.DONE and job.entry is not None:
                self._check(job, job.entry)

    def _check(self, job: Fetch, entry: Entry) -> None:
        """Whether what lies in the entry's extents, from this call or from before, is what was once published."""
        nbytes = entry.nbytes - HEADER_BYTES
        data = b"".join(ctypes.string_at(*part) for part in self._parts(entry, nbytes))
        header = unpack(self._namespace, job.key, nbytes, data)
        if isinstance(header, str):
            job.problem = header
        elif checksum_of(self._region, entry.extents, nbytes) != header.checksum:
            job.problem = "the checksum of its bytes is wrong"
        else:
            job.header = header


def _is_answer(answer: object) -> bool:
    return isinstance(answer, Answer)


def _is_size(size: object) -> bool:
    return size is None or (isinstance(size, int) and not isinstance(size, bool) and size >= 0)


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
