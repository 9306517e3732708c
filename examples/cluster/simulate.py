"""A cluster's hit rate over an access trace, by the number of nodes and the size of the store they share.

    python examples/cluster/simulate.py [TRACE.csv.gz ...]

Every lookup goes to a node at random, which is the worst case for what each node keeps for itself. Nodes and store
evict what was used longest ago; capacities are shares of the trace's footprint. Nothing is measured here but hits.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np

from ecoffload.traces import read_trace

TRACES = Path(__file__).parents[2] / "tests" / "data" / "traces"
NODES = (1, 10, 100, 1000)
STORES = (0.0, 0.1, 0.5, 1.0)
REGIONS = 0.10  # of the footprint, of all nodes' regions together: more nodes do not bring more memory here


class Lru:
    """Objects by number, up to ``capacity`` bytes."""

    def __init__(self, capacity: float) -> None:
        self.left = capacity
        self.sizes: OrderedDict[int, int] = OrderedDict()

    def use(self, key: int) -> bool:
        if key not in self.sizes:
            return False
        self.sizes.move_to_end(key)
        return True

    def add(self, key: int, size: int) -> None:
        if key in self.sizes:
            return
        self.sizes[key] = size
        self.left -= size
        while self.left < 0 and self.sizes:
            self.left += self.sizes.popitem(last=False)[1]


def simulate(objects: list[int], sizes: list[int], nodes: int, regions: float, store: float) -> tuple[float, float]:
    """Shares of all bytes asked for that came from the node's own region, and from the store."""
    footprint = float(sum(sizes))
    own = [Lru(regions * footprint / nodes) for _ in range(nodes)]
    shared = Lru(store * footprint)
    where = np.random.default_rng(1).integers(0, nodes, len(objects)).tolist()
    local = remote = total = 0
    for key, node in zip(objects, where, strict=True):
        size = sizes[key]
        total += size
        if own[node].use(key):
            local += size
            continue
        if shared.use(key):
            remote += size
        else:
            shared.add(key, size)
        own[node].add(key, size)
    return local / total, remote / total


def main() -> None:
    paths = [Path(each) for each in sys.argv[1:]] or sorted(TRACES.glob("*.csv.gz"))
    print("| trace | nodes | " + " | ".join(f"store {store:.0%}" for store in STORES) + " |")
    print("|---|---|" + "---|" * len(STORES))
    for path in paths:
        trace = read_trace(path)
        objects, sizes = trace.objects.tolist(), trace.sizes.tolist()
        for nodes in NODES:
            shares = [simulate(objects, sizes, nodes, REGIONS, store) for store in STORES]
            cells = " | ".join(f"{local:.1%} + {remote:.1%}" for local, remote in shares)
            print(f"| {trace.name} | {nodes} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
