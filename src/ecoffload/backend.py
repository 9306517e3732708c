"""What a backend declares and what it does: the contract between the core and an accelerator's package.

Cold path: a frozen :class:`BackendSpec`, returned by the plugin's one hook, says everything that differs between
devices. Hot path: plain method calls on one :class:`SwapBackend` a device. Authors of backends read this file and
``docs/write-a-backend.md``; the core (registry, submission, worker, conformance kit) calls what is defined here. This
file knows no driver and imports torch never: tensors and streams pass through it as opaque objects.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from math import lcm
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ecoffload.errors import EncodingMismatch, PluginError, RegistrationRefused
from ecoffload.pointers import PointerEncoding

if TYPE_CHECKING:
    import torch

__all__ = [
    "D2H",
    "H2D",
    "Availability",
    "BackendSpec",
    "BatchView",
    "Capabilities",
    "Completed",
    "Completion",
    "DeviceOps",
    "Direction",
    "EventCompletion",
    "KernelSpec",
    "Limits",
    "PointerRange",
    "Registration",
    "SwapBackend",
    "wait_until",
]

Direction = Literal["d2h", "h2d"]
"""Which way a swap moves bytes: device-to-host (a save) or host-to-device (a load)."""

D2H: Direction = "d2h"
H2D: Direction = "h2d"

WordDtype = Literal["int64", "uint64"]


class _Declaration(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KernelSpec(_Declaration):
    """How one copy kernel (or driver call) of a backend reads its tables, and what it can take at once.

    ``address_dtype`` and ``size_dtype`` name the dtype under which the kernel is handed the 64-bit words of addresses
    and sizes; ``placement`` says whether it reads them from host or device memory. ``alignment`` (bytes) holds for
    addresses and sizes, ``min_bytes``/``max_bytes`` for one descriptor, ``max_descriptors`` for one submit (None: no
    known limit).
    """

    name: str
    address_dtype: WordDtype
    size_dtype: WordDtype = "uint64"
    placement: Literal["host", "device"] = "host"
    max_descriptors: int | None = Field(default=None, ge=1)
    alignment: int = Field(default=1, ge=1)
    min_bytes: int = Field(default=1, ge=1)
    max_bytes: int | None = Field(default=None, ge=1)


class Capabilities(_Declaration):
    """What differs between devices, declared instead of guessed; decides what the conformance suite asks.

    * ``submission``: "async" submits return before the bytes have moved; "blocking" ones after (the core then runs
      them on threads of its own, a save and a load at once unless ``ordering`` is "single-queue").
    * ``host_memory``: how host memory becomes DMA-able: "register" ranges, "allocate" it by a means of the backend's
      own (swaps serve that, regions do not: they are mapped files), "unified" with the device's, or "none" (plain
      memory is copied from as it is).
    * ``ordering``: "streams" that events order against each other, or a "single-queue".
    * ``error_scope``: what a failure can name: a "descriptor", the "batch", or "deferred" (only a later call reports).
    * ``snapshots_descriptors``: descriptor arrays are consumed during ``submit``. If False they stay untouched until
      the completion is done.
    * ``needs_record_stream``: tensors used on a side stream must be recorded there, or the allocator reuses them.
    * ``fork_safe``: a forked child may go on using the device.
    """

    submission: Literal["async", "blocking"] = "async"
    host_memory: Literal["register", "allocate", "unified", "none"] = "none"
    ordering: Literal["streams", "single-queue"] = "streams"
    error_scope: Literal["descriptor", "batch", "deferred"] = "batch"
    snapshots_descriptors: bool = False
    needs_record_stream: bool = False
    fork_safe: bool = False


class BackendSpec(_Declaration):
    """The frozen declaration that a plugin's hook returns; reading it initialises no device.

    ``factory`` is "module:Class" of the :class:`SwapBackend`, imported only when the backend is used. ``device_type``
    is torch's name of the device. ``test_only`` backends are never chosen unless named.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")
    device_type: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,63}$")
    encoding: PointerEncoding
    kernels: tuple[KernelSpec, ...] = Field(min_length=1)
    capabilities: Capabilities = Capabilities()
    factory: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    test_only: bool = False

    @field_validator("kernels")
    @classmethod
    def _kernel_names_differ(cls, kernels: tuple[KernelSpec, ...]) -> tuple[KernelSpec, ...]:
        names = [kernel.name for kernel in kernels]
        if len(set(names)) != len(names):
            raise ValueError(f"kernel names must differ, got {names}")
        return kernels

    def load_class(self) -> type[SwapBackend]:
        """Import the backend's class. Raises :class:`PluginError` (cause chained) if that fails or is no backend."""
        module, _, attribute = self.factory.partition(":")
        try:
            cls = getattr(import_module(module), attribute)
        except Exception as exc:
            raise PluginError(
                f"backend {self.name!r}: its class {self.factory!r} could not be imported: {exc}", name=self.name
            ) from exc
        if not (isinstance(cls, type) and issubclass(cls, SwapBackend)):
            raise PluginError(
                f"backend {self.name!r}: {self.factory!r} is {cls!r}, not a subclass of ecoffload.SwapBackend",
                name=self.name,
            )
        return cls


