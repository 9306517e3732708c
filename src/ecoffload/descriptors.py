"""Descriptors: the (source, destination, size) triples of a batch, and the pool that lends the arrays they fill.

Owned here: the arrays (uint64, for everyone), their lease, the check of every range before a submit, merging and
splitting. Callers (worker, swaps) append through a :class:`Batch`; a backend sees addresses and a count for the
duration of one submit. Nothing here knows a device, torch or the region.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from ecoffload.errors import ConfigError, DescriptorError, StaleBatch
from ecoffload.pointers import as_addresses

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["AddressRanges", "Batch", "DescriptorPool", "SubBatch", "merge_descriptors"]

_TOP = 1 << 64
_VECTOR_FROM = 24  # below this many descriptors a Python loop beats numpy's fixed cost (about 1 us a call)


@dataclass(frozen=True, slots=True)
class SubBatch:
    """A window of a batch: what a backend is handed. ``first`` is the global index of its first descriptor."""

    count: int
    src: int
    dst: int
    size: int
    first: int


class AddressRanges:
    """The address ranges of one address space that a copy may touch, and a fast test of whole batches against them.

    Ranges are (start, nbytes), kept apart even where they touch: a descriptor must lie inside one of them, since it
    must never cross an allocation or a registration. Addresses are exact up to 2**64.
    """

    __slots__ = ("_ends", "_ends_array", "_starts", "_starts_array")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        pairs = sorted((start, start + nbytes) for start, nbytes in ranges if nbytes > 0)
        for (a, a_end), (b, _) in pairwise(pairs):
            if b < a_end:
                raise ConfigError(f"address ranges overlap: {a:#x}..{a_end:#x} and one from {b:#x}", value=b)
        self._starts = [start for start, _ in pairs]
        self._ends = [end for _, end in pairs]
        self._starts_array = np.array(self._starts, dtype=np.uint64)
        # The last valid byte, not the end: an end of 2**64 is no uint64.
        self._ends_array = np.array([end - 1 for end in self._ends], dtype=np.uint64)

    def find(self, address: int, nbytes: int) -> bool:
        """Whether ``nbytes`` at ``address`` lie inside one range."""
        i = bisect_right(self._starts, address) - 1
        return i >= 0 and address + nbytes <= self._ends[i]

    def first_outside(self, addresses: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> int | None:
        """Index of the first range that lies inside none of ours, or None. Sizes are at least 1; no sum overflows."""
        if not self._starts:
            return 0 if len(addresses) else None
        single = len(self._starts) == 1  # the usual case: one region, one slab
        if single and len(addresses):
            # Three reductions settle most batches; they can only err towards the exact look below.
            top = int(addresses.max()) + int(sizes.max())
            if int(addresses.min()) >= self._starts[0] and top <= self._ends[0]:
                return None
        last = addresses + (sizes - np.uint64(1))
        if single:
            bad = (addresses < self._starts_array[0]) | (last > self._ends_array[0])
        else:
            at = np.searchsorted(self._starts_array, addresses, side="right")
            bad = (at == 0) | (last > self._ends_array[at - 1])
        return int(bad.argmax()) if bad.any() else None

    def explain(self, address: int, nbytes: int) -> str:
        """In words, which bound broke."""
        i = bisect_right(self._starts, address) - 1
        if i >= 0 and address < self._ends[i]:
            return f"it ends {address + nbytes - self._ends[i]} bytes past the range that ends at {self._ends[i]:#x}"
        return f"its start lies in none of the {len(self._starts)} known ranges"


class Batch:
    """One leased set of descriptors. Append, submit, and it returns to its pool when its swap has completed.

    The three arrays never leave the lease; after :meth:`release` every use raises :class:`StaleBatch`. Not
    thread-safe: a batch has one owner.
    """

    __slots__ = ("_arrays", "_lease", "_pool", "_views", "count")
    first = 0

    def __init__(self, pool: DescriptorPool, lease: _Lease) -> None:
        self._pool = pool
        self._lease: _Lease | None = lease
        self._arrays = lease.arrays
        self._views = lease.views
        self.count = 0

    def _live(self) -> _Lease:
        if self._lease is None:
            raise StaleBatch("this batch was returned to its pool when its swap completed; lease a new one")
        return self._lease

    @property
    def src(self) -> int:
        """Address of the uint64 array of sources."""
        return (self._lease or self._live()).addresses[0]

    @property
    def dst(self) -> int:
        """Address of the uint64 array of destinations."""
        return (self._lease or self._live()).addresses[1]

    @property
    def size(self) -> int:
        """Address of the uint64 array of sizes in bytes."""
        return (self._lease or self._live()).addresses[2]

    def append(self, src: int, dst: int, size: int) -> None:
        """Add one descriptor: addresses in [0, 2**64), size in bytes; zero sizes are left out."""
        lease = self._lease or self._live()  # the call only where it is to raise
        if size == 0:
            return
        i = self.count
        if i == lease.capacity:
            self._grow(i + 1)
        views = self._views
        try:
            views[0][i] = src
            views[1][i] = dst
            views[2][i] = size
        except (ValueError, TypeError) as exc:
            raise DescriptorError(
                f"descriptor {i}: source {src!r}, destination {dst!r} and size {size!r} must be ints in [0, 2**64)",
                index=i,
                src=src,
                dst=dst,
                size=size,
            ) from exc
        self.count = i + 1

    def extend(self, src: ArrayLike, dst: ArrayLike, size: ArrayLike) -> None:
        """Add many: three 1-D tables of one length, read as :func:`as_addresses` reads; zero sizes are left out.

        A scalar stands for a whole column. Raises :class:`DescriptorError` for lengths that differ and
        :class:`AddressError` for a value that is no unsigned 64-bit word; then nothing was added.
        """
        lease = self._live()
        columns = [_column(values) for values in (src, dst, size)]
        lengths = {len(c) for c in columns if c.ndim}
        if len(lengths) != 1 or any(c.ndim > 1 for c in columns):
            raise DescriptorError(
                f"the tables of sources, destinations and sizes must be 1-D and of one length, got "
                f"{[c.shape for c in columns]}",
                index=None,
            )
        n = lengths.pop()
        sizes = columns[2]
        if sizes.ndim == 0:
            keep = None if int(sizes) else slice(0, 0)
        else:
            keep = None if sizes.all() else np.flatnonzero(sizes)  # type: ignore[assignment]
        if keep is not None:
            columns = [c[keep] if c.ndim else c for c in columns]
            n = len(columns[2]) if columns[2].ndim else 0
        if self.count + n > lease.capacity:
            self._grow(self.count + n)
        end = self.count + n
        for array, column in zip(self._arrays, columns, strict=True):
            array[self.count : end] = column
        self.count = end

    def check(
        self,
        sources: AddressRanges | None,
        destinations: AddressRanges | None,
        names: NDArray[np.int64] | None = None,
    ) -> None:
        """Refuse a descriptor that wraps past 2**64 or leaves the known ranges (None: nothing is known of that side).

        ``names``: by which index the caller knows each descriptor. Raises :class:`DescriptorError` naming index,
        source, destination, size and the bound that broke. Drivers answer such a descriptor with a segmentation fault
        or with index 2**64-1.
        """
        self._live()
        n = self.count
        if n < _VECTOR_FROM:
            src, dst, size = self._views
            for i in range(n):
                s, d, z = src[i], dst[i], size[i]
                if s + z > _TOP or d + z > _TOP:
                    self._refuse(i, "it wraps past 2**64", names)
                if sources is not None and not sources.find(s, z):
                    self._refuse(i, "source: " + sources.explain(s, z), names)
                if destinations is not None and not destinations.find(d, z):
                    self._refuse(i, "destination: " + destinations.explain(d, z), names)
            return
        src_a, dst_a, size_a = (a[:n] for a in self._arrays)
        longest = int(size_a.max())
        for addresses in (src_a, dst_a):
            if int(addresses.max()) + longest <= _TOP:
                continue
            wraps = addresses > np.uint64(_TOP - 1) - (size_a - np.uint64(1))
            if wraps.any():
                self._refuse(int(wraps.argmax()), "it wraps past 2**64", names)
        for name, ranges, addresses in (("source", sources, src_a), ("destination", destinations, dst_a)):
            if ranges is None:
                continue
            i_bad = ranges.first_outside(addresses, size_a)
            if i_bad is not None:
                self._refuse(i_bad, f"{name}: " + ranges.explain(int(addresses[i_bad]), int(size_a[i_bad])), names)

    def _refuse(self, index: int, why: str, names: NDArray[np.int64] | None) -> None:
        src, dst, size = (view[index] for view in self._views)
        index = index if names is None else int(names[index])
        raise DescriptorError(
            f"descriptor {index} ({src:#x} -> {dst:#x}, {size} bytes) was not submitted: {why}",
            index=index,
            src=src,
            dst=dst,
            size=size,
        )

    def check_shape(self, alignment: int, min_bytes: int) -> None:
        """Refuse a descriptor whose addresses or size are no multiples of ``alignment`` bytes, or that has less than
        ``min_bytes``: a kernel would move other bytes. Raises :class:`DescriptorError`."""
        self._live()
        if self.count == 0:
            return
        src, dst, size = (a[: self.count] for a in self._arrays)
        unit = np.uint64(alignment)
        bad = ((src % unit) | (dst % unit) | (size % unit) | (size < np.uint64(min_bytes))) != 0
        if bad.any():
            self._refuse(
                int(bad.argmax()),
                f"this device copies at least {min_bytes} bytes, and multiples of {alignment} at such addresses",
                None,
            )

    def split(
        self, max_descriptors: int | None, max_bytes: int | None = None, alignment: int = 1
    ) -> Iterator[SubBatch]:
        """Windows of at most ``max_descriptors``, in order. Descriptors above ``max_bytes`` are cut beforehand, at
        multiples of ``alignment`` bytes."""
        lease = self._live()
        if max_bytes is not None:
            self._cut(max(max_bytes // alignment, 1) * alignment)
            lease = self._live()
        src, dst, size = lease.addresses
        n = self.count
        step = n if max_descriptors is None else max_descriptors
        for at in range(0, n, max(step, 1)):
            yield SubBatch(min(step, n - at), src + 8 * at, dst + 8 * at, size + 8 * at, at)

    def _cut(self, max_bytes: int) -> None:
        n = self.count
        if n == 0:
            return
        size = self._arrays[2][:n]
        if int(size.max()) <= max_bytes:
            return
        limit = np.uint64(max_bytes)
        pieces = ((size + (limit - np.uint64(1))) // limit).astype(np.int64)
        of = np.repeat(np.arange(n), pieces)
        within = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        offset = within.astype(np.uint64) * limit
        src, dst = self._arrays[0][:n][of] + offset, self._arrays[1][:n][of] + offset
        cut = np.minimum(size[of] - offset, limit)
        self.count = 0
        self.extend(src, dst, cut)

    def merge(self, source_edges: AddressRanges | None = None, destination_edges: AddressRanges | None = None) -> None:
        """Join neighbours that continue each other on both sides and stay inside one known range on each."""
        self._live()
        n = self.count
        if n < 2:
            return
        src, dst, size = (a[:n] for a in self._arrays)
        merged = merge_descriptors(src, dst, size, source_edges, destination_edges)
        self.count = 0
        self.extend(*merged)

    @property
    def nbytes(self) -> int:
        """Bytes that the batch moves."""
        self._live()
        return int(self._arrays[2][: self.count].sum(dtype=np.uint64)) if self.count else 0

    def _grow(self, needed: int) -> None:
        old, lease = self._live(), self._pool._take(needed)
        for new, array in zip(lease.arrays, old.arrays, strict=True):
            new[: self.count] = array[: self.count]
        self._lease, self._arrays, self._views = lease, lease.arrays, lease.views
        self._pool._give(old)

    def release(self) -> None:
        """Return the arrays to the pool. Idempotent; called when the swap has completed or was never submitted."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._views = self._arrays = ()  # type: ignore[assignment]
            self._pool._give(lease)

    def abandon(self, ended: Callable[[], bool]) -> None:
        """Give the lease up while a copy may still read its arrays: the pool keeps them until ``ended()``.

        Called from finalizers, so it takes no lock.
        """
        lease, self._lease = self._lease, None
        if lease is not None:
            _abandoned.append((self._pool, lease, ended))


