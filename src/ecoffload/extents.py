"""Which bytes of the host region are free, and which extents an entry gets.

Owns the free space of one region as plain numbers; it never touches memory. The index calls it (allocate, shorten,
free) and, after a warm restart, `reserve` rebuilds it from the journal. It never evicts and never waits: a caller that
gets None evicts one entry and asks again, which is cheap because a refusal costs a look at the largest few free
extents.

An entry in one or two long extents moves 12-15 % faster than one scattered over blocks, so space is given by best fit:
the smallest free extent that holds the entry, the lowest such offset. Where none does, the largest free extents are
used up first and best fit places what remains. Two extents are always allowed, a third and a fourth only to entries so
large that each piece is still long. What is left of a free extent stays beside the neighbour that was allocated
earlier: that one is likely to be evicted first, and then the two become one (a fifth fewer fragments).

Free extents live in one list of integers, length above offset, kept sorted: bisection finds the best fit, the end of
the list the largest. A plain list beats a tree of lists here: a churned region has hundreds of free extents at 16 GiB
and some thousands at 1 TiB, and moving that many words in C is faster than one Python call more. For the same reason
`allocate` and `free`, which a scheduler waits for, spell out what `_add` and `_remove` do for the others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from ecoffload.errors import RegionError

__all__ = ["MAX_EXTENTS", "Extent", "ExtentAllocator"]

MAX_EXTENTS = 4  # of one entry; more would cost descriptors on every load for a little more of the region in use
_BYTES_AN_EXTENT = 6 << 20  # of these an entry must hold n to be given more than n extents, beyond two


class Extent(NamedTuple):
    """A contiguous part of the region: `offset` from its start and `length`, both in bytes, both whole granules."""

    offset: int
    length: int


_extent = partial(tuple.__new__, Extent)  # half the time of a call of the class


class ExtentAllocator:
    """Hands out extents of a region of `capacity` bytes in multiples of `granule` bytes.

    A tail of the region shorter than a granule is never used. `edges` are offsets (bytes, multiples of `granule`) that
    no extent may cross, used or free: the borders of the chunks in which the region is registered with a driver.
    Offsets at or outside the region's ends are ignored.

    Not thread-safe: its caller's lock guards it. Raises RegionError for a geometry that cannot be served.
    """

    def __init__(self, capacity: int, granule: int, *, edges: Iterable[int] = ()) -> None:
        if granule <= 0:
            raise RegionError(f"granule is {granule} bytes; it must be positive", actual=granule)
        if capacity < granule:
            raise RegionError(
                f"capacity is {capacity} bytes, less than one granule of {granule}; give the region more room",
                expected=granule,
                actual=capacity,
            )
        self._granule = granule
        self._capacity = capacity - capacity % granule
        self._edges = frozenset(edge for edge in edges if 0 < edge < self._capacity)
        for edge in self._edges:
            if edge % granule:
                raise RegionError(
                    f"edge {edge} is not a multiple of the granule of {granule}; register chunks of whole granules",
                    expected=granule,
                    actual=edge,
                )
        self._serial = 0  # extents allocated so far
        self._reserved = 0  # extents reserved so far, negative: older than any other, and of no order among themselves
        self._serial_from: dict[int, int] = {}  # offset of every extent that is handed out -> its number
        self._serial_to: dict[int, int] = {}  # the same by its end
        self._length_at: dict[int, int] = {}  # offset -> length of every free extent
        self._start_of: dict[int, int] = {}  # end -> offset of every free extent
        # A free extent as a number: its length in units of `1 << zeros` bytes, above its offset. Lengths end in as many
        # zero bits as the granule, and a number of fewer digits is compared sooner.
        zeros = (granule & -granule).bit_length() - 1
        self._bits = self._capacity.bit_length() + 2  # offsets of four extents add up to less than one unit of length
        self._offset = (1 << self._bits) - 1
        self._up = self._bits - zeros  # a length shifted by so much stands where it should
        self._zeros = zeros
        self._by_length: list[int] = []  # these numbers of every free extent, ascending
        borders = [0, *sorted(self._edges), self._capacity]
        for start, end in pairwise(borders):
            self._add(start, end - start)
        self._free = self._capacity
        self._largest_when_empty = {count: self._reach(count) for count in range(2, MAX_EXTENTS + 1)}  # by extents

    @property
    def capacity(self) -> int:
        """Bytes that can be handed out: what was asked for, rounded down to whole granules."""
        return self._capacity

    @property
    def granule(self) -> int:
        """Unit of every offset and length, in bytes."""
        return self._granule

    @property
    def free_bytes(self) -> int:
        """Bytes in free extents."""
        return self._free

    @property
    def used_bytes(self) -> int:
        """Bytes in extents handed out or reserved."""
        return self._capacity - self._free

    @property
    def largest_free(self) -> int:
        """Length of the largest free extent in bytes; 0 when all is used."""
        return self._reach(1)

    def free_extents(self) -> list[Extent]:
        """Everything that is free, in order of offset."""
        return [Extent(offset, length) for offset, length in sorted(self._length_at.items())]

    def fits(self, nbytes: int) -> bool:
        """Whether an empty region would hold an entry of `nbytes`. If not, no eviction helps."""
        need = nbytes + -nbytes % self._granule
        return need <= self._largest_when_empty[_most_extents(need)]

    def allocate(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Extents for `nbytes` bytes, in the order in which they are to be filled, or None if there is no room.

        Their lengths are whole granules and sum to `nbytes` rounded up; the last holds the unused tail. Zero bytes need
        no extent: an empty tuple. None changes nothing and costs O(1). RegionError for a negative size.
        """
        if nbytes < 0:
            raise RegionError(f"cannot allocate {nbytes} bytes; a size is never negative", actual=nbytes)
        if not nbytes:
            return ()
        need = nbytes + -nbytes % self._granule
        by_length, up = self._by_length, self._up
        wanted = need << up
        if not by_length or (by_length[-1] < wanted and sum(by_length[-_most_extents(need) :]) < wanted):
            return None
        self._free -= need
        length_at, start_of = self._length_at, self._start_of
        serial_from, serial_to = self._serial_from, self._serial_to
        extents: tuple[Extent, ...] = ()
        while True:
            at = -1 if by_length[-1] < wanted else bisect_left(by_length, wanted)
            offset = by_length.pop(at) & self._offset
            took = length_at.pop(offset)
            end = offset + took
            left = took - need
            if left > 0:
                took = need
                if serial_to.get(offset, 0) < serial_from.get(end, 0):
                    del start_of[end]
                    start = offset
                    offset += left
                else:
                    start = end = offset + took
                length_at[start] = left
                start_of[start + left] = start
                insort(by_length, left << up | start)
            else:
                del start_of[end]
            self._serial = serial = self._serial + 1
            serial_from[offset] = serial_to[end] = serial
            extents += (_extent((offset, took)),)
            need -= took
            if not need:
                return extents
            wanted = need << up

    def free(self, extents: Iterable[Extent]) -> None:
        """Give back extents exactly as `allocate`, `shorten` or `reserve` had them: all, or none.

        An extent that is not in use, overlaps one in use, has another length, or comes twice in one call: RegionError
        naming it, and all that was in use still is.
        """
        serial_from, serial_to = self._serial_from, self._serial_to
        by_length, length_at, start_of = self._by_length, self._length_at, self._start_of
        up, edges = self._up, self._edges
        freed: list[Extent] = []
        for extent in extents:
            offset, length = extent
            end = offset + length
            serial = serial_from.get(offset)
            if serial is None or serial_to.get(end) != serial:
                self.reserve(freed)  # taken back
                raise RegionError(
                    f"cannot free {extent}: no extent like it is in use (freed twice, or never allocated)",
                    actual=tuple(extent),
                )
            freed.append(extent)
            del serial_from[offset], serial_to[end]
            self._free += length
            # One extent with its free neighbours on this side of the edges.
            if end in length_at and end not in edges:
                length = length_at.pop(end)
                del by_length[bisect_left(by_length, length << up | end)]
                end += length
            if offset in start_of and offset not in edges:
                start = start_of.pop(offset)
                del by_length[bisect_left(by_length, (offset - start) << up | start)]
                offset = start
            length = end - offset
            length_at[offset] = length
            start_of[end] = offset
            insort(by_length, length << up | offset)

    def shorten(self, extents: Iterable[Extent], nbytes: int) -> tuple[Extent, ...]:
        """Give back what these extents have beyond their first `nbytes` bytes, in whole granules; what is left of them.

        RegionError, and nothing has changed, for a negative size, for more than they hold, and for an extent that is
        not in use or comes twice.
        """
        serial_from, serial_to = self._serial_from, self._serial_to
        whole = tuple(Extent(*each) for each in extents)
        held = 0
        for extent in whole:
            if serial_to.get(extent.offset + extent.length, 0) != serial_from.get(extent.offset):
                raise RegionError(f"cannot shorten {extent}: no extent like it is in use", actual=tuple(extent))
            held += extent.length
        if not 0 <= nbytes <= held or len(set(whole)) < len(whole):
            raise RegionError(
                f"cannot shorten {whole} to {nbytes} bytes: they hold {held}, each counted once",
                expected=held,
                actual=nbytes,
            )
        left = nbytes + -nbytes % self._granule
        kept: list[Extent] = []
        beyond: list[Extent] = []
        for offset, length in whole:
            if 0 < left < length:  # becomes two extents, the second of which is freed like any
                self._serial = serial = self._serial + 1
                serial_to[offset + left] = serial_from[offset]
                serial_from[offset + left] = serial_to[offset + length] = serial
                beyond.append(Extent(offset + left, length - left))
                length = left
            (kept if left else beyond).append(Extent(offset, length))
            left = max(0, left - length)
        self.free(beyond)
        return tuple(kept)

    def reserve(self, extents: Iterable[Extent]) -> None:
        """Mark these free extents as used: all, or none. How a warm restart rebuilds the allocator from a journal.

        Costs a pass over all free extents, so give it everything in one call. An extent that is misaligned, empty,
        outside the region, across an edge, in use, or overlapping another of the call: RegionError naming it, and
        nothing has changed.
        """
        starts = sorted(self._length_at)
        parts: dict[int, list[Extent]] = {}  # free extent -> what of it becomes used, ascending
        filled = 0  # end of the extent before
        for extent in sorted(Extent(*each) for each in extents):
            offset, length = extent
            at = bisect_right(starts, offset) - 1
            start = starts[at] if at >= 0 else offset
            if (
                length <= 0
                or offset % self._granule
                or length % self._granule
                or offset < filled
                or offset + length > start + self._length_at.get(start, 0)
            ):
                raise RegionError(
                    f"cannot reserve {extent}: it must be whole granules of {self._granule} inside one free extent",
                    expected=(start, self._length_at.get(start, 0)),
                    actual=tuple(extent),
                )
            filled = offset + length
            parts.setdefault(start, []).append(extent)
        for start, taken in parts.items():
            end = start + self._length_at[start]
            self._remove(start, end - start)
            for offset, length in taken:
                if offset > start:
                    self._add(start, offset - start)
                self._reserved -= 1
                self._serial_from[offset] = self._serial_to[offset + length] = self._reserved
                self._free -= length
                start = offset + length
            if end > start:
                self._add(start, end - start)

    def check(self) -> None:
        """Raise RegionError unless every granule is free or used exactly once and all records agree."""
        ends = {serial: end for end, serial in self._serial_to.items()}
        self._expect("serial numbers", sorted(ends), sorted(self._serial_from.values()))
        used = {offset: ends[serial] - offset for offset, serial in self._serial_from.items()}
        everything = sorted([*used.items(), *self._length_at.items()])
        filled = 0
        for offset, length in everything:
            if offset != filled or length <= 0 or length % self._granule:
                raise RegionError(
                    f"extents do not tile the region: offset {offset}, length {length} where {filled} was next",
                    expected=filled,
                    actual=offset,
                )
            filled = offset + length
            if any(offset < edge < filled for edge in self._edges):
                raise RegionError(f"the extent at {offset} of length {length} crosses an edge", actual=(offset, length))
        self._expect("end of the last extent", self._capacity, filled)
        self._expect("free bytes", sum(self._length_at.values()), self._free)
        self._expect("free ends", {at + n: at for at, n in self._length_at.items()}, self._start_of)
        self._expect("free lengths", sorted(n << self._up | at for at, n in self._length_at.items()), self._by_length)
        unmerged = {at for at in self._length_at if at in self._start_of and at not in self._edges}
        self._expect("adjacent free extents", set(), unmerged)

    @staticmethod
    def _expect(name: str, expected: object, actual: object) -> None:
        if expected != actual:
            raise RegionError(f"{name}: expected {expected}, found {actual}", expected=expected, actual=actual)

    def _reach(self, count: int) -> int:
        """Bytes in the `count` largest free extents."""
        return sum(self._by_length[-count:]) >> self._bits << self._zeros

    def _add(self, offset: int, length: int) -> None:
        self._length_at[offset] = length
        self._start_of[offset + length] = offset
        insort(self._by_length, length << self._up | offset)

    def _remove(self, offset: int, length: int) -> None:
        del self._length_at[offset], self._start_of[offset + length]
        del self._by_length[bisect_left(self._by_length, length << self._up | offset)]


def _most_extents(nbytes: int) -> int:
    """Extents that an entry of `nbytes` may be split over: two, and up to `MAX_EXTENTS` while each is long."""
    return 2 if nbytes < 2 * _BYTES_AN_EXTENT else min(MAX_EXTENTS, 1 + nbytes // _BYTES_AN_EXTENT)
