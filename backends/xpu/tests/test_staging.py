"""Staging: what is cut how, and when a block may be used again."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from ecoffload_xpu.staging import Staging, chunks
from ecoffload_xpu.ways import ShimWay
from hypothesis import given, settings
from hypothesis import strategies as st

from ecoffload.errors import SwapFailed

BASE = 0xFFFFD556B6400000

sizes = st.lists(st.integers(1, 70), min_size=1, max_size=30)


def batch(lengths: list[int], base: int = BASE):
    size = np.array(lengths, dtype=np.uint64)
    src = np.uint64(base) + np.arange(len(lengths), dtype=np.uint64) * np.uint64(1000)
    return src, src[::-1].copy() - np.uint64(2**40), size


@given(sizes, st.integers(1, 100))
def test_chunks_carry_every_byte_of_every_descriptor_once_and_in_order(lengths, limit):
    src, dst, size = batch(lengths)
    pairs = [
        (int(s) + i, int(d) + i)
        for chunk in chunks(src, dst, size, limit)
        for s, d, n in zip(chunk.src, chunk.dst, chunk.size, strict=True)
        for i in range(int(n))
    ]
    expected = [(int(s) + i, int(d) + i) for s, d, n in zip(src, dst, size, strict=True) for i in range(int(n))]
    assert pairs == expected


@given(sizes, st.integers(1, 100))
def test_all_chunks_but_the_last_hold_exactly_the_limit(lengths, limit):
    held = [chunk.nbytes for chunk in chunks(*batch(lengths), limit)]
    assert held[:-1] == [limit] * (len(held) - 1)
    assert 0 < held[-1] <= limit


@given(sizes, st.integers(1, 100))
def test_every_piece_names_the_descriptor_it_was_cut_from(lengths, limit):
    src, dst, size = batch(lengths)
    for chunk in chunks(src, dst, size, limit):
        assert ((src[chunk.of] <= chunk.src) & (chunk.src - src[chunk.of] < size[chunk.of])).all()


@pytest.fixture
def way(recorder, built) -> ShimWay:
    return ShimWay(recorder.library, built / "_shim.so")


def host_chunk(source: np.ndarray):
    src = np.array([source.ctypes.data], dtype=np.uint64)
    return next(chunks(src, np.array([BASE], dtype=np.uint64), np.array([source.nbytes], dtype=np.uint64)))


def staged_bytes(recorder, copy: int, nbytes: int) -> bytes:
    return ctypes.string_at(int(recorder.copies[copy, 2]), nbytes)


def test_b8_a_source_changed_after_the_call_is_copied_as_it_was(way, recorder):
    staging, source = Staging(way), np.full(5000, 7, dtype=np.uint8)
    staging.copy(recorder.queue(), host_chunk(source))
    source[:] = 9
    assert staged_bytes(recorder, 0, 5000) == b"\7" * 5000
    recorder.finish()


def test_a_block_in_use_is_not_written_again(way, recorder):
    staging, queue = Staging(way), recorder.queue()
    for value in (1, 2):
        staging.copy(queue, host_chunk(np.full(64, value, dtype=np.uint8)))
    assert (staged_bytes(recorder, 0, 64), staged_bytes(recorder, 1, 64)) == (b"\1" * 64, b"\2" * 64)
    recorder.finish()


def test_a_block_that_was_read_is_used_again(way, recorder):
    staging, queue, source = Staging(way), recorder.queue(), np.zeros(64, dtype=np.uint8)
    for _ in range(5):
        staging.copy(queue, host_chunk(source))
        recorder.finish()
    assert recorder.journal.count("allocate 1048576") == 1


def test_at_the_limit_the_oldest_copy_is_waited_for(way, recorder):
    staging, queue, source = Staging(way, limit=2 << 20), recorder.queue(), np.zeros(1 << 20, dtype=np.uint8)
    for _ in range(3):
        staging.copy(queue, host_chunk(source))
    waits = [line for line in recorder.journal if line.startswith("wait")]
    assert len(waits) == 1
    assert staging.nbytes <= 2 << 20
    recorder.finish()


def test_a_refused_copy_gives_its_block_back(way, recorder):
    staging, queue, source = Staging(way), recorder.queue(), np.zeros(64, dtype=np.uint8)
    recorder.throw_at(0)
    with pytest.raises(SwapFailed):
        staging.copy(queue, host_chunk(source))
    staging.copy(queue, host_chunk(source))
    assert recorder.journal.count("allocate 1048576") == 1
    recorder.finish()


def test_closing_waits_for_the_device_and_frees_the_memory(way, recorder):
    staging, before = Staging(way), recorder.live_blocks()
    staging.copy(recorder.queue(), host_chunk(np.zeros(64, dtype=np.uint8)))
    staging.close()
    assert any(line.startswith("wait") for line in recorder.journal)
    assert (staging.nbytes, recorder.live_blocks()) == (0, before)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**64 - 2**25), st.lists(st.integers(1, 2**20), min_size=1, max_size=20))
def test_cutting_is_exact_anywhere_in_the_address_space(base, lengths):
    size = np.array(lengths, dtype=np.uint64)
    src = np.full(len(lengths), base, dtype=np.uint64)
    cut = list(chunks(src, src, size, 1 << 18))
    assert sum(chunk.nbytes for chunk in cut) == sum(lengths)
    ends = {(int(of), int(s) + int(n)) for c in cut for of, s, n in zip(c.of, c.src, c.size, strict=True)}
    assert {(i, base + n) for i, n in enumerate(lengths)} <= ends
