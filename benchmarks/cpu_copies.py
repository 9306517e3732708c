"""The cpu backend against one contiguous `Tensor.copy_` of the same bytes, and what filling descriptors costs.

Every figure is a ratio or a cost within one run: the reference and ours alternate, and the best of each is compared,
since other work on the machine only ever adds. A pause lies before
each: right behind torch's copy ours reaches about 0.7.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from figures import figure, finish

from ecoffload.backend import H2D
from ecoffload.descriptors import DescriptorPool
from ecoffload.registry import get_backend
from ecoffload.submission import submit_batch

MIB = 1 << 20
TOTAL = 96 * MIB


def best(*jobs: Callable[[], object], rounds: int = 15, pause: float = 0.02) -> list[float]:
    """Seconds of each job, the best of `rounds`; jobs alternate so that a busy moment hits all alike."""
    times = [float("inf")] * len(jobs)
    for _ in range(rounds):
        for i, job in enumerate(jobs):
            time.sleep(
                pause
            )  # torch's threads spin for some ms after a copy, and would take a core from what comes next
            start = time.perf_counter()
            job()
            times[i] = min(times[i], time.perf_counter() - start)
    return times


def swap(pool: DescriptorPool, src: np.ndarray, dst: np.ndarray, size: np.ndarray) -> None:
    backend = get_backend("cpu")
    batch = pool.lease(len(src))
    batch.extend(src, dst, size)
    submit_batch(backend, batch, H2D, backend.ops.current_stream()).wait()


def main() -> None:
    pool = DescriptorPool()
    region = torch.randint(0, 255, (2 * TOTAL,), dtype=torch.uint8)
    tensor = torch.zeros(TOTAL, dtype=torch.uint8)
    rng = np.random.default_rng(0)
    # Entries of 1 to 12 MB, each in two extents, as the allocator gives them.
    sizes = rng.integers(1 * MIB, 12 * MIB, 64)
    sizes = sizes[np.cumsum(sizes) < TOTAL]
    halves = np.stack([sizes // 2, sizes - sizes // 2], 1).reshape(-1).astype(np.uint64)
    starts = (np.cumsum(halves) - halves).astype(np.uint64)
    moved = int(halves.sum())
    order = rng.permutation(len(halves))
    src = np.uint64(region.data_ptr()) + (2 * starts)[order]
    dst = np.uint64(tensor.data_ptr()) + starts[order]
    reference, ours = best(lambda: tensor[:moved].copy_(region[:moved]), lambda: swap(pool, src, dst, halves[order]))
    figure("cpu: entries of 1 MB and more, of one contiguous copy", reference / ours, 0.8, better="higher", aim=0.95)

    block = 7168
    count = TOTAL // block
    slots = rng.permutation(2 * TOTAL // block)[:count].astype(np.uint64) * np.uint64(block)
    rows = np.arange(count, dtype=np.uint64) * np.uint64(block)
    uniform = np.full(count, block, dtype=np.uint64)
    blocks = np.uint64(region.data_ptr()) + slots
    row_at = np.uint64(tensor.data_ptr()) + rows
    moved = count * block
    reference, load, save = best(
        lambda: tensor[:moved].copy_(region[:moved]),
        lambda: swap(pool, blocks, row_at, uniform),
        lambda: swap(pool, row_at, blocks, uniform),
    )
    figure("cpu: scattered 7 KiB blocks into a tensor, of one copy", reference / load, 0.5, better="higher", aim=0.8)
    figure("cpu: a tensor into scattered 7 KiB blocks, of one copy", reference / save, 0.5, better="higher", aim=0.8)

    batch = pool.lease(10_000)
    columns = [np.arange(1, 10_001, dtype=np.uint64) for _ in range(3)]

    def fill() -> None:
        batch.count = 0
        batch.extend(*columns)

    (seconds,) = best(fill, rounds=200, pause=0)
    figure("descriptors: filling 10,000, ns each", seconds / 10_000 * 1e9, 5, aim=2)
    batch.release()


if __name__ == "__main__":
    main()
    sys.exit(finish())
