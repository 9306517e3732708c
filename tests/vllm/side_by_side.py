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
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start

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
    """Median microseconds of reserving room for one entry, when full and churned, by connector."""
    from vllm.distributed.ec_transfer.ec_connector.cpu.scheduler.embedding_cache import EmbeddingCache

    rng = np.random.default_rng(seed)
    tokens = np.clip(np.exp(rng.normal(np.log(TOKENS), 0.9, count)), 64, 16384).astype(int).tolist()
    again = rng.random(count).tolist()
    blocks = EmbeddingCache(CAPACITY // TOKEN_BYTES)
    index = EntryIndex(ExtentAllocator(CAPACITY, 4096), make_policy("auto", CAPACITY))
    took: dict[str, list[float]] = {"ecoffload": [], "eccpu": []}
    for number, size in enumerate(tokens):
        key = f"k{number}"
        start = time.thread_time()
        blocks.alloc(key, size, (size, TOKEN_BYTES // 2))
        took["eccpu"].append(time.thread_time() - start)
        blocks.mark_ready(key)
        name = key.encode()
        start = time.thread_time()
        entry = index.reserve(name, size * TOKEN_BYTES, "bfloat16", (size, TOKEN_BYTES // 2))
        took["ecoffload"].append(time.thread_time() - start)
        if entry is None:
            raise RuntimeError("an index without readers had no room")
        index.commit(entry)
        if again[number] < 0.5:  # a hit on something of the last 2,000
            old = f"k{max(0, number - int(again[number] * 4000))}"
            if blocks.get(old) is not None:
                blocks.pin(old)
                blocks.unpin(old)
            found = index.lookup(old.encode())
            if found is not None:
                index.pin(found)
                index.touch(found)
                index.unpin(found)
    full = count // 2  # by then both evict for every entry
    return {which: 1e6 * statistics.median(seconds[full:]) for which, seconds in took.items()}


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
