"""The CUDA driver as this backend uses it: typed functions, and the one context of a device made current for a call.

Built on :mod:`ecoffload.drivers` (which finds the library that torch loaded and words errors). Everything else in this
package calls the driver through a :class:`Cuda`; nothing here decides how bytes move.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from ecoffload.drivers import CUDA, Driver
from ecoffload.errors import BackendUnavailable, SwapFailed

__all__ = ["BATCH_VERSION", "NOT_READY", "NO_CONTEXT", "Cuda", "Device"]

BATCH_VERSION: Final = 12080
"""``cuMemcpyBatchAsync`` as of this version takes 9 arguments; as of 13000 it takes 8."""

NO_CONTEXT: Final = 201
"""CUDA_ERROR_INVALID_CONTEXT: the calling thread has none yet."""
NOT_READY: Final = 600

_HANDLE = ctypes.c_size_t  # pointers, handles and device addresses: 64-bit words, never sign-extended
_INT = ctypes.c_int
_UINT = ctypes.c_uint
_OUT = ctypes.c_void_p  # where the driver writes a result

_PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (_UINT,),
    "cuDriverGetVersion": (_OUT,),
    "cuDeviceGetCount": (_OUT,),
    "cuDeviceGet": (_OUT, _INT),
    "cuDeviceGetName": (_OUT, _INT, _INT),
    "cuDeviceGetAttribute": (_OUT, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_OUT, _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuCtxGetCurrent": (_OUT,),
    "cuCtxPushCurrent_v2": (_HANDLE,),
    "cuCtxPopCurrent_v2": (_OUT,),
    "cuCtxGetStreamPriorityRange": (_OUT, _OUT),
    "cuMemAlloc_v2": (_OUT, ctypes.c_size_t),
    "cuMemFree_v2": (_HANDLE,),
    "cuMemHostAlloc": (_OUT, ctypes.c_size_t, _UINT),
    "cuMemFreeHost": (_HANDLE,),
    "cuMemHostRegister_v2": (_HANDLE, ctypes.c_size_t, _UINT),
    "cuMemHostUnregister": (_HANDLE,),
    "cuMemHostGetDevicePointer_v2": (_OUT, _HANDLE, _UINT),
    "cuMemcpyAsync": (_HANDLE, _HANDLE, ctypes.c_size_t, _HANDLE),
    "cuPointerGetAttributes": (_UINT, _OUT, _OUT, _HANDLE),
    "cuStreamCreateWithPriority": (_OUT, _UINT, _INT),
    "cuStreamDestroy_v2": (_HANDLE,),
    "cuStreamSynchronize": (_HANDLE,),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, _UINT),
    "cuStreamIsCapturing": (_HANDLE, _OUT),
    "cuEventCreate": (_OUT, _UINT),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventQuery": (_HANDLE,),
    "cuEventSynchronize": (_HANDLE,),
    "cuThreadExchangeStreamCaptureMode": (_OUT,),
    "cuModuleLoadData": (_OUT, ctypes.c_char_p),
    "cuModuleUnload": (_HANDLE,),
    "cuModuleGetFunction": (_OUT, _HANDLE, ctypes.c_char_p),
    "cuFuncSetAttribute": (_HANDLE, _INT, _INT),
    "cuLaunchKernel": (_HANDLE, *[_UINT] * 7, _HANDLE, _OUT, _OUT),
}

_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class _Relaxed:
    """Inside, calls of this thread that a graph capture of another thread would forbid are allowed, and harm none."""

    __slots__ = ("_at", "_exchange", "_mode")

    def __init__(self, exchange: Callable[..., int]) -> None:
        self._exchange = exchange
        self._mode = _INT(_RELAXED)
        self._at = ctypes.addressof(self._mode)

    def __enter__(self) -> None:
        self._exchange(self._at)

    def __exit__(self, *exc: object) -> None:
        self._exchange(self._at)  # the word holds what was in force before


class Cuda:
    """One opened driver. Attributes named as the driver's functions, without ``cu``: ``cuda.EventQuery(event)``.

    Functions are looked up at first use, so that an old driver without one of them serves everything else; a missing
    one is :class:`BackendUnavailable` naming it. Each returns the driver's code.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    @classmethod
    def open(cls, library: str | None = None) -> Cuda:
        """The driver of this process (``library``: another file, for tests). Raises :class:`BackendUnavailable`."""
        return cls(Driver.open(CUDA, library))

    def __getattr__(self, name: str) -> Callable[..., int]:
        symbol = f"cu{name}" if f"cu{name}" in _PROTOTYPES else f"cu{name}_v2"
        if symbol not in _PROTOTYPES:
            raise AttributeError(f"this backend knows no driver function cu{name}")
        function = self.driver.function(symbol, *_PROTOTYPES[symbol])
        setattr(self, name, function)
        return function

    def relaxed(self) -> _Relaxed:
        """For event queries, allocations, registrations and synchronisation: anything but copies and launches.

        As :meth:`ecoffload.drivers.Driver.relaxed_capture`, at a third of its cost: completions are polled often.
        """
        return _Relaxed(self.ThreadExchangeStreamCaptureMode)

    def out(self, name: str, *arguments: Any, ctype: Any = ctypes.c_size_t, what: str | None = None) -> int:
        """Call a function whose first argument is where its result goes, and return that result."""
        word = ctype()
        code = getattr(self, name)(ctypes.addressof(word), *arguments)
        if code:
            raise self.driver.error(code, what or f"cu{name} failed")
        return int(word.value)

    def initialise(self) -> None:
        """``cuInit``. Raises :class:`BackendUnavailable` with the driver's name and text."""
        code = self.Init(0)
        if code:
            reason = f"cuInit: {self.driver.error_text(code)}"
            raise BackendUnavailable(f"backend 'cuda' is unavailable: {reason}", name="cuda", reason=reason)


