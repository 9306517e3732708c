"""What a restarted engine may believe about the bytes in a region: one record an entry, in the mapped file.

The scheduler that owns the region writes it: an intent before a save is submitted, a commit after the save has
completed, a drop before the extents go to somebody else. A kill between any two stores leaves a record that is whole or
empty, because one aligned 64-bit word, written last, holds both its state and the checksum of its body. On reading
nothing is trusted: a record that fails any test (checksum, bounds, lengths, shape, dtype, overlap) is dropped.

It never allocates space and never reads an entry's bytes: the caller verifies those against `JournalRecord.checksum`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterable, Sequence
from math import prod
from typing import NamedTuple
from zlib import crc32

from ecoffload.errors import ConfigError
from ecoffload.extents import MAX_EXTENTS, Extent
from ecoffload.hostmem import Gone, Words

__all__ = ["MAX_DIMS", "MAX_KEY", "RECORD_BYTES", "Journal", "JournalRecord", "JournalScan", "Pending"]

RECORD_BYTES = 512
MAX_KEY = 256
MAX_DIMS = 8
# generation, nbytes, key length, extents, dimensions, dtype, shape, (offset, length) pairs, key
_BODY = struct.Struct(f"<QQHBB20s{MAX_DIMS}Q{2 * MAX_EXTENTS}Q{MAX_KEY}s")
_STATE, _CHECKSUM, _HAS_CHECKSUM = range(3)  # words at the head of a record; the body follows
_HEAD = 24
_INTENT, _COMMIT = 0x496E746E << 32, 0x436F6D74 << 32  # high half of the state word; the low half is the CRC
_HIGH = 0xFFFFFFFF << 32

# Bytes of an element of every dtype that a record may name (torch's names; packed sub-byte types count one byte).
_ITEMSIZE = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2", "qint8", "quint8", "quint4x2", "quint2x4"), 1),
    **dict.fromkeys(("bits8", "bits4x2", "bits2x4", "bits1x8"), 1),
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32", "qint32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}


class JournalRecord(NamedTuple):
    """A committed entry, validated. `checksum` is None where none was stored."""

    handle: int
    key: bytes
    generation: int
    extents: tuple[Extent, ...]
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    checksum: int | None


class Pending(NamedTuple):
    """An intent without a commit whose writer may still be alive: its extents must stay unused until nobody else maps
    the region; then drop the handle."""

    handle: int
    extents: tuple[Extent, ...]


class JournalScan(NamedTuple):
    """What a journal holds: entries to serve, saves that may still be written, and how many records were dropped.

    `unreadable` tells that a record which could have named a live writer's extents was beyond reading: then only the
    extents of `records` are known to be safe, and everything else is to be quarantined.
    """

    records: tuple[JournalRecord, ...]
    pending: tuple[Pending, ...]
    dropped: int
    unreadable: bool


class Journal:
    """Records of `count` entries in `buffer` (a writable view of `count * RECORD_BYTES` bytes). Not thread-safe.

    `capacity`, `granule` and `edges` (offsets that no extent crosses) are the region's, in bytes; they decide which
    records are believable.
    """

    def __init__(self, buffer: memoryview, *, capacity: int, granule: int, edges: Collection[int]) -> None:
        self._words: Words = buffer.cast("Q")
        self._buffer: memoryview | Gone = buffer
        self._count = buffer.nbytes // RECORD_BYTES
        self._capacity = capacity
        self._granule = granule
        self._edges = sorted(edge for edge in edges if 0 < edge < capacity)
        self._free: list[int] = []
        self.reload()

    def detach(self, gone: Gone) -> None:
        """Let the memory go; `gone` answers every later call."""
        self._words = self._buffer = gone

    def reload(self) -> None:
        """Look again at which records are free: another process may have kept the journal meanwhile."""
        self._free = [handle for handle in reversed(range(self._count)) if not self._state(handle)]

    @property
    def capacity(self) -> int:
        """Records it has room for."""
        return self._count

    def __len__(self) -> int:
        return self._count - len(self._free)

    def intent(
        self,
        key: bytes,
        generation: int,
        extents: Sequence[tuple[int, int]],
        nbytes: int,
        dtype: str,
        shape: Sequence[int],
    ) -> int | None:
        """Say that these extents are about to be written. Returns the record's handle, or None if the journal is full:
        then the save must not be submitted, since a restart would not know of it.

        `dtype` is torch's name of it, without "torch.". Raises ConfigError for what no reader would accept.
        """
        if not self._free:
            return None
        body = self._pack(key, generation, extents, nbytes, dtype, shape)
        handle = self._free.pop()
        at = handle * RECORD_BYTES
        self._buffer[at + 8 : at + _HEAD] = bytes(_HEAD - 8)
        self._buffer[at + _HEAD : at + _HEAD + len(body)] = body
        self._set_state(handle, _INTENT | crc32(body))
        return handle

    def commit(self, handle: int, checksum: int | None = None) -> None:
        """The save has completed: the entry is whole. `checksum`: 64 bits over its bytes, as the caller computes it."""
        at = handle * RECORD_BYTES
        self._buffer[at + 8 : at + _HEAD] = struct.pack("<QQ", checksum or 0, checksum is not None)
        self._set_state(handle, _COMMIT | self._crc(handle))

    def drop(self, handle: int) -> None:
        """Forget a record; call it before its extents are given to anybody else."""
        if self._state(handle):
            self._set_state(handle, 0)
            self._free.append(handle)

    def clear(self) -> None:
        """Forget every record."""
        for handle in range(self._count):
            if self._state(handle):
                self._set_state(handle, 0)
        self._free = list(reversed(range(self._count)))

    def end_intents(self) -> None:
        """Forget every record that is no commit: nobody is left who could still write its bytes.

        For the one process that holds the region exclusively.
        """
        for handle in range(self._count):
            state = self._state(handle)
            if state and state & _HIGH != _COMMIT:
                self.drop(handle)

    def records(self) -> JournalScan:
        """Read and validate everything; drop what cannot be believed.

        Of two records that claim the same bytes neither is believed; of two with one key the later generation is. Two
        unfinished saves that claim the same bytes are unreadable.
        """
        committed: list[JournalRecord] = []
        pending: list[Pending] = []
        bad: list[int] = []
        unreadable = False
        for handle in range(self._count):
            state = self._state(handle)
            if not state:
                continue
            record = self._read(handle, state)
            if record is None:
                bad.append(handle)
                unreadable |= state & _HIGH != _COMMIT  # a commit is written after its writer has ended
            elif state & _HIGH == _COMMIT:
                committed.append(record)
            else:
                pending.append(Pending(handle, record.extents))
        doubtful = self._overlapping(committed, pending)
        clashing = self._overlapping((), pending)  # whose extents are whose is beyond reading then
        pending = [each for each in pending if each.handle not in clashing]
        unreadable |= bool(clashing)
        bad += sorted(clashing)
        latest: dict[bytes, JournalRecord] = {}
        for record in committed:
            kept = latest.get(record.key)
            if record.handle in doubtful:
                bad.append(record.handle)
            elif kept is None or kept.generation < record.generation:
                if kept is not None:
                    bad.append(kept.handle)
                latest[record.key] = record
            else:
                bad.append(record.handle)
        for handle in bad:
            self.drop(handle)
        return JournalScan(tuple(latest.values()), tuple(pending), len(bad), unreadable)

    def _state(self, handle: int) -> int:
        return self._words[handle * (RECORD_BYTES // 8) + _STATE]

    def _set_state(self, handle: int, state: int) -> None:
        self._words[handle * (RECORD_BYTES // 8) + _STATE] = state

    def _crc(self, handle: int) -> int:
        """Over body and checksum: what a commit's state word carries."""
        at = handle * RECORD_BYTES
        body = self._buffer[at + _HEAD : at + _HEAD + _BODY.size]
        return crc32(self._buffer[at + 8 : at + _HEAD], crc32(body))

    def _pack(
        self,
        key: bytes,
        generation: int,
        extents: Sequence[tuple[int, int]],
        nbytes: int,
        dtype: str,
        shape: Sequence[int],
    ) -> bytes:
        if not 0 < len(key) <= MAX_KEY:
            raise ConfigError(f"a key has 1 to {MAX_KEY} bytes, this one {len(key)}", option="key", value=key)
        if len(extents) > MAX_EXTENTS or len(shape) > MAX_DIMS:
            raise ConfigError(
                f"a journal record holds {MAX_EXTENTS} extents and {MAX_DIMS} dimensions, "
                f"not {len(extents)} and {len(shape)}",
                option="shape",
                value=tuple(shape),
            )
        if not 0 <= generation < 1 << 64:
            raise ConfigError(f"generation is {generation}; it has 64 bits", option="generation", value=generation)
        if dtype not in _ITEMSIZE:
            raise ConfigError(f"the journal knows no dtype {dtype!r}", option="dtype", value=dtype)
        if prod(shape) * _ITEMSIZE[dtype] != nbytes or min(shape, default=0) < 0 or not self._fit(extents, nbytes):
            raise ConfigError(
                f"{nbytes} bytes of shape {tuple(shape)} and dtype {dtype} in extents {tuple(extents)} cannot be: "
                f"granules have {self._granule} bytes, the region {self._capacity}",
                option="extents",
                value=tuple(extents),
            )
        pairs = [number for extent in extents for number in extent]
        return _BODY.pack(
            generation,
            nbytes,
            len(key),
            len(extents),
            len(shape),
            dtype.encode(),
            *shape,
            *[0] * (MAX_DIMS - len(shape)),
            *pairs,
            *[0] * (2 * MAX_EXTENTS - len(pairs)),
            key,
        )

    def _read(self, handle: int, state: int) -> JournalRecord | None:
        """The record behind a state word, or None if anything about it is wrong."""
        at = handle * RECORD_BYTES
        body = bytes(self._buffer[at + _HEAD : at + _HEAD + _BODY.size])
        head = bytes(self._buffer[at + 8 : at + _HEAD])
        crc = crc32(body)
        if state & _HIGH == _COMMIT:
            crc = crc32(head, crc)
        elif state & _HIGH != _INTENT:
            return None
        if state & 0xFFFFFFFF != crc:
            return None
        checksum, has_checksum = struct.unpack("<QQ", head)
        generation, nbytes, key_length, extent_count, ndim, dtype, *rest = _BODY.unpack(body)
        key = rest.pop()
        if not 0 < key_length <= MAX_KEY or extent_count > MAX_EXTENTS or ndim > MAX_DIMS or has_checksum > 1:
            return None
        name = dtype.rstrip(b"\0").decode("ascii", "replace")
        shape = tuple(rest[:ndim])
        pairs = rest[MAX_DIMS : MAX_DIMS + 2 * extent_count]
        extents = tuple(Extent(*pair) for pair in zip(pairs[::2], pairs[1::2], strict=True))
        if name not in _ITEMSIZE or prod(shape) * _ITEMSIZE[name] != nbytes or not self._fit(extents, nbytes):
            return None
        return JournalRecord(
            handle, key[:key_length], generation, extents, nbytes, name, shape, checksum if has_checksum else None
        )

    def _fit(self, extents: Iterable[tuple[int, int]], nbytes: int) -> bool:
        """Whether extents are whole granules inside the region, cross no edge and hold exactly `nbytes` rounded up."""
        total = 0
        for offset, length in extents:
            end = offset + length
            if length <= 0 or offset < 0 or offset % self._granule or length % self._granule or end > self._capacity:
                return False
            if any(offset < edge < end for edge in self._edges):
                return False
            total += length
        return total == nbytes + -nbytes % self._granule

    @staticmethod
    def _overlapping(committed: Iterable[JournalRecord], pending: Iterable[Pending]) -> set[int]:
        """Handles of records whose bytes another record claims as well."""
        claims = [(each.handle, each.extents) for each in committed] + [(each.handle, each.extents) for each in pending]
        spans = sorted((extent.offset, extent.length, handle) for handle, extents in claims for extent in extents)
        doubtful: set[int] = set()
        reach, owner = 0, -1
        for offset, length, handle in spans:
            if offset < reach:
                doubtful |= {owner, handle}
            if offset + length > reach:
                reach, owner = offset + length, handle
        return doubtful


def count_commits(fd: int, offset: int, records: int) -> int:
    """How many records of a journal in an open file say that they are committed; whether they are believable is not
    looked at. For listings: no mapping is needed."""
    found = 0
    for first in range(0, records, 4096):
        block = os.pread(fd, min(4096, records - first) * RECORD_BYTES, offset + first * RECORD_BYTES)
        words = memoryview(block[: len(block) // RECORD_BYTES * RECORD_BYTES]).cast("Q")
        found += sum(word & _HIGH == _COMMIT for word in words[:: RECORD_BYTES // 8])
    return found
