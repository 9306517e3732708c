"""Traces through the real index: published rows reproduced, invariants of the outcome, and real bytes that come back.

The percentages come from the table that was published with the traces, measured there with other code.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ecoffload.errors import ConfigError
from ecoffload.eviction import policy_names
from ecoffload.registry import get_backend
from ecoffload.replay import belady, move, parse_capacity, replay
from ecoffload.traces import Trace, read_trace

TRACES = Path(__file__).parent.parent / "data" / "traces"
SHARES = (0.01, 0.05, 0.10, 0.25)
PUBLISHED = {
    ("mc_conv_seg", "fifo"): (5.1, 18.0, 25.6, 33.4),
    ("mc_conv_seg", "lru"): (5.2, 19.5, 27.8, 35.4),
    ("b_base", "fifo"): (19.4, 36.9, 40.1, 42.5),
    ("b_base", "lru"): (21.1, 39.1, 41.4, 43.5),
    ("b_shared", "fifo"): (18.2, 49.4, 59.9, 70.5),
    ("b_shared", "lru"): (20.5, 54.7, 64.3, 74.0),
}
BELADY = {
    "mc_conv_seg": (24.6, 36.6, 36.6, 36.6),
    "b_base": (41.6, 45.3, 45.3, 45.3),
    "b_shared": (49.0, 70.8, 76.7, 81.6),
}


@cache
def trace(name: str) -> Trace:
    return read_trace(TRACES / f"{name}.csv.gz")


def small(rows: int = 600) -> Trace:
    """Skewed lookups of 60 objects of 1 to 40 KiB."""
    rng = np.random.default_rng(7)
    objects = np.minimum(rng.geometric(0.08, rows) - 1, 59)
    _, first, numbers = np.unique(objects, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))  # numbered in order of appearance, as a reader does
    return Trace("small", rank[numbers].astype(np.int64), rng.integers(1 << 10, 40 << 10, len(first)))


def brute_force(lookups: Trace, capacity: int, *, touches: bool) -> tuple[float, float]:
    """Object and byte hit of an LRU (a FIFO without touches) that counts bytes."""
    held: OrderedDict[int, int] = OrderedDict()
    used = hits = hit_bytes = 0
    sizes = lookups.sizes.tolist()
    for number in lookups.objects.tolist():
        if number in held:
            hits += 1
            hit_bytes += sizes[number]
            if touches:
                held.move_to_end(number)
        elif sizes[number] <= capacity:
            held[number] = sizes[number]
            used += sizes[number]
            while used > capacity:
                used -= held.popitem(last=False)[1]
    return hits / len(lookups), hit_bytes / lookups.total_bytes


@pytest.mark.parametrize(("name", "policy"), PUBLISHED)
def test_objects_and_bytes_are_hit_as_often_as_by_brute_force(name: str, policy: str) -> None:
    lookups = trace(name)
    for share in (0.01, 0.10):
        capacity = int(share * lookups.footprint)
        found = replay(lookups, policy, capacity, bound=0.0)
        wanted = brute_force(lookups, capacity, touches=policy == "lru")
        assert (found.object_hit, found.byte_hit) == pytest.approx(wanted, abs=0.003)


@pytest.mark.parametrize(("name", "policy"), PUBLISHED)
def test_a_published_row_is_reproduced_within_three_tenths_of_a_point(name: str, policy: str) -> None:
    lookups = trace(name)
    found = [replay(lookups, policy, int(share * lookups.footprint), bound=0.0) for share in SHARES]
    assert [100 * outcome.byte_hit for outcome in found] == pytest.approx(PUBLISHED[name, policy], abs=0.3)
    # What a region of that size really gives: its granules and extents cost at most this much more.
    assert [100 * outcome.region_byte_hit for outcome in found] == pytest.approx(PUBLISHED[name, policy], abs=0.6)


@pytest.mark.parametrize("name", BELADY)
def test_beladys_published_row_is_reproduced(name: str) -> None:
    lookups = trace(name)
    found = [100 * belady(lookups, int(share * lookups.footprint)) for share in SHARES]
    assert found == pytest.approx(BELADY[name], abs=0.3)


@pytest.mark.parametrize("policy", policy_names())
def test_no_policy_passes_belady(policy: str) -> None:
    lookups = small()
    for share in (0.1, 0.3, 0.6):
        outcome = replay(lookups, policy, int(share * lookups.footprint))
        assert 0 < outcome.byte_hit <= outcome.belady_byte_hit


def test_a_cache_of_the_footprint_misses_first_lookups_only() -> None:
    lookups = small()
    outcome = replay(lookups, "lru", 2 * lookups.footprint, granule=256)
    assert outcome.byte_hit == outcome.region_byte_hit == 1 - lookups.footprint / lookups.total_bytes
    assert outcome.object_hit == 1 - len(lookups.sizes) / len(lookups)
    assert (outcome.evictions, outcome.refused, outcome.extents_per_entry) == (0, 0, 1.0)


def test_objects_larger_than_the_cache_are_refused_and_counted() -> None:
    lookups = Trace("large", np.array([0, 1, 0, 1]), np.array([1000, 1 << 20]))
    outcome = replay(lookups, "lru", 64 << 10, granule=256)
    assert outcome.refused == 2
    assert outcome.object_hit == 0.25


def test_fifty_thousand_rows_take_at_most_five_seconds() -> None:
    lookups = trace("b_base")
    assert len(lookups) > 50_000
    start = time.process_time()
    replay(lookups, "auto", int(0.05 * lookups.footprint))
    assert time.process_time() - start < 5


def test_progress_counts_every_row_of_both_passes() -> None:
    steps: list[int] = []
    lookups = small(2500)
    replay(lookups, "fifo", 1 << 20, progress=steps.append)
    assert sum(steps) == 2 * len(lookups)


@pytest.mark.parametrize("backend", ["cpu", "sim-uint64"])
def test_moved_bytes_come_back_as_they_were_and_hit_as_often_as_the_replay_says(backend: str) -> None:
    lookups = small(300)
    capacity = lookups.footprint // 3 // 4096 * 4096
    moved = move(lookups, "lru", capacity, backend=get_backend(backend))
    assert moved.mismatched == 0
    assert moved.verified > 0
    assert moved.byte_hit == pytest.approx(replay(lookups, "lru", capacity).region_byte_hit, abs=0.02)


def test_an_object_that_no_memory_holds_is_not_moved_and_the_others_are() -> None:
    lookups = Trace("t", np.array([0, 1, 0, 1], np.int64), np.array([4096, 1 << 55], np.int64))
    moved = move(lookups, "lru", 1 << 16, backend=get_backend("cpu"))
    assert (moved.verified, moved.mismatched, moved.bytes_saved) == (1, 0, 4096)


@pytest.mark.parametrize(("text", "nbytes"), [("5%", 500), ("12.5 %", 1250), ("1000%", 100_000), ("2KiB", 2048)])
def test_a_capacity_is_a_size_or_a_percentage_of_the_footprint(text: str, nbytes: int) -> None:
    assert parse_capacity(text, 10_000) == nbytes


@pytest.mark.parametrize("text", ["0%", "-1%", "%", "many%", "nan%", "inf%", "1001%", "many", ""])
def test_another_capacity_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        parse_capacity(text, 10_000)


def test_a_capacity_below_a_granule_is_refused() -> None:
    with pytest.raises(ConfigError, match="granule"):
        replay(small(), "lru", 100)
