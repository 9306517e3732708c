"""The xpu backend on the SYCL runtime's CPU device, as two devices for tests; never chosen unless named.

``sycl-cpu``: registered memory and late copies, as on a GPU. ``sycl-cpu-plain``: nothing is registered, so that every
load is staged and every save blocks (on a thread of the core's).

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
import weakref
from ctypes import c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecoffload.backend import (
    H2D,
    Availability,
    BackendSpec,
    BatchView,
    Completion,
    DeviceOps,
    Direction,
    Registration,
)
from ecoffload.errors import SwapFailed
from ecoffload.hookspecs import hookimpl
from ecoffload_xpu.backend import XpuBackend
from ecoffload_xpu.plugin import SPEC as XPU
from ecoffload_xpu.ways import sycl_library, words

if TYPE_CHECKING:
    import torch

__all__ = ["PLAIN", "SPEC", "SyclCpuBackend", "SyclCpuOps", "SyclCpuPlainBackend", "SyclEvent", "SyclStream", "plain"]

ECOFFLOAD_HOOK_API = 1

SPEC = XPU.model_copy(
    update={"name": "sycl-cpu", "factory": "ecoffload_xpu.sycl_cpu:SyclCpuBackend", "test_only": True}
)
PLAIN = XPU.model_copy(
    update={
        "name": "sycl-cpu-plain",
        "factory": "ecoffload_xpu.sycl_cpu:SyclCpuPlainBackend",
        "capabilities": XPU.capabilities.model_copy(
            update={"submission": "blocking", "host_memory": "none", "snapshots_descriptors": False}
        ),
        "test_only": True,
    }
)


@hookimpl
def ecoffload_register_backend() -> BackendSpec:
    return SPEC


class plain:  # noqa: N801 - a namespace, named by the entry point
    """The plugin that declares ``sycl-cpu-plain``."""

    @staticmethod
    @hookimpl
    def ecoffload_register_backend() -> BackendSpec:
        return PLAIN


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
    by then on the stream it was allocated for and on those recorded for it. ``device`` and ``context`` (dpctl's) name
    a part of the CPU and what it shares with other parts; by default the whole, and a context of its own.
    """

    def __init__(self, device: Any = None, context: Any = None) -> None:
        # The wheel registers its OpenCL library under a path that is not where it is installed.
        os.environ.setdefault("OCL_ICD_FILENAMES", str(_opencl_library()))
        import dpctl
        import dpctl.memory
        import torch

        self.device = torch.device("cpu")
        self._dpctl = dpctl
        self._torch = torch
        self._device = device or dpctl.SyclDevice("opencl:cpu")
        self._context = context or dpctl.SyclContext(self._device)
        self._lock = threading.RLock()
        self._live: dict[int, tuple[int, list[SyclStream]]] = {}  # address: bytes, streams that use it
        self._dropped: list[tuple[list[SyclEvent], Any]] = []
        self._streams: weakref.WeakSet[SyclStream] = weakref.WeakSet()
        self._default = self.stream()
        self._gates = _Gates(self._context.addressof_ref())

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
        made = SyclStream(self._dpctl.SyclQueue(self._context, self._device, property="in_order"))
        with self._lock:
            self._streams.add(made)
        return made

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
            streams = [target] if target is not None else list(self._streams)
        for stream in streams:
            stream.synchronize()

    def record_stream(self, tensor: torch.Tensor, stream: SyclStream) -> None:
        address = self._allocation(tensor.data_ptr())
        if address is not None:
            with self._lock:
                self._live[address][1].append(stream)

    def delay(self, stream: SyclStream, ms: float) -> None:
        self._gates.close(stream.sycl_queue, ms / 1000)


