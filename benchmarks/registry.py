"""Cold and hot cost of the plugin surface: a discovery among many distributions, and our own Python in a submit."""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from figures import figure, finish

from ecoffload import get_backend, registry
from ecoffload.descriptors import AddressRanges, DescriptorPool
from ecoffload.submission import submit_batch

DISTRIBUTIONS = 100
SUBMITS = 300  # few enough that some of the repeats meet a quiet machine


def best(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the quickest of ``repeats`` runs: the machine's other work only ever adds."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def write_distributions(root: Path) -> None:
    """Metadata as pip leaves it; every tenth brings a backend, the others a command of their own."""
    for i in range(DISTRIBUTIONS):
        info = root / f"package_{i}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: package-{i}\nVersion: 1.0\n" + "Text\n" * 200)
        (info / "RECORD").write_text("package/__init__.py,,\n" * 50)
        mine = f"[ecoffload.backends]\nacme-{i} = package_{i}.plugin\n" if i % 10 == 0 else ""
        (info / "entry_points.txt").write_text(f"[console_scripts]\npackage-{i} = package_{i}:main\n{mine}")


def discovery() -> None:
    with tempfile.TemporaryDirectory() as root:
        write_distributions(Path(root))
        before = list(sys.path)
        sys.path[:] = [root]  # these distributions and no others

        def discover() -> None:
            importlib.invalidate_caches()
            if len(registry._Registry().discover()) != DISTRIBUTIONS // 10:
                raise RuntimeError("the distributions of this benchmark were not found")

        try:
            seconds = best(discover, 10)
        finally:
            sys.path[:] = before
    figure("discovery_among_100_distributions_ms", seconds * 1e3, 50)


def submit() -> None:
    """One descriptor of 64 bytes, from lease to completion, with ranges to check it against."""
    backend, pool = get_backend("cpu"), DescriptorPool()
    ops = backend.ops
    src, dst = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    a, b = ops.address_of(src), ops.address_of(dst)
    sources, destinations = AddressRanges([(a, 64)]), AddressRanges([(b, 64)])
    stream = ops.current_stream()

    def swaps() -> None:
        for _ in range(SUBMITS):
            batch = pool.lease()
            batch.append(a, b, 64)
            submit_batch(backend, batch, "d2h", stream, sources=sources, destinations=destinations).wait()

    figure("submit_of_one_descriptor_us", best(swaps, 100) / SUBMITS * 1e6, 15)


def main() -> None:
    discovery()
    submit()


if __name__ == "__main__":
    main()
    sys.exit(finish())
