"""Byte-hit of our eviction policies beside LRU and Belady on the traces of tests/data/traces, and what an operation
costs.

One row of a trace is one lookup of an encoder output of `tokens` tokens, 7 KiB each (3584 x bf16); a miss is encoded
and saved. Cold misses count. Columns: capacity as a share of the trace's footprint. *scan*: the first 3 hours of B;
after each lookup three images of 650 tokens that never come again; capacity as a share of the chat part's footprint,
only chat counts.

Encode time saved follows the model that encoding takes time proportional to tokens, `MS_A_TOKEN` (an assumption, not a
measurement): so its share equals the byte-hit, and what it adds is minutes. Belady knows the future and bypasses what
comes back later than all that it would have to evict; for entries of different sizes it is a close bound, not an exact
one.

Capacity counts bytes, as in other people's tables; with `--extents` entries get real extents of a region of that size.
Prints the tables, then the figures with bars. About two minutes.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import heapq
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from time import process_time
from typing import NamedTuple

from figures import figure, finish

from ecoffload.eviction import make_policy, policy_names
from ecoffload.extents import Extent, ExtentAllocator

GRANULE = 7 << 10
MS_A_TOKEN = 0.1  # a vision tower of some 600 M parameters on one large GPU; only scales the minutes saved
TRACES = Path(__file__).parent.parent / "tests" / "data" / "traces"
SHARES = (0.01, 0.05, 0.10, 0.25)
SCAN_SHARES = (0.05, 0.10)


class Lookup(NamedTuple):
    """One row: an object, its size, and whether its hit counts."""

    key: int
    tokens: int
    counts: bool


class Outcome(NamedTuple):
    """What one replay showed."""

    byte_hit: float  # percent
    minutes_saved: float
    us: float  # CPU time an operation (touch, add, evict), this file's loop included


class Bytes:
    """Stands in for ExtentAllocator: only the sum of bytes matters."""

    def __init__(self, capacity: int) -> None:
        self._free = capacity

    def allocate(self, nbytes: int) -> tuple[Extent, ...] | None:
        """One extent of that length, wherever it may lie, or None."""
        if nbytes > self._free:
            return None
        self._free -= nbytes
        return (Extent(0, nbytes),)

    def free(self, extents: Iterable[Extent]) -> None:
        """Give it back."""
        self._free += sum(extent.length for extent in extents)


def read(name: str, until_s: float = float("inf")) -> Iterator[Lookup]:
    """The lookups of a trace up to a time."""
    with gzip.open(TRACES / f"{name}.csv.gz", "rt") as rows:
        for row in csv.DictReader(rows):
            if float(row.get("t_s", 0)) >= until_s:
                return
            yield Lookup(int(row["obj"]), int(row["tokens"]), True)


def with_scan(chat: Iterable[Lookup]) -> Iterator[Lookup]:
    """Three one-shot images after each lookup."""
    fresh = -1
    for lookup in chat:
        yield lookup
        for _ in range(3):
            yield Lookup(fresh, 650, False)
            fresh -= 1


def footprint(trace: list[Lookup]) -> int:
    """Bytes of all distinct objects that count."""
    return GRANULE * sum({key: tokens for key, tokens, counts in trace if counts}.values())


def replay(trace: list[Lookup], name: str, capacity: int, *, extents: bool = False) -> Outcome:
    """Play a trace against a policy."""
    policy = make_policy(name, capacity)
    room = ExtentAllocator(capacity, GRANULE) if extents else Bytes(capacity)
    held: dict[int, tuple[Extent, ...]] = {}
    hits = total = operations = 0
    start = process_time()
    for key, tokens, counts in trace:
        total += tokens * counts
        if key in held:
            hits += tokens * counts
            policy.touch(key)
            operations += 1
            continue
        nbytes = tokens * GRANULE
        if nbytes > capacity:
            continue
        given = room.allocate(nbytes)
        if given is None:
            for victim in policy.victims():
                policy.evict(victim)
                operations += 1
                room.free(held.pop(victim))
                if (given := room.allocate(nbytes)) is not None:
                    break
        if given is not None:
            policy.add(key, nbytes, cost=tokens * MS_A_TOKEN)
            operations += 1
            held[key] = given
    us = 1e6 * (process_time() - start) / operations
    return Outcome(100 * hits / total, hits * MS_A_TOKEN / 60_000, us)


def belady(trace: list[Lookup], capacity: int) -> float:
    """Byte-hit in percent of evicting what comes back last, a new entry included."""
    never = len(trace)
    following = [never] * len(trace)
    last: dict[int, int] = {}
    for at in range(len(trace) - 1, -1, -1):
        following[at] = last.get(trace[at].key, never)
        last[trace[at].key] = at
    due: dict[int, int] = {}  # held -> position of its next lookup
    latest: list[tuple[int, int, int]] = []  # (-next lookup, key, tokens); outdated ones are skipped
    used = hits = total = 0
    for at, (key, tokens, counts) in enumerate(trace):
        total += tokens * counts
        hit = key in due
        hits += tokens * counts * hit
        if not hit:
            used += tokens * GRANULE
        due[key] = following[at]
        heapq.heappush(latest, (-following[at], key, tokens))
        while used > capacity:
            position, victim, size = heapq.heappop(latest)
            if due.get(victim) == -position:
                del due[victim]
                used -= size * GRANULE
    return 100 * hits / total


def main(argv: Sequence[str] = ()) -> None:
    """Print the tables and the figures."""
    parser = argparse.ArgumentParser(description="Byte-hit of eviction policies on the traces")
    parser.add_argument("--extents", action="store_true", help="give entries real extents instead of counting bytes")
    extents = parser.parse_args(argv).extents
    chat = list(read("b_base", until_s=3 * 3600))
    traces = {
        "R": (list(read("mc_conv_seg")), footprint(list(read("mc_conv_seg"))), SHARES),
        "B": (list(read("b_base")), footprint(list(read("b_base"))), SHARES),
        "S": (list(read("b_shared")), footprint(list(read("b_shared"))), SHARES),
        "scan": (list(with_scan(chat)), footprint(chat), SCAN_SHARES),
    }
    columns = [(trace, share) for trace, (_, _, shares) in traces.items() for share in shares]
    outcomes: dict[tuple[str, str, float], Outcome] = {}
    for policy in policy_names():
        for trace, share in columns:
            rows, size, _ = traces[trace]
            outcomes[policy, trace, share] = replay(rows, policy, int(share * size), extents=extents)

    def table(title: str, values: dict[str, list[float]]) -> None:
        print(f"\n{title}\n{'':10}" + "".join(f"{trace} {share:.0%}".rjust(9) for trace, share in columns))
        for name, cells in values.items():
            print(f"{name:10}" + "".join(f"{cell:9.1f}" for cell in cells))

    def rows_of(field: str) -> dict[str, list[float]]:
        return {name: [getattr(outcomes[name, *column], field) for column in columns] for name in policy_names()}

    bound = [belady(traces[trace][0], int(share * traces[trace][1])) for trace, share in columns]
    table("byte-hit, %", {**rows_of("byte_hit"), "belady": bound})
    table(f"encode time saved, minutes, at {MS_A_TOKEN} ms a token", rows_of("minutes_saved"))
    table("us an operation", rows_of("us"))
    print()
    over = {c: outcomes["auto", *c].byte_hit - outcomes["lru", *c].byte_hit for c in columns}
    figure("eviction: auto over lru, least of all", min(over.values()), -0.5, better="higher")
    figure("eviction: auto over lru, scan at 5 %", over["scan", 0.05], 4, better="higher")
    for policy in policy_names():
        mean = statistics.fmean(outcomes[policy, *column].us for column in columns)
        figure(f"eviction: {policy}, us an operation", mean, 3)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.exit(finish())
