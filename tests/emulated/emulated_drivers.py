"""Emulated libcuda and libamdhip64 for tests: built with gcc, loaded with knobs, and a ``DeviceOps`` on top.

The libraries (``csrc/``) have the real ABI and no device behind them; backends call them as they call a real driver.
:class:`EmulatedDeviceOps` gives backends memory and streams of that imaginary device: CPU torch tensors that lie in the
library's arena and whose device address is another one (low, or >= 2**63). What is tested here ran emulated, not on
hardware.

    emulated = load("hip", version=70202, base=HIGH)       # a copy of its own: knobs and faults are not shared
    backend = RocmBackend(spec, ops=EmulatedDeviceOps(emulated), library=emulated.path)
    emulated.set("fail_late", 719)                          # names: device.h
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from ecoffload.backend import DeviceOps
from ecoffload.drivers import CUDA, HIP, Driver
from ecoffload.errors import AddressError

LOW = 0x1000_0000_0000
"""Where device addresses of NVIDIA's and AMD's kind begin: below 2**47."""
HIGH = 0xFFFF_D556_B640_0000
"""A device address of the other kind, seen on Intel's XPU: bit 63 is set."""
STRADDLE = 2**63 - 4096
"""Device memory whose first allocation begins below 2**63 and ends above it."""

Kind = Literal["cuda", "hip"]

_SOURCES = Path(__file__).parent / "csrc"
_CACHE = Path(__file__).parents[2] / ".cache" / "emulated"
_LIBRARIES = {"cuda": ("libcuda.c", "libcuda.so.1"), "hip": ("libamdhip64.c", "libamdhip64.so")}
_FLAGS = (
    "-std=gnu11",
    "-O2",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-missing-field-initializers",
    "-Wno-unused-function",
)
_LINK = ("-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wl,-Bsymbolic", "-ldl")

_NOT_READY = 600


@functools.cache
def build(kind: Kind, *defines: str) -> Path:
    """The compiled library; again only when a source or a flag has changed."""
    source, soname = _LIBRARIES[kind]
    texts = b"".join((_SOURCES / name).read_bytes() for name in ("device.h", source))
    key = hashlib.sha256(repr((texts, _FLAGS, _LINK, defines)).encode()).hexdigest()[:16]
    target = _CACHE / key / soname
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / soname
            command = [
                "gcc",
                *_FLAGS,
                *defines,
                str(_SOURCES / source),
                "-o",
                str(made),
                *_LINK,
                f"-Wl,-soname,{soname}",
            ]
            subprocess.run(command, check=True)
            made.replace(target)  # whoever builds at the same time makes the same file
    return target


class Emulated:
    """One loaded copy of an emulated library, its knobs, faults and counters."""

    def __init__(self, kind: Kind, path: str) -> None:
        self.kind = kind
        self.path = path
        self.driver = Driver.open(CUDA if kind == "cuda" else HIP, path)
        self._set = self.driver.function("emu_set", ctypes.c_char_p, ctypes.c_uint64, restype=None)
        self._get = self.driver.function("emu_get", ctypes.c_char_p, restype=ctypes.c_uint64)

    def set(self, name: str, value: int) -> None:
        self._set(name.encode(), value)

    def get(self, name: str) -> int:
        return int(self._get(name.encode()))

    @contextmanager
    def gate(self) -> Iterator[None]:
        """Inside, no copy runs: what is enqueued stays on its way."""
        self.set("gate_closed", 1)
        try:
            yield
        finally:
            self.set("gate_closed", 0)

    def heal(self) -> None:
        """Take back every fault."""
        for name in ("gate_closed", "fail_submit", "fail_submit_index", "fail_late", "lost"):
            self.set(name, 0)
        for name in ("refuse_registration", "registrations_before_refusal", "refusals"):
            self.set(name, 0)


_scratch: tempfile.TemporaryDirectory[str] | None = None
_number = itertools.count()


