"""What stands behind an entry's bytes in a store, so that a reader needs to believe nobody.

Behind, so that an entry and its header arrive in one run of memory where there is one: each further buffer of a fetch
costs a transfer of its own. 512 bytes: magic, version, what the entry belongs to (digests of namespace and key), dtype,
shape, length, XXH3 of the bytes, and XXH3 of the header itself. Everything is checked before an entry becomes ready. It
finds faults of any kind, bytes of another model or key included; it is no signature, so whoever may write to the store
must be trusted.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import xxhash

from ecoffload.dtypes import dtype_of, nbytes_of
from ecoffload.errors import ConfigError

__all__ = ["HEADER_BYTES", "MAX_DIMENSIONS", "Header", "object_name", "pack", "unpack"]

HEADER_BYTES = 512
MAX_DIMENSIONS = 16
_MAGIC = b"ecoffobj"
_VERSION = 2
_FIELDS = struct.Struct(f"<8sHH32s32s32sQQ{MAX_DIMENSIONS}Q")
_CHECK = struct.Struct("<Q")
_MAX_SIZE = 1 << 48


class Header(NamedTuple):
    """``checksum``: XXH3 (64 bits) over the ``nbytes`` before the header."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    checksum: int


@lru_cache(maxsize=64)
def _of_namespace(namespace: str) -> bytes:
    return blake2b(namespace.encode(), digest_size=32, person=b"namespace").digest()


def _of_key(key: bytes) -> bytes:
    return blake2b(key, digest_size=32, person=b"key").digest()


def object_name(namespace: str, key: bytes) -> str:
    """The object's name in a store: two models never ask for each other's."""
    return f"ecoffload-{_VERSION}-{_of_namespace(namespace).hex()[:32]}-{_of_key(key).hex()[:40]}"


def pack(namespace: str, key: bytes, header: Header) -> bytes:
    """HEADER_BYTES. Raises :class:`ConfigError` for what does not fit: a dtype's name, or too many dimensions."""
    dtype, shape = header.dtype.encode(), header.shape
    if len(dtype) > 32 or len(shape) > MAX_DIMENSIONS:
        raise ConfigError(
            f"key {key!r}: {header.dtype} {shape} has a name of over 32 bytes or over {MAX_DIMENSIONS} dimensions",
            option="shape",
            value=shape,
        )
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        len(shape),
        _of_namespace(namespace),
        _of_key(key),
        dtype,
        header.nbytes,
        header.checksum,
        *shape,
        *(0,) * (MAX_DIMENSIONS - len(shape)),
    )
    body = fields.ljust(HEADER_BYTES - _CHECK.size, b"\0")
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def unpack(namespace: str, key: bytes, nbytes: int, data: bytes) -> Header | str:
    """The header of an object whose entry has ``nbytes`` bytes; or why it is not that of this key."""
    if len(data) != HEADER_BYTES:
        return f"a header of {len(data)} bytes"
    body = data[: -_CHECK.size]
    if _CHECK.unpack(data[-_CHECK.size :])[0] != xxhash.xxh3_64_intdigest(body):
        return "the header's checksum is wrong"
    magic, version, count, of_namespace, of_key, dtype, length, checksum, *shape = _FIELDS.unpack_from(body)
    if magic != _MAGIC or version != _VERSION:
        return f"magic {magic!r}, version {version}"
    if of_namespace != _of_namespace(namespace):
        return "it is of another namespace"
    if of_key != _of_key(key):
        return "it is of another key"
    if length != nbytes:
        return f"the header speaks of {length} bytes, the object has {nbytes}"
    if count > MAX_DIMENSIONS or max(shape) > _MAX_SIZE:
        return f"shape {shape[:count]} of {count} dimensions"
    try:
        name = dtype.rstrip(b"\0").decode("ascii")
        expected = nbytes_of(tuple(shape[:count]), dtype_of(name))
    except (UnicodeDecodeError, ConfigError):
        return f"dtype {dtype!r}"
    if expected != nbytes:
        return f"{name} {shape[:count]} has not {nbytes} bytes"
    return Header(name, tuple(shape[:count]), nbytes, checksum)
