"""The ``xpu`` backend: a batch of copies on the SYCL queue that the caller's stream is.

The core constructs it and calls ``submit`` and ``register``. It decides what the device may read late and what not:
USM host memory and ranges that it registered itself are copied asynchronously; the device never reads or writes plain
host memory behind the caller's back. The queue is always the stream's: never guessed from a pointer, because pointers
of one context look alike to every device in it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from ecoffload.backend import (
    D2H,
    H2D,
    Availability,
    BackendSpec,
    BatchView,
    Completed,
    Completion,
    DeviceOps,
    Direction,
    Registration,
    SwapBackend,
)
from ecoffload.errors import BackendUnavailable, ConfigError, EcoffloadError, RegistrationRefused, SwapFailed
from ecoffload_xpu.operator import Operator
from ecoffload_xpu.staging import Staging, chunks
from ecoffload_xpu.ways import SHIM, DpctlWay, Event, ShimWay, Way, dpctl_library, sycl_library, words

__all__ = ["WAY_VARIABLE", "XpuBackend"]

WAY_VARIABLE: Final = "ECOFFLOAD_XPU_WAY"
"""Environment variable that allows one way only: "shim", "dpctl" or "operator"."""

WAYS: Final = ("shim", "dpctl", "operator")

_log = logging.getLogger("ecoffload.xpu")


class XpuBackend(SwapBackend):
    """Copies through the shim, else dpctl's library, else vllm-xpu-kernels' operator; ``stats()`` says which."""

    def __init__(self, spec: BackendSpec, device_index: int = 0, ops: DeviceOps | None = None) -> None:
        """Raises :class:`BackendUnavailable` with the reason of every way if there is none."""
        super().__init__(spec, device_index, ops)
        _ = self.ops  # torch loads libsycl; without its device nothing below can work
        self._skipped: dict[str, str] = {}
        self._libsycl: str | None = None
        self._name, self._way = self._choose()
        self._staging: Staging | None = None  # made for the first batch that needs it
        self._ranges = _Ranges()
        self._lock = threading.Lock()
        self._counts = {"asynchronous": 0, "staged": 0, "synchronous": 0}
        self._said: set[str] = set()
        self._saves: dict[int, Event] = {}  # a queue: its last asynchronous save; in order, so that ends them all

    # --- which way -----------------------------------------------------------------------------------------------

    @classmethod
    def availability(cls, *, probe: bool = False) -> Availability:
        """Looks for torch's XPU library, an Intel GPU and a way to libsycl; with ``probe``, starts the device."""
        torch_spec = importlib.util.find_spec("torch")
        if torch_spec is None or torch_spec.origin is None:
            return Availability(False, "torch is not installed: install a torch build for XPU")
        if not (Path(torch_spec.origin).parent / "lib" / "libtorch_xpu.so").exists():
            return Availability(
                False, "the installed torch was built without XPU support: install torch from PyTorch's xpu index"
            )
        if not intel_gpu_present():
            return Availability(
                False,
                "there is no Intel GPU: no Intel device under /dev/dri (in a container: pass --device /dev/dri, and "
                "add its user to the group that owns the render node)",
            )
        if not (SHIM.exists() or dpctl_library() or importlib.util.find_spec("vllm_xpu_kernels")):
            return Availability(
                False,
                "nothing can reach SYCL: the shim was not built (install g++ and reinstall ecoffload-xpu), and "
                "neither dpctl nor vllm-xpu-kernels is installed",
            )
        if probe:
            try:
                cls(_declaration())
            except EcoffloadError as exc:
                return Availability(False, str(getattr(exc, "reason", exc)))
        return Availability(True, "torch for XPU, an Intel GPU and a way to its SYCL queue are there")

    def _choose(self) -> tuple[str, Way | Operator]:
        only = os.environ.get(WAY_VARIABLE)
        if only and only not in WAYS:
            raise ConfigError(
                f"{WAY_VARIABLE}={only!r} names no way; there are {', '.join(WAYS)}", option=WAY_VARIABLE, value=only
            )
        for name in [only] if only else WAYS:
            try:
                way = self._open(name)
            except BackendUnavailable as exc:
                self._skipped[name] = str(exc.details.get("reason", exc))
                continue
            if self._skipped:
                _log.warning("xpu: copies go through %s, because %s", name, self._reasons())
            return name, way
        raise BackendUnavailable(
            f"backend 'xpu' cannot reach the SYCL queue: {self._reasons()}", name="xpu", reason=self._reasons()
        )

    def _open(self, name: str) -> Way | Operator:
        if name == "operator":
            return Operator()
        library, self._libsycl = sycl_library()
        return ShimWay(library) if name == "shim" else DpctlWay(self._libsycl)

    def _reasons(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self._skipped.items())

    # --- copying -------------------------------------------------------------------------------------------------

    def submit(self, batch: BatchView, direction: Direction, stream: Any) -> Completion:
        """Enqueue on ``stream.sycl_queue``, or block where the host memory leaves no other way (said once)."""
        way = self._way
        if isinstance(way, Operator):
            self._count("operator")
            return way.submit(batch, self.ops, self.device_index, stream)
        queue = queue_of(stream)
        host = batch.src if direction == H2D else batch.dst
        if self._ranges.cover(host, batch.size, batch.count) or way.all_usm_host(queue, host, batch.size, batch.count):
            event = way.copy(queue, batch.dst, batch.src, batch.size, batch.count, batch.first)
            self._count("asynchronous")
            if direction == D2H:
                with self._lock:
                    self._saves[queue] = event
            return _SyclCompletion(event)
        if direction == H2D:
            return self._submit_staged(batch, queue, way)
        event = way.copy(queue, batch.dst, batch.src, batch.size, batch.count, batch.first)
        event.wait()
        self._count("synchronous")
        self._say(
            "synchronous",
            "device-to-host copies into memory that is neither registered nor USM host memory block until they are "
            "done; register the memory, or allow for it",
        )
        return Completed()

    def _submit_staged(self, batch: BatchView, queue: int, way: Way) -> Completion:
        self._say(
            "staged",
            "host-to-device copies from memory that is neither registered nor USM host memory are staged: each byte "
            "is copied once more by the CPU",
        )
        with self._lock:
            staging = self._staging = self._staging or Staging(way)
            saves, self._saves = self._saves, {}
        # Sources are read now, by the host: one that is registered after all may still be the target of a late save.
        for save in saves.values():
            with contextlib.suppress(SwapFailed):  # its own completion reports it
                save.wait()
        src, dst, size = (words(at, batch.count) for at in (batch.src, batch.dst, batch.size))
        event: Event | None = None
        for chunk in chunks(src, dst, size):
            try:
                event = staging.copy(queue, chunk)
            except SwapFailed as exc:
                index = exc.details.get("index")
                if index is None:
                    raise
                index = batch.first + int(chunk.of[index])
                raise type(exc)(
                    f"the staged copy of descriptor {index} failed: {exc}", **{**exc.details, "index": index}
                ) from exc
        self._count("staged")
        return Completed() if event is None else _SyclCompletion(event)  # in order: the last one ends them all

    # --- host memory ---------------------------------------------------------------------------------------------

    def register(self, address: int, nbytes: int) -> Registration:
        """``prepare_for_device_copy``, and a place in the list of ranges that are copied asynchronously.

        SYCL itself tells nothing about such a range (``get_pointer_type`` stays "unknown").
        """
        if nbytes < 1:
            raise RegistrationRefused(
                f"a host range of {nbytes} bytes cannot be registered", address=address, nbytes=nbytes, code=None
            )
        with self._lock:
            if self._ranges.overlap(address, nbytes):
                raise RegistrationRefused(
                    f"host range {address:#x} + {nbytes} bytes overlaps one that is registered already; unregister "
                    "that first",
                    address=address,
                    nbytes=nbytes,
                    code=None,
                )
            try:
                handle = self._prepare(address, nbytes)
            except SwapFailed as exc:
                raise RegistrationRefused(
                    f"host range {address:#x} + {nbytes} bytes was not registered: {exc}; copies stay right, but are "
                    "staged (to the device) or blocking (from it)",
                    address=address,
                    nbytes=nbytes,
                    code=exc.details.get("code"),
                ) from exc
            self._ranges.add(address, nbytes)
        return Registration(address, nbytes, address, handle)

    def unregister(self, registration: Registration) -> None:
        """Undo :meth:`register`. The caller has waited for copies from and to the range."""
        with self._lock:
            if not self._ranges.remove(registration.address, registration.nbytes):
                raise RegistrationRefused(
                    f"host range {registration.address:#x} + {registration.nbytes} bytes is not registered",
                    address=registration.address,
                    nbytes=registration.nbytes,
                    code=None,
                )
            self._release(registration.handle)

    def _prepare(self, address: int, nbytes: int) -> int:
        if isinstance(self._way, Operator):
            raise SwapFailed("vllm-xpu-kernels' operator uses no registered memory; build the shim (g++) for that")
        return self._way.prepare(queue_of(self.ops.current_stream()), address, nbytes)

    def _release(self, handle: int) -> None:
        if not isinstance(self._way, Operator):
            self._way.release(handle)

    # --- what happened -------------------------------------------------------------------------------------------

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] = self._counts.get(what, 0) + 1

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning("xpu: %s", text)

    def stats(self) -> dict[str, Any]:
        """``way``, the ways skipped with their reasons, the libsycl in use, batches by kind, registered ranges."""
        return {
            **super().stats(),
            "way": self._name,
            "skipped": dict(self._skipped),
            "libsycl": self._libsycl,
            "batches": dict(self._counts),
            "registered_ranges": len(self._ranges),
            "staging_bytes": self._staging.nbytes if self._staging is not None else 0,
        }

    def close(self) -> None:
        """Wait for staged copies and give the staging memory back. Registrations are their owners' to undo."""
        with self._lock:
            self._saves = {}
        if self._staging is not None:
            self._staging.close()


