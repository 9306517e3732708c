"""A worker in a process of its own: reads plans (pickled, in hex) line by line, answers with what it loaded.

Arguments: directory, region id, capacity, rank, world. A line "hang HEX" carries a plan out, but stops for ever in the
middle of its copies, with half of each entry written; "end" closes properly.
"""

from __future__ import annotations

import pickle
import sys
import threading
import zlib
from typing import Any

import numpy as np
import torch

import ecoffload.cpu.backend as cpu
from ecoffload import HostRegion, OffloadWorker, get_backend
from ecoffload.plan import Plan


def content(key: bytes, nbytes: int) -> torch.Tensor:
    """What the encoder makes of an input."""
    return torch.from_numpy(np.random.default_rng([*key]).integers(0, 256, nbytes, dtype=np.uint8))


def say(*words: object) -> None:
    print(*words, flush=True)


def half(src: Any, dst: Any, size: Any) -> None:
    copy(src, dst, size // np.uint64(2))
    say("half")
    threading.Event().wait()


copy = cpu.copy_descriptors


def main() -> None:
    directory, id, capacity, rank, world = sys.argv[1:]
    region = HostRegion.open(id, capacity=int(capacity), granule=4096, directory=directory, timeout=30)
    worker = OffloadWorker(region, get_backend("cpu"), int(rank), int(world))
    say("ready")
    for line in sys.stdin:
        how, _, message = line.strip().partition(" ")
        if how == "end":
            break
        plan: Plan = pickle.loads(bytes.fromhex(message))
        if how == "hang":
            cpu.copy_descriptors = half
        loaded = worker.load(plan)
        for op in plan.saves:
            worker.save(op.key, content(op.key, op.nbytes), plan)
        worker.flush()
        worker.poll()
        say(*(f"{key.hex()}:{zlib.crc32(tensor.numpy().tobytes())}" for key, tensor in loaded.items()))
    worker.close()
    region.close()


if __name__ == "__main__":
    main()