def load(kind: Kind, *defines: str, **knobs: int) -> Emulated:
    """A copy of its own of the library, with ``knobs`` set. ``-DWITHOUT_BATCH`` gives a HIP without the batch call."""
    global _scratch
    if _scratch is None:
        _scratch = tempfile.TemporaryDirectory(prefix="ecoffload-emulated-")
    built = build(kind, *defines)
    path = Path(_scratch.name) / str(next(_number)) / built.name
    path.parent.mkdir()
    shutil.copyfile(built, path)  # a copy, since the loader knows one file as one library
    emulated = Emulated(kind, str(path))
    for name, value in knobs.items():
        emulated.set(name, value)
    return emulated


class EmulatedStream:
    """A stream as torch shows one: ``cuda_stream`` is the raw handle."""

    def __init__(self, ops: EmulatedDeviceOps, handle: int) -> None:
        self._ops = ops
        self.cuda_stream = handle

    def synchronize(self) -> None:
        self._ops.synchronize(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EmulatedStream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


class EmulatedEvent:
    """An event; ``cuda_event`` is the raw handle, as torch names it."""

    def __init__(self, handle: int) -> None:
        self.cuda_event = handle


_NAMES: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    # what it does: (libcuda's function, libamdhip64's function, argument types)
    "alloc": ("cuMemAlloc_v2", "hipMalloc", (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t)),
    "free": ("cuMemFree_v2", "hipFree", (ctypes.c_size_t,)),
    "stream_create": ("cuStreamCreate", "hipStreamCreateWithFlags", (ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint)),
    "stream_destroy": ("cuStreamDestroy_v2", "hipStreamDestroy", (ctypes.c_size_t,)),
    "stream_sync": ("cuStreamSynchronize", "hipStreamSynchronize", (ctypes.c_size_t,)),
    "wait_event": ("cuStreamWaitEvent", "hipStreamWaitEvent", (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint)),
    "event_create": ("cuEventCreate", "hipEventCreateWithFlags", (ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint)),
    "event_destroy": ("cuEventDestroy_v2", "hipEventDestroy", (ctypes.c_size_t,)),
    "event_record": ("cuEventRecord", "hipEventRecord", (ctypes.c_size_t, ctypes.c_size_t)),
    "event_query": ("cuEventQuery", "hipEventQuery", (ctypes.c_size_t,)),
    "event_sync": ("cuEventSynchronize", "hipEventSynchronize", (ctypes.c_size_t,)),
    "sync": ("cuCtxSynchronize", "hipDeviceSynchronize", ()),
    "is_capturing": ("cuStreamIsCapturing", "hipStreamIsCapturing", (ctypes.c_size_t, ctypes.POINTER(ctypes.c_int))),
    "begin_capture": ("cuStreamBeginCapture_v2", "hipStreamBeginCapture", (ctypes.c_size_t, ctypes.c_int)),
    "end_capture": ("cuStreamEndCapture", "hipStreamEndCapture", (ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t))),
}