def _column(values: ArrayLike) -> NDArray[np.uint64]:
    if isinstance(values, int) and not isinstance(values, bool):
        return as_addresses([values])[0]
    return as_addresses(values)


def merge_descriptors(
    src: NDArray[np.uint64],
    dst: NDArray[np.uint64],
    size: NDArray[np.uint64],
    source_ranges: AddressRanges | None = None,
    destination_ranges: AddressRanges | None = None,
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Join each descriptor to the one before where both sides continue.

    Inputs are 1-D uint64 arrays of one length, sizes above zero, no range wrapping. A join that would start a new
    known range (an allocation, a registration) is left open, since drivers refuse a copy that crosses one.
    """
    joins = (src[1:] == src[:-1] + size[:-1]) & (dst[1:] == dst[:-1] + size[:-1])
    # An address of 0 cannot continue anything: the sum before it wrapped.
    joins &= (src[1:] != 0) & (dst[1:] != 0)
    for ranges, addresses in ((source_ranges, src), (destination_ranges, dst)):
        if ranges is not None and len(ranges._starts):
            joins &= ~np.isin(addresses[1:], ranges._starts_array)
    if not joins.any():
        return src, dst, size
    heads = np.flatnonzero(np.concatenate(([True], ~joins)))
    return src[heads], dst[heads], np.add.reduceat(size, heads)


class _Lease:
    """Three arrays of one capacity, their addresses and their word views (the quick way to write single words)."""

    __slots__ = ("addresses", "arrays", "capacity", "views")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        block = np.empty((3, capacity), dtype=np.uint64)
        self.arrays = (block[0], block[1], block[2])
        base = block.ctypes.data
        self.addresses = (base, base + 8 * capacity, base + 16 * capacity)
        self.views = tuple(memoryview(a.view(np.uint8).data).cast("Q") for a in self.arrays)


_capacity = attrgetter("capacity")


class DescriptorPool:
    """Lends descriptor arrays and takes them back. Thread-safe; keeps at most ``keep`` idle sets of arrays."""

    def __init__(self, capacity: int = 256, *, keep: int = 8) -> None:
        if capacity < 1:
            raise ConfigError(f"a descriptor pool needs a capacity of at least 1, got {capacity}", value=capacity)
        self._capacity = capacity
        self._keep = keep
        self._idle: list[_Lease] = []
        self._lock = threading.Lock()
        self.leased = 0
        """Sets of arrays lent at present."""

    def lease(self, capacity: int = 0) -> Batch:
        """An empty batch with room for at least ``capacity`` descriptors (it grows when more are added)."""
        for _ in range(len(_abandoned)):
            try:
                pool, lease, ended = _abandoned.popleft()
            except IndexError:  # another thread is looking as well
                break
            if ended():
                pool._give(lease)
            else:
                _abandoned.append((pool, lease, ended))
        return Batch(self, self._take(capacity))

    def _take(self, needed: int) -> _Lease:
        with self._lock:
            self.leased += 1
            for i, lease in enumerate(self._idle):
                if lease.capacity >= needed:
                    return self._idle.pop(i)
        size = self._capacity
        while size < needed:
            size *= 2
        return _Lease(size)

    def _give(self, lease: _Lease) -> None:
        with self._lock:
            self.leased -= 1
            if len(self._idle) < self._keep:
                insort(self._idle, lease, key=_capacity)


# Arrays given up before their copy had ended. Of the process, not of a pool: a copy may outlive its pool as well.
_abandoned: deque[tuple[DescriptorPool, _Lease, Callable[[], bool]]] = deque()
_inherited: list[object] = []


def _after_fork() -> None:
    """In a forked child: what the parent gave up is the parent's, to be neither asked for nor freed here."""
    global _abandoned
    _inherited.append(_abandoned)
    _abandoned = deque()


os.register_at_fork(after_in_child=_after_fork)
