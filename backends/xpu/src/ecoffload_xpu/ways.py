"""The ways to enqueue on a ``sycl::queue`` that somebody else made: the shim, or dpctl's C library.

It owns finding the one libsycl of the process and calling it. Queues come in and stay as ints (addresses of
``sycl::queue`` objects, what ``torch.xpu.Stream.sycl_queue`` is); batches are addresses of uint64 arrays. The backend
calls it; it knows no tensor, no registered range, and decides nothing about host memory.

Both ways are the same small set of calls, :class:`Way`. A SYCL exception arrives as our error, with libsycl's text:
through bare ctypes it would abort the process.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from ecoffload.drivers import loaded_libraries, open_library, words_at
from ecoffload.errors import BackendUnavailable, ConfigError, DeviceLost, EcoffloadError, SwapFailed

__all__ = [
    "SHIM",
    "DpctlWay",
    "Event",
    "HostBlock",
    "ShimWay",
    "Way",
    "Words",
    "dpctl_library",
    "sycl_library",
    "words",
]

Words = NDArray[np.uint64]

SHIM: Final = Path(__file__).with_name("_shim.so")
"""Where the build puts the shim."""

_EXPERIMENTAL = "_ZN4sycl3_V13ext6oneapi12experimental"
_HERE = "RKNS0_6detail13code_locationE"
_STATUS = "NS0_6detail18is_event_info_descIT_E11return_typeEv"

SYMBOLS: Final = (
    ("_ZNK4sycl3_V15queue11is_in_orderEv", True),
    (f"{_EXPERIMENTAL}6memcpyENS0_5queueEPvPKvm{_HERE}", True),
    (f"_ZN4sycl3_V15queue25ext_oneapi_submit_barrierE{_HERE}", True),
    (f"_ZN4sycl3_V15queue25ext_oneapi_submit_barrierERKSt6vectorINS0_5eventESaIS3_EE{_HERE}", True),
    (f"_ZN4sycl3_V15queue10wait_proxyE{_HERE}", True),
    (f"_ZNK4sycl3_V15event8get_infoINS0_4info5event24command_execution_statusEEE{_STATUS}", True),
    ("_ZN4sycl3_V15event4waitEv", True),
    ("_ZNK4sycl3_V15queue11get_contextEv", True),
    # One of the two: libsycl.so.9 exports only the first, early libsycl.so.8 only the second.
    ("_ZN4sycl3_V16detail16get_pointer_typeEPKvRNS1_12context_implE", False),
    ("_ZN4sycl3_V116get_pointer_typeEPKvRKNS0_7contextE", False),
    (f"_ZN4sycl3_V111malloc_hostEmRKNS0_7contextE{_HERE}", True),
    (f"_ZN4sycl3_V14freeEPvRKNS0_7contextE{_HERE}", True),
    (f"{_EXPERIMENTAL}23prepare_for_device_copyEPKvmRKNS0_7contextE", False),
    (f"{_EXPERIMENTAL}24release_from_device_copyEPKvRKNS0_7contextE", False),
)
"""Mangled names of libsycl in the order of ``Api`` in shim.cpp, and whether the shim needs them."""

_SHIM_VERSION = 1
_THREW, _OUT_OF_ORDER = 1, 2
_COMPLETE = 0  # sycl::info::event_command_status::complete, CL_COMPLETE
_TEXT = 512

_LOST = re.compile(r"DEVICE_LOST|CONTEXT_LOST|device lost", re.IGNORECASE)


def sycl_library(maps: str = "/proc/self/maps") -> tuple[ctypes.CDLL, str]:
    """The one libsycl that this process holds, and its path. It is never loaded here: torch brings its own.

    A queue of one libsycl handed to another kills the process, so two are refused, and so is none. Raises
    :class:`BackendUnavailable`.
    """
    copies = loaded_libraries("libsycl", maps)
    if not copies:
        raise _unavailable(
            "this process holds no libsycl; torch loads it if it was built for XPU: install such a torch"
        )
    if len(copies) > 1:
        raise _unavailable(
            f"this process holds {len(copies)} SYCL runtimes ({', '.join(copies)}), and a queue of one kills the "
            "other; start it so that only torch's is loaded (check LD_PRELOAD, LD_LIBRARY_PATH, oneAPI's setvars.sh)"
        )
    return open_library("libsycl", (Path(copies[0]).name,), name="xpu")


def dpctl_library() -> Path | None:
    """Where an installed dpctl keeps libDPCTLSyclInterface. Imports nothing."""
    spec = importlib.util.find_spec("dpctl")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "libDPCTLSyclInterface.so"
        if path.exists():
            return path
    return None


def words(address: int, count: int) -> Words:
    """The ``count`` uint64 words at host address ``address``, as an array on the same memory."""
    return np.frombuffer(memoryview((ctypes.c_uint64 * count).from_address(address)), dtype=np.uint64)


def _unavailable(reason: str) -> BackendUnavailable:
    return BackendUnavailable(f"backend 'xpu' is unavailable: {reason}", name="xpu", reason=reason)


def _failure(what: str, text: str, **details: Any) -> SwapFailed:
    kind = DeviceLost if _LOST.search(text) else SwapFailed
    return kind(f"{what}: {text or 'SYCL gave no reason'}", **details)


def _out_of_order() -> ConfigError:
    return ConfigError(
        "the SYCL queue runs out of order, so nothing orders these copies against the work around them; pass a stream "
        "whose queue was made with the property in_order (torch.xpu's streams are)",
        option="stream",
        value="out-of-order queue",
    )


class Event:
    """One SYCL event that this object owns; freed with it."""

    __slots__ = ("_finished", "_handle", "_way")

    def __init__(self, way: Way, handle: int) -> None:
        self._way = way
        self._handle = handle
        self._finished = False

    def done(self) -> bool:
        """Whether it has happened. Raises :class:`SwapFailed` for a status that says the work failed."""
        if not self._finished:
            self._finished = self._way.event_done(self._handle)
        return self._finished

    def wait(self) -> None:
        """Block the host until it has happened, the GIL released."""
        if not self._finished:
            self._way.event_wait(self._handle)
            self._finished = True

    def block(self, queue: int) -> None:
        """Later work on ``queue`` waits for it."""
        if not self._finished:
            self._way.event_block(queue, self._handle)

    def __del__(self, _finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _finalizing():  # an interpreter that ends has taken ctypes apart already
            self._way.event_free(self._handle)


class HostBlock:
    """USM host memory that this object owns, uninitialised: ``nbytes`` at ``address``; freed with it."""

    __slots__ = ("_handle", "_way", "address", "nbytes")

    def __init__(self, way: Way, handle: int, address: int, nbytes: int) -> None:
        self._way = way
        self._handle = handle
        self.address = address
        self.nbytes = nbytes

    def __del__(self, _finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _finalizing():
            self._way.free(self._handle)


class Way(ABC):
    """Calls on SYCL queues. Errors of SYCL are :class:`SwapFailed`, or :class:`DeviceLost` where the text says so."""

    name: ClassVar[str]

    @abstractmethod
    def in_order(self, queue: int) -> bool:
        """Whether ``queue`` runs its work in order."""

    @abstractmethod
    def copy(self, queue: int, dst: int, src: int, size: int, count: int, first: int) -> Event:
        """Enqueue ``count`` copies from arrays of uint64 words; the event behind them.

        Raises with ``index`` (``first`` added) of the copy that SYCL refused, after the queue has drained; and
        :class:`ConfigError` for an out-of-order queue, before anything is enqueued.
        """

    @abstractmethod
    def all_usm_host(self, queue: int, address: int, size: int, count: int) -> bool:
        """Whether ``count`` host ranges (arrays of uint64 words) are USM host memory of the queue's context."""

    @abstractmethod
    def gather(self, to: int, src: int, size: int, count: int) -> None:
        """Pack ``count`` host ranges one behind the other at ``to``, the GIL released."""

    @abstractmethod
    def allocate(self, queue: int, nbytes: int) -> HostBlock:
        """USM host memory of the queue's context."""

    @abstractmethod
    def prepare(self, queue: int, address: int, nbytes: int) -> int:
        """``prepare_for_device_copy`` of a host range; a handle for :meth:`release`. Raises with SYCL's reason."""

    @abstractmethod
    def release(self, handle: int) -> None:
        """Undo :meth:`prepare`."""

    @abstractmethod
    def event_done(self, handle: int) -> bool: ...
    @abstractmethod
    def event_wait(self, handle: int) -> None: ...
    @abstractmethod
    def event_block(self, queue: int, handle: int) -> None: ...
    @abstractmethod
    def event_free(self, handle: int) -> None: ...
    @abstractmethod
    def free(self, handle: int) -> None: ...


