"""Simulated devices: real memory at fake addresses, queues that complete late, faults on request.

Three backends that exist only for tests: ``sim-int64`` (memory at an address that Intel's driver really gave),
``sim-uint64`` (memory straddling 2**63) and ``sim-top`` (memory that ends at 2**64). They differ in every
capability, so that every path of the core (pool, submission, worker, cache) runs on addresses at and above 2**63
without hardware.

Tensors of a simulated device are torch CPU tensors inside its arena; ``ops.address_of`` gives their fake address and
``ops.owns`` knows them. What a caller does to them happens at once, not on a stream: synchronise before reading.
A device is stricter than drivers are: a descriptor must lie in one live allocation or one registration, sizes, counts
and the direction must be right, and a registered range is reached through its alias only.

``get_backend("sim-uint64")`` gives the process's one; :func:`simulated` makes another. :func:`sim_of` gives the backend
itself where the core wrapped it; its ``inject_fault`` and ``device`` are the handles for tests of recovery.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from ecoffload.backend import BackendSpec, BatchView, Completion, DeviceOps, Direction, Registration, SwapBackend
from ecoffload.drivers import words_at
from ecoffload.errors import ConfigError, DeviceLost, RegistrationRefused, SwapFailed
from ecoffload.host_queue import BlockingBackend, HostEvent, HostQueue, QueuedCompletion
from ecoffload.testing.declarations import DECLARED

__all__ = ["Fault", "SimBackend", "SimDevice", "SimOps", "sim_of", "simulated"]

Fault = Literal["submit", "late", "lost", "register"]
"""The next submit raises; the next swap fails after its submit; the device is gone; a registration is refused."""

_GRANULE = 256
_POISON = 0xDD
_Range = tuple[int, int]


class SimMemory:
    """The arena: allocations that return when their last view is gone and the streams that used them have run.

    First fit, from the end with ``from_top``. Returned space is poisoned, so that a copy which outlives its tensor
    moves wrong bytes instead of plausible ones.
    """

    def __init__(self, base: int, nbytes: int, *, record_stream: bool, from_top: bool = False) -> None:
        self.base = base
        self.nbytes = nbytes
        self._from_top = from_top
        self._map = mmap.mmap(-1, nbytes)  # anonymous: pages appear as they are touched
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.real = self._bytes.ctypes.data
        self._record_stream = record_stream
        self._lock = threading.Lock()
        self._free: list[_Range] = [(0, nbytes)]
        self._starts: list[int] = []
        self._live: dict[int, int] = {}
        self._uses: dict[int, set[HostQueue]] = {}
        self._dropped: deque[int] = deque()  # filled by finalizers, which may run inside any call: no lock there
        self._waiting: list[tuple[int, list[HostEvent]]] = []

    def allocate(self, nbytes: int, stream: HostQueue, streams: list[HostQueue]) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        size = -(-nbytes // _GRANULE) * _GRANULE
        with self._lock:
            self._reclaim(streams, block=False)
            offset = self._take(size)
            if offset is None:
                self._reclaim(streams, block=True)
                offset = self._take(size)
            if offset is None:
                free = sum(n for _, n in self._free)
                raise torch.OutOfMemoryError(f"simulated device out of memory: asked {nbytes}, {free} free in pieces")
            insort(self._starts, offset)
            self._live[offset] = size
            self._uses[offset] = {stream}
        # The array lives exactly as long as the storage of the tensor and all of its views.
        array = np.frombuffer(self._map, dtype=np.uint8, count=nbytes, offset=offset)
        weakref.finalize(array, self._dropped.append, offset).atexit = False
        return torch.from_numpy(array)

    def _take(self, size: int) -> int | None:
        order = range(len(self._free))
        for i in reversed(order) if self._from_top else order:
            offset, room = self._free[i]
            if room < size:
                continue
            rest = (offset if self._from_top else offset + size, room - size)
            self._free[i : i + 1] = [rest] if room > size else []
            return offset + room - size if self._from_top else offset
        return None

    def _reclaim(self, streams: list[HostQueue], *, block: bool) -> None:
        while self._dropped:
            offset = self._dropped.popleft()
            # Where the device does not ask for record_stream it guards lifetimes itself, against every stream.
            used = self._uses.pop(offset) if self._record_stream else {*self._uses.pop(offset), *streams}
            events = []
            for queue in used:
                event = HostEvent()
                queue.record(event)
                events.append(event)
            self._waiting.append((offset, events))
        waiting, self._waiting = self._waiting, []
        for offset, events in waiting:
            if all(event.wait(10) if block else event.query() for event in events):
                self._return(offset)
            else:
                self._waiting.append((offset, events))

    def _return(self, offset: int) -> None:
        size = self._live.pop(offset)
        self._starts.remove(offset)
        self._bytes[offset : offset + size] = _POISON
        merged: list[_Range] = []
        for start, room in sorted([*self._free, (offset, size)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self._free = merged

    def contains(self, address: int) -> bool:
        return self.base <= address < self.base + self.nbytes

    def find(self, offset: int) -> _Range | None:
        """The live allocation around ``offset``."""
        i = bisect_right(self._starts, offset) - 1
        if i < 0 or offset >= self._starts[i] + self._live[self._starts[i]]:
            return None
        return self._starts[i], self._live[self._starts[i]]

    def use(self, offset: int, stream: HostQueue) -> None:
        with self._lock:
            found = self.find(offset)
            if found is not None and found[0] in self._uses:
                self._uses[found[0]].add(stream)

    @property
    def allocated(self) -> int:
        """Bytes of live allocations, those included whose tensors are gone and whose streams are not by yet."""
        return sum(self._live.values())


@dataclass
class SimDevice:
    """One device: its memory, its streams, the host ranges registered with it, and what is to go wrong next."""

    memory: SimMemory
    alias_offset: int = 0
    latency: float = 0.0003
    """Seconds between the moment a swap reaches the head of its stream and the moment its bytes move."""
    single_queue: bool = False
    capturing: bool = False
    """Whether the current stream is being captured into a graph: nothing may be recorded or waited for there."""
    lost: bool = False
    registered: dict[int, Registration] = field(default_factory=dict)
    faults: list[tuple[Fault, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue = HostQueue("ecoffload-sim")
        self._streams: weakref.WeakSet[HostQueue] = weakref.WeakSet([self.queue])
        self._lock = threading.Lock()

    def stream(self) -> HostQueue:
        if self.single_queue:
            return self.queue
        stream = HostQueue("ecoffload-sim-side")
        with self._lock:
            self._streams.add(stream)
        return stream

    def streams(self) -> list[HostQueue]:
        with self._lock:
            return list(self._streams)

    def take_fault(self, kind: Fault, first: int = 0, count: int = 1) -> int | None:
        """Spend a fault of ``kind`` that is due among ``count`` descriptors from ``first``; the index it was for."""
        with self._lock:
            for i, (wanted, index) in enumerate(self.faults):
                if wanted == kind and first <= index < first + count:
                    del self.faults[i]
                    return index
        return None

    def reset(self) -> None:
        """Forget pending faults and a loss."""
        self.faults.clear()
        self.lost = False

    def check_alive(self) -> None:
        if self.lost:
            raise DeviceLost("the simulated device is lost", code=999)

    def resolve(self, address: int, nbytes: int, side: Literal["host", "device"]) -> int:
        """Real address of ``nbytes`` at ``address``. Raises ValueError with the reason a driver would not give."""
        if self.memory.contains(address):
            if side != "device":
                raise ValueError(f"{address:#x} is device memory, and the direction says host")
            offset = address - self.memory.base
            found = self.memory.find(offset)
            if found is None:
                raise ValueError(f"{address:#x} lies in no allocation")
            if offset + nbytes > sum(found):
                raise ValueError(f"{nbytes} bytes at {address:#x} leave their allocation")
            return self.memory.real + offset
        if side != "host":
            raise ValueError(f"{address:#x} is not device memory, and the direction says device")
        for registration in list(self.registered.values()):
            start, end = registration.alias, registration.alias + registration.nbytes
            if start <= address < end:
                if address + nbytes > end:
                    raise ValueError(f"{nbytes} bytes at {address:#x} cross the edge of a registration")
                return registration.address + (address - start)
            begin = registration.address
            if address < begin + registration.nbytes and begin < address + nbytes:
                raise ValueError(f"{address:#x} is the host's address of a registered range; use its alias")
        return address


class SimOps(DeviceOps):
    """Tensors, streams and events of a simulated device."""

    def __init__(self, device: SimDevice) -> None:
        self.device = torch.device("cpu")
        self.sim = device

    def owns(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != "cpu":
            return False
        if not tensor.numel():  # torch gives no address for it, so it may lie anywhere
            return True
        return 0 <= tensor.data_ptr() - self.sim.memory.real < self.sim.memory.nbytes

    def empty(self, nbytes: int, stream: Any = None) -> torch.Tensor:
        sim = self.sim
        return sim.memory.allocate(nbytes, stream or sim.queue, [] if sim.memory._record_stream else sim.streams())

    def address_of(self, tensor: torch.Tensor) -> int:
        if not self.owns(tensor):
            raise ConfigError("the tensor does not lie on this simulated device", option="tensor", value=tensor.shape)
        if not tensor.numel():
            return self.sim.memory.base
        return tensor.data_ptr() - self.sim.memory.real + self.sim.memory.base

    def stream(self) -> HostQueue:
        return self.sim.stream()

    def current_stream(self) -> HostQueue:
        return self.sim.queue

    def event(self) -> HostEvent:
        return HostEvent()

    def is_capturing(self, stream: HostQueue) -> bool:
        return self.sim.capturing

    def _check_capture(self, stream: HostQueue) -> None:
        if self.sim.capturing and stream is self.sim.queue:
            raise SwapFailed("the capture of the simulated device's current stream is lost", code=901)

    def record(self, event: HostEvent, stream: HostQueue) -> None:
        self._check_capture(stream)
        stream.record(event)

    def wait(self, stream: HostQueue, event: HostEvent) -> None:
        self._check_capture(stream)
        stream.wait(event)

    def query(self, event: HostEvent) -> bool:
        self.sim.check_alive()
        return event.query()

    def synchronize(self, target: Any = None) -> None:
        if isinstance(target, HostEvent):
            target.wait()
        elif target is not None:
            target.synchronize()
        else:
            for stream in self.sim.streams():
                stream.synchronize()
        self.sim.check_alive()

    def delay(self, stream: HostQueue, ms: float) -> None:
        stream.delay(ms)

    def record_stream(self, tensor: torch.Tensor, stream: HostQueue) -> None:
        self.sim.memory.use(tensor.data_ptr() - self.sim.memory.real, stream)


class SimBackend(SwapBackend):
    """Copies between a simulated device and host memory, as its declaration says: early or late, naming much or little.

    Subclasses state where memory lies. ``_addresses`` and ``_copy`` are the places where seeded faults go.
    """

    base: ClassVar[int]
    memory: ClassVar[int] = 256 << 20
    alias_offset: ClassVar[int] = 0
    from_top: ClassVar[bool] = False

    def __init__(self, spec: BackendSpec, device_index: int = 0, ops: DeviceOps | None = None) -> None:
        capabilities = spec.capabilities
        self.device = SimDevice(
            SimMemory(self.base, self.memory, record_stream=capabilities.needs_record_stream, from_top=self.from_top),
            self.alias_offset,
            single_queue=capabilities.ordering == "single-queue",
        )
        super().__init__(spec, device_index, ops or SimOps(self.device))
        self._counts = {"submits": 0, "descriptors": 0, "bytes": 0}

    def submit(self, batch: BatchView, direction: Direction, stream: Any) -> Completion | None:
        device, capabilities = self.device, self.spec.capabilities
        device.check_alive()
        first, count = batch.first, batch.count
        if device.take_fault("lost", first, count) is not None:
            device.lost = True
            device.check_alive()
        most = self.limits(direction).max_descriptors
        if count == 0 or (most is not None and count > most):
            raise self._failed(f"{count} descriptors in one submit, of 1 to {most} that it takes", None)
        deferred = capabilities.error_scope == "deferred"
        bad = None if deferred else device.take_fault("submit", first, count)
        if bad is not None:
            raise self._failed("asked to fail at submit", bad)
        at = (batch.src, batch.dst, batch.size)
        self._counts["submits"] += 1
        read: Callable[[], list[tuple[int, int, int]]] = partial(self._read, at, count, first, direction)
        if capabilities.snapshots_descriptors and not deferred:
            moves = read()
            read = lambda: moves  # noqa: E731 - what was read at submit
        elif capabilities.snapshots_descriptors:
            words = self._addresses(*(words_at(a, count) for a in at))
            read = partial(self._resolve, words, first, direction)
        work = partial(self._run, read, first, count)
        if capabilities.submission == "blocking":
            work()
            return None
        return QueuedCompletion(stream, work)

    def _run(self, read: Callable[[], list[tuple[int, int, int]]], first: int, count: int) -> None:
        time.sleep(self.device.latency)
        self.device.check_alive()
        moves = read()
        bad = self.device.take_fault("late", first, count)
        if bad is None and self.spec.capabilities.error_scope == "deferred":
            bad = self.device.take_fault("submit", first, count)
        if bad is not None:
            raise self._failed("asked to fail late", bad)
        self._copy(moves)
        self._counts["descriptors"] += count
        self._counts["bytes"] += sum(n for _, _, n in moves)

    def _read(
        self, at: tuple[int, int, int], count: int, first: int, direction: Direction
    ) -> list[tuple[int, int, int]]:
        return self._resolve(self._addresses(*(words_at(a, count) for a in at)), first, direction)

    def _addresses(self, src: list[int], dst: list[int], size: list[int]) -> list[tuple[int, int, int]]:
        """Descriptors as the device understands them."""
        return list(zip(src, dst, size, strict=True))

    def _resolve(
        self, words: list[tuple[int, int, int]], first: int, direction: Direction
    ) -> list[tuple[int, int, int]]:
        moves = []
        for i, (src, dst, nbytes) in enumerate(words):
            try:
                if nbytes == 0:
                    raise ValueError("its size is 0")
                if direction == "d2h":
                    found = (self.device.resolve(src, nbytes, "device"), self.device.resolve(dst, nbytes, "host"))
                else:
                    found = (self.device.resolve(src, nbytes, "host"), self.device.resolve(dst, nbytes, "device"))
            except ValueError as exc:
                raise self._failed(f"descriptor {first + i}: {exc}", first + i) from exc
            moves.append((*found, nbytes))
        return moves

    def _copy(self, moves: list[tuple[int, int, int]]) -> None:
        for src, dst, nbytes in moves:
            ctypes.memmove(dst, src, nbytes)

    def _failed(self, why: str, index: int | None) -> SwapFailed:
        named = index if self.spec.capabilities.error_scope == "descriptor" else None
        return SwapFailed(f"simulated device {self.spec.name!r}: {why}", index=named, code=1)

    def register(self, address: int, nbytes: int) -> Registration:
        if self.spec.capabilities.host_memory != "register":
            return super().register(address, nbytes)
        device, code = self.device, 0
        if nbytes <= 0:
            code = 1
        elif device.take_fault("register") is not None:
            code = 801
        elif any(r.address < address + nbytes and address < r.address + r.nbytes for r in device.registered.values()):
            code = 712
        if code:
            raise RegistrationRefused(
                f"the simulated device does not register {nbytes} bytes at {address:#x} (code {code})",
                address=address,
                nbytes=nbytes,
                code=code,
            )
        registration = Registration(address, nbytes, address + device.alias_offset)
        device.registered[address] = registration
        return registration

    def unregister(self, registration: Registration) -> None:
        if self.spec.capabilities.host_memory != "register":
            return
        if self.device.registered.pop(registration.address, None) is None:
            raise RegistrationRefused(
                f"{registration.address:#x} is not registered",
                address=registration.address,
                nbytes=registration.nbytes,
                code=713,
            )

    def inject_fault(self, kind: Fault, index: int = 0) -> bool:
        """Make the next call of ``kind`` fail; for swaps, the one that holds global descriptor ``index``."""
        self.device.faults.append((kind, index))
        return True

    def echo(self, kernel: str, table: torch.Tensor) -> list[int]:
        """The addresses that a kernel on this device reads from ``table``: words under its dtype, as 64 bits."""
        self.check_table(kernel, table)
        return [word % 2**64 for word in table.tolist()]

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), **self._counts, "ran_on": "a simulated device"}

    def close(self) -> None:
        for stream in self.device.streams():
            stream.synchronize()
        self.device.registered.clear()


class SimInt64(SimBackend):
    """Addresses as Intel's driver gives them, words read as int64; errors name a descriptor."""

    base = 0xFFFF_D556_B640_0000


class SimUint64(SimBackend):
    """Memory straddling 2**63; reads its descriptors late; host memory has another address on the device."""

    base = 2**63 - 4096  # near its start, so that the first allocation of some size lies on both sides
    alias_offset = 1 << 61


class SimTop(SimBackend):
    """Memory that ends at 2**64; copies block; one queue; errors come late and name nothing."""

    base = 2**64 - SimBackend.memory
    from_top = True


def simulated(name: str, device_index: int = 0) -> SwapBackend:
    """A new simulated device of its own, as the registry would hand it out (which keeps one for each name)."""
    spec = DECLARED[name]
    backend = spec.load_class()(spec, device_index)
    return BlockingBackend(backend) if spec.capabilities.submission == "blocking" else backend


def sim_of(backend: SwapBackend) -> SimBackend:
    """The simulated backend behind ``backend``. Raises :class:`ConfigError` if there is none."""
    inner = getattr(backend, "inner", backend)
    if not isinstance(inner, SimBackend):
        raise ConfigError(f"backend {backend.spec.name!r} is not simulated", option="backend", value=backend.spec.name)
    return inner
