"""The HIP runtime as this backend uses it: typed functions, and what differs between its versions.

Built on :mod:`ecoffload.drivers`, which finds the libamdhip64 that torch loaded and words errors. Nothing here decides
how bytes move. Not run on hardware: facts are from AMD's headers, sources and public reports.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple

from ecoffload.backend import PointerRange
from ecoffload.drivers import HIP, BatchCall, Driver
from ecoffload.errors import BackendUnavailable

__all__ = ["DEVICE_TO_HOST", "HOST_TO_DEVICE", "NOT_SUPPORTED", "Hip", "Way", "version_text"]

HOST_TO_DEVICE: Final = 1  # hipMemcpyKind
DEVICE_TO_HOST: Final = 2
NOT_SUPPORTED: Final = 801

_PORTABLE_MAPPED: Final = 1 | 2  # hipHostRegister: for every device of the process, with a device address

_ATTRIBUTES_SINCE: Final = 71_300_000
_NEW_MEMORY_TYPES_SINCE: Final = 60_000_000

_WORD = ctypes.c_size_t  # pointers, handles and device addresses: 64-bit words, never sign-extended


class Way(NamedTuple):
    """How batches are copied: the batched call (None: one by one), whether it is given attributes, and why so."""

    call: BatchCall | None
    attributes: bool
    why: str


class _PointerAttributes(ctypes.Structure):
    """hipPointerAttribute_t, 32 bytes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("devicePointer", ctypes.c_uint64),
        ("hostPointer", ctypes.c_uint64),
        ("isManaged", ctypes.c_int),
        ("allocationFlags", ctypes.c_uint),
    )


def version_text(version: int) -> str:
    """hipRuntimeGetVersion's number (major * 10**7 + minor * 10**5 + patch) as "7.2.2"."""
    return f"{version // 10**7}.{version // 10**5 % 100}.{version % 10**5}"


class Hip:
    """One opened runtime. Return codes are left to the caller unless a docstring says that a method raises."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        out = ctypes.c_void_p
        self._runtime_version = driver.function("hipRuntimeGetVersion", out)
        self._device_count = driver.function("hipGetDeviceCount", out)
        self._get_device = driver.function("hipGetDevice", out)
        self._set_device = driver.function("hipSetDevice", ctypes.c_int)
        self._is_capturing = driver.find("hipStreamIsCapturing", _WORD, out)
        self.memcpy_async = driver.function("hipMemcpyAsync", _WORD, _WORD, _WORD, ctypes.c_int, _WORD)
        self._register = driver.function("hipHostRegister", _WORD, _WORD, ctypes.c_uint)
        self.unregister = driver.function("hipHostUnregister", _WORD)
        self._host_alias = driver.function("hipHostGetDevicePointer", out, _WORD, ctypes.c_uint)
        self._attributes = driver.function("hipPointerGetAttributes", out, _WORD)
        self._address_range = driver.function("hipMemGetAddressRange", out, out, _WORD)
        batch = driver.find("hipMemcpyBatchAsync")
        self._batch = ctypes.cast(batch, ctypes.c_void_p).value if batch is not None else None  # type: ignore[arg-type]

    @classmethod
    def open(cls, path: str | None = None) -> Hip:
        """The runtime of this process, or the library at ``path``. Raises :class:`BackendUnavailable`; runs nothing."""
        return cls(Driver.open(HIP, path))

    def version(self) -> int:
        """The runtime's version number, 0 if it does not say."""
        word = ctypes.c_int()
        return word.value if self._runtime_version(ctypes.addressof(word)) == 0 else 0

    def check_device(self, index: int) -> None:
        """Initialises the runtime. Raises :class:`BackendUnavailable` if device ``index`` is not there."""
        count = ctypes.c_int()
        code = self._device_count(ctypes.addressof(count))
        if code == 0 and 0 <= index < count.value:
            return
        what = f"HIP {version_text(self.version())} ({self.driver.path})"
        if code:
            self.driver.forget_error()
            reason = (
                f"{what} finds no device: {self.driver.error_text(code)}; check that the amdgpu driver is loaded, that "
                "/dev/kfd and /dev/dri are there (in a container: --device /dev/kfd --device /dev/dri), and that you "
                "are in the groups render and video"
            )
        else:
            reason = f"{what} sees {count.value} devices, and none has index {index}; check HIP_VISIBLE_DEVICES"
        raise BackendUnavailable(f"backend 'rocm' is unavailable: {reason}", name="rocm", reason=reason)

    def way(self, version: int) -> Way:
        """How this version is best asked to copy a batch."""
        text = version_text(version)
        if self._batch is None:
            return Way(None, False, f"HIP {text} has no hipMemcpyBatchAsync (it came with 7.1)")
        if version < _ATTRIBUTES_SINCE:
            call = BatchCall(self._batch, attributes=False)
            return Way(call, False, f"HIP {text} refuses attributes (taken from 7.13 on)")
        return Way(BatchCall(self._batch), True, f"HIP {text} takes attributes")

    def next_way(self, refused: Way, version: int) -> Way:
        """What to try once a runtime has refused the way that its version promised."""
        text = version_text(version)
        if refused.attributes and self._batch is not None:
            call = BatchCall(self._batch, attributes=False)
            return Way(call, False, f"HIP {text} refused attributes (801), although its version takes them")
        return Way(None, False, f"HIP {text} refused hipMemcpyBatchAsync altogether (801)")

    @contextmanager
    def on_device(self, index: int) -> Iterator[None]:
        """The calling thread's device is ``index`` inside, and no call there ruins another thread's graph capture."""
        word = ctypes.c_int(-1)
        with self.driver.relaxed_capture():
            self._get_device(ctypes.addressof(word))
            before = word.value
            if before != index:
                self.driver.check(self._set_device(index), f"device {index} cannot be made current")
            try:
                yield
            finally:
                if before not in (index, -1):
                    self._set_device(before)

    def is_capturing(self, stream: int) -> bool:
        """Whether work on ``stream`` is being captured into a graph instead of run."""
        status = ctypes.c_int()
        if self._is_capturing is None or self._is_capturing(stream, ctypes.addressof(status)):
            self.driver.forget_error()
            return False
        return status.value != 0

    def register(self, address: int, nbytes: int) -> int:
        return int(self._register(address, nbytes, _PORTABLE_MAPPED))

    def host_alias(self, address: int) -> tuple[int, int]:
        """Code, and the device's address of registered host memory."""
        word = ctypes.c_uint64()
        return int(self._host_alias(ctypes.addressof(word), address, 0)), int(word.value)

    def pointer_range(self, address: int, version: int) -> PointerRange | None:
        """What holds ``address``, None if it is nobody's or plain host memory.

        The numbers of the memory types changed with 6.0: before, host 0, device 1, and unknown memory an error; since,
        unregistered 0, host 1, device 2, managed 3.
        """
        attributes = _PointerAttributes()
        if self._attributes(ctypes.addressof(attributes), address):
            self.driver.forget_error()
            return None
        new = version >= _NEW_MEMORY_TYPES_SINCE
        kinds: dict[int, Literal["device", "host"]] = (
            {1: "host", 2: "device", 3: "device"} if new else {0: "host", 1: "device"}
        )
        kind = kinds.get(attributes.type)
        start, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        if kind is None or self._address_range(ctypes.addressof(start), ctypes.addressof(nbytes), address):
            self.driver.forget_error()
            return None
        return PointerRange(start.value, nbytes.value, kind, attributes.device)
