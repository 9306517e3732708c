"""What exists once the device is in use: streams, events, descriptor tables and kernels, and the end of a swap.

Made and closed by backend.py, which decides what runs on them; ops.py lends events from the same pool.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ecoffload.backend import D2H, H2D, Completion, Direction, wait_until
from ecoffload.drivers import BatchCall
from ecoffload_cuda.driver import BATCH_VERSION, NO_CONTEXT, NOT_READY, Cuda, Device
from ecoffload_cuda.kernel import Gather
from ecoffload_cuda.tables import TableRing
from ecoffload_cuda.tuning import Tuning, load_tuning

__all__ = ["CudaCompletion", "Live"]


def _raw(stream: Any) -> int:
    """The driver's handle of a stream: torch's object, or the handle itself; None is the default stream."""
    handle = getattr(stream, "cuda_stream", stream)
    return 0 if handle is None else int(handle)


class CudaCompletion(Completion):
    """An event of the driver's behind the copies. Queries leave another thread's graph capture alone."""

    __slots__ = ("_done", "_event", "_live")

    def __init__(self, live: Live, event: int) -> None:
        self._live = live
        self._event = event
        self._done = False

    def done(self) -> bool:
        if self._done:
            return True
        live = self._live
        pushed = live.device.enter()
        try:
            with live.cuda.relaxed():
                code = live.cuda.EventQuery(self._event)
        finally:
            if pushed:
                live.device.leave()
        if code == NOT_READY:
            return False
        live.cuda.driver.check(code, "a swap did not complete", index=None)
        self._done = True
        return True

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return wait_until(self.done, timeout)
        if not self._done:
            live = self._live
            with live.device.current(), live.cuda.relaxed():
                live.cuda.driver.check(live.cuda.EventSynchronize(self._event), "a swap did not complete", index=None)
            self._done = True
        return True

    def block(self, stream: Any) -> None:
        if self._done:
            return
        live = self._live
        code = live.cuda.StreamWaitEvent(_raw(stream), self._event, 0)
        if code == NO_CONTEXT:  # this thread's first call
            with live.device.current():
                code = live.cuda.StreamWaitEvent(_raw(stream), self._event, 0)
        if code:
            raise live.cuda.driver.error(code, "a stream cannot wait for a swap", index=None)

    def __del__(self) -> None:
        # Only here: two threads may ask done() at once, and an event that went back twice would serve two swaps.
        live = getattr(self, "_live", None)
        if live is not None:
            live.events.append(self._event)


class Live:
    """What exists once the device is in use: context, streams, tables, the kernels."""

    def __init__(self, cuda: Cuda, index: int) -> None:
        self.cuda = cuda
        self.device = device = Device(cuda, index)
        self.events: list[int] = []
        self.gathers: dict[Direction, Gather] = {}
        with device.current(), cuda.relaxed():
            least, greatest = ctypes.c_int(), ctypes.c_int()
            cuda.CtxGetStreamPriorityRange(ctypes.addressof(least), ctypes.addressof(greatest))
            self.engine_stream = cuda.out("StreamCreateWithPriority", 1, greatest.value)  # 1: CU_STREAM_NON_BLOCKING
            # One for each direction: a load must not queue behind a save that waits for compute.
            self.kernel_streams: dict[Direction, int] = {
                way: cuda.out("StreamCreateWithPriority", 1, greatest.value) for way in (D2H, H2D)
            }
            self.fork = cuda.out("EventCreate", 2)
            self.join = cuda.out("EventCreate", 2)
            self.tables = TableRing(device)
        entry = cuda.driver.resolve("cuMemcpyBatchAsync", BATCH_VERSION)
        self.batch = BatchCall(entry) if entry else None
        version = cuda.out("DriverGetVersion", ctype=ctypes.c_int)
        self.version = f"{version // 1000}.{version % 1000 // 10}"
        self.tuning: Tuning = load_tuning(device)

    def event(self) -> int:
        try:
            return self.events.pop()
        except IndexError:
            with self.cuda.relaxed():
                return self.cuda.out("EventCreate", 2)

    def close(self) -> None:
        cuda = self.cuda
        if self.device.forked:
            return  # the child has no context to free anything in
        with self.device.current(), cuda.relaxed():
            for stream in (self.engine_stream, *self.kernel_streams.values()):
                cuda.StreamSynchronize(stream)
                cuda.StreamDestroy(stream)
            for event in (self.fork, self.join, *self.events):
                cuda.EventDestroy(event)
            self.events.clear()
            self.tables.close()
            for gather in set(self.gathers.values()):
                gather.unload()
            self.gathers.clear()
        self.device.release()
