"""The header: what it accepts is exactly what was packed for the same namespace and key."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ecoffload import ConfigError
from ecoffload.tiers.header import HEADER_BYTES, Header, object_name, pack, unpack

HEADER = Header("bfloat16", (12, 34), 816, 0x0123456789ABCDEF)
PACKED = pack("model", b"key", HEADER)


def resealed(data: bytes) -> bytes:
    """With a header checksum that is right again: what a peer with another idea of the format would send."""
    return data[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:-8]))


def test_it_comes_back_as_it_was() -> None:
    assert len(PACKED) == HEADER_BYTES
    assert unpack("model", b"key", 816, PACKED) == HEADER


@given(st.text(min_size=1, max_size=20), st.binary(min_size=1, max_size=256), st.lists(st.integers(0, 9), max_size=16))
def test_every_key_and_shape_comes_back(namespace: str, key: bytes, shape: list[int]) -> None:
    nbytes = 4
    for size in shape:
        nbytes *= size
    header = Header("float32", tuple(shape), nbytes, 5)
    assert unpack(namespace, key, nbytes, pack(namespace, key, header)) == header


@given(st.integers(0, 8 * HEADER_BYTES - 1))
def test_any_flipped_bit_is_found(bit: int) -> None:
    data = bytearray(PACKED)
    data[bit // 8] ^= 1 << bit % 8
    assert isinstance(unpack("model", b"key", 816, bytes(data)), str)


@given(st.integers(0, HEADER_BYTES - 9), st.integers(1, 255))
def test_a_well_sealed_header_with_any_other_byte_is_refused_or_describes_as_many_bytes(at: int, change: int) -> None:
    data = bytearray(PACKED)
    data[at] ^= change
    header = unpack("model", b"key", 816, resealed(bytes(data)))
    assert isinstance(header, str) or (header.nbytes == 816 and header != HEADER) or header == HEADER


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_noise_is_refused_even_if_well_sealed(data: bytes) -> None:
    assert isinstance(unpack("model", b"key", 816, data), str)
    assert isinstance(unpack("model", b"key", 816, resealed(data)), str)


@pytest.mark.parametrize(
    ("namespace", "key", "nbytes", "reason"),
    [
        ("other", b"key", 816, "namespace"),
        ("model", b"other", 816, "another key"),
        ("model", b"key", 815, "816 bytes"),
    ],
)
def test_what_belongs_to_something_else_is_refused_with_a_reason(
    namespace: str, key: bytes, nbytes: int, reason: str
) -> None:
    found = unpack(namespace, key, nbytes, PACKED)
    assert isinstance(found, str)
    assert reason in found


def test_a_dtype_that_this_torch_does_not_have_is_refused() -> None:
    found = unpack("model", b"key", 816, resealed(PACKED.replace(b"bfloat16", b"float999")))
    assert isinstance(found, str)
    assert "float999" in found


def test_what_does_not_fit_a_header_is_an_error() -> None:
    with pytest.raises(ConfigError, match="16 dimensions"):
        pack("model", b"key", Header("uint8", (1,) * 17, 1, 0))


def test_names_differ_by_namespace_and_key() -> None:
    names = {object_name(n, k) for n in ("a", "b") for k in (b"a", b"b")}
    assert len(names) == 4
