"""Every range is checked before a driver sees it: the loop for small batches and the vectors for large ones agree."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecoffload.descriptors import AddressRanges, Batch, DescriptorPool
from ecoffload.errors import ConfigError, DescriptorError
from ecoffload.testing.strategies import addresses

TOP = 2**64
POOL = DescriptorPool()


@pytest.fixture(params=[0, 40], ids=["loop", "vectors"])
def batch(request: pytest.FixtureRequest) -> Batch:
    """A batch that begins with none, or with so many good descriptors that the vector path checks it."""
    batch = DescriptorPool().lease()
    for i in range(request.param):
        batch.append(1000 + i, 5000 + i, 1)
    return batch


SOURCES = AddressRanges([(1000, 100), (1100, 100), (TOP - 4096, 4096)])
DESTINATIONS = AddressRanges([(5000, 200)])


def refused(batch: Batch, index: int, why: str) -> DescriptorError:
    with pytest.raises(DescriptorError, match=why) as caught:
        batch.check(SOURCES, DESTINATIONS)
    assert caught.value.index == index
    assert f"descriptor {index} " in str(caught.value)
    return caught.value


def test_what_lies_inside_passes(batch: Batch) -> None:
    batch.append(1000, 5000, 100)
    batch.append(1199, 5199, 1)
    assert batch.check(SOURCES, DESTINATIONS) is None


def test_a_range_that_ends_at_two_to_the_64_passes(batch: Batch) -> None:
    batch.append(TOP - 200, 5000, 200)
    assert batch.check(SOURCES, DESTINATIONS) is None


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("size", [2, 2**63, TOP - 1])
def test_a_wrap_past_two_to_the_64_is_refused_even_where_nothing_is_known(batch: Batch, side: str, size: int) -> None:
    at = batch.count
    batch.append(*((TOP - 1, 0) if side == "source" else (0, TOP - 1)), size)
    with pytest.raises(DescriptorError, match=r"past 2\*\*64") as caught:
        batch.check(None, None)
    assert caught.value.index == at


def test_a_byte_past_the_end_is_refused_with_how_far(batch: Batch) -> None:
    at = batch.count
    batch.append(1150, 5150, 51)
    error = refused(batch, at, "source: it ends 1 bytes past the range that ends at 0x4b0")
    assert (error.src, error.dst, error.size) == (1150, 5150, 51)


def test_a_byte_before_the_start_is_refused(batch: Batch) -> None:
    at = batch.count
    batch.append(1000, 4999, 2)
    refused(batch, at, "destination: its start lies in none of the 1 known ranges")


def test_a_descriptor_across_two_ranges_that_touch_is_refused(batch: Batch) -> None:
    at = batch.count
    batch.append(1099, 5000, 2)
    refused(batch, at, "source: it ends 1 bytes past the range that ends at 0x44c")


def test_the_first_of_several_bad_ones_is_named(batch: Batch) -> None:
    at = batch.count
    batch.append(1000, 5000, 1)
    batch.append(2000, 5000, 1)
    batch.append(3000, 5000, 1)
    refused(batch, at + 1, "source")


def test_where_no_range_is_known_everything_is_refused(batch: Batch) -> None:
    batch.append(1000, 5000, 1)
    with pytest.raises(DescriptorError, match="none of the 0 known ranges") as caught:
        batch.check(AddressRanges(), None)
    assert caught.value.index == 0


def test_an_empty_batch_passes_whatever_is_known() -> None:
    assert DescriptorPool().lease().check(AddressRanges(), AddressRanges()) is None


def test_ranges_that_overlap_are_refused() -> None:
    with pytest.raises(ConfigError, match="overlap"):
        AddressRanges([(0, 100), (99, 10)])


def test_empty_ranges_are_no_ranges() -> None:
    assert not AddressRanges([(5, 0)]).find(5, 1)


@st.composite
def ranges_and_batches(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Ranges that often touch, and descriptors that often begin or end at their borders."""
    cuts = sorted(set(draw(st.lists(addresses(), min_size=1, max_size=8))) | {draw(st.just(TOP))})
    spans = [(a, b - a) for a, b in pairwise(cuts)]
    ranges = [span for span in spans if draw(st.booleans())]
    near = st.sampled_from(cuts).flatmap(lambda cut: st.integers(max(0, cut - 3), min(TOP - 1, cut + 3)))
    starts = draw(st.lists(near | addresses(), min_size=1, max_size=60))
    descriptors = []
    for start in starts:
        ends = [cut for cut in cuts if cut > start] or [TOP]
        size = draw(st.sampled_from(ends)) - start + draw(st.integers(-2, 2))
        descriptors.append((start, min(max(1, size), TOP - start, TOP - 1)))
    return ranges, descriptors


@given(ranges_and_batches(), st.integers(0, 60))
def test_both_paths_agree_with_the_definition(
    case: tuple[list[tuple[int, int]], list[tuple[int, int]]], doubled: int
) -> None:
    ranges, descriptors = case
    descriptors = (descriptors * (1 + doubled))[:80]
    known = AddressRanges(ranges)

    def inside(start: int, size: int) -> bool:
        return any(a <= start and start + size <= a + n for a, n in ranges)

    expected = next((i for i, pair in enumerate(descriptors) if not inside(*pair)), None)
    assert [known.find(*pair) for pair in descriptors] == [inside(*pair) for pair in descriptors]
    starts, sizes = (np.array(column, dtype=np.uint64) for column in zip(*descriptors, strict=True))
    assert known.first_outside(starts, sizes) == expected
    for sides in ("source", "destination"):
        batch = POOL.lease(len(descriptors))
        for start, size in descriptors:
            batch.append(*((start, 0) if sides == "source" else (0, start)), size)
        try:
            batch.check(*((known, None) if sides == "source" else (None, known)))
            found = None
        except DescriptorError as error:
            found = error.index
        batch.release()
        assert found == expected
