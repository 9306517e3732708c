"""The host region: memory in a tmpfs that several processes map, with what they must know of each other in its header.

Owns a region's file from creation to unlinking, and one process's mapping of it. Scheduler and worker stand on it; it
knows slots, journal and layout below it, and nothing of entries, devices or plans. It never waits without a limit and
never trusts what it reads.

Life and death go by locks, which the kernel drops when their holder dies, however it dies:

* whoever maps the region holds the LIFE byte shared, on a descriptor of its own, for as long as it maps;
* creating, taking over and unlinking need it exclusively, and then the file at the path must still be the locked one;
* beside it, whoever maps the region holds the byte of an *era*, shared. A scheduler that loses sight of writers (it
  begins, or a worker dies) begins a new era; what they may still write stays unused until the old eras have no holders.

So a file that anybody maps is never touched, and a late close never unlinks a successor's file.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from ecoffload import hostmem, layout, options
from ecoffload.errors import CacheClosed, RegionError
from ecoffload.journal import RECORD_BYTES, Journal
from ecoffload.opening import Opened, Opener
from ecoffload.regions import is_at
from ecoffload.slots import Failure, LostSlot, SlotBoard, SlotTable, WorkerSlot

__all__ = ["Failure", "HostRegion", "LostSlot", "WorkerSlot"]

_log = logging.getLogger(__name__)
_NUMBER = (1 << 62) - 1


class HostRegion:
    """One process's mapping of a region. Make it with `HostRegion.open`; close it, or leave it with the process.

    Attributes: `id`, `path`; `address` of the data area, page aligned; `capacity` usable bytes, whole granules;
    `nbytes` mapped data bytes, whole pages; `granule`; `namespace`; `chunk_edges`, the data offsets at which
    registrations start and which no extent may cross; `start`: "created", "joined", "warm" (taken over with its
    entries) or "cold" (taken over without), and `start_reason`, a sentence on it; `era`, see `begin_era`.
    """

    id: str
    path: Path
    address: int
    capacity: int
    nbytes: int
    granule: int
    namespace: str
    warm: bool
    chunk_edges: tuple[int, ...]
    start: str
    start_reason: str
    era: int

    @classmethod
    def open(
        cls,
        id: str | None = None,
        *,
        capacity: int,
        granule: int,
        namespace: str = "",
        directory: str | os.PathLike[str] = "/dev/shm",
        create: bool = True,
        warm: bool = False,
        timeout: float = 30.0,
        slots: int = 64,
        chunk_bytes: int = 64 << 30,
        numa_node: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        scrub_on_close: bool = False,
        reclaim_after: float = 3600.0,
        takeover_limit: tuple[int, float] = (3, 600.0),
    ) -> Self:
        """Create the region `id`, take over one that nobody maps any more, or join the one that others map.

        * `id`: letters, digits, "-" and "_", at most 64. None: one of its own, or with `warm` one that the namespace
          gives.
        * `capacity`, `granule`: bytes. All processes must ask for the same, and for the same `namespace`, `warm`,
          `slots` and `chunk_bytes` (the most bytes of one registration).
        * `create=False`: only join; wait until somebody else has made the region.
        * `timeout`: seconds to wait for another process that should create it, or whose creating makes no progress.
        * `progress(done, total)`: bytes populated, called while creating.
        * `numa_node`: where its memory shall lie. `scrub_on_close`: the last to close overwrites it with zeros.
        * `reclaim_after`: seconds after which another namespace's ownerless region may be unlinked for this one.
        * `takeover_limit`: so many takeovers within so many seconds make a warm start cold.

        Raises ConfigError for options that make no region, NoSpace where tmpfs or cgroup are too small (nothing is
        left behind), RegionError for anything else that keeps it from being opened.
        """
        opener = Opener(
            id=id,
            capacity=capacity,
            granule=granule,
            namespace=namespace,
            directory=options.directory("directory", directory),
            create=create,
            warm=warm,
            timeout=timeout,
            slots=slots,
            chunk_bytes=chunk_bytes,
            numa_node=numa_node,
            progress=progress,
            scrub=scrub_on_close,
            reclaim_after=reclaim_after,
            takeover_limit=takeover_limit,
        )
        return cls(opener.open())

    def __init__(self, opened: Opened) -> None:
        header = opened.header
        self.id = opened.id
        self.path = opened.path
        self.start = opened.start
        self.start_reason = opened.reason
        self.address = opened.address + header.data_offset
        self.capacity = header.capacity
        self.nbytes = header.nbytes
        self.granule = header.granule
        self.namespace = header.namespace
        self.warm = header.warm
        self.chunk_edges = header.edges
        self._header = header
        self._fd = opened.fd
        self._gone: hostmem.Gone | None = None
        self._lock = threading.Lock()
        self._slots: weakref.WeakSet[WorkerSlot] = weakref.WeakSet()
        self._orphans: list[WorkerSlot] = []  # of workers that were dropped unclosed
        self._board: SlotBoard | None = None
        self._journal: Journal | None = None
        self._scheduling = False
        # The memory lives as long as anybody holds a view: every memoryview, array and tensor made of one keeps this
        # ctypes array, and only its end unmaps the file and lets the shared lock go.
        holder = (ctypes.c_ubyte * header.total).from_address(opened.address)
        mapping = _Mapping(opened)
        _mappings.add(mapping)
        self._end = weakref.finalize(holder, mapping.end)
        self._end.atexit = False
        self._memory = memoryview(holder).cast("B")
        self._data = self._memory[header.data_offset :]
        self._words: hostmem.Words = self._memory[: header.journal_offset].cast("Q")
        self._table = SlotTable(
            self._fd,
            self._words,
            offset=layout.HEADER_BYTES,
            count=header.slots,
            epoch=layout.W_EPOCH,
            claims=layout.W_CLAIMS,
            mutex=layout.CLAIMS,
        )
        self._instance = self._words[layout.W_INSTANCE]
        self.era = self._words[layout.W_ERA] & layout.LAST_ERA
        hostmem.try_lock(self._fd, layout.ERAS + self.era, 1, shared=True)  # nobody ever holds one exclusively
        _regions.add(self)

    # --- what everybody uses ----------------------------------------------------------------------------------------

    @property
    def created(self) -> bool:
        """Whether this object made the region or took it over; False if it joined."""
        return self.start != "joined"

    @property
    def closed(self) -> bool:
        return self._gone is not None

    @property
    def instance(self) -> int:
        """The engine instance whose numbers count: the one this object began, else the one in the header now."""
        return self._instance if self._scheduling else self._words[layout.W_INSTANCE]

    def view(self, extents: Iterable[tuple[int, int]]) -> list[memoryview]:
        """Writable views of (offset, length) pairs in the data, in bytes. Raises RegionError for one outside it.

        A view that outlives `close` keeps the mapping alive.
        """
        if self._gone is not None:
            self._raise()
        data, nbytes = self._data, self.nbytes
        views = []
        for offset, length in extents:
            if offset < 0 or length < 0 or offset + length > nbytes:
                raise RegionError(
                    f"extent at {offset} of {length} bytes is outside the region of {nbytes}: {self.path}",
                    path=str(self.path),
                    expected=nbytes,
                    actual=(offset, length),
                )
            views.append(data[offset : offset + length])
        return views

    def alone(self) -> bool:
        """Whether nobody else maps the region: then nobody is left whose device could still write into it."""
        self._check()
        return not hostmem.lock_is_held(self._fd, layout.LIFE, 1)

    def ranks(self) -> frozenset[int]:
        """Ranks of live workers that hold a slot, whether or not they have heard of the scheduler yet."""
        self._check()
        return self._table.ranks()

    def scheduled(self) -> bool:
        """Whether another open region object, of this process or another, is its scheduler's."""
        self._check()
        return hostmem.lock_is_held(self._fd, layout.SCHEDULER, 1)

    # --- the worker's side ------------------------------------------------------------------------------------------

    def enter_era(self, era: int) -> None:
        """Say that nothing that this process was told in an earlier era can be written any more. Never goes back.

        Call it with nothing in flight, and carry out no plan of an earlier era afterwards.
        """
        self._check()
        if self.era < era <= layout.LAST_ERA:
            hostmem.try_lock(self._fd, layout.ERAS + era, 1, shared=True)
            hostmem.unlock(self._fd, layout.ERAS + self.era, 1)
            self.era = era

    def claim_slot(self, rank: int) -> WorkerSlot:
        """A slot for the worker `rank`. The newest claim of a rank counts; an older one, of another mapping, is lost to
        the scheduler, which waits for that mapping's end before it uses what the older one may be writing.

        Raises RegionError if all slots are held by live workers, or if this object holds one of that rank already.
        """
        self._check()
        if not 0 <= rank < 1 << 32:
            raise RegionError(f"rank is {rank}; it counts from 0", actual=rank)
        if any(slot.rank == rank and slot.held for slot in list(self._slots)):
            raise RegionError(
                f"a worker of rank {rank} holds its slot of {self.path} in this process, and may be writing; "
                "close that worker first (one that was dropped unclosed holds it until the region is closed)",
                path=str(self.path),
                actual=rank,
            )
        slot = self._table.claim(rank, self._words[layout.W_INSTANCE])
        self._slots.add(slot)
        return slot

    def keep_slot(self, slot: WorkerSlot) -> None:
        """Keep the slot of a worker that was dropped unclosed: its copies may go on. It counts as dead when this region
        is closed. Called from finalizers, so it takes no lock."""
        self._orphans.append(slot)

    # --- the scheduler's side ---------------------------------------------------------------------------------------

    def begin_instance(self) -> int:
        """Become the region's scheduler, or start again as it: a new instance, whose numbers count from 1.

        Returns the instance, a random number that plans carry. Slots count again once their workers adopt it.
        Raises RegionError if another live process schedules this region, or if a dead engine's processes still map a
        region that keeps no journal of what they may be writing.
        """
        self._check()
        if not self._scheduling:
            if not hostmem.try_lock(self._fd, layout.SCHEDULER, 1):
                raise RegionError(
                    f"another live process schedules the region {self.path}; give each engine an id of its own",
                    path=str(self.path),
                )
            if self._words[layout.W_BEGUN] and not self.warm and not self.alone():
                hostmem.unlock(self._fd, layout.SCHEDULER, 1)
                raise RegionError(
                    f"processes of an engine that died still map the region {self.path} and may write into it; "
                    "wait until they have ended, or use another id",
                    path=str(self.path),
                )
        self._scheduling = True
        self.begin_era()
        self._instance = secrets.randbits(61) + 1
        self._words[layout.W_BEGUN] = 1
        self._words[layout.W_INSTANCE] = self._instance
        self._table.touch()
        self._board = SlotBoard(self._table, self._instance)
        if self._journal is not None:
            self._journal.reload()
        return self._instance

    def begin_era(self) -> int:
        """Begin a new era and return the one that ends: only who maps the region since then, or longer, knows of saves
        that were planned so far."""
        self._check()
        ended = self._words[layout.W_ERA] & layout.LAST_ERA
        self._words[layout.W_ERA] = ended + 1
        if not self._has_worker():
            self.enter_era(ended + 1)  # else that is the worker's to do, once it has nothing in flight
        return ended

    @property
    def latest_era(self) -> int:
        """The era that was begun last, whether or not this object has entered it."""
        return self._words[layout.W_ERA] & layout.LAST_ERA

    def outlived(self, era: int) -> bool:
        """Whether everybody who knows of saves planned up to this era, this object included, has entered a later one or
        is gone: then nobody is left who could still write what it was told then."""
        self._check()
        mine = self.era <= era and self._has_worker()
        return not mine and not hostmem.lock_is_held(self._fd, layout.ERAS, era + 1)

    def _has_worker(self) -> bool:
        return any(slot.held for slot in list(self._slots))

    def end_instance(self) -> None:
        """Stop scheduling with nothing in flight: the next scheduler needs not fear this one's workers. Idempotent."""
        if self._scheduling and self._gone is None:
            self._words[layout.W_BEGUN] = 0
            self._board, self._scheduling = None, False
            hostmem.unlock(self._fd, layout.SCHEDULER, 1)

    def publish(self, first: int, values: Sequence[int]) -> None:
        """Write words of the header from word `first` on, for readers outside: see `telemetry`."""
        for word, value in enumerate(values, start=first):
            self._words[word] = value

    def progress(self, world: int) -> tuple[int, int]:
        """Highest save and load number that every live rank of 0..world-1 has finished; see `SlotBoard.progress`."""
        return (self._board or self._open_board()).progress(world)

    def saved_by(self, rank: int) -> int:
        """Highest save number that this rank itself has finished; see `SlotBoard.saved_by`."""
        return (self._board or self._open_board()).saved_by(rank)

    @property
    def lost_waiting(self) -> bool:
        """Whether `progress` has noticed workers that `take_lost` has yet to hand out."""
        return self._board is not None and self._board.lost_waiting

    def take_lost(self) -> list[LostSlot]:
        """Workers that died or were replaced since the last call; see `SlotBoard.take_lost`."""
        return (self._board or self._open_board()).take_lost()

    def take_failures(self) -> list[Failure]:
        """Saves and loads that failed since the last call; see `SlotBoard.take_failures`."""
        return (self._board or self._open_board()).take_failures()

    def dead_ranks(self, world: int) -> frozenset[int]:
        """Ranks of 0..world-1 whose newest worker is dead."""
        return (self._board or self._open_board()).dead_ranks(world)

    @property
    def journal(self) -> Journal | None:
        """Records of entries that outlive the process; None for a region that is not warm. The scheduler's alone."""
        self._check()
        if self._journal is None and self.warm:
            header = self._header
            buffer = self._memory[header.journal_offset :][: header.journal_records * RECORD_BYTES]
            self._journal = Journal(buffer, capacity=self.capacity, granule=self.granule, edges=self.chunk_edges)
        return self._journal

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Unmap the region; the last to do so unlinks it, unless it is warm. Idempotent.

        Unregister it with drivers, and drop views, before. If a view is still held the mapping stays until it is gone.
        """
        with self._lock:
            if self._gone is not None:
                return
            gone = hostmem.Gone(CacheClosed, f"the region {self.path} was closed")
            for slot in list(self._slots):
                if slot not in self._orphans:
                    slot.release()
                slot.forget(gone)
            if self._scheduling:
                hostmem.unlock(self._fd, layout.SCHEDULER, 1)
            self._detach(gone)
        if self._end.alive:
            _log.warning(
                "region %s: closed while views of it are still held; it stays mapped until they are dropped", self.path
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.start
        return f"<HostRegion {self.path} {self.capacity} bytes in granules of {self.granule}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise RegionError(f"a region cannot be pickled; open {self.id!r} in the other process", path=str(self.path))

    def _open_board(self) -> SlotBoard:
        self._check()
        self._board = SlotBoard(self._table, self.instance)
        return self._board

    def _check(self) -> None:
        if self._gone is not None:
            self._raise()

    def _raise(self) -> NoReturn:
        self._words[0]  # it is gone: this raises
        raise RegionError(f"the region {self.path} is gone", path=str(self.path))

    def _detach(self, gone: hostmem.Gone) -> None:
        """Drop every view of the memory that this package holds; `gone` answers in their place."""
        self._gone = gone
        self._words = self._table.words = gone
        self._board = None
        if self._journal is not None:
            self._journal.detach(gone)
            self._journal = None
        self._data = self._memory = memoryview(b"")
        _regions.discard(self)

    def _forget(self) -> None:
        """In a forked child: it has no part in the region."""
        gone = hostmem.Gone(
            RegionError,
            f"the region {self.path} was opened before this process was forked; open {self.id!r} in the child itself",
        )
        self._lock = threading.Lock()
        for slot in list(self._slots):
            slot.forget(gone)
        self._end.detach()
        self._detach(gone)


class _Mapping:
    """The mapped file behind a region and every view of it; ends when the last of them is gone."""

    def __init__(self, opened: Opened) -> None:
        self.fd = opened.fd
        self.address = opened.address
        self.header = opened.header
        self.path = opened.path

    def end(self) -> None:
        """Unmap. A finalizer calls it once."""
        try:
            self.leave()
        finally:
            _mappings.discard(self)
            hostmem.unmap(self.address, self.header.total)
            os.close(self.fd)

    def leave(self) -> None:
        """If nobody else maps the file: scrub and unlink it, or stamp a warm one with the time."""
        header = self.header
        try:
            if not hostmem.try_lock(self.fd, layout.LIFE, 1):
                return
            if header.scrub:
                hostmem.zero(self.address + header.data_offset, header.nbytes)
            if header.warm:
                since = ctypes.c_uint64.from_address(self.address + 8 * layout.W_OWNERLESS_SINCE)
                since.value = int(time.time())
            elif is_at(self.fd, self.path):
                self.path.unlink()
        except OSError as error:
            _log.warning("region %s: could not be unlinked: %s", self.path, error)

    def forget(self) -> None:
        """In a forked child: let the file go without touching it."""
        os.close(self.fd)
        hostmem.replace_by_nothing(self.address, self.header.total)


_mappings: set[_Mapping] = set()
_regions: weakref.WeakSet[HostRegion] = weakref.WeakSet()


def _forget_all() -> None:
    """A forked child has no part in its parent's regions: it must neither keep them alive nor touch them."""
    for region in list(_regions):
        region._forget()
    for mapping in _mappings:
        mapping.forget()
    _mappings.clear()


def _leave_all() -> None:
    """At interpreter exit: other threads may still read the memory, so it goes with the process; the files go now."""
    left = list(_mappings)
    while left:
        mapping = left.pop()
        if any(other.path == mapping.path for other in left):
            hostmem.unlock(mapping.fd, layout.LIFE, 1)  # the last one of this process answers for all
        else:
            mapping.leave()


os.register_at_fork(after_in_child=_forget_all)
atexit.register(_leave_all)