class _Gates:
    """Holds queues back without work: the CPU device has as many workers as cores, and a busy one holds back all.

    A gate is a user event of OpenCL, which lies below this device, and a barrier behind it on the queue's own command
    queue; a timer opens it.
    """

    def __init__(self, context: int) -> None:
        sycl, _ = sycl_library()
        self._opencl = ctypes.CDLL(str(_opencl_library().with_name("libOpenCL.so.1")))
        self._queue_of = sycl["_ZNK4sycl3_V15queue9getNativeERi"]
        self._queue_of.argtypes, self._queue_of.restype = (c_void_p, c_void_p), c_void_p
        context_of = sycl["_ZNK4sycl3_V17context3getEv"]
        context_of.argtypes, context_of.restype = (c_void_p,), c_void_p
        self._context = context_of(context)
        self._opencl.clCreateUserEvent.argtypes = (c_void_p, c_void_p)
        self._opencl.clCreateUserEvent.restype = c_void_p
        self._opencl.clEnqueueBarrierWithWaitList.argtypes = (c_void_p, ctypes.c_uint, c_void_p, c_void_p)
        self._opencl.clFlush.argtypes = self._opencl.clReleaseEvent.argtypes = (c_void_p,)
        self._opencl.clSetUserEventStatus.argtypes = (c_void_p, ctypes.c_int)

    def close(self, sycl_queue: int, seconds: float) -> None:
        """What is enqueued on the queue from now on waits for ``seconds`` from now."""
        queue = self._queue_of(sycl_queue, ctypes.addressof(ctypes.c_int()))
        gate = self._opencl.clCreateUserEvent(self._context, None)
        waited_for = (c_void_p * 1)(gate)
        code = self._opencl.clEnqueueBarrierWithWaitList(queue, 1, ctypes.addressof(waited_for), None)
        if code != 0:
            raise SwapFailed(f"clEnqueueBarrierWithWaitList gave {code}", index=None, code=code)
        self._opencl.clFlush(queue)
        # No daemon: a process that ends lets the gate open, and the runtime's own end waits for its queues.
        threading.Timer(seconds, self._open, (gate,)).start()

    def _open(self, gate: int) -> None:
        self._opencl.clSetUserEventStatus(gate, 0)
        self._opencl.clReleaseEvent(gate)


class SyclCpuBackend(XpuBackend):
    """:class:`XpuBackend` with :class:`SyclCpuOps` for torch's part, and registration that is a list only.

    The CPU reads and writes all host memory late as it is; ``prepare_for_device_copy`` is UNSUPPORTED on this device.
    """

    def __init__(self, spec: BackendSpec, device_index: int = 0, ops: DeviceOps | None = None) -> None:
        super().__init__(spec, device_index, ops or SyclCpuOps())
        self._faults: list[tuple[str, int]] = []

    @classmethod
    def availability(cls, *, probe: bool = False) -> Availability:
        if importlib.util.find_spec("dpctl") is None or not _opencl_library().exists():
            return Availability(
                False, "the SYCL runtime for CPUs is not installed: pip install dpctl intel-opencl-rt intel-sycl-rt"
            )
        return Availability(True, "dpctl and the OpenCL runtime for CPUs are installed")

    def inject_fault(self, kind: str, index: int = 0) -> bool:
        """Make the runtime itself refuse the next "submit" that holds descriptor ``index``, or the next "register"."""
        if kind not in ("submit", "register"):
            return False
        self._faults.append((kind, index))
        return True

    def submit(self, batch: BatchView, direction: Direction, stream: Any) -> Completion:
        for fault in self._faults:
            if fault[0] == "submit" and 0 <= fault[1] - batch.first < batch.count:
                self._faults.remove(fault)
                return super().submit(_WithNull(batch, direction, fault[1] - batch.first), direction, stream)
        return super().submit(batch, direction, stream)

    def _prepare(self, address: int, nbytes: int) -> int:
        if ("register", 0) in self._faults:
            self._faults.remove(("register", 0))
            return super()._prepare(address, nbytes)
        return 0

    def _release(self, handle: int) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        runtime = Path(self._libsycl).name if self._libsycl else "libsycl"
        return {**super().stats(), "ran_on": f"the CPU device of the real SYCL runtime ({runtime})"}


class _WithNull:
    """A batch one of whose descriptors names no device memory: libsycl throws at it."""

    def __init__(self, batch: BatchView, direction: Direction, index: int) -> None:
        self.count, self.first = batch.count, batch.first
        self._arrays = [words(at, batch.count).copy() for at in (batch.src, batch.dst, batch.size)]
        self._arrays[direction == H2D][index] = 0
        self.src, self.dst, self.size = (array.ctypes.data for array in self._arrays)


class SyclCpuPlainBackend(SyclCpuBackend):
    """Refuses registration as the runtime does: plain host memory is what there is."""

    def register(self, address: int, nbytes: int) -> Registration:
        return Registration(address, nbytes, address)  # as the core's default where host_memory is "none"

    def unregister(self, registration: Registration) -> None:
        pass
