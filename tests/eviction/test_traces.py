"""The policies on the traces of tests/data/traces: the published rows, and what `auto` must reach to be the default.

The percentages come from the table that was published with the traces, measured there with other code.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path

import pytest

from ecoffload.eviction import make_policy

TRACES = Path(__file__).parent.parent / "data" / "traces"
GRANULE = 7 << 10  # a token of Qwen2-VL-7B: 3584 x bf16

Lookup = tuple[int, int, bool]  # object, bytes, whether its hit counts


@cache
def trace(name: str, until_s: float = float("inf")) -> list[Lookup]:
    def rows() -> Iterator[Lookup]:
        with gzip.open(TRACES / f"{name}.csv.gz", "rt") as lines:
            for row in csv.DictReader(lines):
                if float(row.get("t_s", 0)) >= until_s:
                    return
                yield int(row["obj"]), int(row["tokens"]) * GRANULE, True

    return list(rows())


def footprint(lookups: list[Lookup]) -> int:
    return sum({key: nbytes for key, nbytes, _ in lookups}.values())


def byte_hit(lookups: list[Lookup], name: str, capacity: int) -> float:
    """Percent of the counted bytes that were held when they were looked up."""
    policy = make_policy(name, capacity)
    held: dict[int, int] = {}
    used = hits = total = 0
    for key, nbytes, counts in lookups:
        total += nbytes * counts
        if key in held:
            hits += nbytes * counts
            policy.touch(key)
        elif nbytes <= capacity:
            used += nbytes
            if used > capacity:
                for victim in policy.victims():
                    policy.evict(victim)
                    used -= held.pop(victim)
                    if used <= capacity:
                        break
            policy.add(key, nbytes, cost=float(nbytes))
            held[key] = nbytes
    return 100 * hits / total


@pytest.mark.parametrize(
    ("name", "policy", "share", "published"),
    [
        ("mc_conv_seg", "fifo", 0.05, 18.0),
        ("mc_conv_seg", "lru", 0.05, 19.5),
        ("b_base", "fifo", 0.01, 19.4),
        ("b_base", "lru", 0.01, 21.1),
        ("b_shared", "lru", 0.10, 64.3),
        ("b_shared", "gdsf", 0.10, 66.6),
    ],
)
def test_a_published_row_is_reproduced(name: str, policy: str, share: float, published: float) -> None:
    lookups = trace(name)
    assert byte_hit(lookups, policy, int(share * footprint(lookups))) == pytest.approx(published, abs=0.3)


@pytest.mark.parametrize("name", ["mc_conv_seg", "b_base", "b_shared"])
@pytest.mark.parametrize("share", [0.01, 0.25])
def test_auto_is_at_most_half_a_point_below_lru_on_chat(name: str, share: float) -> None:
    lookups = trace(name)
    capacity = int(share * footprint(lookups))
    assert byte_hit(lookups, "auto", capacity) >= byte_hit(lookups, "lru", capacity) - 0.5


def test_auto_is_four_points_above_lru_beside_a_scan() -> None:
    chat = trace("b_base", until_s=3 * 3600)
    fresh = count(-1, -1)
    both: list[Lookup] = []
    for lookup in chat:
        both += [lookup, *((next(fresh), 650 * GRANULE, False) for _ in range(3))]
    capacity = int(0.05 * footprint(chat))
    assert byte_hit(both, "auto", capacity) >= byte_hit(both, "lru", capacity) + 4
