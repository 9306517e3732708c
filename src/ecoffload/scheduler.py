"""Deciding what is saved, loaded and evicted: the half of the engine that never touches a device.

One scheduler a region and engine instance. It plans (``plan_save``, ``plan_load``), hands the plan over
(``take_plan``), and learns from the region's slots, and from nowhere else, how far the workers have got (``poll``).
Nothing is promised before it is pinned; pins are released on confirmed completion, at the slowest live worker.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ecoffload.checksums import Checksums
from ecoffload.errors import CacheClosed
from ecoffload.eviction import EvictionPolicy, make_policy
from ecoffload.extents import ExtentAllocator
from ecoffload.index import Entry, EntryIndex
from ecoffload.plan import PLAN_VERSION, LoadOp, Plan, SaveOp
from ecoffload.region import HostRegion
from ecoffload.sizing import ReuseTimes
from ecoffload.telemetry import Reporter

if TYPE_CHECKING:
    from ecoffload.tiers.link import TierLink

__all__ = ["OffloadScheduler", "SchedulerStats"]

_log = logging.getLogger("ecoffload.scheduler")


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts since the scheduler started, and what is held now. Bytes are entries' own bytes unless said otherwise."""

    entries: int
    capacity_bytes: int
    used_bytes: int
    pinned_entries: int
    quarantined_bytes: int
    hits: int
    misses: int
    saves: int
    saves_failed: int
    saves_refused_too_large: int
    saves_refused_no_room: int
    bytes_saved: int
    loads: int
    loads_failed: int
    bytes_loaded: int
    evictions: int
    evicted_bytes: int
    invalidated: int
    workers_lost: int


