"""The estimate of LRU's byte-hit by capacity, against LRU itself; and what one recorded lookup costs."""

from __future__ import annotations

import time
from collections import OrderedDict
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecoffload.errors import ConfigError
from ecoffload.sizing import Curve, ReuseTimes
from ecoffload.traces import Trace, read_trace

TRACES = Path(__file__).parent.parent / "data" / "traces"
NAMES = ["mc_conv_seg", "b_base", "b_shared"]
SHARES = [0.002, 0.005, 0.01, 0.02, 0.05, 0.10, 0.15, 0.25, 0.50, 1.0]


@cache
def trace(name: str) -> Trace:
    return read_trace(TRACES / f"{name}.csv.gz")


def watched(lookups: Trace, **options: int) -> ReuseTimes:
    times = ReuseTimes(**options)
    sizes = lookups.sizes.tolist()
    for number in lookups.objects.tolist():
        times.use(b"%d" % number, sizes[number])
    return times


def lru(lookups: Trace, capacity: int) -> float:
    """Byte-hit by brute force: an LRU that counts bytes."""
    held: OrderedDict[int, int] = OrderedDict()
    used = hit = 0
    sizes = lookups.sizes.tolist()
    for number in lookups.objects.tolist():
        if number in held:
            held.move_to_end(number)
            hit += sizes[number]
        elif sizes[number] <= capacity:
            held[number] = sizes[number]
            used += sizes[number]
            while used > capacity:
                used -= held.popitem(last=False)[1]
    return hit / lookups.total_bytes


@pytest.mark.parametrize("name", NAMES)
def test_the_curve_is_within_two_points_of_brute_force(name: str) -> None:
    lookups = trace(name)
    curve = watched(lookups).curve()
    for share in SHARES:
        capacity = int(share * lookups.footprint)
        assert curve.byte_hit(capacity) == pytest.approx(lru(lookups, capacity), abs=0.02)


def test_with_few_keys_remembered_the_curve_is_right_as_far_as_they_reach() -> None:
    lookups = trace("b_base")
    curve = watched(lookups, most=4096).curve()  # at least 2048 keys: 7 % of the objects
    capacity = int(0.02 * lookups.footprint)
    assert curve.byte_hit(capacity) == pytest.approx(lru(lookups, capacity), abs=0.02)


def test_remembered_keys_have_a_bound() -> None:
    times = watched(trace("b_base"), most=1000)
    assert len(times._young) + len(times._old) <= 1000


def test_an_infinite_cache_misses_first_lookups_only() -> None:
    lookups = trace("b_shared")
    curve = watched(lookups).curve()
    assert curve.footprint == lookups.footprint
    assert curve.best == pytest.approx(1 - lookups.footprint / lookups.total_bytes)


def test_a_recommendation_reaches_its_share_and_the_next_smaller_capacity_does_not() -> None:
    curve = watched(trace("b_base")).curve()
    advice = curve.recommend(0.9)
    assert advice is not None
    assert curve.byte_hit(advice.capacity) >= 0.9 * curve.best > curve.byte_hit(int(0.97 * advice.capacity))


def test_keys_that_never_return_give_no_recommendation() -> None:
    times = ReuseTimes()
    for number in range(10):
        times.use(b"%d" % number, 100)
    assert times.curve().recommend() is None
    assert times.curve().best == 0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 1 << 30)), max_size=200))
def test_a_curve_rises_and_never_passes_the_footprint(lookups: list[tuple[int, int]]) -> None:
    times = ReuseTimes(most=8)
    for key, nbytes in lookups:
        times.use(b"%d" % key, nbytes)
    curve = times.curve()
    assert list(curve.capacities) == sorted(set(curve.capacities))
    assert list(curve.hits) == sorted(curve.hits)
    assert all(capacity <= curve.footprint for capacity in curve.capacities)
    assert 0 <= curve.best <= 1


def test_points_thin_a_curve_and_keep_its_end() -> None:
    curve = Curve(tuple(range(1, 101)), tuple(n / 100 for n in range(1, 101)), 100, 100)
    points = curve.points(7)
    assert len(points) <= 7
    assert points[-1] == (100, 1.0)


def test_fewer_than_two_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="two keys"):
        ReuseTimes(most=1)


def test_recording_a_lookup_costs_less_than_a_microsecond_beside_a_dict() -> None:
    # In units of what a dict's get and set cost on this machine at this moment: some 0.1 us on an idle one.
    lookups = trace("b_base")
    sizes = lookups.sizes.tolist()
    keys = [b"%d" % number for number in range(len(sizes))]
    rows = [(keys[number], sizes[number]) for number in lookups.objects.tolist()]

    def plain() -> float:
        held: dict[bytes, int] = {}
        start = time.thread_time()
        for key, nbytes in rows:
            held[key] = held.get(key, 0) + nbytes
        return time.thread_time() - start

    def recorded() -> float:
        use = ReuseTimes().use
        start = time.thread_time()
        for key, nbytes in rows:
            use(key, nbytes)
        return time.thread_time() - start

    assert min(recorded() for _ in range(5)) < 10 * min(plain() for _ in range(5))
