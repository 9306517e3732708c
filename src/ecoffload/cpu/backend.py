"""The ``cpu`` backend: a real asynchronous device in miniature, and what serves engines whose device is the CPU.

Given a stream (a queue with a thread), ``submit`` returns at once and copies run there in order; given the caller's
own, it copies inside the call, as a CPU user expects. Large batches are shared out to all cores.
"""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecoffload.backend import BackendSpec, BatchView, Completed, Completion, DeviceOps, Direction, SwapBackend
from ecoffload.cpu.copies import ROWS_BELOW, copy_descriptors, words_at
from ecoffload.cpu_ops import CpuOps
from ecoffload.errors import ConfigError
from ecoffload.host_queue import Caller, QueuedCompletion

__all__ = ["CpuBackend"]

_SHARE_FROM = 512 << 10  # bytes that pay for the wake-up of one more thread


class CpuBackend(SwapBackend):
    """Copies with memmove and numpy's row copies, the GIL released, on as many cores as the batch is worth."""

    def __init__(self, spec: BackendSpec, device_index: int = 0, ops: DeviceOps | None = None) -> None:
        if device_index:
            raise ConfigError(
                f"device 'cpu:{device_index}': torch has one device of type 'cpu'; write 'cpu'",
                option="device",
                value=device_index,
            )
        super().__init__(spec, 0, ops or CpuOps())
        self._helpers = max(0, (len(os.sched_getaffinity(0))) - 1)
        self._forget_pool()
        _backends.add(self)

    def _forget_pool(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def submit(self, batch: BatchView, direction: Direction, stream: Any) -> Completion:
        # The arrays are read when the copy runs (snapshots_descriptors is False), so addresses are all it needs.
        work = partial(self._copy, batch.src, batch.dst, batch.size, batch.count)
        if isinstance(stream, Caller):
            work()
            return Completed()
        return QueuedCompletion(stream, work)

    def _copy(self, src_at: int, dst_at: int, size_at: int, count: int) -> None:
        src, dst, size = words_at(src_at, count), words_at(dst_at, count), words_at(size_at, count)
        total = int(size.sum()) if count > 1 else int(size[0])
        shares = min(self._helpers + 1, total // _SHARE_FROM)
        if shares < 2 or self.per_copy:
            copy_descriptors(src, dst, size)
            return
        parts = _shares(src, dst, size, shares)
        futures = [self._executor().submit(copy_descriptors, *part) for part in parts[1:]]
        copy_descriptors(*parts[0])
        for future in futures:
            future.result()

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._helpers, thread_name_prefix="ecoffload-cpu")
            return self._pool

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "threads": self._helpers + 1}

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


_backends: weakref.WeakSet[CpuBackend] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child: it has no threads of its parent's, and another one may have held the lock."""
    for backend in list(_backends):
        backend._forget_pool()


os.register_at_fork(after_in_child=_after_fork)


Part = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]


def _shares(src: NDArray[np.uint64], dst: NDArray[np.uint64], size: NDArray[np.uint64], parts: int) -> list[Part]:
    """Cut a batch into ``parts`` of about the same bytes; large descriptors are cut inside, small ones between."""
    if int(size.max()) >= ROWS_BELOW:
        total = int(size.sum())
        limit = max(ROWS_BELOW, -(-total // parts))
        limit = -(-limit // 4096) * 4096
        bound = np.uint64(limit)
        pieces = ((size + (bound - np.uint64(1))) // bound).astype(np.int64)
        of = np.repeat(np.arange(len(size)), pieces)
        offset = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)).astype(np.uint64) * bound
        src, dst, size = src[of] + offset, dst[of] + offset, np.minimum(size[of] - offset, bound)
    ends = np.cumsum(size)
    total = int(ends[-1])
    cuts = np.searchsorted(ends, [total * i // parts for i in range(1, parts)]).tolist()
    edges = [0, *(min(c + 1, len(size)) for c in cuts), len(size)]
    return [(src[a:b], dst[a:b], size[a:b]) for a, b in pairwise(edges) if b > a]
