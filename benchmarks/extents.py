"""The extent allocator in a churned region: time, fragments and waste, at 16 GiB and at 1 TiB.

Churn: entries of log-normal(6.9, 0.9) granules of 7 KiB, clipped to 64..16,384; after every other step one of the last
2,000 entries is touched; the least recently used entry is evicted until the next one fits. The time is CPU time of an
allocation with its evictions, this file's loop included; the best of five runs, because other work on the machine only
ever adds. Shares are means over runs, since the rare huge entry sways each by 0.3 %.
"""

from __future__ import annotations

import statistics
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from time import process_time
from typing import NamedTuple

import numpy as np
from figures import figure, finish

from ecoffload.extents import Extent, ExtentAllocator

GRANULE = 7 << 10
GIB = 1 << 30
MIB = 1 << 20


class Churn(NamedTuple):
    """What one run showed over its second half."""

    us: float
    mean_extents: float
    most_extents: int
    in_use: float
    in_large: float


def churn(capacity: int, steps: int, *, seed: int, edges: range | tuple[int, ...] = ()) -> Churn:
    """Play the churn for `steps` entries, after filling the region once."""
    rng = np.random.default_rng(seed)
    warm = capacity // (1_400 * GRANULE)
    total = warm + steps
    sizes = (np.clip(np.exp(rng.normal(6.9, 0.9, total)), 64, 16_384).astype(int) * GRANULE).tolist()
    touches = (rng.random(total) < 0.5).tolist()
    back = rng.integers(1, 2_001, total).tolist()
    allocator = ExtentAllocator(capacity, GRANULE, edges=edges)
    entries: OrderedDict[int, tuple[Extent, ...]] = OrderedDict()

    def play(steps: range) -> Iterator[tuple[int, tuple[Extent, ...]]]:
        """Yields the bytes in use and what the entry got, after each step."""
        for step in steps:
            while (extents := allocator.allocate(sizes[step])) is None:
                allocator.free(entries.popitem(last=False)[1])
            entries[step] = extents
            yield allocator.used_bytes, extents
            if touches[step] and step - back[step] in entries:
                entries.move_to_end(step - back[step])

    half = total - steps // 2
    deque(play(range(half)), maxlen=0)
    start = process_time()
    seen = list(play(range(half, total)))
    spent = process_time() - start
    allocator.check()
    large = [extents for size, (_, extents) in zip(sizes[half:], seen, strict=True) if size >= MIB]
    return Churn(
        1e6 * spent / len(seen),
        statistics.fmean(len(extents) for _, extents in seen),
        max(len(extents) for _, extents in seen),
        statistics.fmean(used for used, _ in seen) / allocator.capacity,
        sum(extent.length for extents in large for extent in extents if extent.length >= MIB)
        / sum(extent.length for extents in large for extent in extents),
    )


def main() -> None:
    """Print the figures at 16 GiB against their bars, and the time at 1 TiB against the same bar."""
    runs = [churn(16 * GIB, 20_000, seed=seed) for seed in range(5)]
    figure("extents: us an allocation, 16 GiB", min(run.us for run in runs), 15, aim=8)
    figure("extents: an entry, mean", statistics.fmean(run.mean_extents for run in runs), 2.0, aim=1.7)
    figure("extents: an entry, most", max(run.most_extents for run in runs), 4, aim=4)
    figure("extents: share in use", statistics.fmean(run.in_use for run in runs), 0.96, better="higher", aim=0.97)
    figure(
        "extents: share in 1 MiB and more",
        statistics.fmean(run.in_large for run in runs),
        0.97,
        better="higher",
        aim=0.99,
    )
    figure("extents: us an allocation, 1 TiB", min(churn(1024 * GIB, 20_000, seed=0).us for _ in range(3)), 15, aim=8)


if __name__ == "__main__":
    main()
    sys.exit(finish())
