"""Calling a device's driver through ctypes: the one file of the core that does so, and a public helper for backends.

It owns four things: finding the copy of a library that the process already holds (torch loaded it; a second copy would
not know torch's streams), typed functions of it, turning its return codes into errors of ours with the driver's own
name and text, and :class:`BatchCall`, the batched copy whose prototype CUDA and HIP share. Backend packages call it; it
knows no backend, no tensor, no numpy, and initialises no device.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple

from ecoffload.errors import BackendUnavailable, DeviceLost, EcoffloadError, SwapFailed

__all__ = [
    "CUDA",
    "DEVICE_LOST_CODES",
    "FLAG_OVERLAP",
    "HIP",
    "ORDER_ANY",
    "ORDER_DURING_CALL",
    "ORDER_STREAM",
    "BatchCall",
    "BatchResult",
    "Driver",
    "Family",
    "MemcpyAttributes",
    "loaded_libraries",
    "open_library",
    "words_at",
]

SIZE_MAX: Final = 2 ** (8 * ctypes.sizeof(ctypes.c_size_t)) - 1

DEVICE_LOST_CODES: Final = frozenset({4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})
"""Return codes after which no later call on the context can succeed; CUDA and HIP number them alike."""

_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed


# --- the library -----------------------------------------------------------------------------------------------------


def loaded_libraries(stem: str, maps: str = "/proc/self/maps") -> list[str]:
    """Paths of the different copies of library ``stem`` ("libcuda", "libamdhip64", "libsycl") that this process maps.

    Read from ``maps``, because ``dlopen(NULL)`` does not see libraries that torch loaded for itself. Names that a wheel
    repair tool gave (``libamdhip64-0a1b2c3d.so.7``) count; links to one file count once.
    """
    name = re.compile(re.escape(stem) + r"(-[0-9a-f]{8})?\.so(\.\d+)*")
    found: dict[tuple[str, str], str] = {}
    with open(maps, encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) < 6 or not fields[5].startswith("/"):
                continue
            path = fields[5].removesuffix(" (deleted)")
            if name.fullmatch(os.path.basename(path)):
                found.setdefault((fields[3], fields[4]), path)
    # On WSL the library under /usr/lib/wsl/lib is a loader that maps the driver proper: one driver, not two.
    copies = [path for path in found.values() if not path.startswith("/usr/lib/wsl/drivers/")]
    return copies or list(found.values())


def open_library(
    stem: str, sonames: tuple[str, ...], *, name: str, path: str | None = None, remedy: str = ""
) -> tuple[ctypes.CDLL, str]:
    """Open the one copy of library ``stem`` that is to be used; return it and the path that it came from.

    ``path`` opens exactly that file (for tests: emulated drivers). Otherwise the copy that the process already maps is
    opened with ``RTLD_NOLOAD``, and two copies are refused; if there is none, the first of ``sonames`` that the loader
    finds. ``name`` is the backend's, ``remedy`` what a user can do if nothing is found. Raises
    :class:`BackendUnavailable` (details: name, reason).
    """
    if path is not None:
        try:
            return ctypes.CDLL(path), path
        except OSError as exc:
            raise _unavailable(name, f"the library {path!r} that was asked for cannot be opened: {exc}") from exc
    copies = loaded_libraries(stem)
    if len(copies) > 1:
        raise _unavailable(
            name,
            f"this process holds {len(copies)} copies of {stem} ({', '.join(copies)}), and streams of one mean nothing "
            "to the other; start it so that only torch's copy is loaded (check LD_PRELOAD and LD_LIBRARY_PATH)",
        )
    if copies:
        for candidate in (copies[0], *sonames):
            try:
                return ctypes.CDLL(candidate, mode=os.RTLD_NOW | os.RTLD_NOLOAD), copies[0]
            except OSError:
                continue
        raise _unavailable(name, f"{copies[0]} is mapped by this process, but the loader does not hand it out again")
    failures = []
    for soname in sonames:
        try:
            library = ctypes.CDLL(soname)
        except OSError as exc:
            failures.append(str(exc))
        else:
            return library, next(iter(loaded_libraries(stem)), soname)
    # The first failure that is not "no such file" says most (a dependency that is missing, a wrong architecture).
    telling = next((text for text in failures if "No such file" not in text), failures[0])
    raise _unavailable(name, f"{sonames[0]} cannot be loaded ({telling}){'; ' + remedy if remedy else ''}")


def _unavailable(name: str, reason: str) -> BackendUnavailable:
    return BackendUnavailable(f"backend {name!r} is unavailable: {reason}", name=name, reason=reason)


# --- typed calls and errors ------------------------------------------------------------------------------------------


class Family(NamedTuple):
    """A vendor's driver interface: how its functions begin, which library holds them, how its errors are named."""

    backend: str
    prefix: str
    stem: str
    sonames: tuple[str, ...]
    variable: str
    """Environment variable that names another library file; for tests with emulated drivers."""
    remedy: str
    text_style: Literal["out", "returned"]
    """Whether GetErrorName hands its text out through a pointer (CUDA) or returns it (HIP)."""


