"""What the allocator promises, on hand-made cases and against a model that owns every granule one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from ecoffload.errors import RegionError
from ecoffload.extents import MAX_EXTENTS, Extent, ExtentAllocator


def with_holes(*holes: tuple[int, int], capacity: int = 1_000) -> ExtentAllocator:
    """An allocator with granule 1 whose only free extents are `holes` (offset, length)."""
    allocator = ExtentAllocator(capacity, 1)
    used, at = [], 0
    for offset, length in sorted(holes):
        if offset > at:
            used.append(Extent(at, offset - at))
        at = offset + length
    if at < capacity:
        used.append(Extent(at, capacity - at))
    allocator.reserve(used)
    return allocator


# --- geometry ---------------------------------------------------------------------------------------------------------


def test_a_new_region_is_one_free_extent() -> None:
    allocator = ExtentAllocator(100, 10)
    assert (allocator.capacity, allocator.granule) == (100, 10)
    assert (allocator.free_bytes, allocator.used_bytes, allocator.largest_free) == (100, 0, 100)
    allocator.check()


def test_a_tail_shorter_than_a_granule_is_never_used() -> None:
    allocator = ExtentAllocator(109, 10)
    assert allocator.capacity == 100
    assert allocator.allocate(100) == (Extent(0, 100),)
    assert allocator.allocate(1) is None


@pytest.mark.parametrize(("capacity", "granule"), [(0, 1), (9, 10), (10, 0), (10, -1), (-10, 10)])
def test_a_geometry_without_one_granule_is_refused(capacity: int, granule: int) -> None:
    with pytest.raises(RegionError, match=r"granule"):
        ExtentAllocator(capacity, granule)


def test_an_edge_inside_a_granule_is_refused() -> None:
    with pytest.raises(RegionError, match="edge 15"):
        ExtentAllocator(100, 10, edges=[15])


def test_edges_at_or_outside_the_ends_are_ignored() -> None:
    assert ExtentAllocator(100, 10, edges=[0, 100, 205]).allocate(100) == (Extent(0, 100),)


# --- allocate ---------------------------------------------------------------------------------------------------------


def test_zero_bytes_need_no_extent() -> None:
    allocator = ExtentAllocator(10, 10)
    allocator.allocate(10)
    assert allocator.allocate(0) == ()


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(RegionError, match="-1"):
        ExtentAllocator(10, 10).allocate(-1)


def test_a_size_is_rounded_up_to_whole_granules() -> None:
    allocator = ExtentAllocator(100, 10)
    assert allocator.allocate(11) == (Extent(0, 20),)
    assert allocator.used_bytes == 20


def test_the_smallest_free_extent_that_fits_is_taken() -> None:
    assert with_holes((0, 50), (100, 20), (200, 30)).allocate(15) == (Extent(100, 15),)


def test_of_equal_free_extents_the_lowest_is_taken() -> None:
    assert with_holes((300, 20), (100, 20), (200, 20)).allocate(20) == (Extent(100, 20),)


def test_an_entry_that_no_free_extent_holds_is_split_over_the_largest() -> None:
    extents = with_holes((0, 10), (100, 40), (200, 30)).allocate(60)
    assert extents == (Extent(100, 40), Extent(200, 20))


def test_what_remains_after_the_largest_is_placed_by_best_fit() -> None:
    extents = with_holes((0, 10), (100, 40), (200, 30)).allocate(48)
    assert extents == (Extent(100, 40), Extent(0, 8))


@pytest.mark.parametrize(("mib", "most"), [(1, 2), (11, 2), (12, 3), (17, 3), (18, 4), (1_000, 4)])
def test_an_entry_gets_two_extents_and_a_third_and_fourth_only_while_each_is_long(mib: int, most: int) -> None:
    size = mib << 20
    piece = -(-size // most)
    holes = [(at * size, piece) for at in range(MAX_EXTENTS)]
    extents = with_holes(*holes, capacity=10 * size).allocate(size)
    assert extents is not None
    assert len(extents) == most
    assert with_holes(*holes, capacity=10 * size).allocate(piece * most + 1) is None


def test_what_is_left_stays_beside_the_neighbour_that_was_allocated_earlier() -> None:
    allocator = ExtentAllocator(100, 1)
    first, second, third = allocator.allocate(10), allocator.allocate(20), allocator.allocate(70)
    assert first is not None
    assert second is not None
    assert third is not None
    allocator.free(second)
    assert allocator.allocate(5) == (Extent(25, 5),)  # beside the third; the hole touches the first, which is older
    allocator.free(first)
    assert allocator.largest_free == 25


def test_a_refusal_changes_nothing() -> None:
    allocator = with_holes((0, 10), (20, 10))
    assert allocator.allocate(21) is None
    allocator.check()
    assert allocator.free_bytes == 20


def test_an_entry_fits_if_an_empty_region_would_hold_it() -> None:
    allocator = ExtentAllocator(109, 10)
    allocator.allocate(100)
    assert allocator.fits(0)
    assert allocator.fits(100)
    assert not allocator.fits(101)


def test_an_entry_that_the_chunks_between_edges_cannot_hold_does_not_fit() -> None:
    mib = 1 << 20
    allocator = ExtentAllocator(50 * mib, mib, edges=[at * mib for at in (10, 20, 30, 40)])
    assert allocator.fits(40 * mib)
    assert not allocator.fits(40 * mib + 1)
    extents = allocator.allocate(40 * mib)
    assert extents is not None
    assert len(extents) == 4


def test_offsets_and_sizes_far_beyond_32_bits_are_exact() -> None:
    allocator = ExtentAllocator(1 << 50, 1 << 20)
    assert allocator.allocate((1 << 49) + 1) == (Extent(0, (1 << 49) + (1 << 20)),)
    allocator.check()


# --- free -------------------------------------------------------------------------------------------------------------


def test_freed_neighbours_become_one_extent() -> None:
    allocator = ExtentAllocator(30, 10)
    parts = [allocator.allocate(10) for _ in range(3)]
    for part in (parts[0], parts[2], parts[1]):
        assert part is not None
        allocator.free(part)
    assert allocator.largest_free == 30


def test_free_neighbours_stay_apart_at_an_edge() -> None:
    allocator = ExtentAllocator(40, 10, edges=[20])
    first, second = allocator.allocate(20), allocator.allocate(20)
    assert first is not None
    assert second is not None
    allocator.free(first)
    allocator.free(second)
    assert allocator.largest_free == 20
    allocator.check()


@pytest.mark.parametrize(
    "bad",
    [Extent(0, 10), Extent(20, 20), Extent(30, 10), Extent(90, 20), Extent(-10, 10), Extent(20, 0)],
    ids=["already free", "too long", "inside another", "past the end", "before the start", "empty"],
)
def test_one_bad_extent_frees_none(bad: Extent) -> None:
    allocator = with_holes((0, 10), (40, 60), capacity=100)  # used: 10..40 as one extent
    allocator.free([Extent(10, 30)])
    allocator.reserve([Extent(10, 10), Extent(20, 10)])
    with pytest.raises(RegionError, match="cannot free"):
        allocator.free([Extent(10, 10), bad])
    assert allocator.used_bytes == 20
    allocator.check()


def test_two_extents_of_one_entry_are_not_freed_as_one() -> None:
    allocator = with_holes((0, 10), (20, 10), capacity=30)
    extents = allocator.allocate(20)
    assert extents == (Extent(20, 10), Extent(0, 10))
    with pytest.raises(RegionError, match="cannot free"):
        allocator.free([Extent(0, 30)])
    allocator.free(extents)
    assert allocator.free_bytes == 20


def test_a_double_free_raises_and_changes_nothing() -> None:
    allocator = ExtentAllocator(100, 10)
    extents = allocator.allocate(30)
    assert extents is not None
    with pytest.raises(RegionError, match="twice"):
        allocator.free([*extents, *extents])
    assert allocator.used_bytes == 30
    allocator.free(extents)
    with pytest.raises(RegionError, match="twice"):
        allocator.free(extents)
    assert allocator.used_bytes == 0
    allocator.check()


# --- reserve ----------------------------------------------------------------------------------------------------------


def test_a_reserved_region_equals_the_one_that_the_journal_described() -> None:
    before = ExtentAllocator(1_000, 10, edges=[500])
    kept = [before.allocate(size) for size in (95, 300, 10, 480)]
    extents = [extent for entry in kept if entry is not None for extent in entry]
    after = ExtentAllocator(1_000, 10, edges=[500])
    after.reserve(reversed(extents))
    after.check()
    assert after.used_bytes == before.used_bytes
    assert after.allocate(20) == before.allocate(20)


@pytest.mark.parametrize(
    "bad",
    [
        Extent(5, 10),
        Extent(0, 15),
        Extent(0, 0),
        Extent(0, -10),
        Extent(-10, 10),
        Extent(90, 20),
        Extent(40, 20),
        Extent(60, 20),
        Extent(10, 10),
        Extent(30, 20),
    ],
    ids=[
        "misaligned",
        "part of a granule",
        "empty",
        "negative",
        "before the start",
        "past the end",
        "across an edge",
        "in use",
        "overlaps the call's own",
        "contains the call's own",
    ],
)
def test_one_bad_extent_reserves_none(bad: Extent) -> None:
    allocator = ExtentAllocator(100, 10, edges=[50])
    allocator.reserve([Extent(70, 10)])
    with pytest.raises(RegionError, match="cannot reserve"):
        allocator.reserve([Extent(10, 10), Extent(40, 10), bad])
    assert allocator.used_bytes == 10
    allocator.check()


# --- check ------------------------------------------------------------------------------------------------------------


def test_check_finds_a_granule_that_was_lost() -> None:
    allocator = ExtentAllocator(100, 10)
    extents = allocator.allocate(30)
    assert extents is not None
    offset, length = extents[0]
    del allocator._serial_from[offset], allocator._serial_to[offset + length]
    with pytest.raises(RegionError, match="tile"):
        allocator.check()


def test_check_finds_an_extent_whose_two_ends_disagree() -> None:
    allocator = ExtentAllocator(100, 10)
    extents = allocator.allocate(30)
    assert extents is not None
    allocator._serial_to[extents[0].length] += 1
    with pytest.raises(RegionError, match="serial numbers"):
        allocator.check()


# --- against a model --------------------------------------------------------------------------------------------------

GRANULE = 2 << 20  # so that the model's entries are allowed two, three and four extents
GRANULES = 60
EDGES = (21 * GRANULE, 40 * GRANULE)


# --- shorten ----------------------------------------------------------------------------------------------------------


def test_what_a_shortened_entry_no_longer_needs_is_free_and_one_with_its_neighbour() -> None:
    allocator = ExtentAllocator(100, 10)
    extents = allocator.allocate(70)
    assert extents is not None
    assert allocator.shorten(extents, 41) == (Extent(0, 50),)
    assert allocator.free_extents() == [Extent(50, 50)]
    allocator.check()
    allocator.free([Extent(0, 50)])
    assert allocator.largest_free == 100


def test_shortening_to_what_is_needed_anyway_changes_nothing() -> None:
    allocator = ExtentAllocator(100, 10)
    extents = allocator.allocate(70)
    assert extents is not None
    assert allocator.shorten(extents, 61) == extents
    assert allocator.free_bytes == 30


def test_an_extent_that_is_not_needed_any_more_is_free_as_a_whole() -> None:
    allocator = with_holes((0, 60), (500, 40))
    extents = allocator.allocate(100)
    assert extents == (Extent(0, 60), Extent(500, 40))
    assert allocator.shorten(extents, 60) == (Extent(0, 60),)
    assert allocator.free_extents() == [Extent(500, 40)]
    allocator.check()


@pytest.mark.parametrize(
    ("extents", "nbytes"),
    [
        ([Extent(0, 50)], 20),  # in use with another length
        ([Extent(0, 70), Extent(70, 10)], 20),  # the second is free
        ([Extent(0, 70)], 71),
        ([Extent(0, 70)], -1),
        ([Extent(0, 70), Extent(0, 70)], 20),
    ],
)
def test_shortening_what_is_not_in_use_or_too_short_is_refused_and_changes_nothing(
    extents: list[Extent], nbytes: int
) -> None:
    allocator = ExtentAllocator(100, 10)
    whole = allocator.allocate(70)
    assert whole is not None
    with pytest.raises(RegionError, match="cannot shorten"):
        allocator.shorten(extents, nbytes)
    assert allocator.free_extents() == [Extent(70, 30)]
    allocator.free(whole)
    allocator.check()


class EveryGranuleHasOneOwner(RuleBasedStateMachine):
    """Random allocate, free, shorten, reserve and bad frees; the model is an owner for every granule."""

    entries: Bundle[tuple[Extent, ...]] = Bundle("entries")

    @initialize(edged=st.booleans())
    def start(self, edged: bool) -> None:
        self.edges = EDGES if edged else ()
        self.allocator = ExtentAllocator(GRANULES * GRANULE + 3, GRANULE, edges=self.edges)
        self.owner: list[Extent | None] = [None] * GRANULES

    def own(self, extent: Extent) -> None:
        for granule in range(extent.offset // GRANULE, (extent.offset + extent.length) // GRANULE):
            assert self.owner[granule] is None
            self.owner[granule] = extent

    def free_runs(self) -> list[int]:
        """Lengths in bytes of the free runs, cut at the edges, ascending."""
        runs = [0]
        for granule, owner in enumerate(self.owner):
            if owner is not None or granule * GRANULE in self.edges:
                runs.append(0)
            if owner is None:
                runs[-1] += GRANULE
        return sorted(run for run in runs if run)

    @rule(target=entries, nbytes=st.integers(0, 25 * GRANULE))
    def allocate(self, nbytes: int) -> object:
        extents = self.allocator.allocate(nbytes)
        need = -(-nbytes // GRANULE) * GRANULE
        most = min(4, max(2, 1 + need // (6 << 20)))
        reach = sum(self.free_runs()[-most:])
        if extents is None:
            assert need > reach
            return multiple()
        assert need <= reach
        assert sum(extent.length for extent in extents) == need
        assert len(extents) <= most
        for extent in extents:
            assert extent.length > 0
            self.own(extent)
        return extents

    @rule(extents=consumes(entries))
    def free(self, extents: tuple[Extent, ...]) -> None:
        self.allocator.free(extents)
        self.owner = [None if owner in extents else owner for owner in self.owner]

    @rule(target=entries, extents=consumes(entries), share=st.floats(0, 1))
    def shorten(self, extents: tuple[Extent, ...], share: float) -> tuple[Extent, ...]:
        nbytes = int(share * sum(extent.length for extent in extents))
        left = self.allocator.shorten(extents, nbytes)
        self.owner = [None if owner in extents else owner for owner in self.owner]
        assert sum(extent.length for extent in left) == -(-nbytes // GRANULE) * GRANULE
        for extent, before in zip(left, extents, strict=False):  # the same bytes, in the same order
            assert extent.offset == before.offset
            assert extent == before or extent is left[-1]
            self.own(extent)
        return left

    @rule(extents=entries, offset=st.integers(-1, GRANULES), length=st.integers(0, 20))
    def free_with_one_that_is_not_owned(self, extents: tuple[Extent, ...], offset: int, length: int) -> None:
        bad = Extent(offset * GRANULE, length * GRANULE)
        if bad in self.owner and bad not in extents:
            return
        with pytest.raises(RegionError):
            self.allocator.free([*extents, bad])

    @rule(target=entries, offset=st.integers(-1, GRANULES), length=st.integers(0, 20))
    def reserve(self, offset: int, length: int) -> object:
        wanted = Extent(offset * GRANULE, length * GRANULE)
        end = offset + length
        crosses = any(wanted.offset < edge < wanted.offset + wanted.length for edge in self.edges)
        if not length or offset < 0 or end > GRANULES or crosses or any(self.owner[offset:end]):
            with pytest.raises(RegionError):
                self.allocator.reserve([wanted])
            return multiple()
        self.allocator.reserve([wanted])
        self.own(wanted)
        return (wanted,)

    @invariant()
    def every_granule_is_free_or_owned_once(self) -> None:
        self.allocator.check()
        runs = self.free_runs()
        assert self.allocator.free_bytes == sum(runs)
        assert self.allocator.used_bytes == GRANULES * GRANULE - sum(runs)
        assert self.allocator.largest_free == max(runs, default=0)

    @invariant()
    def no_extent_crosses_an_edge(self) -> None:
        for offset, length in {owner for owner in self.owner if owner is not None}:
            assert not any(offset < edge < offset + length for edge in self.edges)


EveryGranuleHasOneOwner.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEveryGranuleHasOneOwner = EveryGranuleHasOneOwner.TestCase
