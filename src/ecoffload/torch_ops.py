"""The default :class:`DeviceOps`: memory, streams and events of a device as torch knows them (cuda, xpu, ...)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ecoffload.backend import DeviceOps
from ecoffload.errors import BackendUnavailable

__all__ = ["TorchDeviceOps"]

_TOP = 1 << 64


class TorchDeviceOps(DeviceOps):
    """Streams and events from ``torch.<device_type>``. Raises :class:`BackendUnavailable` if torch lacks the device."""

    def __init__(self, device_type: str, device_index: int = 0) -> None:
        module = getattr(torch, device_type, None)
        if module is None or not hasattr(module, "Stream") or not module.is_available():
            raise BackendUnavailable(
                f"torch {torch.__version__} here has no {device_type!r} device; install a torch build for it",
                name=device_type,
                reason=f"torch has no {device_type} device",
            )
        self.device = torch.device(device_type, device_index)
        self._module = module
        self._index = device_index
        self._ask_capturing: Any = getattr(module, "is_current_stream_capturing", None)

    def owns(self, tensor: torch.Tensor) -> bool:
        device = tensor.device
        return device.type == self.device.type and (device.index or 0) == self._index

    def empty(self, nbytes: int, stream: Any = None) -> torch.Tensor:
        if stream is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        with self._module.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def empty_tensors(
        self, specs: Sequence[tuple[tuple[int, ...], torch.dtype, int]], stream: Any
    ) -> list[torch.Tensor]:
        device = self.device
        with self._module.stream(stream):  # entered once for all: a switch costs more than an allocation
            return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in specs]

    def address_of(self, tensor: torch.Tensor) -> int:
        # torch before 2.6 returned negative ints for Intel XPU's addresses; the words are the same.
        return tensor.data_ptr() % _TOP

    def stream(self) -> Any:
        return self._module.Stream(device=self.device)

    def current_stream(self) -> Any:
        return self._module.current_stream(self.device)

    @functools.cached_property
    def _make_event(self) -> Any:
        return self._module.Event

    def event(self) -> Any:
        return self._make_event()

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def query(self, event: Any) -> bool:
        return bool(event.query())

    def synchronize(self, target: Any = None) -> None:
        if target is None:
            self._module.synchronize(self.device)
        else:
            target.synchronize()

    def is_capturing(self, stream: Any) -> bool:
        if self._ask_capturing is None:
            return False
        if self._module.current_device() == self._index:
            return bool(self._ask_capturing())
        with self._module.device(self._index):
            return bool(self._ask_capturing())

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def delay(self, stream: Any, ms: float) -> None:
        sleep = getattr(self._module, "_sleep", None)
        with self._module.stream(stream):
            if sleep is not None:
                sleep(int(ms * 1.5e6))  # device clocks run at 1 to 2 GHz
                return
            side = torch.empty(1 << 26, dtype=torch.uint8, device=self.device)
            for _ in range(max(1, int(ms * 10))):
                side.add_(1)