_devices: weakref.WeakSet[Device] = weakref.WeakSet()


def _forked() -> None:
    for device in _devices:
        device.forked = True


os.register_at_fork(after_in_child=_forked)


class Device:
    """One device and its primary context, which is torch's too: there is one context a device.

    Calls that need the context stand between :meth:`enter` and :meth:`leave`, or inside ``with device.current():``;
    either works from any thread and leaves the thread's current context as it was.
    """

    def __init__(self, cuda: Cuda, index: int) -> None:
        self.cuda = cuda
        self.index = index
        self.forked = False
        """Whether this process is a fork of the one that made the context, which does not survive that."""
        cuda.initialise()
        count = cuda.out("DeviceGetCount", ctype=_INT)
        if not 0 <= index < count:
            reason = f"there is no device {index}: the driver sees {count} (check CUDA_VISIBLE_DEVICES)"
            raise BackendUnavailable(f"backend 'cuda' is unavailable: {reason}", name="cuda", reason=reason)
        self.handle = cuda.out("DeviceGet", index, ctype=_INT)
        self.context = cuda.out(
            "DevicePrimaryCtxRetain", self.handle, what=f"the context of device {index} cannot be had"
        )
        name = ctypes.create_string_buffer(256)
        code = cuda.DeviceGetName(ctypes.addressof(name), 256, self.handle)
        self.name = name.value.decode(errors="replace") if code == 0 else f"device {index}"
        self.compute = (self.attribute(75), self.attribute(76))  # COMPUTE_CAPABILITY_MAJOR, _MINOR
        self.multiprocessors = self.attribute(16)
        self.shared_memory = self.attribute(97)  # MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        _devices.add(self)

    def attribute(self, number: int) -> int:
        """A CUdevice_attribute, or 0 where the driver does not know it."""
        word = _INT()
        return word.value if self.cuda.DeviceGetAttribute(ctypes.addressof(word), number, self.handle) == 0 else 0

    def enter(self) -> bool:
        """Make the context current. True: :meth:`leave` must follow. Raises after a fork."""
        if self.forked:
            raise SwapFailed(
                f"this process was forked after CUDA device {self.index} was used, and CUDA does not survive a fork; "
                "start workers with the 'spawn' method, or use the device only in the child"
            )
        cuda = self.cuda
        current = ctypes.c_size_t()
        if cuda.CtxGetCurrent(ctypes.addressof(current)) == 0 and current.value == self.context:
            return False
        code = cuda.CtxPushCurrent(self.context)
        if code:
            raise cuda.driver.error(code, f"the context of device {self.index} cannot be made current")
        return True

    def leave(self) -> None:
        """Give the thread back the context that it had before :meth:`enter` returned True."""
        current = ctypes.c_size_t()
        self.cuda.CtxPopCurrent(ctypes.addressof(current))

    @contextmanager
    def current(self) -> Iterator[None]:
        """The context is current inside: for everything that is not hot."""
        pushed = self.enter()
        try:
            yield
        finally:
            if pushed:
                self.leave()

    def release(self) -> None:
        """Give the primary context back. The object is of no use afterwards."""
        if not self.forked:
            self.cuda.DevicePrimaryCtxRelease(self.handle)
