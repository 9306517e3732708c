"""The ``rocm`` backend: batches through the HIP runtime that torch loaded, and registration of host memory.

One decision, the path: the batched copy with attributes, without them, or copies one by one. It follows from the
runtime's version, is corrected once if the runtime refuses, is said in the log and shown by :meth:`RocmBackend.stats`.
Streams, events and memory are torch's (``ops``); this file copies, registers and words failures.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from typing import Any

from ecoffload.backend import (
    Availability,
    BackendSpec,
    BatchView,
    Completion,
    DeviceOps,
    Direction,
    EventCompletion,
    Limits,
    PointerRange,
    Registration,
    SwapBackend,
)
from ecoffload.drivers import words_at
from ecoffload.errors import (
    BackendUnavailable,
    ConfigError,
    DescriptorError,
    DeviceLost,
    EcoffloadError,
    RegistrationRefused,
    SwapFailed,
)
from ecoffload_rocm.hip import DEVICE_TO_HOST, HOST_TO_DEVICE, NOT_SUPPORTED, Hip, Way, version_text

__all__ = ["RocmBackend"]

_log = logging.getLogger("ecoffload.rocm")

_MOST = 8192  # more in one call faulted on an MI350X with 7.15


class RocmBackend(SwapBackend):
    """Copies and registers on one AMD GPU. Any thread may call it; the thread's current device is left as it was.

    ``ops`` and ``library`` (path of a libamdhip64, also ECOFFLOAD_ROCM_LIBRARY) are for tests with an emulated runtime.
    ``max_descriptors`` (also ECOFFLOAD_ROCM_MAX_BATCH) bounds one batched copy. Raises :class:`BackendUnavailable`
    with a reason that a user can act on.
    """

    def __init__(
        self,
        spec: BackendSpec,
        device_index: int = 0,
        ops: DeviceOps | None = None,
        *,
        library: str | None = None,
        max_descriptors: int | None = None,
    ) -> None:
        super().__init__(spec, device_index, ops)
        if ops is None:
            reason = _not_torchs()
            if reason:
                raise BackendUnavailable(f"backend 'rocm' is unavailable: {reason}", name="rocm", reason=reason)
        self._hip = Hip.open(library)
        self._hip.check_device(device_index)
        self._version = self._hip.version()
        self._most = _max_batch() if max_descriptors is None else max_descriptors
        self._way = self._hip.way(self._version)
        self._lock = threading.Lock()
        self._registered: dict[int, Registration] = {}
        self._counts = {"submits": 0, "batched_copies": 0, "single_copies": 0}
        _log.info("device %d: %s (%s)", device_index, self._path, self._way.why)

    # --- can it run here?

    @classmethod
    def availability(cls, *, probe: bool = False) -> Availability:
        """Without ``probe``: torch's build, the kernel's device file, the library and its functions.

        With ``probe`` the runtime that is found is asked for its devices, whatever else is missing.
        """
        missing = [reason for reason in (_not_torchs(), _no_device_file()) if reason]
        if missing and not probe:
            return Availability(False, "; ".join(missing))  # loading the library would only cost time and memory
        try:
            hip = Hip.open()
            if probe:
                hip.check_device(0)
        except BackendUnavailable as exc:
            return Availability(False, "; ".join([*missing, exc.details["reason"]]))
        return Availability(not missing, "; ".join(missing) or f"HIP runtime {hip.driver.path}")

    # --- copies

    def limits(self, direction: Direction) -> Limits:
        return Limits(None if self.per_copy or self._way.call is None else self._most)

    @property
    def _path(self) -> str:
        if self.per_copy or self._way.call is None:
            return "hipMemcpyAsync"
        return "hipMemcpyBatchAsync" if self._way.attributes else "hipMemcpyBatchAsync without attributes"

    def submit(self, batch: BatchView, direction: Direction, stream: Any) -> Completion:
        """Enqueue on ``stream`` (torch's, or anything with ``cuda_stream``), the default stream included.

        Raises :class:`SwapFailed` with the global index, also while ``stream`` is being captured: the batched copy has
        no place in a graph, and a replay would copy to addresses that are somebody else's by then.
        """
        hip, handle = self._hip, int(stream.cuda_stream)
        if hip.driver.forked:
            raise SwapFailed(
                f"this process was forked after ROCm device {self.device_index} was used, and HIP does not survive a "
                "fork; start workers with the 'spawn' method, or use the device only in the child",
                index=None,
                enqueued=False,
            )
        with hip.on_device(self.device_index):
            if hip.is_capturing(handle):
                raise SwapFailed(
                    "the stream is being captured into a graph, where batched copies have no place; copy on a stream "
                    "of its own, outside the capture",
                    index=None,
                    enqueued=False,
                )
            if self.per_copy or not self._batched(batch, direction, handle):
                self._one_by_one(batch, direction, handle)
            event = self.ops.event()
            self.ops.record(event, stream)
        with self._lock:
            self._counts["submits"] += 1
        return _HipCompletion(self, event)

    def _batched(self, batch: BatchView, direction: Direction, handle: int) -> bool:
        """The batched copy; False if the runtime has none, or turns out not to (then nothing was enqueued)."""
        way, count = self._way, batch.count
        while way.call is not None:
            if count > self._most:
                raise DescriptorError(
                    f"{count} descriptors in one submit, and this runtime takes {self._most} (more have ended "
                    "processes); submit through ecoffload, which cuts batches, or set ECOFFLOAD_ROCM_MAX_BATCH",
                    index=batch.first + self._most,
                )
            result = way.call(batch.dst, batch.src, batch.size, count, handle)
            if result.code == 0:
                with self._lock:
                    self._counts["batched_copies"] += count
                return True
            if result.code != NOT_SUPPORTED:
                raise self._failed(result.code, "hipMemcpyBatchAsync", batch, direction, result.failed)
            self._hip.driver.forget_error()
            way = self._refused(way)
        return False

    def _refused(self, way: Way) -> Way:
        """The way to go from here on, found and said once, whichever thread met the refusal first."""
        with self._lock:
            if self._way is way:
                self._way = self._hip.next_way(way, self._version)
                _log.warning("%s; from here on: %s", self._way.why, self._path)
            return self._way

    def _one_by_one(self, batch: BatchView, direction: Direction, handle: int) -> None:
        kind = HOST_TO_DEVICE if direction == "h2d" else DEVICE_TO_HOST  # stated by the caller, so never guessed
        copy, count = self._hip.memcpy_async, batch.count
        words = zip(*(words_at(at, count) for at in (batch.dst, batch.src, batch.size)), strict=True)
        for i, (dst, src, size) in enumerate(words):
            code = copy(dst, src, size, kind, handle)
            if code:
                raise self._failed(code, "hipMemcpyAsync", batch, direction, i)
        with self._lock:
            self._counts["single_copies"] += count

    def _failed(self, code: int, call: str, batch: BatchView, direction: Direction, at: int | None) -> EcoffloadError:
        which, index = f"a batch of {batch.count} (which one is not said)", None
        if at is not None:
            index = batch.first + at
            src, dst, size = (words_at(column + 8 * at, 1)[0] for column in (batch.src, batch.dst, batch.size))
            which = f"descriptor {index} (source {src:#x}, destination {dst:#x}, {size} bytes)"
        return self._hip.driver.error(
            code,
            f"{call} on device {self.device_index}, {direction}, refused {which}; earlier descriptors may be under way",
            index=index,
        )

    # --- host memory

    def register(self, address: int, nbytes: int) -> Registration:
        """``alias`` is the device's address of the range, for kernels; copies take either.

        Overlapping an earlier registration is refused here, because HIP takes it in silence.
        """
        hip = self._hip
        with self._lock, hip.on_device(self.device_index):
            for other in self._registered.values():
                if address < other.address + other.nbytes and other.address < address + nbytes:
                    raise RegistrationRefused(
                        f"{nbytes} bytes at {address:#x} overlap {other.nbytes} bytes at {other.address:#x} that are "
                        "registered already; unregister those first",
                        address=address,
                        nbytes=nbytes,
                        code=None,
                    )
            what = f"registering {nbytes} bytes at {address:#x}"
            code = hip.register(address, nbytes)
            if code:
                hint = _registration_hint(nbytes)
                raise hip.driver.error(code, f"{what}{hint}", RegistrationRefused, address=address, nbytes=nbytes)
            code, alias = hip.host_alias(address)
            if code:
                hip.unregister(address)
                raise hip.driver.error(
                    code, f"{what}: it has no device address", RegistrationRefused, address=address, nbytes=nbytes
                )
            registration = Registration(address, nbytes, alias)
            self._registered[address] = registration
            return registration

    def unregister(self, registration: Registration) -> None:
        """Raises :class:`RegistrationRefused` for a range that is not registered (any more)."""
        address, nbytes = registration.address, registration.nbytes
        with self._lock:
            if self._registered.pop(address, None) is None:
                raise RegistrationRefused(
                    f"{nbytes} bytes at {address:#x} are not registered", address=address, nbytes=nbytes, code=None
                )
        with self._hip.on_device(self.device_index):
            self._hip.driver.check(
                self._hip.unregister(address),
                f"unregistering {nbytes} bytes at {address:#x}",
                RegistrationRefused,
                address=address,
                nbytes=nbytes,
            )

    has_pointer_query = True

    def pointer_range(self, address: int) -> PointerRange | None:
        """The allocation or registration that holds ``address``, as the runtime knows it; None: nobody's, or plain."""
        with self._hip.on_device(self.device_index):
            return self._hip.pointer_range(address, self._version)

    # --- state

    def stats(self) -> dict[str, Any]:
        why = "ECOFFLOAD_PER_COPY is set" if self.per_copy else self._way.why
        with self._lock:
            counts, registered = dict(self._counts), sum(r.nbytes for r in self._registered.values())
        return {
            **super().stats(),
            "path": self._path,
            "reason": why,
            "library": self._hip.driver.path,
            "runtime": version_text(self._version),
            "max_descriptors": self._most,
            "registered_bytes": registered,
            **counts,
        }

    def close(self) -> None:
        """Wait for the device and unregister what is left; the first failure is raised once all was tried.

        In a process that was forked from the user's it does nothing.
        """
        if self._hip.driver.forked:
            return
        with self._lock:
            left = list(self._registered.values())
            used = bool(left) or self._counts["submits"] > 0
        failure: EcoffloadError | None = None
        try:
            if used:
                self.ops.synchronize()
        finally:
            for registration in reversed(left):
                try:
                    self.unregister(registration)
                except EcoffloadError as exc:
                    failure = failure or exc
        if failure is not None:
            raise failure


class _HipCompletion(EventCompletion):
    """An event behind the copies. What torch raises for it is a device that is lost; asking ruins no capture."""

    __slots__ = ("_backend",)

    def __init__(self, backend: RocmBackend, event: Any) -> None:
        super().__init__(backend.ops, event)
        self._backend = backend

    def done(self) -> bool:
        return bool(self._asked(super().done))

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self._asked(super().wait, timeout))

    def block(self, stream: Any) -> None:
        self._asked(super().block, stream)

    def _asked(self, ask: Any, *arguments: Any) -> Any:
        backend = self._backend
        try:
            with backend._hip.driver.relaxed_capture():
                return ask(*arguments)
        except EcoffloadError:
            raise
        except RuntimeError as exc:  # torch's own; the runtime's errors of finished work stay until the process ends
            raise DeviceLost(f"ROCm device {backend.device_index} failed while a batch was copied: {exc}") from exc


