"""EcoffloadConnector beside vLLM's own ECCPUConnector: the same requests, in vLLM's real scheduler, V2 semantics.

    .venv-vllm-0.33.0/bin/python tests/vllm/side_by_side.py [--requests 600] [--trace FILE] [--allocations 12000]

Prints two tables. Requests: a trace's lookups as one-image requests (an image's tokens are scaled down to 16 to 64, so
that an entry is whole granules for the one and whole blocks for the other), at several capacities: images encoded, and
the time that the connector's scheduler half takes a step. Allocation: what reserving room for one entry of about 1,000
tokens of 7,168 bytes costs when 16 GiB are full and churned (bookkeeping only; no such memory is needed).
The comparator's scheduler half and its cache are vLLM's, unmodified; see eccpu_comparator.py for its copies.
"""

from __future__ import annotations

import argparse
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
TOKENS = 1000
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
    """CPU seconds that an object's methods took, all together: other processes of a busy machine do not count."""

    def __init__(self, target: Any, names: tuple[str, ...]) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(target, name, self._timed(getattr(target, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def play(model: Path, which: str, requests: list[tuple[str, int]], capacity: int) -> dict[str, float]:
    """Encodes, the share that was saved, and microseconds of the scheduler half a step."""
    vllm = Engine(model, runner="v2", encoder_cache_items=4, extra={"ec_cpu_bytes": capacity}, **CONNECTORS[which])
    watch = Stopwatch(vllm.connector, HOOKS)
    try:
        for number, (image, rows) in enumerate(requests):
            vllm.add(f"r{number}", image, rows=rows, max_tokens=1)
            vllm.step()
        vllm.run(100_000)
        encodes = len(vllm.encodes())
        return {
            "encodes": encodes,
            "saved": 1 - encodes / len(requests),
            "us_per_step": 1e6 * watch.seconds / vllm.steps,
        }
    finally:
        vllm.shutdown()


def allocations(count: int, seed: int = 1) -> dict[str, float]:
    """Mean microseconds of reserving room for one entry, evictions included, when full and churned, by connector.

    Each has the machine for itself: both at once would measure each other's cache misses.
    """
    from vllm.distributed.ec_transfer.ec_connector.cpu.scheduler.embedding_cache import EmbeddingCache

    rng = np.random.default_rng(seed)
    tokens = np.clip(np.exp(rng.normal(np.log(TOKENS), 0.5, count)), 64, 16384).astype(int).tolist()
    # Half of the entries are followed by a hit on one of the last 2,000.
    hits = [int(back * 4000) if back < 0.5 else None for back in rng.random(count).tolist()]
    blocks = EmbeddingCache(CAPACITY // TOKEN_BYTES)
    index = EntryIndex(ExtentAllocator(CAPACITY, 4096), make_policy("auto", CAPACITY))

    def theirs(name: str, size: int) -> None:
        blocks.alloc(name, size, (size, TOKEN_BYTES // 2))

    def theirs_after(name: str, hit: str | None) -> None:
        blocks.mark_ready(name)
        if hit is not None and blocks.get(hit) is not None:
            blocks.pin(hit)
            blocks.unpin(hit)

    def ours(name: str, size: int) -> None:
        index.reserve(name.encode(), size * TOKEN_BYTES, "bfloat16", (size, TOKEN_BYTES // 2))

    def ours_after(name: str, hit: str | None) -> None:
        entry = index.lookup(name.encode())
        if entry is None:
            raise RuntimeError("an index without readers had no room")
        index.commit(entry)
        found = None if hit is None else index.lookup(hit.encode())
        if found is not None:
            index.pin(found)
            index.touch(found)
            index.unpin(found)

    result = {}
    for which, reserve, after in (("ecoffload", ours, ours_after), ("eccpu", theirs, theirs_after)):
        took = []
        for number, size in enumerate(tokens):
            name, back = f"k{number}", hits[number]
            start = time.perf_counter()
            reserve(name, size)
            took.append(time.perf_counter() - start)
            after(name, None if back is None else f"k{max(0, number - back)}")
        full = sorted(took[count // 2 :])  # by then both evict for every entry
        result[which] = 1e6 * statistics.fmean(full[: len(full) * 99 // 100])  # other work on the machine only adds
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--trace", type=Path, default=sorted(TRACES.glob("*.csv*"))[0])
    parser.add_argument("--allocations", type=int, default=12000)
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
    print("\n| 16 GiB, about 1,000 tokens an entry | us an allocation |\n|---|---|")
    for which, us in took.items():
        print(f"| {which} | {us:.1f} |")
    print(f"\n{took['eccpu'] / took['ecoffload']:.0f} times less")


if __name__ == "__main__":
    main()
