"""A device on the CPU that finishes late, and fails when told to: what a GPU does to the connector, by the clock.

A load's bytes are there when it is submitted (nothing on a CPU would wait for them), a save reads its source only when
it ends, and both are said to have ended `late` ticks of the reference connector's clock later. Handed to the
connector's worker half by the tests, one a rank. Never imported outside these tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reference_connector import CLOCK

from ecoffload import get_backend
from ecoffload.backend import D2H, Completion
from ecoffload.cpu.backend import CpuBackend, CpuOps
from ecoffload.cpu.copies import copy_descriptors, words_at
from ecoffload.errors import SwapFailed


class LateOps(CpuOps):
    """Not ordered by the host: what is submitted is in flight."""

    host_ordered = False


class LateCompletion(Completion):
    """Ends when its time has come. `work`: what moves the bytes of a save then; a load's have arrived before."""

    def __init__(self, ticks: int, work: Callable[[], None] | None = None) -> None:
        self._ended = False
        self._work = work
        CLOCK.start(ticks, self._finish)

    def _finish(self) -> None:
        if not self._ended:
            self._ended = True
            if self._work is not None:
                self._work()

    def done(self) -> bool:
        return self._ended

    def wait(self, timeout: float | None = None) -> bool:
        self._finish()
        return True

    def block(self, stream: Any) -> None:
        """Order what follows behind it: on this device that is the host's to do, and a save must have moved."""
        if self._work is not None:
            self._finish()


class LateBackend(CpuBackend):
    """`late`: ticks; `failing`: what the next submits raise, by direction."""

    def __init__(self, late: int, ops: LateOps | None = None) -> None:
        spec = get_backend("cpu").spec
        super().__init__(spec, 0, ops or LateOps())
        self.late = late
        self.failing: dict[str, list[Exception]] = {"d2h": [], "h2d": []}

    def submit(self, batch: Any, direction: Any, stream: Any) -> Completion:
        if self.failing[direction]:
            raise self.failing[direction].pop(0)
        tables = [words_at(at, batch.count).copy() for at in (batch.src, batch.dst, batch.size)]
        if direction == D2H:
            return LateCompletion(self.late, lambda: copy_descriptors(*tables))
        copy_descriptors(*tables)
        return LateCompletion(self.late)


class Devices:
    """The late devices of one test, in the order in which workers asked for them (their ranks)."""

    def __init__(self, late: dict[int, int]) -> None:
        self.late = late
        self.made: list[LateBackend] = []

    def __call__(self, name: str | None = None, *, device: Any = None) -> LateBackend:
        self.made.append(LateBackend(self.late.get(len(self.made), 0)))
        return self.made[-1]

    def fail(self, direction: str, *errors: Exception, rank: int = 0) -> None:
        """The next submits of that direction raise these."""
        self.made[rank].failing[direction] += errors or (SwapFailed("the device said no"),)
