"""The toy's one class: it copies a batch inside the call, and the core runs that on a thread."""

import ctypes

from ecoffload import Availability, SwapBackend
from ecoffload.backend import BatchView, Direction
from ecoffload.drivers import words_at


class ToyBackend(SwapBackend):
    @classmethod
    def availability(cls, *, probe: bool = False) -> Availability:
        return Availability(True, "needs nothing but memory")

    def submit(self, batch: BatchView, direction: Direction, stream: object) -> None:
        tables = (words_at(at, batch.count) for at in (batch.src, batch.dst, batch.size))
        for src, dst, size in zip(*tables, strict=True):
            ctypes.memmove(dst, src, size)