class ShimWay(Way):
    """The package's shim (shim.cpp): one call a batch, every exception caught in C++."""

    name = "shim"

    def __init__(self, sycl: ctypes.CDLL, shim: Path | None = None) -> None:
        """``sycl`` is the libsycl whose queues will come in, ``shim`` another file than :data:`SHIM`.

        Raises :class:`BackendUnavailable`.
        """
        shim = shim or SHIM
        try:
            self._library = ctypes.CDLL(str(shim))
        except OSError as exc:
            remedy = "it was not built (no C++ compiler then): install g++ and reinstall ecoffload-xpu"
            raise _unavailable(f"the shim: {exc if shim.exists() else remedy}") from exc
        version = self._library.ecoffload_xpu_version()
        if version != _SHIM_VERSION:
            raise _unavailable(
                f"the shim {shim} is of version {version}, this package needs {_SHIM_VERSION}: reinstall ecoffload-xpu"
            )
        addresses = [_address_of(sycl, symbol) for symbol, _ in SYMBOLS]
        lacking = [s for (s, needed), at in zip(SYMBOLS, addresses, strict=True) if needed and not at]
        if lacking:
            raise _unavailable(f"the shim: this libsycl exports no {lacking[0]} (2025.0 or newer is needed)")
        self._api = (c_void_p * len(SYMBOLS))(*addresses)
        self._sycl = sycl  # the addresses are good as long as the library is
        api = ctypes.addressof(self._api)

        def entry(name: str, *argtypes: Any) -> Any:
            function = self._library[f"ecoffload_xpu_{name}"]
            function.argtypes = (c_void_p, *argtypes, c_char_p, c_size_t)

            def call(*arguments: Any) -> tuple[int, str]:
                text = ctypes.create_string_buffer(_TEXT)
                code = function(api, *arguments, text, _TEXT)
                return code, text.value.decode(errors="replace") if code else ""

            return call

        word = c_size_t  # unsigned, so that no address is ever sign-extended, and quicker than a pointer type
        self._in_order = entry("in_order", word, POINTER(c_int))
        self._copy = entry("copy", word, word, word, word, word, POINTER(c_size_t), POINTER(c_size_t))
        self._all_usm_host = entry("all_usm_host", word, word, word, word, POINTER(c_int))
        self._status = entry("event_status", word, POINTER(c_int))
        self._wait = entry("event_wait", word)
        self._block = entry("event_block", word, word)
        self._allocate = entry("allocate", word, word, POINTER(c_size_t), POINTER(c_size_t))
        self._free = entry("free", word)
        self._prepare = entry("prepare", word, word, word, POINTER(c_size_t))
        self._unprepare = entry("unprepare", word)
        self._gather = self._library.ecoffload_xpu_gather
        self._gather.argtypes, self._gather.restype = (word, word, word, word), None
        self._event_free = self._library.ecoffload_xpu_event_free
        self._event_free.argtypes, self._event_free.restype = (word,), None

    def in_order(self, queue: int) -> bool:
        answer = c_int()
        _check(self._in_order(queue, byref(answer)), "the SYCL queue could not be asked for its order")
        return bool(answer.value)

    def copy(self, queue: int, dst: int, src: int, size: int, count: int, first: int) -> Event:
        done, event = c_size_t(), c_size_t()
        code, text = self._copy(queue, dst, src, size, count, byref(done), byref(event))
        if code == _OUT_OF_ORDER:
            raise _out_of_order()
        if code:
            raise _copy_failure(text, dst, src, size, count, done.value, first)
        return Event(self, event.value)

    def all_usm_host(self, queue: int, address: int, size: int, count: int) -> bool:
        answer = c_int()
        code, _ = self._all_usm_host(queue, address, size, count, byref(answer))
        return code == 0 and bool(answer.value)  # what cannot be told is treated as plain memory: slower, and right

    def gather(self, to: int, src: int, size: int, count: int) -> None:
        self._gather(to, src, size, count)

    def allocate(self, queue: int, nbytes: int) -> HostBlock:
        handle, address = c_size_t(), c_size_t()
        _check(
            self._allocate(queue, nbytes, byref(handle), byref(address)),
            f"{nbytes} bytes of USM host memory for staging could not be had",
        )
        return HostBlock(self, handle.value, address.value, nbytes)

    def free(self, handle: int) -> None:
        self._free(handle)

    def prepare(self, queue: int, address: int, nbytes: int) -> int:
        handle = c_size_t()
        _check(self._prepare(queue, address, nbytes, byref(handle)), "prepare_for_device_copy")
        return handle.value

    def release(self, handle: int) -> None:
        _check(self._unprepare(handle), "release_from_device_copy")

    def event_done(self, handle: int) -> bool:
        status = c_int()
        _check(self._status(handle, byref(status)), "a copy failed")
        return status.value == _COMPLETE

    def event_wait(self, handle: int) -> None:
        _check(self._wait(handle), "a copy failed")

    def event_block(self, queue: int, handle: int) -> None:
        _check(self._block(queue, handle), "the stream could not be made to wait for the copies")

    def event_free(self, handle: int) -> None:
        self._event_free(handle)


