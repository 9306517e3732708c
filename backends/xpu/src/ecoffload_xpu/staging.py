"""USM host memory through which plain host memory goes to the device, so that it may change right after a submit.

The backend calls it for host-to-device batches whose sources the device must not read late. It owns the staging blocks
and knows which of them the device still reads; bytes in use stay under a limit, beyond which it waits for the oldest.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ecoffload_xpu.ways import Event, HostBlock, Way, Words

__all__ = ["Chunk", "Staging", "chunks"]

CHUNK_BYTES: Final = 16 << 20
LIMIT_BYTES: Final = 8 * CHUNK_BYTES
_ROUND: Final = 1 << 20


class Chunk(NamedTuple):
    """Copies whose bytes fit one staging block: uint64 arrays of one length, ``of`` naming each one's descriptor."""

    src: Words
    dst: Words
    size: Words
    of: NDArray[np.intp]

    @property
    def nbytes(self) -> int:
        return int(self.size.sum())


def chunks(src: Words, dst: Words, size: Words, limit: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Cut a batch, as one row of bytes, at every multiple of ``limit``; a descriptor across a cut becomes several."""
    ends = np.cumsum(size, dtype=np.uint64)
    total = int(ends[-1])
    if total <= limit:
        yield Chunk(src, dst, size, np.arange(len(size)))
        return
    starts = ends - size
    cuts = np.union1d(starts, np.arange(0, total, limit, dtype=np.uint64))
    of = np.searchsorted(ends, cuts, side="right")
    inside = cuts - starts[of]
    lengths = np.diff(np.append(cuts, np.uint64(total)))
    edges = np.searchsorted(cuts, np.arange(0, total + limit, limit, dtype=np.uint64))
    for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = of[a:b]
        yield Chunk(src[part] + inside[a:b], dst[part] + inside[a:b], lengths[a:b], part)


class Staging:
    """Blocks of USM host memory, reused once the device has read them. Any thread may call."""

    def __init__(self, way: Way, *, limit: int = LIMIT_BYTES) -> None:
        self._way = way
        self._limit = limit
        self._lock = threading.Lock()
        self._free: list[HostBlock] = []
        self._reading: deque[tuple[Event, HostBlock]] = deque()
        self._held = 0

    def copy(self, queue: int, chunk: Chunk) -> Event:
        """Read the chunk's sources now and enqueue their copies; the event behind them.

        Raises :class:`SwapFailed` as :meth:`Way.copy` does, with the ``index`` in the chunk.
        """
        block = self._take(queue, chunk.nbytes)
        event = None
        try:
            count = len(chunk.size)
            self._way.gather(block.address, chunk.src.ctypes.data, chunk.size.ctypes.data, count)
            staged = np.uint64(block.address) + (np.cumsum(chunk.size, dtype=np.uint64) - chunk.size)
            event = self._way.copy(queue, chunk.dst.ctypes.data, staged.ctypes.data, chunk.size.ctypes.data, count, 0)
            return event
        finally:
            with self._lock:
                if event is None:  # refused: the queue has drained, so nothing reads the block any more
                    self._free.append(block)
                else:
                    self._reading.append((event, block))

    def _take(self, queue: int, nbytes: int) -> HostBlock:
        with self._lock:
            self._reclaim()
            fitting = [i for i, block in enumerate(self._free) if block.nbytes >= nbytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda i: self._free[i].nbytes))
            asked = -(-nbytes // _ROUND) * _ROUND
            while self._held + asked > self._limit and (self._free or self._reading):
                if not self._free:
                    event, block = self._reading.popleft()
                    try:
                        event.wait()
                    finally:
                        self._free.append(block)
                self._held -= self._free.pop().nbytes
            made = self._way.allocate(queue, asked)
            self._held += asked
            return made

    def _reclaim(self) -> None:
        # From the oldest on, and only as far as they are done: queues run in order, and the rest waits for its turn.
        while self._reading and self._reading[0][0].done():
            self._free.append(self._reading.popleft()[1])

    @property
    def nbytes(self) -> int:
        """Bytes of staging memory held now."""
        return self._held

    def close(self) -> None:
        """Wait until the device has read everything, and give the memory back. Usable again afterwards."""
        with self._lock:
            while self._reading:
                event, block = self._reading.popleft()
                try:
                    event.wait()
                finally:
                    self._free.append(block)
            self._free.clear()
            self._held = 0
