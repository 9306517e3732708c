"""Measuring the crossovers of tuning.py on the device at hand: what ``ecoffload tune --backend cuda`` runs.

It submits through the backend itself, under tunings that force one share for every size, and times whole batches on the
host; what is measured is what a caller gets.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ecoffload.backend import D2H, H2D, Direction, SwapBackend
from ecoffload.descriptors import DescriptorPool
from ecoffload.submission import submit_batch
from ecoffload_cuda.tuning import DEFAULTS, Tuning, Way, store_tuning

if TYPE_CHECKING:
    from ecoffload_cuda.live import Live

__all__ = ["tune"]

_log = logging.getLogger("ecoffload.cuda")

_KIB: Final = 1024
_TOTAL: Final = 128 << 20
_SIZES: Final = tuple(k * _KIB for k in (16, 32, 64, 128, 256, 512, 1024))
_SHARES: Final = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
_SMS: Final = (1, 2, 3, 4, 6, 8)
_SMALL: Final = (2 * _KIB, 4 * _KIB)
_ROUNDS: Final = 3
_NEAR: Final = 0.985
"""Of the best rate: fewer multiprocessors, or a larger share of the engine's, are worth so much."""


class _Bench:
    def __init__(self, backend: SwapBackend, live: Live) -> None:
        self.backend = backend
        self.live = live
        self.ops = backend.ops
        self.memory = mmap.mmap(-1, 2 * _TOTAL)
        self.view: npt.NDArray[np.uint8] = np.frombuffer(self.memory, np.uint8)
        self.view[:] = 1
        self.registration = backend.register(self.view.ctypes.data, self.view.nbytes)
        self.tensor = self.ops.empty(2 * _TOTAL)
        self.stream = self.ops.stream()
        self.pool = DescriptorPool()
        self.random = np.random.default_rng(0)

    def rate(self, direction: Direction, size: int, tuning: Tuning) -> float:
        """GB/s of a batch of scattered descriptors of one size under ``tuning``, the best of a few rounds."""
        live = self.live
        count = _TOTAL // size
        places = self.random.permutation(2 * count)[:count].astype(np.uint64)
        host = np.uint64(self.registration.alias) + places * np.uint64(size)
        device = np.uint64(self.ops.address_of(self.tensor)) + np.arange(count, dtype=np.uint64) * np.uint64(size)
        src, dst = (host, device) if direction == H2D else (device, host)
        before, live.tuning = live.tuning, tuning
        try:
            best = float("inf")
            for _ in range(_ROUNDS + 1):
                batch = self.pool.lease(count)
                batch.extend(src, dst, size)
                start = time.perf_counter()
                submit_batch(self.backend, batch, direction, self.stream).wait()
                best = min(best, time.perf_counter() - start)
        finally:
            live.tuning = before
        return count * size / best / 1e9

    def close(self) -> None:
        self.backend.unregister(self.registration)
        del self.view
        self.memory.close()


def _fixed(share: float, sms: int) -> Tuning:
    way = Way(((0, share),), ((0, sms),))
    return Tuning(way, way, 1, "measuring")


def tune(backend: SwapBackend, live: Live, progress: Callable[[str], None]) -> dict[str, Any]:
    """See :meth:`CudaBackend.tune`."""
    bench = _Bench(backend, live)
    measured: dict[str, Any] = {}
    ways: dict[Direction, Way] = {}
    try:
        for direction in (H2D, D2H):
            rates: dict[str, dict[str, float]] = {}
            sms: list[tuple[int, int]] = []
            for size in _SMALL:
                row = {str(n): round(bench.rate(direction, size, _fixed(0.0, n)), 2) for n in _SMS}
                rates[f"kernel {size} by multiprocessors"] = row
                chosen = next(n for n in _SMS if row[str(n)] >= _NEAR * max(row.values()))
                sms.append((0 if not sms else 3 * _KIB, chosen))
                progress(f"{direction} {size} bytes: {chosen} multiprocessors give {row[str(chosen)]:.1f} GB/s")
            blocks = sms[-1][1]
            classes: list[tuple[int, float]] = []
            for size in _SIZES:
                row = {str(s): round(bench.rate(direction, size, _fixed(s, blocks)), 2) for s in _SHARES}
                rates[f"{size} by engine share"] = row
                share = max(s for s in _SHARES if row[str(s)] >= _NEAR * max(row.values()))
                progress(f"{direction} {size} bytes: engine share {share} gives {row[str(share)]:.1f} GB/s")
                # A class reaches from the middle between two measured sizes (geometrically) to the next.
                if share > 0.0 or classes:
                    classes.append((int(size / 2**0.5), share))
            measured[direction] = rates
            ways[direction] = Way(tuple(classes), tuple(sms))
    finally:
        bench.close()
    tuning = Tuning(ways[H2D], ways[D2H], DEFAULTS.kernel_min, "measured in this process")
    path: str | None = None
    try:
        path = str(store_tuning(live.device.name, tuning, measured))
        tuning = Tuning(tuning.h2d, tuning.d2h, tuning.kernel_min, path)
    except OSError as exc:
        _log.warning("the tuning could not be kept (%s); it holds for this process only", exc)
    live.tuning = tuning
    return {
        "device": live.device.name,
        "driver": live.version,
        "file": path,
        "measured": measured,
        "tuning": {way: {"classes": ways[way].classes, "sms": ways[way].sms} for way in (H2D, D2H)},
    }