def _address_of(library: ctypes.CDLL, symbol: str) -> int | None:
    try:
        return ctypes.cast(library[symbol], c_void_p).value
    except AttributeError:
        return None


def _check(answer: tuple[int, str], what: str) -> None:
    code, text = answer
    if code:
        raise _failure(what, text, index=None, code=code)


def _copy_failure(text: str, dst: int, src: int, size: int, count: int, done: int, first: int) -> EcoffloadError:
    if done == count:
        return _failure(f"SYCL took {count} copies but no barrier behind them", text, index=None, code=_THREW)
    at = [words_at(array + 8 * done, 1)[0] for array in (src, dst, size)]
    return _failure(
        f"SYCL refused descriptor {first + done} (source {at[0]:#x}, destination {at[1]:#x}, {at[2]} bytes)",
        text,
        index=first + done,
        code=_THREW,
    )


class DpctlWay(Way):
    """``libDPCTLSyclInterface`` of an installed dpctl: a call a copy. It has no host registration.

    It catches exceptions itself and prints them on stderr; what reaches us is that a call gave nothing.
    """

    name = "dpctl"

    def __init__(self, sycl_path: str, library: Path | None = None) -> None:
        """``sycl_path`` is the process's libsycl: one that dpctl was not built for is refused before it is loaded."""
        path = library or dpctl_library()
        if path is None:
            raise _unavailable("dpctl is not installed: pip install dpctl (of the generation of torch's libsycl)")
        wanted = re.search(rb"libsycl\.so\.\d+", path.read_bytes())
        if wanted is not None and not os.path.basename(sycl_path).startswith(wanted[0].decode()):
            raise _unavailable(
                f"dpctl needs {wanted[0].decode()}, but this process holds {sycl_path}; install the dpctl of that "
                "generation (0.21 for libsycl.so.8, 0.22 for libsycl.so.9)"
            )
        try:
            library_ = ctypes.CDLL(str(path))
        except OSError as exc:
            raise _unavailable(f"dpctl's library cannot be loaded: {exc}") from exc
        sycl_library()  # refuses if loading it brought a second one
        word = c_size_t

        def entry(name: str, restype: Any, *argtypes: Any) -> Any:
            function = library_[name]
            function.argtypes, function.restype = argtypes, restype
            return function

        try:
            self._in_order = entry("DPCTLQueue_IsInOrder", ctypes.c_bool, word)
            self._memcpy = entry("DPCTLQueue_Memcpy", word, word, word, word, word)
            self._barrier_after = entry("DPCTLQueue_SubmitBarrierForEvents", word, word, POINTER(c_size_t), word)
            self._queue_wait = entry("DPCTLQueue_Wait", None, word)
            self._status = entry("DPCTLEvent_GetCommandExecutionStatus", c_int, word)
            self._wait = entry("DPCTLEvent_Wait", None, word)
            self._delete = entry("DPCTLEvent_Delete", None, word)
            self._context_of = entry("DPCTLQueue_GetContext", word, word)
            self._context_delete = entry("DPCTLContext_Delete", None, word)
            self._pointer_type = entry("DPCTLUSM_GetPointerType", c_int, word, word)
            self._malloc_host = entry("DPCTLmalloc_host", word, word, word)
            self._free_with_context = entry("DPCTLfree_with_context", None, word, word)
        except AttributeError as exc:
            raise _unavailable(f"dpctl's library lacks a function ({exc}); 0.21 or newer is needed") from exc
        self._held: dict[int, int] = {}  # address of a block: the context it came from

    def in_order(self, queue: int) -> bool:
        return bool(self._in_order(queue))

    def copy(self, queue: int, dst: int, src: int, size: int, count: int, first: int) -> Event:
        if not self._in_order(queue):
            raise _out_of_order()
        memcpy, delete = self._memcpy, self._delete
        triples = zip(words_at(dst, count), words_at(src, count), words_at(size, count), strict=True)
        for i, (to, at, nbytes) in enumerate(triples):
            handle = memcpy(queue, to, at, nbytes)
            if not handle:
                self._queue_wait(queue)
                raise _copy_failure("dpctl printed why on stderr", dst, src, size, count, i, first)
            if i < count - 1:
                delete(handle)
        return Event(self, handle)

    def all_usm_host(self, queue: int, address: int, size: int, count: int) -> bool:
        context = self._context_of(queue)
        try:
            return all(
                self._pointer_type(at, context) == _DPCTL_USM_HOST
                and self._pointer_type(at + nbytes - 1, context) == _DPCTL_USM_HOST
                for at, nbytes in zip(words_at(address, count), words_at(size, count), strict=True)
            )
        finally:
            self._context_delete(context)

    def gather(self, to: int, src: int, size: int, count: int) -> None:
        for at, nbytes in zip(words_at(src, count), words_at(size, count), strict=True):
            ctypes.memmove(to, at, nbytes)
            to += nbytes

    def allocate(self, queue: int, nbytes: int) -> HostBlock:
        address = self._malloc_host(nbytes, queue)
        if not address:
            raise _failure(f"{nbytes} bytes of USM host memory for staging", "malloc_host returned no memory")
        self._held[address] = self._context_of(queue)
        return HostBlock(self, address, address, nbytes)

    def free(self, handle: int) -> None:
        context = self._held.pop(handle)
        self._free_with_context(handle, context)
        self._context_delete(context)

    def prepare(self, queue: int, address: int, nbytes: int) -> int:
        raise _failure("prepare_for_device_copy", "libDPCTLSyclInterface does not offer it; the shim does", code=None)

    def release(self, handle: int) -> None:
        """Nothing: :meth:`prepare` hands out no handle."""

    def event_done(self, handle: int) -> bool:
        return bool(self._status(handle) == _DPCTL_COMPLETE)

    def event_wait(self, handle: int) -> None:
        self._wait(handle)

    def event_block(self, queue: int, handle: int) -> None:
        barrier = self._barrier_after(queue, byref(c_size_t(handle)), 1)
        if not barrier:
            raise _failure("the stream could not be made to wait for the copies", "dpctl printed why on stderr")
        self._delete(barrier)

    def event_free(self, handle: int) -> None:
        self._delete(handle)


_DPCTL_USM_HOST = 3
_DPCTL_COMPLETE = 3
