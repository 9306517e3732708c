"""Which entries the region holds, in what state, and who may be evicted.

Owns keys, entries, their extents and pins. The scheduler is its only caller; it moves no bytes and knows no worker.
States: reserved -> writing -> ready -> pinned (a ready entry with readers). An entry in flight is neither evicted nor
reused: one that is dropped meanwhile cannot be found any more, and gives its extents back when its write has ended and
its last reader has gone. With a journal, every change of owner is written there before the extents change hands.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeVar

from ecoffload.errors import ConfigError, RegionError

if TYPE_CHECKING:
    from ecoffload.eviction import EvictionPolicy
    from ecoffload.extents import Extent, ExtentAllocator
    from ecoffload.journal import Journal
    from ecoffload.sizing import ReuseTimes

__all__ = ["Entry", "EntryIndex"]

_log = logging.getLogger("ecoffload.scheduler")  # whose index it is

T = TypeVar("T")

State = Literal["reserved", "writing", "ready", "pinned", "ended"]


class Entry:
    """One encoder output in the region. ``nbytes`` are its own bytes; its extents hold them rounded up to granules,
    and a little more of what came from a tier. (On its way from there: the bytes of the object, with the header behind
    the entry's own.)

    ``dtype`` is torch's name without "torch."; ``cost`` what encoding it again would cost, in any one unit.
    """

    __slots__ = (
        "checksum",
        "cost",
        "dtype",
        "durable",
        "extents",
        "fetched",
        "generation",
        "handle",
        "held_bytes",
        "key",
        "landed",
        "listed",
        "nbytes",
        "pins",
        "quarantined",
        "shape",
        "since",
        "write",
    )

    def __init__(
        self, key: bytes, generation: int, extents: tuple[Extent, ...], nbytes: int, dtype: str, shape: tuple[int, ...]
    ) -> None:
        self.key = key
        self.generation = generation
        self.extents = extents
        held = 0
        for _, length in extents:
            held += length
        self.held_bytes = held
        self.nbytes = nbytes
        self.dtype = dtype
        self.shape = shape
        self.since = time.monotonic()
        self.cost: float = 1.0
        self.checksum: int | None = None
        self.handle: int | None = None
        self.durable = True
        self.pins = 0
        self.write: Literal["reserved", "writing", "ended"] = "reserved"
        self.fetched = False
        """Whether its bytes come from a tier: while they do, nothing on the device can be ordered behind them."""
        self.listed = True
        """Whether its key leads to it."""
        self.quarantined = False
        self.landed = False
        """Whether its bytes are there although it is still in flight: its checksum is being computed."""

    @property
    def state(self) -> State:
        if self.write != "ended":
            return self.write
        if not self.listed:
            return "ended"
        return "pinned" if self.pins else "ready"

    def __repr__(self) -> str:
        return f"<Entry {self.key!r} {self.state} {self.nbytes} bytes in {len(self.extents)} extents>"


class EntryIndex:
    """Keys to entries, over one allocator and one eviction policy. Not thread-safe: its caller's lock guards it."""

    def __init__(
        self, allocator: ExtentAllocator, policy: EvictionPolicy[bytes], journal: Journal | None = None
    ) -> None:
        self._allocator = allocator
        self._policy = policy
        self._journal = journal
        self._entries: dict[bytes, Entry] = {}
        self._unlisted: set[Entry] = set()  # entries that no key leads to any more and that still hold extents
        self._in_doubt: deque[tuple[int, Entry]] = deque()  # those of them that are kept aside, by era
        self._evictable = 0  # bytes of ready entries without readers
        self._generation = 0
        self.reuse: ReuseTimes | None = None
        """Ghost statistics, for whoever sets them: every use of an entry, and every save, which follows a miss."""
        self.evictions = 0
        self.evicted_bytes = 0
        self.refused_too_large = 0
        self.refused_no_room = 0
        self.refused_unrecordable = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def capacity(self) -> int:
        """Bytes that entries can take."""
        return self._allocator.capacity

    @property
    def used_bytes(self) -> int:
        """Bytes in extents that are not free."""
        return self._allocator.used_bytes

    @property
    def pinned(self) -> int:
        """Entries that have readers."""
        return sum(1 for entry in self._owners() if entry.pins)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes kept aside because a writer that nobody hears of may still be at them."""
        return sum(entry.held_bytes for _, entry in self._in_doubt)

    def _owners(self) -> Iterator[Entry]:
        """Every entry that holds extents."""
        return chain(self._entries.values(), self._unlisted)

    def lookup(self, key: bytes) -> Entry | None:
        """The entry of that key in whatever state, or None. Does not count as a use."""
        return self._entries.get(key)

    def reserve(
        self,
        key: bytes,
        nbytes: int,
        dtype: str,
        shape: tuple[int, ...],
        *,
        cost: float = 1.0,
        durable: bool = True,
    ) -> Entry | None:
        """Extents for a new entry, evicting as many as needed; None, at once, if there is no room to be had.

        An entry larger than the region is refused without evicting anything. ``durable`` False: the entry is not to
        outlive the process. Raises :class:`RegionError` if the key is there already.
        """
        if key in self._entries:
            raise RegionError(f"key {key!r} has an entry already; drop it first", actual=key)
        if self.reuse is not None:
            self.reuse.use(key, nbytes)
        allocator = self._allocator
        extents = allocator.allocate(nbytes)
        if extents is None:
            if not allocator.fits(nbytes):
                if not self.refused_too_large:  # said once; stats count the rest
                    _log.warning(
                        "key %r is not kept: its %d bytes are more than the whole cache's %d",
                        key,
                        nbytes,
                        self.capacity,
                    )
                self.refused_too_large += 1
                return None
            # Not even asked for what all evictions together would not give.
            if nbytes <= allocator.free_bytes + self._evictable:
                extents = self._evict_until(partial(allocator.allocate, nbytes))
            if extents is None:
                self.refused_no_room += 1
                return None
        self._generation += 1
        entry = Entry(key, self._generation, extents, nbytes, dtype, shape)
        entry.cost = cost
        entry.durable = durable
        journal = self._journal
        if journal is not None:

            def intent() -> int | None:
                return journal.intent(key, entry.generation, extents, nbytes, dtype, shape)

            try:
                entry.handle = intent()
                if entry.handle is None:
                    # Full of small entries: one has to go although there are bytes left, or none would ever come in.
                    entry.handle = self._evict_until(intent)
            except ConfigError:
                # What no restart could read (more dimensions than a record holds): the entry is not kept, as with one
                # that is too large; its caller has the tensor.
                allocator.free(extents)
                self.refused_unrecordable += 1
                return None
            except BaseException:
                allocator.free(extents)
                raise
            if entry.handle is None:
                allocator.free(extents)
                self.refused_no_room += 1
                return None
        self._entries[key] = entry
        return entry

    def _evict_until(self, attempt: Callable[[], T | None]) -> T | None:
        """Evict, best victim first, until ``attempt`` gives something; None if nothing is left that may go."""
        policy, entries = self._policy, self._entries
        for key in policy.victims():
            entry = entries[key]
            if entry.pins:
                continue  # the policy parks it until its last reader has gone
            self.evictions += 1
            self.evicted_bytes += entry.nbytes
            policy.evict(key)
            self._evictable -= entry.held_bytes
            del entries[key]
            entry.listed = False
            self._free(entry)
            found = attempt()
            if found is not None:
                return found
        return None

    def adopt(self, entry: Entry) -> None:
        """Take in an entry of an earlier process, in flight until it is committed (verified) or dropped.

        Its extents are reserved in the allocator already.
        """
        self._entries[entry.key] = entry
        self._generation = max(self._generation, entry.generation)
        entry.write = "writing"

    def quarantine_foreign(self, handle: int | None, extents: tuple[Extent, ...], era: int = 0) -> None:
        """Keep extents aside that an earlier process may still be writing (reserved in the allocator already)."""
        entry = Entry(b"", 0, extents, 0, "uint8", (0,))
        entry.handle, entry.listed, entry.quarantined, entry.write = handle, False, True, "writing"
        self._unlisted.add(entry)
        self._in_doubt.append((era, entry))

    def writing(self, entry: Entry) -> None:
        """Its save was handed to a worker."""
        entry.write = "writing"

    def shorten(self, entry: Entry, nbytes: int, dtype: str, shape: tuple[int, ...]) -> None:
        """What is in flight turned out to be ``nbytes`` bytes, fewer than were reserved; the rest is free again.

        But for up to 1/64 of it, in whole granules: the hole would be of use to nobody, and the next entry for which as
        much is reserved would not fit where this one was. Raises :class:`RegionError` for a durable entry: no journal
        is to know it from now on.
        """
        if entry.durable:
            raise RegionError(f"{entry!r} is durable; only one that no restart finds is shortened", actual=entry.key)
        if self._journal is not None and entry.handle is not None:
            self._journal.drop(entry.handle)  # before the extents change hands
            entry.handle = None
        last = entry.extents[-1].length if entry.extents else 0  # every extent has to hold something of the entry
        spare = entry.held_bytes - nbytes - -nbytes % self._allocator.granule
        if nbytes <= entry.held_bytes - last or spare > entry.held_bytes >> 6:
            entry.extents = self._allocator.shorten(entry.extents, nbytes)
            entry.held_bytes = sum(length for _, length in entry.extents)
        entry.nbytes, entry.dtype, entry.shape = nbytes, dtype, shape

    def commit(self, entry: Entry, checksum: int | None = None) -> None:
        """Its save has landed: from now on it can be found, loaded and evicted (or, if dropped meanwhile, freed)."""
        entry.write = "ended"
        entry.checksum = checksum
        if not entry.listed:
            self._release(entry)
            return
        if self._journal is not None and entry.handle is not None:
            if entry.durable:
                self._journal.commit(entry.handle, checksum)
            else:
                self._journal.drop(entry.handle)
                entry.handle = None
        if not entry.pins:
            self._evictable += entry.held_bytes
        self._policy.add(entry.key, entry.held_bytes, entry.cost)

    def touch(self, entry: Entry) -> None:
        """It was used."""
        if self.reuse is not None:
            self.reuse.use(entry.key, entry.nbytes)
        if entry.listed and entry.write == "ended":
            self._policy.touch(entry.key)

    def pin(self, entry: Entry) -> None:
        """One more reader; until all are gone the entry keeps its extents."""
        if not entry.pins and entry.listed and entry.write == "ended":
            self._evictable -= entry.held_bytes
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """One reader less. Raises :class:`RegionError` if there was none."""
        if entry.pins <= 0:
            raise RegionError(f"{entry!r} is unpinned more often than it was pinned", actual=entry.pins)
        entry.pins -= 1
        if entry.pins:
            return
        if not entry.listed:
            self._release(entry)
        elif entry.write == "ended":
            self._evictable += entry.held_bytes
            self._policy.unpin(entry.key)

    def drop(self, entry: Entry) -> None:
        """Its save failed, or its bytes are not to be trusted: no lookup finds it again. Its write has ended."""
        self._forget(entry)
        entry.write = "ended"
        self._release(entry)

    def quarantine(self, entry: Entry, era: int = 0) -> None:
        """Its writer is gone without a word and its device may still be writing: keep the extents aside.

        ``era``: of the region, when it was told to write; eras never go back from one call to the next.
        """
        self._forget(entry)
        entry.quarantined = True
        self._in_doubt.append((era, entry))

    def release_quarantine(self, outlived: Callable[[int], bool] = lambda era: True) -> int:
        """Free what was kept aside in eras of which no writer is left; returns how many entries."""
        count = 0
        while self._in_doubt and outlived(self._in_doubt[0][0]):
            entry = self._in_doubt.popleft()[1]
            entry.quarantined = False
            entry.write = "ended"
            self._release(entry)
            count += 1
        return count

    def invalidate(self, key: bytes | None = None) -> int:
        """Forget one key, or all; returns how many there were. What is in flight ends first, unseen."""
        if key is None:
            found = list(self._entries.values())
        else:
            entry = self._entries.get(key)
            found = [] if entry is None else [entry]
        for entry in found:
            self._forget(entry)
            self._release(entry)
        return len(found)

    def unlist(self, entry: Entry) -> None:
        """No lookup finds it any more. If it is in flight it keeps its extents until it is dropped."""
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        """Out of the policy and of the keys."""
        if not entry.listed:
            return
        if entry.write == "ended":
            self._policy.remove(entry.key)
            if not entry.pins:
                self._evictable -= entry.held_bytes
            if self._journal is not None and entry.handle is not None:
                self._journal.drop(entry.handle)  # at once, readers or not: a restart must not find it either
                entry.handle = None
        del self._entries[entry.key]
        entry.listed = False
        self._unlisted.add(entry)

    def _release(self, entry: Entry) -> None:
        """Give the extents back unless somebody writes or reads them, or may still do so unheard."""
        if entry.write == "ended" and not entry.pins and not entry.quarantined:
            self._unlisted.remove(entry)
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        """Out of the journal, and then its extents to whoever asks next."""
        if self._journal is not None and entry.handle is not None:
            self._journal.drop(entry.handle)  # before the extents change hands: two records must never claim them
            entry.handle = None
        self._allocator.free(entry.extents)

    def check(self) -> None:
        """Raise :class:`RegionError` unless every granule is free or owned by exactly one entry, and pins are sane."""
        self._allocator.check()
        spans = sorted(extent for entry in self._owners() for extent in entry.extents)
        end = 0
        for offset, length in spans:
            if offset < end:
                raise RegionError(f"two entries own the bytes at offset {offset}", actual=offset)
            end = offset + length
        total = sum(length for _, length in spans)
        if total != self._allocator.used_bytes:
            raise RegionError(
                f"entries own {total} bytes, the allocator has lent {self._allocator.used_bytes}",
                expected=total,
                actual=self._allocator.used_bytes,
            )
        free_to_go = 0
        for entry in self._owners():
            if entry.pins < 0:
                raise RegionError(f"{entry!r} has {entry.pins} pins", actual=entry.pins)
            if entry.listed != (self._entries.get(entry.key) is entry):
                raise RegionError(f"{entry!r} is listed and cannot be found, or the reverse", actual=entry.key)
            if entry.listed and entry.write == "ended" and not entry.pins:
                free_to_go += entry.held_bytes
        if free_to_go != self._evictable:
            raise RegionError(
                f"{free_to_go} bytes can be evicted, {self._evictable} were counted",
                expected=free_to_go,
                actual=self._evictable,
            )
        for key, entry in self._entries.items():
            if entry.key != key or entry in self._unlisted:
                raise RegionError(f"the key {key!r} leads to {entry!r}, which is unlisted or another's", actual=key)