class Availability(NamedTuple):
    """Whether a backend can be used here, and why (not). ``bool()`` of it is ``ok``."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


class Limits(NamedTuple):
    """Of the live device and one direction. None: no known limit. Bytes are per descriptor."""

    max_descriptors: int | None = None
    max_bytes: int | None = None
    alignment: int = 1
    min_bytes: int = 1


class PointerRange(NamedTuple):
    """What a driver knows of an address: the allocation or registration around it, and where that lies."""

    start: int
    nbytes: int
    kind: Literal["host", "device"]
    device: int


@dataclass(frozen=True, slots=True)
class Registration:
    """A host range made DMA-able. ``alias`` is the device's address of it (often ``address`` itself)."""

    address: int
    nbytes: int
    alias: int
    handle: Any = None


class BatchView(Protocol):
    """What a backend sees of a batch, for the duration of one ``submit``.

    ``src``, ``dst`` and ``size`` are addresses (ints) of three contiguous uint64 arrays of ``count`` words in host
    memory. ``first`` is the index of its first descriptor in the caller's batch: errors name global indices.
    """

    @property
    def count(self) -> int: ...
    @property
    def src(self) -> int: ...
    @property
    def dst(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def first(self) -> int: ...


class Completion(ABC):
    """The end of one submitted batch. Each method may raise :class:`SwapFailed` or :class:`DeviceLost`."""

    @abstractmethod
    def done(self) -> bool:
        """True once every byte has arrived; never early. Does not block."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> bool:
        """Block the host until done, at most ``timeout`` seconds. False if the time ran out."""

    @abstractmethod
    def block(self, stream: Any) -> None:
        """Make later work on ``stream`` wait for this; blocks the host only where the device has no other way."""


def wait_until(done: Callable[[], bool], timeout: float) -> bool:
    """Ask ``done`` in growing pauses (20 us to 2 ms), ``timeout`` seconds at most; False if the time ran out. For
    completions of drivers that can wait without a limit only."""
    end = time.monotonic() + timeout
    pause = 20e-6
    while not done():
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * 2, 2e-3)
    return True


class Completed(Completion):
    """Work that had ended when it was handed out (an empty batch, a copy done inline)."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> bool:
        return True

    def block(self, stream: Any) -> None:
        pass


class DeviceOps(ABC):
    """Memory, streams and events of one device, as far as offloading needs them.

    The core reaches a device only through this (it never calls ``data_ptr()`` itself), so that simulated and emulated
    devices can stand in. :class:`ecoffload.torch_ops.TorchDeviceOps` is the default.
    """

    host_ordered: ClassVar[bool] = False
    """True where the caller's own work is ordered by the host alone (a CPU): submits then run inside the call."""

    device: torch.device

    @abstractmethod
    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in this device's memory."""

    @abstractmethod
    def empty(self, nbytes: int, stream: Any = None) -> torch.Tensor:
        """1-D uint8 tensor of ``nbytes`` on the device, allocated for use on ``stream`` (None: the current one)."""

    @abstractmethod
    def address_of(self, tensor: torch.Tensor) -> int:
        """Unsigned 64-bit device address of the tensor's first element."""

    @abstractmethod
    def stream(self) -> Any:
        """A new side stream, ordered against no other."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The stream on which the calling thread's own work is enqueued. Two objects for one stream compare equal."""

    @abstractmethod
    def event(self) -> Any:
        """A new event."""

    @abstractmethod
    def record(self, event: Any, stream: Any) -> None:
        """``event`` happens when all that is enqueued on ``stream`` so far has run."""

    @abstractmethod
    def wait(self, stream: Any, event: Any) -> None:
        """Later work on ``stream`` waits for ``event``."""

    @abstractmethod
    def query(self, event: Any) -> bool:
        """Whether ``event`` has happened. May raise what the device reports."""

    @abstractmethod
    def synchronize(self, target: Any = None) -> None:
        """Block the host for an event, a stream, or (None) the whole device."""

    def order(self, before: Any, after: Any) -> bool:
        """Later work on the stream ``after`` waits for what is on ``before``, the calling thread's current stream, by
        now. False, with nothing done, if ``before`` is being captured into a graph."""
        if self.is_capturing(before):
            return False
        event = self.event()
        self.record(event, before)
        self.wait(after, event)
        return True

    def is_capturing(self, stream: Any) -> bool:
        """Whether ``stream``, the calling thread's current one, is being captured into a graph: then nothing must be
        recorded or waited for there, or the capture is lost. False where a device has no graphs."""
        return False

    @abstractmethod
    def delay(self, stream: Any, ms: float) -> None:
        """Keep ``stream`` busy for about ``ms`` milliseconds. For tests only."""

    def empty_tensors(
        self, specs: Sequence[tuple[tuple[int, ...], torch.dtype, int]], stream: Any
    ) -> list[torch.Tensor]:
        """One tensor of its own for each (shape, dtype, nbytes), allocated for use on ``stream``."""
        return [self.empty(nbytes, stream).view(dtype).reshape(shape) for shape, dtype, nbytes in specs]

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the device, made in order of the current stream."""
        nbytes = tensor.numel() * tensor.element_size()
        (copy,) = self.empty_tensors([(tuple(tensor.shape), tensor.dtype, nbytes)], self.current_stream())
        if tensor.element_size() == 1:  # torch copies bytes of any dtype, but not every dtype of one byte
            import torch

            copy.view(torch.uint8).copy_(tensor.view(torch.uint8))
            return copy
        return copy.copy_(tensor)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:  # noqa: B027 - most devices need nothing
        """Keep ``tensor``'s memory from reuse until what ``stream`` holds now has run."""


class SwapBackend(ABC):
    """One device that copies batches and registers host memory. Subclass it, declare a :class:`BackendSpec`: done.

    The registry constructs it as ``Class(spec, device_index)``. Methods may be called from any thread.
    """

    def __init__(self, spec: BackendSpec, device_index: int = 0, ops: DeviceOps | None = None) -> None:
        self.spec = spec
        self.device_index = device_index
        self.per_copy = os.environ.get("ECOFFLOAD_PER_COPY", "") not in ("", "0")
        """One descriptor a submit, through the plainest copy call: for drivers whose batch call is broken."""
        self._ops = ops

    @property
    def ops(self) -> DeviceOps:
        """Memory and streams of this device; torch's own unless the backend brought another."""
        if self._ops is None:
            if self.spec.device_type == "cpu":  # torch has neither streams nor events for it
                from ecoffload.cpu_ops import CpuOps

                self._ops = CpuOps()
            else:
                from ecoffload.torch_ops import TorchDeviceOps

                self._ops = TorchDeviceOps(self.spec.device_type, self.device_index)
        return self._ops

    @classmethod
    def availability(cls, *, probe: bool = False) -> Availability:
        """Whether it can run here. Without ``probe`` it looks at files and symbols only and initialises no device."""
        return Availability(True, "needs nothing beyond torch")

    def limits(self, direction: Direction) -> Limits:
        """Of the live device; by default those that every declared kernel shares."""
        return self._declared_limits

    @cached_property
    def _declared_limits(self) -> Limits:
        kernels = self.spec.kernels
        counts = [k.max_descriptors for k in kernels if k.max_descriptors is not None]
        sizes = [k.max_bytes for k in kernels if k.max_bytes is not None]
        return Limits(
            min(counts, default=None),
            min(sizes, default=None),
            lcm(*(k.alignment for k in kernels)),
            max(k.min_bytes for k in kernels),
        )

    @abstractmethod
    def submit(self, batch: BatchView, direction: Direction, stream: Any) -> Completion | None:
        """Copy every descriptor of ``batch`` in order of ``stream``; return what tells the end.

        Sizes are above zero and within :meth:`limits`; the core has checked every range against the memory that it
        knows. A "blocking" backend copies inside the call and may return None. Raises :class:`SwapFailed` with the
        global ``index`` where the driver names one; what was enqueued before is unknown then.
        """

    def register(self, address: int, nbytes: int) -> Registration:
        """Make ``nbytes`` host bytes at ``address`` DMA-able. Raises :class:`RegistrationRefused`."""
        if self.spec.capabilities.host_memory in ("unified", "none"):
            return Registration(address, nbytes, address)
        raise RegistrationRefused(
            f"backend {self.spec.name!r} does not register host memory", address=address, nbytes=nbytes, code=None
        )

    has_pointer_query: ClassVar[bool] = False
    """Whether :meth:`pointer_range` asks a driver; without one, addresses that a caller brings cannot be checked."""

    def pointer_range(self, address: int) -> PointerRange | None:
        """The allocation or registration that holds ``address``, or None if the driver knows of none."""
        return None

    def unregister(self, registration: Registration) -> None:  # noqa: B027 - the counterpart of the default register
        """Undo :meth:`register`."""

    def kernel(self, name: str) -> KernelSpec:
        """The declared kernel of that name. Raises :class:`EncodingMismatch` if there is none."""
        for kernel in self.spec.kernels:
            if kernel.name == name:
                return kernel
        raise EncodingMismatch(
            f"backend {self.spec.name!r} declares no kernel {name!r}; it has {[k.name for k in self.spec.kernels]}",
            expected=[k.name for k in self.spec.kernels],
            actual=name,
        )

    def check_table(self, kernel: str, tensor: torch.Tensor, *, sizes: bool = False) -> None:
        """Refuse a table that ``kernel`` would misread.

        ``tensor`` holds 64-bit words of addresses (or of sizes, with ``sizes=True``). Raises
        :class:`EncodingMismatch` naming expected and actual dtype, placement or layout; it never casts.
        """
        spec = self.kernel(kernel)
        what = "sizes" if sizes else "addresses"
        expected = spec.size_dtype if sizes else spec.address_dtype
        actual = str(tensor.dtype).removeprefix("torch.")
        problems: list[tuple[str, str, str]] = []
        if actual != expected:
            problems.append(("dtype", expected, actual))
        # A device's table must lie on this very device: a kernel would read another's address, or none (meta).
        if not (self.ops.owns(tensor) if spec.placement == "device" else tensor.device.type == "cpu"):
            problems.append(("placement", spec.placement, str(tensor.device)))
        if not tensor.is_contiguous():
            problems.append(("layout", "contiguous", f"strides {tuple(tensor.stride())}"))
        if problems:
            field, want, got = problems[0]
            raise EncodingMismatch(
                f"kernel {kernel!r} of backend {self.spec.name!r} reads its table of {what} with {field} {want}, "
                f"got {got}; build it with ecoffload.pointer_table(..., encoding=backend.spec.encoding)",
                expected=want,
                actual=got,
            )

    def stats(self) -> dict[str, Any]:
        """What was chosen and why, as plain data (paths taken, switches, counts)."""
        return {"per_copy": self.per_copy}

    def close(self) -> None:  # noqa: B027 - most backends hold nothing
        """Wait for work in flight and release what this object holds. Idempotent."""


class EventCompletion(Completion):
    """The usual completion of a device with streams: an event recorded behind the copies."""

    __slots__ = ("_event", "_ops")

    def __init__(self, ops: DeviceOps, event: Any) -> None:
        self._ops = ops
        self._event = event

    def done(self) -> bool:
        return self._ops.query(self._event)

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            self._ops.synchronize(self._event)
            return True
        return wait_until(self.done, timeout)

    def block(self, stream: Any) -> None:
        self._ops.wait(stream, self._event)
