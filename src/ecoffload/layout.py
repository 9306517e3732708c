"""What a region's file looks like: the header's fields, where slots, journal and data lie, which bytes are locks.

Plain numbers and bytes; it opens and maps nothing. `region` writes it, `region` and `regions` read it.

    0     fixed fields, a CRC over them, the namespace's text     written once, before the region is ready
    2048  words that change (the W_ numbers below)                each one aligned 64-bit store
    4096  slots, then the journal, then, on a page of its own, the data

Magic, version and the words READY and OWNERLESS_SINCE keep their places in every later version, so that any version can
tell whose file it is and reclaim it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import lcm
from zlib import crc32

from ecoffload.errors import ConfigError
from ecoffload.journal import RECORD_BYTES
from ecoffload.slots import SLOT_BYTES

__all__ = ["HEADER_BYTES", "MAGIC", "VERSION", "Header"]

MAGIC = b"ECOFFLD\0"
VERSION = 1
HEADER_BYTES = 4096
# Bytes of the file whose locks mean something; a slot's own range is its owner's.
LIFE, CLAIMS, SCHEDULER = 0, 8, 16
ERAS = 1 << 62  # far beyond the file: from here on one byte an era, held shared by who maps the region since then
LAST_ERA = (1 << 40) - 1
# Words of the header that change.
W_READY, W_OWNERLESS_SINCE, W_INSTANCE, W_EPOCH, W_BEGUN, W_OPENED, W_CLAIMS, W_ERA = range(256, 264)
W_TAKEOVERS = 264  # eight times, in seconds, newest first
TAKEOVERS = 8
W_ACTIVITY = 288  # to the end of the page: what the scheduler tells the outside, see telemetry.py

_FIXED = struct.Struct("<8sIIQQQQQQIIQQ32sI")
_TEXT = 256  # where the namespace's text lies
_TEXT_MAX = 1536
_F_WARM, _F_SCRUB = 1, 2
_ENTRY_BYTES = 128 << 10  # an encoder output is rarely smaller: a journal record for each so many bytes of the region
_MAX_RECORDS = 1 << 20


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed fields. Sizes and offsets in bytes. `incarnation`: a random number, new with every cold start."""

    data_offset: int
    capacity: int
    nbytes: int
    granule: int
    chunk_bytes: int
    slots: int
    journal_offset: int
    journal_records: int
    warm: bool
    scrub: bool
    namespace: str
    digest: bytes
    incarnation: int = 0

    @property
    def total(self) -> int:
        """Bytes of the file."""
        return self.data_offset + self.nbytes

    @property
    def edges(self) -> tuple[int, ...]:
        """Offsets in the data at which registrations start."""
        return tuple(range(0, self.nbytes, self.chunk_bytes))

    def same_layout(self, other: Header) -> bool:
        """Whether a file of one can be used in place as a file of the other."""
        return replace(self, warm=other.warm, scrub=other.scrub, namespace="", digest=b"", incarnation=0) == replace(
            other, namespace="", digest=b"", incarnation=0
        )

    def differences(self, other: Header) -> list[tuple[str, object, object]]:
        """(field, ours, theirs) of what keeps two processes from sharing one region."""
        names = ["capacity", "granule", "chunk_bytes", "slots", "warm", "namespace"]
        names += ["nbytes", "data_offset", "journal_records"]
        found = [(name, getattr(self, name), getattr(other, name)) for name in names]
        found = [each for each in found if each[1] != each[2]]
        if self.digest != other.digest and not any(name == "namespace" for name, _, _ in found):
            found.append(("namespace", self.digest.hex(), other.digest.hex()))
        return found

    def pack(self) -> bytes:
        """The first `HEADER_BYTES // 2` bytes of the file."""
        text = self.namespace.encode("utf-8", "surrogateescape")
        fields = (
            self.data_offset,
            self.capacity,
            self.nbytes,
            self.granule,
            self.chunk_bytes,
            self.incarnation,
            self.slots,
            (_F_WARM if self.warm else 0) | (_F_SCRUB if self.scrub else 0),
            self.journal_offset,
            self.journal_records,
            self.digest,
            len(text),
        )
        body = bytearray(HEADER_BYTES // 2)
        _FIXED.pack_into(body, 0, MAGIC, VERSION, 0, *fields)
        body[_TEXT : _TEXT + len(text)] = text
        struct.pack_into("<I", body, 12, crc32(body))
        return bytes(body)


def version_of(page: bytes) -> int | None:
    """The layout version of a file that begins with `page`; None if it is no region at all."""
    return struct.unpack_from("<I", page, 8)[0] if len(page) >= HEADER_BYTES and page[:8] == MAGIC else None


def word_of(page: bytes, word: int) -> int:
    """One changing word of a header page that was read, not mapped."""
    return int(struct.unpack_from("<Q", page, 8 * word)[0])


def is_ready(page: bytes) -> bool:
    """Whether a creator has finished. The word repeats the incarnation, so that stray bytes rarely pass for it."""
    header = parse(page)
    return header is not None and word_of(page, W_READY) == header.incarnation != 0


def parse(page: bytes) -> Header | None:
    """The header in a file's first page, or None unless every field of it can be believed."""
    if version_of(page) != VERSION:
        return None
    fixed = bytearray(page[: HEADER_BYTES // 2])
    (stored,) = struct.unpack_from("<I", fixed, 12)
    struct.pack_into("<I", fixed, 12, 0)
    if stored != crc32(fixed):
        return None
    _, _, _, data, capacity, nbytes, granule, chunk, incarnation, slots, flags, journal, records, digest, length = (
        _FIXED.unpack_from(fixed)
    )
    if length > _TEXT_MAX or not granule or not chunk or not slots or capacity % granule or flags > 3:
        return None
    if journal != HEADER_BYTES + slots * SLOT_BYTES or data < journal + records * RECORD_BYTES:
        return None
    if not 0 < capacity <= nbytes or data % 4096 or nbytes % 4096 or chunk % 4096 or chunk % granule:
        return None
    if data + nbytes >= 1 << 62 or slots > 1 << 16 or records > _MAX_RECORDS:
        return None
    text = bytes(fixed[_TEXT : _TEXT + length]).decode("utf-8", "replace")
    warm, scrub = bool(flags & _F_WARM), bool(flags & _F_SCRUB)
    return Header(
        data, capacity, nbytes, granule, chunk, slots, journal, records, warm, scrub, text, digest, incarnation
    )


def plan(
    *,
    capacity: int,
    granule: int,
    page: int,
    chunk_bytes: int,
    slots: int,
    warm: bool,
    scrub: bool,
    namespace: str,
    incarnation: int,
) -> Header:
    """The layout for what was asked: `capacity` rounded up to whole granules, the data to whole pages.

    Chunks start at common multiples of granule and page, so that each can be registered and no granule lies in two.
    Raises ConfigError for numbers that make no region.
    """
    for name, value in (("capacity", capacity), ("granule", granule), ("slots", slots), ("chunk_bytes", chunk_bytes)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1", option=name, value=value)
    if slots > 4096:
        raise ConfigError(f"slots is {slots}; 4096 is the most", option="slots", value=slots)
    if granule > capacity:
        raise ConfigError(
            f"capacity is {capacity} bytes, less than one granule of {granule}", option="capacity", value=capacity
        )
    step = lcm(granule, page)
    if chunk_bytes < page:
        raise ConfigError(f"chunk_bytes is {chunk_bytes}, less than a page", option="chunk_bytes", value=chunk_bytes)
    usable = -(-capacity // granule) * granule
    nbytes = -(-usable // page) * page
    chunk = max(step, chunk_bytes // step * step)
    records = min(usable // granule, _MAX_RECORDS, max(256, usable // _ENTRY_BYTES)) if warm else 0
    journal = HEADER_BYTES + slots * SLOT_BYTES
    data = -(-(journal + records * RECORD_BYTES) // page) * page
    if data + nbytes >= 1 << 62:
        raise ConfigError(
            f"capacity is {capacity} bytes; no address space holds that", option="capacity", value=capacity
        )
    raw = namespace.encode("utf-8", "surrogateescape")
    text = raw[:_TEXT_MAX].decode("utf-8", "ignore")
    digest = blake2b(raw, digest_size=32).digest()
    return Header(data, usable, nbytes, granule, chunk, slots, journal, records, warm, scrub, text, digest, incarnation)
