"""The ``cuda`` backend: one decision for each batch, three ways to carry it out, and what tells the end of it.

Owned here: the route of a batch (copy engine, gather kernel, both at once, or copy by copy), its order among streams,
registration of host memory, and errors. live.py holds what exists while the device is in use, driver.py calls the
driver, kernel.py launches, tables.py carries descriptor tables, tuning.py knows the crossovers. It checks no ranges
(the core has), and knows no region and no entry.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import os
import resource
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

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
    Limits,
    PointerRange,
    Registration,
    SwapBackend,
)
from ecoffload.descriptors import AddressRanges
from ecoffload.drivers import words_at
from ecoffload.errors import BackendUnavailable, EcoffloadError, RegistrationRefused, SwapFailed
from ecoffload_cuda.driver import Cuda
from ecoffload_cuda.kernel import PLAIN_BLOCKS, Gather, shape_for
from ecoffload_cuda.live import CudaCompletion, Live
from ecoffload_cuda.tables import words

__all__ = ["CudaBackend"]

_log = logging.getLogger("ecoffload.cuda")

_NO_LIMITS: Final = Limits()
_LEGACY: Final = (0, 1)  # NULL and CU_STREAM_LEGACY: the batch call refuses them
_ENGINE_FIRST: Final = 32
_ENGINE_MOST: Final = 256
"""Descriptors of the first batch call and of the longest; each is twice the one before. The engine begins when a call
returns, and a call takes the host 8 us and about 0.45 us a descriptor: one call for thousands would leave the link idle
for milliseconds. (Nor are very long calls safe: about 52,000 descriptors crashed one card and driver, as reported.)"""
_LAUNCH_MOST: Final = 16384
"""Descriptors of one launch: the first of a long batch is under way while the next table is written, and tables stay
small. (A kernel needs some 5 us to fill and drain its slots, and a millisecond for so many descriptors of 4 KiB.)"""
_LOOK_ALL: Final = 128
"""Up to so many descriptors, plain Python weighs them quicker than numpy."""
_REGISTER_FLAGS: Final = 3  # PORTABLE | DEVICEMAP

Words = npt.NDArray[np.uint64]


class CudaBackend(SwapBackend):
    """Copies of one NVIDIA GPU. Nothing touches the device before the first submit or registration.

    ``library`` is another file instead of the process's libcuda, for tests. Environment: ``ECOFFLOAD_PER_COPY`` (one
    ``cuMemcpyAsync`` a descriptor), ``ECOFFLOAD_CUDA_KERNEL=0`` (no kernel), ``ECOFFLOAD_CUDA_SMS`` (most
    multiprocessors that it may take), ``ECOFFLOAD_CACHE_DIR``.
    """

    def __init__(
        self, spec: BackendSpec, device_index: int = 0, ops: DeviceOps | None = None, *, library: str | None = None
    ) -> None:
        super().__init__(spec, device_index, ops)
        self._cuda = Cuda.open(library)
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._ranges: dict[int, Registration] = {}
        self._mapped = AddressRanges()
        self._why: Counter[str] = Counter()
        self._paths: Counter[str] = Counter()
        self._kernel_off = "" if os.environ.get("ECOFFLOAD_CUDA_KERNEL", "1") not in ("", "0") else "switched off"

    @property
    def ops(self) -> DeviceOps:
        if self._ops is None:
            from ecoffload_cuda.ops import CudaDeviceOps

            self._ops = CudaDeviceOps(self.live, self.device_index)
        return self._ops

    @classmethod
    def availability(cls, *, probe: bool = False) -> Availability:
        try:
            cuda = Cuda.open()
            for name in ("MemHostRegister", "StreamIsCapturing", "DevicePrimaryCtxRetain"):
                getattr(cuda, name)
        except BackendUnavailable as exc:
            return Availability(False, exc.details["reason"])
        if not os.environ.get(cuda.driver.family.variable):
            torch = _torch_version()
            if torch.endswith("+cpu"):
                return Availability(False, f"torch {torch} is a CPU build; install a torch build for CUDA")
            if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu")):
                return Availability(False, "the driver's library is there, but no NVIDIA device (no /dev/nvidiactl)")
        if probe:
            try:
                cuda.initialise()
                count = cuda.out("DeviceGetCount", ctype=ctypes.c_int)
            except EcoffloadError as exc:
                return Availability(False, str(exc))
            if count == 0:
                return Availability(False, "the driver sees no device (check CUDA_VISIBLE_DEVICES)")
            return Availability(True, f"{count} device{'s' if count > 1 else ''}")
        return Availability(True, f"driver {cuda.driver.path}")

    def limits(self, direction: Direction) -> Limits:
        return _NO_LIMITS  # batches are cut here, where the share of the copy engine is known

    # -- start and stop ------------------------------------------------------------------------------------------------

    def live(self) -> Live:
        """The device in use; put to use now if it was not. For this package's own parts."""
        return self._live or self._start()

    def _start(self) -> Live:
        with self._lock:
            if self._live is None:
                live = Live(self._cuda, self.device_index)
                if live.batch is None:
                    _log.warning(
                        "driver %s has no cuMemcpyBatchAsync of CUDA 12.8: long descriptors are copied one by one",
                        live.version,
                    )
                self._live = live
            return self._live

    def _gather(self, live: Live, direction: Direction) -> Gather | None:
        """The kernel for a direction, or None with the reason in ``_kernel_off``, said once."""
        gather = live.gathers.get(direction)
        if gather is None and not self._kernel_off:
            shape = shape_for(live.device, direction)
            try:
                with live.cuda.relaxed():
                    known = next((g for g in live.gathers.values() if g.shape == shape), None)
                    gather = live.gathers[direction] = known or Gather(live.device, shape)
            except ImportError as exc:
                self._kernel_off = f"{exc}; pip install cuda-core cuda-bindings"
            except Exception as exc:  # NVRTC missing, a compilation or a load that failed: copies go on without it
                self._kernel_off = f"{type(exc).__name__}: {exc} (if NVRTC is missing: pip install nvidia-cuda-nvrtc)"
            if self._kernel_off:
                _log.warning("the gather kernel is not used, all goes to the copy engine: %s", self._kernel_off)
        return gather

    def close(self) -> None:
        with self._lock:
            live, self._live = self._live, None
            if live is not None:
                live.close()

    # -- a batch -------------------------------------------------------------------------------------------------------

    def submit(self, batch: BatchView, direction: Direction, stream: Any) -> Completion:
        """Copy every descriptor in order of ``stream`` (torch's, or a raw handle).

        The legacy default stream is served by a side stream ordered behind and before it. A stream that is being
        captured into a graph is refused (:class:`SwapFailed`): a replay would copy to and from addresses that have
        other owners by then. After a failure the call has waited for whatever was enqueued.
        """
        if batch.count == 0:
            return Completed()
        live = self._live or self._start()
        cuda, device = live.cuda, live.device
        raw = getattr(stream, "cuda_stream", stream) or 0
        capturing = ctypes.c_int()
        pushed = device.enter()
        try:
            code = cuda.StreamIsCapturing(raw, ctypes.addressof(capturing))
            if code or capturing.value:
                self._refuse_stream(live, raw, code)
            with self._lock:
                last = raw
                if raw in _LEGACY:
                    last = live.engine_stream
                    self._order(live, raw, live.fork, last)
                self._copy(live, batch, direction, last)
                event = live.event()
                code = cuda.EventRecord(event, last)
                if last != raw and not code:
                    code = cuda.StreamWaitEvent(raw, event, 0)
            if code:
                raise cuda.driver.error(code, "the end of a swap cannot be recorded", index=None)
        finally:
            if pushed:
                device.leave()
        return CudaCompletion(live, event)

    def _refuse_stream(self, live: Live, raw: int, code: int) -> NoReturn:
        if code:
            raise live.cuda.driver.error(code, f"stream {raw:#x} of a swap cannot be used", index=None)
        raise SwapFailed(
            f"stream {raw:#x} is being captured into a graph, and a swap must not be part of one: a replay would copy "
            "to and from addresses that have other owners by then; submit it on another stream, or outside the capture",
            index=None,
        )

    def _order(self, live: Live, before: int, event: int, after: int) -> None:
        """What is on ``before`` by now runs before what comes on ``after``."""
        cuda = live.cuda
        cuda.driver.check(cuda.EventRecord(event, before), "ordering two streams", index=None)
        cuda.driver.check(cuda.StreamWaitEvent(after, event, 0), "ordering two streams", index=None)

    def _copy(self, live: Live, batch: BatchView, direction: Direction, raw: int) -> None:
        count = batch.count
        tuning = live.tuning
        if count < tuning.kernel_min:
            why = "too few descriptors for a kernel"
        elif self._kernel_off or self.per_copy:
            why = "copy by copy was asked for" if self.per_copy else "no kernel"
        else:
            why = self._copy_with_kernel(live, batch, direction, raw)
            if not why:
                return
        self._why[why] += 1
        self._paths["engine"] += count
        self._engine(live, batch.dst, batch.src, batch.size, count, raw, batch.first)

    def _copy_with_kernel(self, live: Live, batch: BatchView, direction: Direction, raw: int) -> str:
        """Share a batch between kernel and engine; or enqueue nothing and return why all of it is the engine's."""
        count = batch.count
        way = live.tuning.way(direction)
        if count <= _LOOK_ALL and sum(map(way.whole.__gt__, words_at(batch.size, count))) < live.tuning.kernel_min:
            return "long descriptors"
        size = words(batch.size, count)
        low = int(size.min())
        if low >= way.whole:
            return "long descriptors"
        high = int(size.max())
        src, dst = words(batch.src, count), words(batch.dst, count)
        first, last = way.klass(low), way.klass(high)
        rest: tuple[Words, Words, Words] | None = None  # the engine's, where it is no prefix of the batch
        taken: Words | None = None
        if first == last:
            cut = round(way.shares[first] * count)
        else:
            classes = np.searchsorted(np.array(way.edges, np.uint64), size, side="right")
            mine = np.ones(count, bool)
            for k in range(first, last + 1):
                share = way.shares[k]
                if share > 0.0:
                    members = np.flatnonzero(classes == k)
                    mine[members[: round(share * len(members))]] = False
            cut = count - int(mine.sum())
        if count - cut < live.tuning.kernel_min:
            return "long descriptors"
        if first != last and cut:
            taken = np.flatnonzero(~mine).astype(np.uint64)
            theirs = ~mine
            rest = src[theirs], dst[theirs], size[theirs]
            src, dst, size = src[mine], dst[mine], size[mine]
            low, high = int(size.min()), int(size.max())
        elif cut:
            src, dst, size = src[cut:], dst[cut:], size[cut:]
        if not self._reachable(live, src if direction == H2D else dst, size):
            return "host memory that is neither registered nor pinned"
        gather = self._gather(live, direction)
        if gather is None:
            return "no kernel"
        mean = low if low == high else int(size.sum()) / len(size)
        stream = live.kernel_streams[direction] if cut else raw
        if cut:
            self._order(live, raw, live.fork, stream)
        self._launch(live, gather, way.blocks(mean), src, dst, size, low, high, stream)
        if cut:
            live.cuda.driver.check(live.cuda.EventRecord(live.join, stream), "ordering two streams", index=None)
            try:
                if rest is None or taken is None:
                    self._engine(live, batch.dst, batch.src, batch.size, cut, raw, batch.first)
                else:
                    at = [column.ctypes.data for column in rest]
                    self._engine(live, at[1], at[0], at[2], cut, raw, batch.first, taken)
            finally:
                # Also after a failure: whoever waits for the stream then waits for the kernel's share too.
                code = live.cuda.StreamWaitEvent(raw, live.join, 0)
            live.cuda.driver.check(code, "ordering two streams", index=None)
        self._paths["engine"] += cut
        self._paths["kernel"] += count - cut
        self._why["short descriptors" if not cut else "shared by size"] += 1
        return ""

    def _launch(
        self,
        live: Live,
        gather: Gather,
        blocks: int,
        src: Words,
        dst: Words,
        size: Words,
        low: int,
        high: int,
        stream: int,
    ) -> None:
        if not gather.shape.depth:
            blocks = PLAIN_BLOCKS
        blocks = min(blocks, live.device.multiprocessors or blocks)
        tables = live.tables
        for at in range(0, len(src), _LAUNCH_MOST):
            part = slice(at, at + _LAUNCH_MOST)
            slot = tables.lend(len(src[part]))
            launched = False
            try:
                table = tables.fill(slot, src[part], dst[part], size[part], low, high, gather.shift, stream)
                code = gather.launch(blocks, stream, table)
                if code:
                    what = f"the gather kernel could not be launched on {blocks} blocks"
                    raise live.cuda.driver.error(code, what, index=None)
                launched = True
            finally:
                if launched:
                    tables.used(slot, stream)
                else:
                    self._settle(live, stream)
                    tables.unused(slot)

    def _engine(
        self,
        live: Live,
        dst: int,
        src: int,
        size: int,
        count: int,
        stream: int,
        first: int,
        indices: Words | None = None,
    ) -> None:
        """Copy engine: one batch call (or a few), or one call a descriptor. ``indices``: their places in the batch."""
        call = live.batch
        if call is None or self.per_copy:
            self._one_by_one(live, dst, src, size, count, stream, first, indices)
            return
        at, most = 0, _ENGINE_FIRST
        while at < count:
            n = min(most, count - at)
            code, failed = call(dst + 8 * at, src + 8 * at, size + 8 * at, n, stream)
            if code:
                local = None if failed is None else at + failed
                raise self._failure(live, code, "cuMemcpyBatchAsync", src, dst, size, local, stream, first, indices)
            at += n
            most = min(2 * most, _ENGINE_MOST)

    def _one_by_one(
        self,
        live: Live,
        dst: int,
        src: int,
        size: int,
        count: int,
        stream: int,
        first: int,
        indices: Words | None,
    ) -> None:
        copy = live.cuda.MemcpyAsync
        self._paths["copies"] += count
        columns = zip(words_at(dst, count), words_at(src, count), words_at(size, count), strict=True)
        for i, (to, source, nbytes) in enumerate(columns):
            code = copy(to, source, nbytes, stream)
            if code:
                raise self._failure(live, code, "cuMemcpyAsync", src, dst, size, i, stream, first, indices)

    def _failure(
        self,
        live: Live,
        code: int,
        name: str,
        src: int,
        dst: int,
        size: int,
        local: int | None,
        stream: int,
        first: int,
        indices: Words | None,
    ) -> EcoffloadError:
        """The error of a copy call; what may have been enqueued before it has ended when this returns."""
        self._settle(live, stream)
        if local is None:
            what = f"{name} failed for the whole batch, and blames no one descriptor"
            index = None
        else:
            index = first + (local if indices is None else int(indices[local]))
            source, to, nbytes = (words_at(column + 8 * local, 1)[0] for column in (src, dst, size))
            what = f"{name} failed at descriptor {index} ({source:#x} -> {to:#x}, {nbytes} bytes)"
        what += "; descriptors before and after it may have been copied all the same, and none is on its way any more"
        return live.cuda.driver.error(code, what, index=index)

    def _settle(self, live: Live, stream: int) -> None:
        with live.cuda.relaxed():
            for each in (stream, *live.kernel_streams.values()):
                live.cuda.StreamSynchronize(each)

    # -- host memory ---------------------------------------------------------------------------------------------------

    def _reachable(self, live: Live, host: Words, size: Words) -> bool:
        """Whether a kernel may touch these host ranges: it would kill the context where the copy engine would not."""
        if self._mapped.first_outside(host, size) is None:
            return True
        at, alias = int(host[0]), ctypes.c_size_t()
        with live.cuda.relaxed():
            found = self._query(live, at)
            if found is None or found.kind != "host":
                return False
            if live.cuda.MemHostGetDevicePointer(ctypes.addressof(alias), at, 0) or alias.value != at:
                return False
        return AddressRanges([(found.start, found.nbytes)]).first_outside(host, size) is None

    def _query(self, live: Live, address: int) -> PointerRange | None:
        kind, ordinal = ctypes.c_uint(), ctypes.c_int(-1)
        start, nbytes = ctypes.c_uint64(), ctypes.c_uint64()
        # CU_POINTER_ATTRIBUTE_ MEMORY_TYPE 2 (host 1, device 2), DEVICE_ORDINAL 9, RANGE_START_ADDR 11, RANGE_SIZE 12
        wanted = (ctypes.c_int * 4)(2, 9, 11, 12)
        data = (ctypes.c_void_p * 4)(*(ctypes.addressof(word) for word in (kind, ordinal, start, nbytes)))
        code = live.cuda.PointerGetAttributes(4, ctypes.addressof(wanted), ctypes.addressof(data), address)
        if code or not nbytes.value or kind.value not in (1, 2):
            return None
        return PointerRange(start.value, nbytes.value, "host" if kind.value == 1 else "device", ordinal.value)

    def pointer_range(self, address: int) -> PointerRange | None:
        """What the driver knows of an address; None for memory that no driver call made or registered."""
        live = self._live or self._start()
        with live.device.current(), live.cuda.relaxed():
            return self._query(live, address)

    def register(self, address: int, nbytes: int) -> Registration:
        """Pin a range and map it. Raises :class:`RegistrationRefused` with the driver's words and a likely cause."""
        details = {"address": address, "nbytes": nbytes}
        if nbytes <= 0:
            raise RegistrationRefused(f"a registration needs at least one byte, got {nbytes}", code=None, **details)
        live = self._live or self._start()
        cuda = live.cuda
        with self._lock, live.device.current(), cuda.relaxed():
            for known in self._ranges.values():
                if address < known.address + known.nbytes and known.address < address + nbytes:
                    raise RegistrationRefused(
                        f"{address:#x} + {nbytes} bytes overlaps {known.address:#x} + {known.nbytes} bytes, which this "
                        "process has registered already; unregister that first",
                        code=712,
                        **details,
                    )
            code = cuda.MemHostRegister(address, nbytes, _REGISTER_FLAGS)
            if code:
                raise cuda.driver.error(
                    code,
                    f"cuMemHostRegister refused {nbytes} bytes at {address:#x}{_hint(code, nbytes)}",
                    RegistrationRefused,
                    **details,
                )
            alias = ctypes.c_size_t()
            code = cuda.MemHostGetDevicePointer(ctypes.addressof(alias), address, 0)
            if code:
                cuda.MemHostUnregister(address)
                raise cuda.driver.error(
                    code, f"{nbytes} bytes at {address:#x} have no device address", RegistrationRefused, **details
                )
            registration = Registration(address, nbytes, alias.value)
            self._ranges[address] = registration
            self._remap()
            self._gather(live, H2D)  # compiled while nobody waits for a copy
            self._gather(live, D2H)
        return registration

    def unregister(self, registration: Registration) -> None:
        """Undo :meth:`register`. No copy may use the range any more. Raises :class:`SwapFailed` if it is not known."""
        with self._lock:
            if self._ranges.pop(registration.address, None) is None:
                raise SwapFailed(f"{registration.address:#x} is not registered with this backend (any more)", code=713)
            self._remap()
            live = self._live or self._start()
            if live.device.forked:
                return  # the parent's registration; the child has none
            with live.device.current(), live.cuda.relaxed():
                code = live.cuda.MemHostUnregister(registration.address)
            live.cuda.driver.check(code, f"cuMemHostUnregister of {registration.address:#x}")

    def _remap(self) -> None:
        """Ranges under their device addresses; chunks that touch become one, for a quick test of whole batches."""
        merged: list[list[int]] = []
        for r in sorted(self._ranges.values(), key=lambda r: r.alias):
            if merged and merged[-1][0] + merged[-1][1] == r.alias:
                merged[-1][1] += r.nbytes
            else:
                merged.append([r.alias, r.nbytes])
        self._mapped = AddressRanges((start, nbytes) for start, nbytes in merged)

    # -- what was chosen -----------------------------------------------------------------------------------------------

    def tune(self, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Measure the crossovers on this device, keep them for later processes, use them from now on.

        Takes some seconds and 256 MiB on each side; nothing else should use the link meanwhile. Returns plain data:
        the rates measured (GB/s), the tuning, and the file it was written to (None if that failed, which is said).
        """
        from ecoffload_cuda.measure import tune

        return tune(self, self.live(), progress or (lambda _: None))

    def stats(self) -> dict[str, Any]:
        live = self._live
        batch = "not looked up yet"
        if live is not None:
            batch = "12080" if live.batch is not None else f"driver {live.version} has none: copied one by one"
        kernel: object = self._kernel_off or "not used yet"
        if live is not None and live.gathers:
            kernel = {way: gather.shape.describe() for way, gather in live.gathers.items()}
        return {
            **super().stats(),
            "device": live.device.name if live else f"device {self.device_index}, not used yet",
            "driver": live.version if live else "",
            "batch_call": batch,
            "kernel": kernel,
            "tuning": live.tuning.source if live else "not read yet",
            "descriptors": dict(self._paths),
            "batches": dict(self._why),
        }


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _hint(code: int, nbytes: int) -> str:
    """What users found behind the driver's codes."""
    if code == 801:
        return " (not supported: confidential computing forbids registration; use register='prefer' or 'off')"
    if code == 712:
        return " (someone in this process registered part of it already)"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and limit < nbytes:
        return f" (the limit of locked memory is {limit} bytes: raise it with 'ulimit -l' or --ulimit memlock)"
    if code == 2:
        return " (the driver takes no single range of 512 GiB or more; register in chunks)"
    return ""