CUDA: Final = Family(
    "cuda",
    "cu",
    "libcuda",
    ("libcuda.so.1",),
    "ECOFFLOAD_CUDA_LIBRARY",
    "install NVIDIA's driver, or start the container with GPU access (--gpus all)",
    "out",
)
HIP: Final = Family(
    "rocm",
    "hip",
    "libamdhip64",
    ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"),
    "ECOFFLOAD_ROCM_LIBRARY",
    "install ROCm 6 or newer, or a torch build for ROCm, which brings it",
    "returned",
)


class Driver:
    """One opened driver library: typed functions by name, and errors with the driver's own name and text.

    Cheap to make; calls nothing by itself. Functions release the GIL while they run.
    """

    def __init__(self, family: Family, library: ctypes.CDLL, path: str) -> None:
        self.family = family
        self.library = library
        self.path = path
        self._pid = os.getpid()
        self._exchange_mode: Callable[..., int] | None = self.find(
            f"{family.prefix}ThreadExchangeStreamCaptureMode", ctypes.POINTER(ctypes.c_int)
        )
        self._last_error = self.find(f"{family.prefix}GetLastError")  # a runtime's; CUDA's driver has no such state

    @classmethod
    def open(cls, family: Family, path: str | None = None) -> Driver:
        """The driver that this process uses; ``path``, or else ``family.variable``, names another file (for tests).

        Raises :class:`BackendUnavailable` with a reason that a user can act on.
        """
        path = path or os.environ.get(family.variable) or None
        library, where = open_library(family.stem, family.sonames, name=family.backend, path=path, remedy=family.remedy)
        return cls(family, library, where)

    def find(self, name: str, *argtypes: Any, restype: Any = ctypes.c_int) -> Callable[..., Any] | None:
        """Function ``name`` with these argument types, or None where this version of the library lacks it."""
        try:
            function = self.library[name]  # by index: a function object of our own, whose types nobody else sets
        except AttributeError:
            return None
        function.argtypes = argtypes
        function.restype = restype
        return function

    def function(self, name: str, *argtypes: Any, restype: Any = ctypes.c_int) -> Callable[..., Any]:
        """As :meth:`find`, but a missing function is :class:`BackendUnavailable`."""
        function = self.find(name, *argtypes, restype=restype)
        if function is None:
            raise _unavailable(self.family.backend, f"{self.path} has no function {name}: a newer driver is needed")
        return function

    def resolve(self, name: str, version: int) -> int | None:
        """Address of CUDA function ``name`` with the meaning it has in driver API ``version``; None: no such entry.

        Versions matter: ``cuMemcpyBatchAsync`` takes 9 arguments as of 12080 and 8 as of 13000. Source: the driver's
        cuGetProcAddress_v2; an entry too new gives return code 1, one not yet there a NULL pointer.
        """
        lookup = self.find(
            "cuGetProcAddress_v2",
            ctypes.c_char_p,
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.POINTER(ctypes.c_int),
        )
        if lookup is None:
            return None
        entry, status = ctypes.c_void_p(), ctypes.c_int()
        code = lookup(name.encode(), ctypes.byref(entry), version, 0, ctypes.byref(status))
        return entry.value if code == 0 else None

    def error_text(self, code: int) -> str:
        """The driver's name and text of ``code``, as "CUDA_ERROR_INVALID_VALUE (1): invalid argument"."""
        name, text = self._text("GetErrorName", code), self._text("GetErrorString", code)
        return f"{name or 'error'} ({code})" + (f": {text}" if text not in ("", name) else "")

    def _text(self, what: str, code: int) -> str:
        name = self.family.prefix + what
        if self.family.text_style == "returned":
            returned = self.find(name, ctypes.c_int, restype=ctypes.c_char_p)
            raw = returned(code) if returned is not None else None
        else:
            out = ctypes.c_char_p()
            handed = self.find(name, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
            raw = out.value if handed is not None and handed(code, ctypes.byref(out)) == 0 else None
        return raw.decode(errors="replace") if raw else ""

    def error(self, code: int, what: str, kind: type[EcoffloadError] = SwapFailed, **details: Any) -> EcoffloadError:
        """The error for return code ``code`` of ``what`` (a sentence without its end), ready to be raised.

        ``kind`` gives way to :class:`DeviceLost` where the code says that the context is gone.
        """
        self.forget_error()
        lost = code in DEVICE_LOST_CODES
        end = "; the device's context is gone and this process must start again" if lost else ""
        return (DeviceLost if lost else kind)(f"{what}: {self.error_text(code)}{end}", code=code, **details)

    def check(self, code: int, what: str, kind: type[EcoffloadError] = SwapFailed, **details: Any) -> None:
        """Raise :meth:`error` unless ``code`` is 0."""
        if code != 0:
            raise self.error(code, what, kind, **details)

    def forget_error(self) -> None:
        """Clear the thread's last error where a runtime keeps one: torch would raise it at its next, unrelated call.

        :meth:`error` does so itself; needed after a failure that is handled without one.
        """
        if self._last_error is not None:
            self._last_error()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that opened the driver: contexts do not survive that."""
        return os.getpid() != self._pid

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Calls inside do not invalidate a graph capture that another thread has under way."""
        if self._exchange_mode is None:
            yield
            return
        mode = ctypes.c_int(_RELAXED)
        self._exchange_mode(ctypes.byref(mode))
        try:
            yield
        finally:
            self._exchange_mode(ctypes.byref(mode))  # hands back what was in force before


# --- the batched copy ------------------------------------------------------------------------------------------------

ORDER_STREAM: Final = 1
"""Sources are read in stream order."""
ORDER_DURING_CALL: Final = 2
"""Sources are read before the call returns; the call then waits for the stream to drain."""
ORDER_ANY: Final = 3
"""Sources may be read at any time from the call on."""
FLAG_OVERLAP: Final = 1
"""PREFER_OVERLAP_WITH_COMPUTE: a hint for the copy's scheduling."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes and hipMemcpyAttributes: 24 bytes, aligned to 4."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", _Location),
        ("dstLocHint", _Location),
        ("flags", ctypes.c_uint),
    )


# Words go in as unsigned integers of pointer size: quicker for ctypes than pointer types, and never sign-extended.
_BATCH_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 9)


class BatchResult(NamedTuple):
    """What a batched copy answered: the return code, and the index in this call that it blames (None: no one copy)."""

    code: int
    failed: int | None


_DONE: Final = BatchResult(0, None)


class _FailCell(threading.local):
    """failIdx of the calling thread: the only word of a call that the driver writes."""

    def __init__(self) -> None:
        self.word = ctypes.c_size_t(SIZE_MAX)
        self.address = ctypes.addressof(self.word)


class BatchCall:
    """``cuMemcpyBatchAsync`` as of 12080 and ``hipMemcpyBatchAsync``: one prototype of 9 arguments.

    Made once from the function's address; calling it costs little over the driver's own time, because attributes and
    their indices are constants made here and only failIdx, which the driver writes, is the thread's own. Any thread
    may call it. ``attributes=False`` passes none (HIP before 7.13 refuses them).
    """

    __slots__ = ("_attributes", "_attributes_at", "_cell", "_first", "_first_at", "_function", "_number")

    def __init__(self, address: int, *, order: int = ORDER_STREAM, flags: int = 0, attributes: bool = True) -> None:
        self._function: Callable[..., int] = _BATCH_PROTOTYPE(address)
        self._attributes = MemcpyAttributes(srcAccessOrder=order, flags=flags)
        self._first = ctypes.c_size_t(0)  # attrsIdxs: the one set of attributes holds from copy 0 on
        self._attributes_at = ctypes.addressof(self._attributes) if attributes else 0
        self._first_at = ctypes.addressof(self._first) if attributes else 0
        self._number = 1 if attributes else 0
        self._cell = _FailCell()

    def __call__(self, dst: int, src: int, size: int, count: int, stream: int) -> BatchResult:
        """Enqueue ``count`` copies on raw stream handle ``stream``.

        ``dst``, ``src`` and ``size`` are addresses of host arrays of 64-bit words. Returns the driver's code; what was
        enqueued before a failure is unknown. The driver refuses (code 1) stream 0 and 1, count 0 and sizes of 0.
        """
        cell = self._cell
        cell.word.value = SIZE_MAX
        code = self._function(
            dst, src, size, count, self._attributes_at, self._first_at, self._number, cell.address, stream
        )
        if code == 0:
            return _DONE
        index = cell.word.value
        return BatchResult(code, index if index < count else None)


def words_at(address: int, count: int) -> list[int]:
    """The ``count`` unsigned 64-bit words at host address ``address``: for copying one by one."""
    words: list[int] = (ctypes.c_uint64 * count).from_address(address)[:]
    return words