class _SyclCompletion(Completion):
    """The end of a batch: the barrier behind its copies."""

    __slots__ = ("_event",)

    def __init__(self, event: Event) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.done()

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            self._event.wait()
            return True
        end = time.monotonic() + timeout
        pause = 20e-6
        while not self._event.done():
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, 2e-3)
        return True

    def block(self, stream: Any) -> None:
        self._event.block(queue_of(stream))


class _Ranges:
    """Registered host ranges, sorted, none overlapping; asked lock-free, replaced whole by each change."""

    def __init__(self) -> None:
        self._table = np.empty((2, 0), dtype=np.uint64)  # first addresses, last addresses

    def __len__(self) -> int:
        return self._table.shape[1]

    def cover(self, address: int, size: int, count: int) -> bool:
        """Whether each of ``count`` ranges (arrays of uint64 words) lies within one registered range."""
        starts, lasts = self._table
        if not len(starts):
            return False
        at, nbytes = words(address, count), words(size, count)
        within = np.searchsorted(starts, at, side="right") - 1
        if int(within.min()) < 0:
            return False
        room = lasts[within] - at  # wraps to a huge number behind the range's end, so that is asked for first
        return bool(((at <= lasts[within]) & (nbytes - np.uint64(1) <= room)).all())

    def overlap(self, address: int, nbytes: int) -> bool:
        first, last = np.uint64(address), np.uint64(address + nbytes - 1)
        starts, lasts = self._table
        return bool(((starts <= last) & (first <= lasts)).any())

    def add(self, address: int, nbytes: int) -> None:
        edge = np.array([[address], [address + nbytes - 1]], dtype=np.uint64)
        table = np.concatenate((self._table, edge), axis=1)
        self._table = table[:, np.argsort(table[0])]

    def remove(self, address: int, nbytes: int) -> bool:
        starts, lasts = self._table
        here = (starts == np.uint64(address)) & (lasts == np.uint64(address + nbytes - 1))
        self._table = self._table[:, ~here]
        return bool(here.any())


def queue_of(stream: Any) -> int:
    """Address of the stream's ``sycl::queue``: the int that ``torch.xpu.Stream.sycl_queue`` is."""
    queue = getattr(stream, "sycl_queue", None)
    if not isinstance(queue, int) or isinstance(queue, bool) or queue == 0:
        raise ConfigError(
            f"{stream!r} is no XPU stream: its sycl_queue is {queue!r}, not an address; pass a torch.xpu.Stream",
            option="stream",
            value=repr(stream),
        )
    return queue % (1 << 64)


def intel_gpu_present(devices: Path = Path("/dev"), drm: Path = Path("/sys/class/drm")) -> bool:
    """Whether a render node of an Intel GPU (or WSL's /dev/dxg) is there. Opens no device."""
    if (devices / "dxg").exists():
        return True
    for node in (devices / "dri").glob("renderD*"):
        vendor = drm / node.name / "device" / "vendor"
        try:
            if vendor.read_text().strip() == "0x8086":
                return True
        except OSError:
            return True  # /sys is hidden in some containers; the device itself will tell
    return False


def _declaration() -> BackendSpec:
    from ecoffload_xpu.plugin import SPEC

    return SPEC