class EmulatedDeviceOps(DeviceOps):
    """Memory, streams and events of an emulated device; tensors are CPU tensors in its arena.

    The caller's own work on those tensors is the host's and happens at once; :meth:`delay` and copies run late on
    their streams. The current stream is the default one (handle 0), as in torch, unless :meth:`use` chose another.
    """

    def __init__(self, emulated: Emulated, device_index: int = 0) -> None:
        self.emulated = emulated
        self.device = torch.device("cpu")
        self._index = device_index
        self._local = threading.local()
        driver = emulated.driver
        self._calls: dict[str, tuple[str, Callable[..., Any]]] = {}
        for what, (in_cuda, in_hip, types) in _NAMES.items():
            name = in_cuda if emulated.kind == "cuda" else in_hip
            self._calls[what] = (name, driver.function(name, *types))
        self._real = driver.function("emu_real", ctypes.c_uint64, restype=ctypes.c_void_p)
        self._fake = driver.function("emu_fake", ctypes.c_void_p, restype=ctypes.c_uint64)
        self._delay = driver.function("emu_delay", ctypes.c_size_t, ctypes.c_uint64)
        self._default = EmulatedStream(self, 0)

    def _enter(self) -> None:
        """As torch does on a thread's first call: make the device current there."""
        if getattr(self._local, "ready", False):
            return
        driver = self.emulated.driver
        if self.emulated.kind == "cuda":
            context = ctypes.c_size_t()
            driver.check(driver.function("cuInit", ctypes.c_uint)(0), "cuInit")
            retain = driver.function("cuDevicePrimaryCtxRetain", ctypes.POINTER(ctypes.c_size_t), ctypes.c_int)
            driver.check(retain(ctypes.byref(context), self._index), "cuDevicePrimaryCtxRetain")
            driver.check(driver.function("cuCtxSetCurrent", ctypes.c_size_t)(context.value), "cuCtxSetCurrent")
        else:
            driver.check(driver.function("hipSetDevice", ctypes.c_int)(self._index), "hipSetDevice")
        self._local.ready = True

    def call(self, what: str, *arguments: Any) -> None:
        """One function of the table above; raises what the driver reports."""
        self._enter()
        name, function = self._calls[what]
        self.emulated.driver.check(function(*arguments), name)

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and self._fake(tensor.data_ptr()) != 0

    def empty(self, nbytes: int, stream: Any = None) -> torch.Tensor:
        address = ctypes.c_uint64()
        self.call("alloc", ctypes.byref(address), max(nbytes, 1))
        memory = (ctypes.c_ubyte * max(nbytes, 1)).from_address(self._real(address.value))
        weakref.finalize(memory, self._calls["free"][1], address.value).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]

    def address_of(self, tensor: torch.Tensor) -> int:
        address = int(self._fake(tensor.data_ptr()))
        if address == 0:
            raise AddressError("this tensor does not lie on the emulated device", value=tensor.data_ptr())
        return address

    def stream(self) -> EmulatedStream:
        handle = ctypes.c_size_t()
        self.call("stream_create", ctypes.byref(handle), 1)  # NON_BLOCKING, as torch's are
        stream = EmulatedStream(self, handle.value)
        weakref.finalize(stream, self._calls["stream_destroy"][1], handle.value).atexit = False
        return stream

    def current_stream(self) -> EmulatedStream:
        return getattr(self._local, "stream", self._default)

    @contextmanager
    def use(self, stream: EmulatedStream) -> Iterator[None]:
        """Make ``stream`` the calling thread's current one."""
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def is_capturing(self, stream: EmulatedStream) -> bool:
        status = ctypes.c_int()
        self.call("is_capturing", stream.cuda_stream, ctypes.byref(status))
        return bool(status.value)

    def event(self) -> EmulatedEvent:
        handle = ctypes.c_size_t()
        self.call("event_create", ctypes.byref(handle), 2)
        event = EmulatedEvent(handle.value)
        weakref.finalize(event, self._calls["event_destroy"][1], handle.value).atexit = False
        return event

    def record(self, event: EmulatedEvent, stream: EmulatedStream) -> None:
        self.call("event_record", event.cuda_event, stream.cuda_stream)

    def wait(self, stream: EmulatedStream, event: EmulatedEvent) -> None:
        self.call("wait_event", stream.cuda_stream, event.cuda_event, 0)

    def query(self, event: EmulatedEvent) -> bool:
        self._enter()
        name, function = self._calls["event_query"]
        code = function(event.cuda_event)
        if code == _NOT_READY:
            return False
        self.emulated.driver.check(code, name)
        return True

    def synchronize(self, target: Any = None) -> None:
        if target is None:
            self.call("sync")
        elif isinstance(target, EmulatedEvent):
            self.call("event_sync", target.cuda_event)
        else:
            self.call("stream_sync", target.cuda_stream)

    def delay(self, stream: EmulatedStream, ms: float) -> None:
        self._enter()
        self.emulated.driver.check(self._delay(stream.cuda_stream, int(ms * 1000)), "emu_delay")

    @contextmanager
    def capturing(self, stream: EmulatedStream, mode: int = 0) -> Iterator[None]:
        """``stream`` is captured into a graph; leaving raises if something inside ruined the capture."""
        self.call("begin_capture", stream.cuda_stream, mode)
        try:
            yield
        finally:
            graph = ctypes.c_size_t()
            self.call("end_capture", stream.cuda_stream, ctypes.byref(graph))
