"""EcoffloadConnector beside vLLM's own ECCPUConnector: the same requests, in vLLM's real scheduler, V2 semantics.

    .venv-vllm-0.33.0/bin/python tests/vllm/side_by_side.py [--requests 600] [--trace FILE] [--allocations 20000]

Prints two tables. Requests: a trace's lookups as one-image requests (an image's tokens are scaled down to 16 to 64, so
that an entry is whole granules for the one and whole blocks for the other), at several capacities: images encoded, and
the time that the connector's scheduler half takes in a step (median).

Allocation: what reserving room for one entry costs, evictions included, when 16 GiB are full and churned (bookkeeping
only; no such memory is needed): entries of log-normal(6.9, 0.9) tokens, the median 1,000, of 7,168 bytes; half of them
are followed by a use of one of the last 2,000. Each side churns in a fresh process, in turns; an allocation counts with
its best of five runs, because other work on the machine only ever adds.

The comparator's scheduler half and its cache are vLLM's, unmodified; see eccpu_comparator.py for its copies.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import numpy as np
from harness import Engine
from tinymodel import HIDDEN, make_model

from ecoffload.eviction import make_policy
from ecoffload.extents import ExtentAllocator
from ecoffload.index import EntryIndex
from ecoffload.traces import read_trace

ROW = HIDDEN * 4
TRACES = Path(__file__).parents[1] / "data" / "traces"
HOOKS = (
    *("ensure_cache_available", "has_cache_item", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "has_pending_push_work", "request_finished", "get_ec_connector_stats"),
    "update_state_after_free",
)
CONNECTORS = {
    "ecoffload": {"connector": "EcoffloadConnector"},
    "eccpu": {"connector": "ComparatorConnector", "module": "eccpu_comparator"},
}
TOKEN_BYTES = 7168
CAPACITY = 16 << 30


def requests_of(trace: Path, count: int) -> list[tuple[str, int]]:
    """(image, rows) of each lookup; rows are 16, 32, 48 or 64."""
    read = read_trace(trace).head(count)
    rows = np.clip(np.rint(read.sizes / TOKEN_BYTES / 512).astype(int), 1, 4) * 16
    return [(f"image{number}", int(rows[number])) for number in read.objects.tolist()]


def footprint(requests: list[tuple[str, int]]) -> int:
    """Bytes of all distinct images."""
    return sum(dict(requests).values()) * ROW


class Stopwatch:
    """Seconds that an object's methods took, all together, until they are asked for."""

    def __init__(self, target: Any, names: tuple[str, ...]) -> None:
        self._seconds = 0.0
        for name in names:
            setattr(target, name, self._timed(getattr(target, name)))

    def lap(self) -> float:
        """Since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds += time.perf_counter() - start

        return timed


def play(model: Path, which: str, requests: list[tuple[str, int]], capacity: int) -> dict[str, float]:
    """Encodes, the share that was saved, and microseconds of the scheduler half in a step (the median)."""
    vllm = Engine(model, runner="v2", encoder_cache_items=4, extra={"ec_cpu_bytes": capacity}, **CONNECTORS[which])
    watch = Stopwatch(vllm.connector, HOOKS)
    steps = []
    try:
        for number, (image, rows) in enumerate(requests):
            vllm.add(f"r{number}", image, rows=rows, max_tokens=1)
            vllm.step()
            steps.append(watch.lap())
        vllm.run(100_000)
        encodes = len(vllm.encodes())
        return {
            "encodes": encodes,
            "saved": 1 - encodes / len(requests),
            "us_per_step": 1e6 * statistics.median(steps),
        }
    finally:
        vllm.shutdown()


def allocations(count: int, runs: int = 5) -> dict[str, float]:
    """Mean microseconds of reserving room for one entry by connector, over the second half of `count` entries."""
    took: dict[str, list[list[float]]] = {which: [] for which in CONNECTORS}
    fresh = multiprocessing.get_context("fork")
    for _ in range(runs):
        for which in CONNECTORS:
            with fresh.Pool(1) as process:
                took[which].append(process.apply(churn, (which, count)))
    return {which: 1e6 * statistics.fmean(map(min, zip(*all_runs, strict=True))) for which, all_runs in took.items()}


def churn(which: str, count: int, seed: int = 1) -> list[float]:
    """Seconds of each of the last `count / 2` allocations of `count`."""
    rng = np.random.default_rng(seed)
    tokens = np.clip(np.exp(rng.normal(6.9, 0.9, count)), 64, 16384).astype(int).tolist()
    used = (rng.random(count) < 0.5).tolist()
    back = rng.integers(1, 2001, count).tolist()
    reserve, ready, use = blocks() if which == "eccpu" else extents()
    took = []
    for number, size in enumerate(tokens):
        name = f"k{number}"
        start = time.perf_counter()
        reserve(name, size)
        took.append(time.perf_counter() - start)
        ready(name)
        if used[number]:
            use(f"k{number - back[number]}")
    return took[count // 2 :]


Side = tuple[Callable[[str, int], object], Callable[[str], None], Callable[[str], None]]


def blocks() -> Side:
    """vLLM's cache: reserve, mark as ready, use."""
    from vllm.distributed.ec_transfer.ec_connector.cpu.scheduler.embedding_cache import EmbeddingCache

    cache = EmbeddingCache(CAPACITY // TOKEN_BYTES)

    def use(name: str) -> None:
        if cache.get(name) is not None:
            cache.pin(name)
            cache.unpin(name)

    return lambda name, size: cache.alloc(name, size, (size, TOKEN_BYTES // 2)), cache.mark_ready, use


def extents() -> Side:
    """Ours: reserve, commit, use."""
    index = EntryIndex(ExtentAllocator(CAPACITY, 4096), make_policy("auto", CAPACITY))

    def reserve(name: str, size: int) -> object:
        return index.reserve(name.encode(), size * TOKEN_BYTES, "bfloat16", (size, TOKEN_BYTES // 2))

    def ready(name: str) -> None:
        entry = index.lookup(name.encode())
        if entry is None:
            raise RuntimeError("an index without readers had no room")
        index.commit(entry)

    def use(name: str) -> None:
        found = index.lookup(name.encode())
        if found is not None:
            index.pin(found)
            index.touch(found)
            index.unpin(found)

    return reserve, ready, use


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--trace", type=Path, default=sorted(TRACES.glob("*.csv*"))[0])
    parser.add_argument("--allocations", type=int, default=20_000)
    options = parser.parse_args()
    requests = requests_of(options.trace, options.requests)
    print(
        f"{options.trace.name}: {len(requests)} requests, {len(dict(requests))} images, {footprint(requests)} bytes\n"
    )
    print("| capacity | connector | encodes | encodes saved | scheduler half, us a step |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory))
        for share in (0.05, 0.1, 0.25, 0.5):
            capacity = max(4 * 64 * ROW, int(footprint(requests) * share) // 4096 * 4096)
            for which in CONNECTORS:
                got = play(model, which, requests, capacity)
                print(
                    f"| {share:.0%} | {which} | {got['encodes']} | {got['saved']:.1%} | {got['us_per_step']:.0f} |",
                    flush=True,
                )
    took = allocations(options.allocations)
    print("\n| 16 GiB, 1,000 tokens an entry (median) | us an allocation, mean |\n|---|---|")
    for which, us in took.items():
        print(f"| {which} | {us:.1f} |")
    print(f"\n{took['eccpu'] / took['ecoffload']:.1f} times less")


if __name__ == "__main__":
    main()
