"""The kernels of the cpu backend move exactly the bytes they are told, whichever of them runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ecoffload.cpu import backend as cpu
from ecoffload.cpu import copies
from ecoffload.cpu.copies import ROWS_BELOW, copy_descriptors, words_at

Bytes = NDArray[np.uint8]


def buffers(nbytes: int, seed: int = 0) -> tuple[Bytes, Bytes]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8), np.full(nbytes, 0xAB, np.uint8)


def columns(rows: list[tuple[int, int, int]], src: Bytes, dst: Bytes) -> list[NDArray[np.uint64]]:
    """Offsets within the buffers as descriptors."""
    bases = (src.ctypes.data, dst.ctypes.data, 0)
    return [np.array([base + row[i] for row in rows], dtype=np.uint64) for i, base in enumerate(bases)]


def expected(rows: list[tuple[int, int, int]], src: Bytes, dst: Bytes) -> Bytes:
    result = dst.copy()
    for s, d, n in rows:
        result[d : d + n] = src[s : s + n]
    return result


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """Descriptors with destinations of their own: runs of one size on a grid, odd offsets, loose ones between."""
    rows: list[tuple[int, int, int]] = []
    filled = draw(st.integers(0, 9))
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 70))
        count = draw(st.sampled_from([1, 2, 15, 16, 17, 40]))
        gather = draw(st.booleans())
        odd = draw(st.integers(0, 7))
        blocks = draw(st.permutations(range(count)))
        loose = draw(st.integers(0, 3)) == 0
        for i, block in enumerate(blocks):
            shift = draw(st.integers(0, 3)) if loose else 0
            if gather:
                rows.append((odd + block * size + shift, filled + i * size, size))
            else:
                rows.append((odd + i * size, filled + block * size, size))
        filled += count * size + draw(st.integers(0, 5))
    total = max(max(s, d) + n for s, d, n in rows)
    return total + 8, rows


@settings(deadline=None, max_examples=150)
@given(batches())
def test_random_batches_are_byte_exact(case: tuple[int, list[tuple[int, int, int]]]) -> None:
    nbytes, rows = case
    src, dst = buffers(nbytes)
    want = expected(rows, src, dst)
    copy_descriptors(*columns(rows, src, dst))
    assert np.array_equal(dst, want)


@settings(deadline=None, max_examples=50)
@given(batches(), st.integers(1, 5))
def test_shares_of_a_batch_are_the_batch(case: tuple[int, list[tuple[int, int, int]]], parts: int) -> None:
    nbytes, rows = case
    src, dst = buffers(nbytes)
    want = expected(rows, src, dst)
    shares = cpu._shares(*columns(rows, src, dst), parts)
    assert 1 <= len(shares) <= parts
    assert sum(int(size.sum()) for _, _, size in shares) == sum(n for _, _, n in rows)
    for share in shares:
        copy_descriptors(*share)
    assert np.array_equal(dst, want)


@pytest.mark.parametrize("parts", [2, 3, 16])
@pytest.mark.parametrize("sizes", [[5 << 20], [3 << 20, 1, 7, 2 << 20], [ROWS_BELOW - 1] * 20, [1] * 5000])
def test_no_share_is_much_larger_than_others_since_large_descriptors_are_cut_inside(
    parts: int, sizes: list[int]
) -> None:
    size = np.array(sizes, dtype=np.uint64)
    src = np.cumsum(size) + np.uint64(2**62)
    dst = np.cumsum(size) + np.uint64(2**40)
    shares = cpu._shares(src, dst, size, parts)
    moved = [int(each.sum()) for _, _, each in shares]
    assert sum(moved) == sum(sizes)
    assert max(moved) <= 2 * sum(sizes) / parts + 2 * ROWS_BELOW
    assert all(int(s[0]) - int(d[0]) == 2**62 - 2**40 for s, d, _ in shares)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("size", [1, 7, 64, 7168, 4096])
def test_the_rows_kernel_serves_blocks_of_one_size_on_a_grid(
    gather: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = np.random.default_rng(1).permutation(40)
    src, dst = buffers(40 * size + 3)
    rows = [
        (3 + int(block) * size, 1 + i * size, size) if gather else (1 + i * size, 3 + int(block) * size, size)
        for i, block in enumerate(order)
    ]
    want = expected(rows, src, dst)

    def never(*_: object) -> None:
        raise AssertionError("one foreign call each is what rows are there to save")

    monkeypatch.setattr(copies, "_memmove", never)
    copy_descriptors(*columns(rows, src, dst))
    assert np.array_equal(dst, want)


def test_what_is_on_no_grid_is_copied_one_by_one() -> None:
    src, dst = buffers(4000)
    rows = [(i * 37 + (i % 3), i * 20, 20) for i in range(100)]
    want = expected(rows, src, dst)
    copy_descriptors(*columns(rows, src, dst))
    assert np.array_equal(dst, want)


def test_one_block_may_be_read_many_times() -> None:
    src, dst = buffers(64 * 32)
    rows = [(64, i * 64, 64) for i in range(32)]
    want = expected(rows, src, dst)
    copy_descriptors(*columns(rows, src, dst))
    assert np.array_equal(dst, want)


def test_a_grid_may_lie_below_and_above_each_other_far_apart() -> None:
    low, high = buffers(4096)[0], np.zeros(64 * 32, np.uint8)
    other = buffers(4096, 1)[0]
    apart = other.ctypes.data - low.ctypes.data
    aligned = low.ctypes.data + (apart // 64) * 64  # on low's grid, inside or just before the other
    rows_src = [low.ctypes.data + i * 64 for i in range(16)] + [aligned + 64 * (1 + i) for i in range(16)]
    src = np.array(rows_src, dtype=np.uint64)
    dst = high.ctypes.data + np.arange(32, dtype=np.uint64) * np.uint64(64)
    copy_descriptors(src, dst, np.full(32, 64, np.uint64))
    shift = aligned + 64 - other.ctypes.data
    assert np.array_equal(high[:1024], low[:1024])
    assert np.array_equal(high[1024:], other[shift : shift + 1024])


def test_words_are_read_where_they_lie() -> None:
    words = np.array([1, 2**63, 2**64 - 1], dtype=np.uint64)
    seen = words_at(words.ctypes.data, 3)
    words[0] = 5
    assert seen.tolist() == [5, 2**63, 2**64 - 1]
    assert len(words_at(0, 0)) == 0
