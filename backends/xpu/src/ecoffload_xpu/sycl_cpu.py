"""``sycl-cpu``: the xpu backend, unchanged, on the SYCL runtime's CPU device. For tests; never chosen unless named.

Everything below torch is real: libsycl, its queues and events, USM memory, copies that run late. What torch would give
on an Intel GPU (streams with a ``sycl_queue``, events, an allocator) comes from dpctl here, behind
:class:`SyclCpuOps`, and is independent of the calls that the backend makes. Needs ``dpctl``, ``intel-opencl-rt`` and
``intel-sycl-rt``; nothing is imported before the device is used.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecoffload.backend import Availability, BackendSpec, DeviceOps
from ecoffload.hookspecs import hookimpl
from ecoffload_xpu.backend import XpuBackend
from ecoffload_xpu.plugin import SPEC as XPU

if TYPE_CHECKING:
    import torch

__all__ = ["SyclCpuBackend", "SyclCpuOps", "SyclEvent", "SyclStream"]

ECOFFLOAD_HOOK_API = 1

SPEC = BackendSpec.model_validate(
    {**dict(XPU), "name": "sycl-cpu", "factory": "ecoffload_xpu.sycl_cpu:SyclCpuBackend", "test_only": True}
)

_SPIN = """
kernel void spin(ulong turns, global ulong *out) {
    volatile ulong x = 0;
    for (ulong i = 0; i < turns; i++) x += i;
    out[0] = x;
}
"""


@hookimpl
def ecoffload_register_backend() -> BackendSpec:
    return SPEC


def _opencl_library() -> Path:
    return Path(sys.prefix) / "lib" / "libintelocl.so"


class SyclStream:
    """An in-order queue, shaped like ``torch.xpu.Stream``: ``sycl_queue`` is the address of its ``sycl::queue``."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self.sycl_queue: int = queue.addressof_ref()

    def synchronize(self) -> None:
        self.queue.wait()


class SyclEvent:
    """What :meth:`SyclCpuOps.record` last recorded; one never recorded has happened."""

    def __init__(self) -> None:
        self.event: Any = None


class SyclCpuOps(DeviceOps):
    """Torch CPU tensors over USM device memory, which the CPU device shares with the host; dpctl's queues and events.

    As torch's allocator does, memory of a dropped tensor is given back only when the work has run that was enqueued
    by then on the stream it was allocated for and on those recorded for it.
    """

    def __init__(self) -> None:
        # The wheel registers its OpenCL library under a path that is not where it is installed.
        os.environ.setdefault("OCL_ICD_FILENAMES", str(_opencl_library()))
        import dpctl
        import dpctl.memory
        import torch

        self.device = torch.device("cpu")
        self._dpctl = dpctl
        self._torch = torch
        device = dpctl.SyclDevice("opencl:cpu")
        self._context = dpctl.SyclContext(device)
        self._device = device
        self._lock = threading.RLock()
        self._live: dict[int, tuple[int, list[SyclStream]]] = {}  # address: bytes, streams that use it
        self._dropped: list[tuple[list[SyclEvent], Any]] = []
        self._default = self.stream()
        self._kernel: Any = None
        self._turns_per_ms = 0.0

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._allocation(tensor.data_ptr()) is not None

    def _allocation(self, address: int) -> int | None:
        with self._lock:
            return next((at for at, (nbytes, _) in self._live.items() if at <= address < at + nbytes), None)

    def empty(self, nbytes: int, stream: SyclStream | None = None) -> torch.Tensor:
        stream = stream or self._default
        self._give_back()
        memory = self._dpctl.memory.MemoryUSMDevice(max(nbytes, 1), alignment=64, queue=stream.queue)
        address = int(memory._pointer)
        buffer = (ctypes.c_uint8 * max(nbytes, 1)).from_address(address)
        with self._lock:
            self._live[address] = (max(nbytes, 1), [stream])
        weakref.finalize(buffer, self._drop, address, memory).atexit = False
        return self._torch.frombuffer(buffer, dtype=self._torch.uint8)[:nbytes]

    def _drop(self, address: int, memory: Any) -> None:
        with self._lock:
            _, streams = self._live.pop(address)
            self._dropped.append(([self._recorded(stream) for stream in streams], memory))

    def _give_back(self) -> None:
        with self._lock:
            self._dropped = [d for d in self._dropped if not all(self.query(event) for event in d[0])]

    def _recorded(self, stream: SyclStream) -> SyclEvent:
        event = self.event()
        self.record(event, stream)
        return event

    def address_of(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def stream(self) -> SyclStream:
        return SyclStream(self._dpctl.SyclQueue(self._context, self._device, property="in_order"))

    def current_stream(self) -> SyclStream:
        return self._default

    def event(self) -> SyclEvent:
        return SyclEvent()

    def record(self, event: SyclEvent, stream: SyclStream) -> None:
        event.event = stream.queue.submit_barrier()

    def wait(self, stream: SyclStream, event: SyclEvent) -> None:
        if event.event is not None:
            stream.queue.submit_barrier([event.event])

    def query(self, event: SyclEvent) -> bool:
        return event.event is None or event.event.execution_status == self._dpctl.event_status_type.complete

    def synchronize(self, target: SyclEvent | SyclStream | None = None) -> None:
        if isinstance(target, SyclEvent):
            if target.event is not None:
                target.event.wait()
            return
        with self._lock:
            streams = {id(s): s for _, used in self._live.values() for s in used} | {0: self._default}
        for stream in [target] if target is not None else streams.values():
            stream.synchronize()

    def record_stream(self, tensor: torch.Tensor, stream: SyclStream) -> None:
        address = self._allocation(tensor.data_ptr())
        if address is not None:
            with self._lock:
                self._live[address][1].append(stream)

    def delay(self, stream: SyclStream, ms: float) -> None:
        with self._lock:
            if self._kernel is None:
                self._calibrate()
        self._spin(stream, int(ms * self._turns_per_ms))

    def _calibrate(self) -> None:
        import dpctl.program

        program = dpctl.program.create_program_from_source(self._default.queue, _SPIN)
        self._kernel = program.get_sycl_kernel("spin")
        self._sink = self._dpctl.memory.MemoryUSMDevice(64, queue=self._default.queue)
        side = self.stream()
        rates = []
        for turns in (1 << 16, 1 << 22, 1 << 24):
            start = time.perf_counter()
            self._spin(side, turns)
            side.synchronize()
            rates.append(turns / (time.perf_counter() - start) / 1e3)
        self._turns_per_ms = rates[-1]

    def _spin(self, stream: SyclStream, turns: int) -> None:
        stream.queue.submit_async(self._kernel, [ctypes.c_ulonglong(turns), self._sink], [1])


class SyclCpuBackend(XpuBackend):
    """:class:`XpuBackend` with :class:`SyclCpuOps` for torch's part."""

    def __init__(self, spec: BackendSpec, device_index: int = 0, ops: DeviceOps | None = None) -> None:
        super().__init__(spec, device_index, ops or SyclCpuOps())

    @classmethod
    def availability(cls, *, probe: bool = False) -> Availability:
        if importlib.util.find_spec("dpctl") is None or not _opencl_library().exists():
            return Availability(
                False, "the SYCL runtime for CPUs is not installed: pip install dpctl intel-opencl-rt intel-sycl-rt"
            )
        return Availability(True, "dpctl and the OpenCL runtime for CPUs are installed")