class OffloadScheduler:
    """Plans saves and loads of one region. Not thread-safe: one thread (or its caller's lock) uses it.

    ``world`` is the number of workers, ranks 0 to world-1, that all carry out every plan. ``checksum``: entries become
    ready only once a checksum over their landed bytes was computed, on a thread of its own (always so in a warm
    region, where the entries of an earlier process are verified before they are promised). ``ghost_stats``: remember
    the keys that were asked for, so that ``ecoffload size --live`` can say how large the region should be. ``tier``: a
    store behind the region, closed with this scheduler; committed entries are published there, ``fetch`` asks it.
    """

    def __init__(
        self,
        region: HostRegion,
        *,
        world: int = 1,
        policy: str | EvictionPolicy[bytes] = "auto",
        checksum: bool = False,
        ghost_stats: bool = False,
        tier: TierLink | None = None,
    ) -> None:
        self.region = region
        self.world = world
        region.begin_instance()
        if isinstance(policy, str):
            policy = make_policy(policy, capacity=region.capacity)
        allocator = ExtentAllocator(region.capacity, region.granule, edges=region.chunk_edges)
        self.index = EntryIndex(allocator, policy, region.journal)
        if ghost_stats:
            self.index.reuse = ReuseTimes()
        self._checksums = Checksums(region) if checksum or region.warm else None
        self._verifying: dict[Entry, int] = {}  # taken over, with the checksum that its journal record gives
        self.recovered = 0
        """Entries of an earlier process that were verified and can be loaded."""
        self.recovery_dropped = 0
        """Records or entries of an earlier process that could not be believed."""
        self._saves: list[SaveOp] = []  # planned, not yet taken
        self._loads: list[LoadOp] = []
        self._saving: deque[tuple[int, Entry]] = deque()  # planned or in flight, by number
        self._loading: deque[tuple[int, Entry]] = deque()
        self._save_number = self._load_number = 0
        self._taken = (0, 0)
        self._early_saves: set[int] = set()  # failed, but not yet covered by the finished number
        self._early_loads: set[int] = set()
        self._closed = False
        self._hits = self._misses = self._n_saves = self._n_loads = 0
        self._saves_failed = self._loads_failed = 0
        self._bytes_saved = self._bytes_loaded = 0
        self._invalidated = self._workers_lost = 0

        self.tier = tier
        self._recover(allocator)
        self._reporter = Reporter(region, self)
        if tier is not None:
            tier.attach(region, self.index)

    def _recover(self, allocator: ExtentAllocator) -> None:
        """Take over what a journal tells: committed entries once they are verified, unfinished ones into quarantine."""
        journal = self.region.journal
        if journal is None or self._checksums is None:
            return
        scan = journal.records()
        era = self.region.latest_era - 1  # of whoever is left from an earlier scheduler
        self.recovery_dropped = scan.dropped
        claimed = [record.extents for record in scan.records] + [pending.extents for pending in scan.pending]
        allocator.reserve(extent for extents in claimed for extent in extents)
        for pending in scan.pending:
            self.index.quarantine_foreign(pending.handle, pending.extents, era)
        if scan.unreadable:
            # Somebody alive may be writing where only a record told that cannot be read: all but the entries is theirs.
            _log.warning(
                "region %s: a live writer's record is unreadable; its free space is kept aside", self.region.id
            )
            rest = allocator.free_extents()
            allocator.reserve(rest)
            self.index.quarantine_foreign(None, tuple(rest), era)
        for record in scan.records:
            entry = Entry(record.key, record.generation, record.extents, record.nbytes, record.dtype, record.shape)
            entry.handle, entry.cost = record.handle, float(record.nbytes)
            self.index.adopt(entry)
            if record.checksum is None:
                self.recovery_dropped += 1
                self.index.drop(entry)
            else:
                self._verifying[entry] = record.checksum
                self._checksums.put(entry, recovered=True)

    def await_recovered(self, timeout: float) -> int:
        """Wait until the entries of an earlier process are verified, at most ``timeout`` seconds: for a start that
        takes its time anyway. Returns how many are left; those go on in the background."""
        end = time.monotonic() + timeout
        while self._verifying and self._checksums is not None:
            taken = self._take_checksums(self._checksums)
            if time.monotonic() > end:
                break
            if not taken:
                time.sleep(0.001)
        return len(self._verifying)

    def _open(self) -> None:
        if self._closed:
            raise CacheClosed("this scheduler is closed; open another one on the region")

    def lookup(self, key: bytes) -> bool:
        """Whether a load of ``key`` could be planned now. Does not count as a use."""
        entry = self.index.lookup(key)
        return entry is not None and entry.write == "ended"

    def known(self, key: bytes) -> bool:
        """Whether ``key`` has an entry that is there or being saved."""
        entry = self.index.lookup(key)
        return entry is not None and (entry.write == "ended" or not entry.fetched)

    def fetch(self, key: bytes) -> bool:
        """Have ``key`` fetched from the tier if the region does not hold it; whether it is on its way. Never waits."""
        if self.tier is None:
            return False
        entry = self.index.lookup(key)
        return self.tier.fetch(key) if entry is None else entry.fetched and entry.write != "ended"

    def plan_save(
        self,
        key: bytes,
        nbytes: int,
        dtype: str,
        shape: tuple[int, ...],
        *,
        cost: float | None = None,
        durable: bool = True,
    ) -> SaveOp | None:
        """Reserve room for an entry and plan its save; None if it is known already, too large, or there is no room.

        ``cost`` is what encoding it again would cost (any one unit; default its bytes).
        """
        self._open()
        known = self.index.lookup(key)
        if known is not None and self.tier is not None and known.fetched and known.write != "ended":
            self.tier.give_way(known)
        elif known is not None:
            return None
        cost = float(nbytes) if cost is None else cost
        entry = self.index.reserve(key, nbytes, dtype, shape, cost=cost, durable=durable)
        if entry is None and self._release_quarantine():
            entry = self.index.reserve(key, nbytes, dtype, shape, cost=cost, durable=durable)
        if entry is None:
            return None
        self._save_number = number = self._save_number + 1
        op = SaveOp(number, key, entry.extents, nbytes, dtype, shape)
        self._saves.append(op)
        self._saving.append((number, entry))
        return op

    def plan_load(self, key: bytes, *, in_flight: bool = False) -> LoadOp | None:
        """Pin the entry of ``key`` and plan its load into every worker; None is a miss.

        ``in_flight`` also takes an entry whose save has not landed: only for a caller that orders the load behind that
        save on the device.
        """
        self._open()
        entry = self.index.lookup(key)
        foreign = entry is not None and (entry.fetched or entry in self._verifying)
        if entry is None or (entry.write != "ended" and (foreign or not in_flight)):
            self._misses += 1
            return None
        self._hits += 1
        index = self.index
        index.pin(entry)
        index.touch(entry)
        self._load_number = number = self._load_number + 1
        in_flight = entry.write != "ended" and not entry.landed
        op = LoadOp(number, key, entry.extents, entry.nbytes, entry.dtype, entry.shape, in_flight)
        self._loads.append(op)
        self._loading.append((number, entry))
        return op

    def cancel_load(self, op: LoadOp) -> bool:
        """Take back a planned load that no worker has been told of; True if it was still there."""
        if op not in self._loads:
            return False
        self._loads.remove(op)
        for i, (number, entry) in enumerate(self._loading):
            if number == op.number:
                del self._loading[i]
                self.index.unpin(entry)
                break
        return True

    def distrust(self, op: LoadOp) -> None:
        """Take back a planned load because the bytes in the region are not those that were saved: it is a miss."""
        entry = self.index.lookup(op.key)
        if self.cancel_load(op):
            self._hits -= 1
            self._misses += 1
            if entry is not None:
                self.index.drop(entry)

    def cancel_save(self, op: SaveOp) -> bool:
        """Take back a planned save that no worker has been told of; True if it was still there."""
        if op not in self._saves:
            return False
        self._saves.remove(op)
        for i, (number, entry) in enumerate(self._saving):
            if number == op.number:
                del self._saving[i]
                self.index.drop(entry)
                break
        return True

    def take_plan(self) -> Plan:
        """Everything planned since the last call; from here on it counts as in flight."""
        saves, loads = tuple(self._saves), tuple(self._loads)
        saved, loaded = self._taken
        self._release_quarantine()
        if saves:
            self.region.progress(self.world)
            if self.region.lost_waiting:
                self._bury_the_lost()  # first: these saves are none of theirs
            self._saves = []
            for _, entry in self._saving:
                if entry.write == "reserved":
                    self.index.writing(entry)
        if loads:
            self._loads = []
        self._taken = (self._save_number, self._load_number)
        region = self.region
        return Plan(PLAN_VERSION, region.id, region.instance, region.latest_era, saved, loaded, saves, loads)

    def has_pending(self) -> bool:
        """Whether saves or loads are planned or in flight, so that ``poll`` has something to wait for."""
        return self.saving() or bool(self._loading) or (self.tier is not None and self.tier.pending())

    def saving(self) -> bool:
        """Whether saves are planned or in flight (checksums included)."""
        return bool(self._saving or (self._checksums is not None and self._checksums.waiting))

    def being_saved(self) -> set[Entry]:
        """The entries of those saves, and those of an earlier process that are still being verified."""
        landed: set[Entry] = set() if self._checksums is None else self._checksums.waiting
        return landed.union(entry for _, entry in self._saving)

    def unsettled(self) -> int:
        """Transfers planned or in flight, checksums of their saves included; entries of an earlier process that are
        still being verified are not counted: nothing waits for those."""
        waiting = 0 if self._checksums is None else len(self._checksums.waiting) - len(self._verifying)
        return len(self._saving) + len(self._loading) + waiting

    def settled(self) -> tuple[int, int]:
        """Highest save and load number up to which everything that was handed over is settled."""
        return (
            self._saving[0][0] - 1 if self._saving else self._taken[0],
            self._loading[0][0] - 1 if self._loading else self._taken[1],
        )

    def counters(self) -> dict[str, int]:
        """The counts of :meth:`stats` that cost nothing to read: for a caller that asks at every step."""
        index = self.index
        return {
            "saves": self._n_saves,
            "saves_failed": self._saves_failed,
            "saves_refused_too_large": index.refused_too_large,
            "saves_refused_no_room": index.refused_no_room,
            "bytes_saved": self._bytes_saved,
            "loads": self._n_loads,
            "loads_failed": self._loads_failed,
            "bytes_loaded": self._bytes_loaded,
            "evictions": index.evictions,
            "evicted_bytes": index.evicted_bytes,
            "invalidated": self._invalidated,
            "workers_lost": self._workers_lost,
        }

    def poll(self) -> bool:
        """Read completion from the region and settle what has ended; True if anything did. Never blocks."""
        self._reporter.tick()
        checked = self._checksums is not None and self._take_checksums(self._checksums)
        if self.tier is not None:
            checked |= self.tier.settle()
        saving, loading = self._saving, self._loading
        if not saving and not loading:
            return checked
        region = self.region
        saved, loaded = region.progress(self.world)
        if region.lost_waiting:
            self._bury_the_lost()
            saved, loaded = region.progress(self.world)
        if saving and self.world > 1:
            # Rank 0 saves: without it the others' numbers say nothing of what was written.
            saved = min(saved, region.saved_by(0))
        # What was planned but never handed over cannot have ended, whatever a slot says.
        saved, loaded = min(saved, self._taken[0]), min(loaded, self._taken[1])
        if not (saving and saving[0][0] <= saved) and not (loading and loading[0][0] <= loaded):
            return checked
        failed_saves, failed_loads = self._failures(saved, loaded)
        index = self.index
        while saving and saving[0][0] <= saved:
            number, entry = saving.popleft()
            if number in failed_saves:
                self._saves_failed += 1
                index.drop(entry)
            else:
                self._n_saves += 1
                self._bytes_saved += entry.nbytes
                if self._checksums is None or not entry.listed:
                    self._commit(entry)
                else:
                    entry.landed = True
                    self._checksums.put(entry)
        while loading and loading[0][0] <= loaded:
            number, entry = loading.popleft()
            if number in failed_loads:
                # Whoever asked again would fail again: the entry goes, and its key is a miss.
                self._loads_failed += 1
                if entry.listed and entry.write == "ended":
                    index.drop(entry)
            else:
                self._n_loads += 1
                self._bytes_loaded += entry.nbytes
            index.unpin(entry)
        return True

    def _take_checksums(self, checksums: Checksums) -> bool:
        taken = checksums.take()
        for entry, value in taken:
            expected = self._verifying.pop(entry, None)
            if value is None or (expected is not None and expected != value):
                _log.warning("entry %r is dropped: its bytes are not those that were saved", entry.key)
                self.recovery_dropped += expected is not None
                self.index.drop(entry)
            else:
                self.recovered += expected is not None and entry.listed
                self._commit(entry, value)
        return bool(taken)

    def _commit(self, entry: Entry, checksum: int | None = None) -> None:
        self.index.commit(entry, checksum)
        if self.tier is not None:
            self.tier.offer(entry)

    def _failures(self, saved: int, loaded: int) -> tuple[set[int], set[int]]:
        saves: set[int] = set()
        loads: set[int] = set()
        failures = self.region.take_failures()
        if not (failures or self._early_saves or self._early_loads):
            return saves, loads
        for failure in failures:
            if failure.kind == "save":
                saves.add(failure.number)
            elif failure.kind == "load":
                loads.add(failure.number)
            elif failure.kind == "saves-lost":
                saves.update(number for number, _ in self._saving if number <= failure.number)
            elif failure.kind == "saves-through":
                # More failed than a slot remembers. The forgotten ones may lie beyond its finished number as well.
                saves.update(number for number, _ in self._saving if number <= self._taken[0])
            else:
                loads.update(number for number, _ in self._loading if number <= self._taken[1])
        # Failures may be told before the number that covers them is: keep those for their turn.
        saves |= self._early_saves
        loads |= self._early_loads
        self._early_saves = {n for n in saves if n > saved}
        self._early_loads = {n for n in loads if n > loaded}
        return saves, loads

    def _bury_the_lost(self) -> None:
        """A worker died: its device may still be writing what it had been given to save."""
        for lost in self.region.take_lost():
            self._workers_lost += 1
            in_doubt = []
            if lost.rank == 0:  # the others write nothing
                in_doubt = [(number, entry) for number, entry in self._saving if lost.saved < number <= self._taken[0]]
            if in_doubt:
                era = self.region.begin_era()
                for each in in_doubt:
                    self._saving.remove(each)  # nobody will report it
                    self.index.quarantine(each[1], era)
            _log.warning(
                "the worker of rank %d is gone; %d entries that it may still be writing are kept aside",
                lost.rank,
                len(in_doubt),
            )
        self._release_quarantine()

    def _release_quarantine(self) -> int:
        """Use what was kept aside once every process that could write it is gone, or past it; how many entries."""
        return self.index.release_quarantine(self.region.outlived)

    def invalidate(self, key: bytes | None = None) -> int:
        """Forget one key, or everything (after a weight update); returns how many entries that were."""
        self._open()
        count = self.index.invalidate(key)
        self._invalidated += count
        if self.tier is not None:
            self.tier.forget(key)
        return count

    def stats(self) -> SchedulerStats:
        index = self.index
        return SchedulerStats(
            entries=len(index),
            capacity_bytes=index.capacity,
            used_bytes=index.used_bytes,
            pinned_entries=index.pinned,
            quarantined_bytes=index.quarantined_bytes,
            hits=self._hits,
            misses=self._misses,
            saves=self._n_saves,
            saves_failed=self._saves_failed,
            saves_refused_too_large=index.refused_too_large,
            saves_refused_no_room=index.refused_no_room,
            bytes_saved=self._bytes_saved,
            loads=self._n_loads,
            loads_failed=self._loads_failed,
            bytes_loaded=self._bytes_loaded,
            evictions=index.evictions,
            evicted_bytes=index.evicted_bytes,
            invalidated=self._invalidated,
            workers_lost=self._workers_lost,
        )

    def close(self) -> None:
        """Stop planning. The region is its opener's to close. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._checksums is not None:
            self._checksums.close()
            self._take_checksums(self._checksums)
        if self.tier is not None and not self.tier.close():
            return  # a call of its is stuck, and may write into the region
        if not self._saving and not self._loading:
            self.region.end_instance()
