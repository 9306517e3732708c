"""Our Python in one `put` and one `get` on the cpu backend, copies stubbed out: CPU time of the calling thread."""

from __future__ import annotations

import sys
import time
from unittest.mock import patch

import torch
from figures import figure, finish

from ecoffload import EncoderCache
from ecoffload.cpu.backend import CpuBackend


def main() -> None:
    tensor = torch.randn(10, 10)
    with patch.object(CpuBackend, "_copy", lambda *arguments: None), EncoderCache("8MiB") as cache:
        number = 0

        def some(count: int) -> float:
            nonlocal number
            start = time.thread_time()
            for _ in range(count):
                number += 1
                key = b"%d" % number
                cache.put(key, tensor)
                cache.get(key)
            return (time.thread_time() - start) / count

        some(3000)  # fills the region: from here on every put evicts
        figure("cache: put + get, our Python, us", min(some(500) for _ in range(15)) * 1e6, 120, aim=60)


if __name__ == "__main__":
    main()
    sys.exit(finish())
