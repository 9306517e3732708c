"""Splitting by a device's limits, cutting and merging: the same bytes move, and no edge is crossed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecoffload.descriptors import AddressRanges, Batch, DescriptorPool, SubBatch, merge_descriptors
from ecoffload.drivers import words_at

TOP = 2**64
Row = tuple[int, int, int]


def filled(rows: list[Row]) -> Batch:
    batch = DescriptorPool(4).lease()
    for row in rows:
        batch.append(*row)
    return batch


def rows_of(view: Batch | SubBatch) -> list[Row]:
    return list(zip(*(words_at(at, view.count) for at in (view.src, view.dst, view.size)), strict=True))


# --- splitting


@pytest.mark.parametrize("most", [None, 1, 2, 9, 10, 11])
def test_windows_cover_the_batch_once_in_order(most: int | None) -> None:
    rows = [(i, 100 + i, 1 + i) for i in range(10)]
    windows = list(filled(rows).split(most))
    assert [row for window in windows for row in rows_of(window)] == rows
    assert all(window.count <= (most or 10) for window in windows)
    assert [window.first for window in windows] == [sum(w.count for w in windows[:i]) for i in range(len(windows))]


def test_an_empty_batch_has_no_windows() -> None:
    assert list(filled([]).split(3, 10)) == []


@pytest.mark.parametrize(("size", "pieces"), [(9, [9]), (10, [10]), (11, [10, 1]), (30, [10, 10, 10])])
def test_a_descriptor_above_the_limit_is_cut(size: int, pieces: list[int]) -> None:
    batch = filled([(5, 50, 1), (2**63 - 3, 1000, size)])
    (window,) = batch.split(None, 10)
    found = rows_of(window)
    assert found[0] == (5, 50, 1)
    assert [row[2] for row in found[1:]] == pieces
    assert [row[0] - (2**63 - 3) for row in found[1:]] == [row[1] - 1000 for row in found[1:]]
    assert [row[1] for row in found[1:]] == [1000 + sum(pieces[:i]) for i in range(len(pieces))]


def test_indices_of_windows_count_the_pieces() -> None:
    windows = list(filled([(0, 0, 25), (100, 100, 5)]).split(2, 10))
    assert [(window.first, window.count) for window in windows] == [(0, 2), (2, 2)]


@given(
    st.lists(st.tuples(st.integers(0, TOP - 2000), st.integers(0, TOP - 2000), st.integers(1, 2000)), max_size=60),
    st.integers(1, 700),
    st.integers(1, 20),
)
def test_cutting_and_splitting_keep_every_byte(rows: list[Row], most_bytes: int, most: int) -> None:
    found = [row for window in filled(rows).split(most, most_bytes) for row in rows_of(window)]
    assert all(0 < size <= most_bytes for _, _, size in found)
    at = iter(found)
    for src, dst, size in rows:
        done = 0
        while done < size:
            piece = next(at)
            assert piece[:2] == (src + done, dst + done)
            done += piece[2]
        assert done == size
    assert next(at, None) is None


# --- merging


def test_neighbours_that_continue_each_other_become_one() -> None:
    batch = filled([(0, 100, 10), (10, 110, 5), (15, 115, 1), (40, 200, 3)])
    batch.merge()
    assert rows_of(batch) == [(0, 100, 16), (40, 200, 3)]


@pytest.mark.parametrize(
    "second", [(11, 110, 5), (10, 111, 5), (9, 110, 5), (10, 100, 5)], ids=["gap", "gap there", "overlap", "same"]
)
def test_neighbours_that_continue_on_one_side_only_stay_apart(second: Row) -> None:
    batch = filled([(0, 100, 10), second])
    batch.merge()
    assert rows_of(batch) == [(0, 100, 10), second]


def test_a_merge_never_crosses_into_another_range() -> None:
    touching = AddressRanges([(0, 10), (10, 100)])
    for edges in ((touching, None), (None, AddressRanges([(100, 10), (110, 50)]))):
        batch = filled([(0, 100, 10), (10, 110, 5), (15, 115, 5)])
        batch.merge(*edges)
        assert rows_of(batch) == [(0, 100, 10), (10, 110, 10)]


def test_the_end_of_the_address_space_does_not_continue_at_zero() -> None:
    batch = filled([(TOP - 10, 100, 10), (0, 110, 5)])
    batch.merge()
    assert rows_of(batch) == [(TOP - 10, 100, 10), (0, 110, 5)]


def test_a_merged_range_may_end_at_two_to_the_64() -> None:
    batch = filled([(TOP - 20, 0, 10), (TOP - 10, 10, 10)])
    batch.merge()
    assert rows_of(batch) == [(TOP - 20, 0, 20)]
    assert batch.check(AddressRanges([(TOP - 20, 20)]), None) is None


@st.composite
def chains(draw: st.DrawFn) -> list[Row]:
    """Descriptors of which many continue the one before, on one side or on both."""
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 40))):
        size = draw(st.integers(1, 6))
        src, dst = draw(st.integers(0, 200)), draw(st.integers(0, 200))
        if rows:
            last = rows[-1]
            src = draw(st.sampled_from([last[0] + last[2], src]))
            dst = draw(st.sampled_from([last[1] + last[2], dst]))
        rows.append((src, dst, size))
    return rows


def cut_into_ranges(edges: set[int]) -> AddressRanges:
    return AddressRanges([(a, b - a) for a, b in pairwise(sorted({0, *edges, 1000}))])


@given(chains(), st.sets(st.integers(1, 400), max_size=12), st.sets(st.integers(1, 400), max_size=12))
def test_merging_moves_the_same_bytes_in_the_same_order(
    rows: list[Row], src_cuts: set[int], dst_cuts: set[int]
) -> None:
    src, dst, size = (np.array(column, dtype=np.uint64) for column in zip(*rows, strict=True))
    merged = merge_descriptors(src, dst, size, cut_into_ranges(src_cuts), cut_into_ranges(dst_cuts))
    found = list(zip(*(column.tolist() for column in merged), strict=True))

    expected = [rows[0]]
    for row in rows[1:]:
        last = expected[-1]
        joins = row[0] == last[0] + last[2] and row[1] == last[1] + last[2]
        if joins and row[0] not in src_cuts and row[1] not in dst_cuts:
            expected[-1] = (last[0], last[1], last[2] + row[2])
        else:
            expected.append(row)
    assert found == expected
