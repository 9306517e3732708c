"""One device under test: buffers, batches and waits, the way the core itself makes them.

Between the conformance suite (and authors' own tests) and a backend: memory is reached through ``backend.ops`` alone,
host buffers are registered where the backend asks for it, every wait has a limit. Knows no particular device.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import lcm
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import pytest

from ecoffload.backend import Completion, Direction, KernelSpec, Limits, Registration, SwapBackend
from ecoffload.descriptors import AddressRanges, DescriptorPool
from ecoffload.host_queue import BlockingBackend
from ecoffload.registry import get_backend
from ecoffload.submission import submit_batch

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["DeviceUnderTest", "HostBuffer", "asked", "random_bytes"]

PAGE = mmap.PAGESIZE
_F = TypeVar("_F", bound=Callable[..., Any])


def asked(id: str, *, since: int = 1, when: Callable[[DeviceUnderTest], str] | None = None) -> Callable[[_F], _F]:
    """Mark a conformance test.

    ``id`` is "group.name" and never changes; ``since`` is the suite version that brought it; ``when`` looks at the
    device and answers why the test cannot be asked of it, or "".
    """
    mark: Callable[[_F], _F] = pytest.mark.conformance(id=id, since=since, when=when)
    return mark


def random_bytes(nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    """Reproducible bytes without a period, so that a copy from a wrong place shows."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class HostBuffer:
    """Page-aligned host memory, registered where the backend registers.

    ``array`` is what the host sees (uint8), ``address`` where the host sees it, ``alias`` what a descriptor must name.
    The memory of buffers that are gone is kept for later ones: a backend that still writes there must fail, not crash.
    """

    _kept: ClassVar[dict[int, list[mmap.mmap]]] = {}

    def __init__(self, backend: SwapBackend, nbytes: int, *, register: bool = True) -> None:
        self.nbytes = nbytes
        size = max(PAGE, -(-nbytes // PAGE) * PAGE)
        kept = self._kept.setdefault(size, [])
        self._map = kept.pop() if kept else mmap.mmap(-1, size)
        weakref.finalize(self, kept.append, self._map).atexit = False
        whole = np.frombuffer(self._map, dtype=np.uint8)
        self.array: NDArray[np.uint8] = whole[:nbytes]
        self.address: int = whole.ctypes.data
        self._backend = backend
        self.registration: Registration | None = backend.register(self.address, len(self._map)) if register else None
        self.alias = self.registration.alias if self.registration is not None else self.address

    def close(self) -> None:
        registration, self.registration = self.registration, None
        if registration is not None:
            self._backend.unregister(registration)


class DeviceUnderTest:
    """A backend with what a test needs around it. Made by :meth:`named`; ``budget`` is the share of the usual work."""

    def __init__(self, backend: SwapBackend, *, budget: float = 1.0) -> None:
        self.backend = backend
        self.ops = backend.ops
        self.spec = backend.spec
        self.capabilities = backend.spec.capabilities
        self.pool = DescriptorPool()
        self.limit_s = 30.0 / min(1.0, budget)
        """Seconds after which something that must end is taken for hung."""
        self.delay_ms = 60.0
        """How long a held-back stream is held back: far above a submit's own time, short enough for many tests."""
        shapes: list[Limits | KernelSpec] = [backend.limits("d2h"), backend.limits("h2d"), *self.spec.kernels]
        self.alignment = lcm(*(each.alignment for each in shapes), *(each.min_bytes for each in shapes))
        self.side = self.ops.stream()
        """The stream that swaps run on unless a test names another."""
        self._scratch: Any = None

    @classmethod
    def named(cls, name: str, *, budget: float = 1.0) -> DeviceUnderTest:
        """The backend that users get under that name. Raises what :func:`ecoffload.get_backend` raises."""
        backend = get_backend(name)
        return cls(backend, budget=budget)

    @property
    def inner(self) -> SwapBackend:
        """The author's own object, where the core wrapped it."""
        return getattr(self.backend, "inner", self.backend)

    def fresh(self) -> DeviceUnderTest:
        """Another object of the same backend and device, for tests that close or break it."""
        backend: SwapBackend = self.spec.load_class()(self.spec, self.backend.device_index)
        if self.capabilities.submission == "blocking":
            backend = BlockingBackend(backend)
        other = DeviceUnderTest(backend)
        other.limit_s = self.limit_s
        return other

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.host.close()
            self._scratch = None

    # --- memory

    def aligned(self, nbytes: int) -> int:
        """``nbytes`` rounded up to what the backend's kernels can copy."""
        return -(-nbytes // self.alignment) * self.alignment

    @contextmanager
    def host(self, nbytes: int, fill: NDArray[np.uint8] | int | None = None) -> Iterator[HostBuffer]:
        """Host memory for a test. Nothing that copies to or from it may be in flight at the end."""
        buffer = HostBuffer(self.backend, nbytes, register=self.capabilities.host_memory == "register")
        if fill is not None:
            buffer.array[:] = fill
        try:
            yield buffer
        finally:
            buffer.close()

    def tensor(self, nbytes: int, fill: NDArray[np.uint8] | int | None = None) -> torch.Tensor:
        """A uint8 tensor on the device, filled and synchronised."""
        tensor = self.ops.empty(nbytes)
        if fill is not None:
            data = fill if isinstance(fill, np.ndarray) else np.full(nbytes, fill, np.uint8)
            self.write(tensor, data)
        return tensor

    def write(self, tensor: torch.Tensor, data: NDArray[np.uint8]) -> None:
        """Fill a device tensor by torch, not by the backend under test."""
        import torch

        tensor.copy_(torch.from_numpy(np.array(data)))
        self.ops.synchronize(self.ops.current_stream())

    def read(self, tensor: torch.Tensor) -> NDArray[np.uint8]:
        """A device tensor's bytes, by torch, after everything on the device has run."""
        self.ops.synchronize()
        return np.array(tensor.cpu().numpy())

    def address(self, tensor: torch.Tensor) -> int:
        return self.ops.address_of(tensor)

    @property
    def scratch(self) -> Any:
        """``host`` and ``tensor`` of 256 KiB that last for the session: property tests cannot make their own."""
        if self._scratch is None:
            nbytes = 256 << 10
            register = self.capabilities.host_memory == "register"
            self._scratch = SimpleNamespace(
                nbytes=nbytes, host=HostBuffer(self.backend, nbytes, register=register), tensor=self.tensor(nbytes, 0)
            )
        return self._scratch

    # --- swaps

    def submit(
        self,
        direction: Direction,
        descriptors: Iterable[tuple[int, int, int]],
        stream: Any = None,
        *,
        sources: AddressRanges | None = None,
        destinations: AddressRanges | None = None,
    ) -> Completion:
        """(source, destination, size) triples through the core's way in, on ``stream`` (None: :attr:`side`)."""
        batch = self.pool.lease()
        for src, dst, size in descriptors:
            batch.append(src, dst, size)
        stream = self.side if stream is None else stream
        return submit_batch(self.backend, batch, direction, stream, sources=sources, destinations=destinations)

    def finish(self, completion: Completion) -> None:
        """Wait for the end; a swap that does not end in time fails the test."""
        if not completion.wait(self.limit_s):
            pytest.fail(f"the swap had not ended after {self.limit_s:.0f} s")

    def swap(self, direction: Direction, descriptors: Iterable[tuple[int, int, int]], stream: Any = None) -> None:
        """Submit and wait."""
        self.finish(self.submit(direction, descriptors, stream))

    def save(self, tensor: torch.Tensor, host: HostBuffer, nbytes: int | None = None, stream: Any = None) -> Completion:
        """One descriptor from the start of ``tensor`` to the start of ``host``; keep both until it has ended."""
        size = host.nbytes if nbytes is None else nbytes
        return self.submit("d2h", [(self.address(tensor), host.alias, size)], stream)

    def load(self, host: HostBuffer, tensor: torch.Tensor, nbytes: int | None = None, stream: Any = None) -> Completion:
        """One descriptor from the start of ``host`` to the start of ``tensor``; keep both until it has ended."""
        size = host.nbytes if nbytes is None else nbytes
        return self.submit("h2d", [(host.alias, self.address(tensor), size)], stream)

    def hold(self, stream: Any) -> None:
        """Keep ``stream`` from running what is enqueued next, for :attr:`delay_ms`."""
        self.ops.delay(stream, self.delay_ms)

    def attempts(self) -> Iterator[None]:
        """Three tries with delays that grow, for what only shows while a stream is held back.

        On a busy machine the host can lose a whole delay between two lines; a backend that is at fault loses all three.
        """
        usual = self.delay_ms
        try:
            for factor in (1, 4, 16):
                self.delay_ms = usual * factor
                yield
        finally:
            self.delay_ms = usual

    def after(self, stream: Any, earlier: Any) -> None:
        """Later work on ``stream`` waits for what ``earlier`` holds now."""
        event = self.ops.event()
        self.ops.record(event, earlier)
        self.ops.wait(stream, event)

    # --- faults

    def inject(self, kind: str, index: int = 0) -> bool:
        """Arm a fault, where the backend (or its emulated driver) offers ``inject_fault(kind, index)``."""
        offered = getattr(self.inner, "inject_fault", None)
        return offered is not None and bool(offered(kind, index))