# --- reasons


def _not_torchs() -> str:
    """Why torch here cannot use AMD GPUs, or ""."""
    import torch

    if torch.version.hip is not None:
        return ""
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    return (
        f"torch {torch.__version__} is built for {built}, not for ROCm; install the ROCm build "
        "(https://pytorch.org/get-started/locally)"
    )


def _no_device_file() -> str:
    """Why there can be no AMD GPU, or "". /dev/dxg is WSL's."""
    if os.path.exists("/dev/kfd") or os.path.exists("/dev/dxg"):
        return ""
    return (
        "no AMD GPU driver: /dev/kfd is not there; load amdgpu, or start the container with "
        "--device /dev/kfd --device /dev/dri"
    )


def _max_batch() -> int:
    text = os.environ.get("ECOFFLOAD_ROCM_MAX_BATCH", "")
    if not text:
        return _MOST
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"ECOFFLOAD_ROCM_MAX_BATCH is {text!r}; give the most descriptors of one batched copy, a number from 1",
            option="ECOFFLOAD_ROCM_MAX_BATCH",
            value=text,
        )
    return int(text)


def _registration_hint(nbytes: int) -> str:
    """What usually stands behind a refusal, as far as it can be seen from here."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and limit < nbytes:
        return f" (the memlock limit is {limit} bytes: raise it, ulimit -l unlimited)"
    return " (where pinning is not supported at all, as in confidential virtual machines, leave registration off)"
