"""The default :class:`DeviceOps` where torch's device is the CPU, which has neither streams nor events of torch's."""

from __future__ import annotations

from typing import Any

import torch

from ecoffload.backend import DeviceOps
from ecoffload.host_queue import CALLER, Caller, HostEvent, HostQueue

__all__ = ["CpuOps"]


class CpuOps(DeviceOps):
    """Torch CPU tensors; streams are queues with a thread each, the current stream is the calling thread."""

    host_ordered = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def empty(self, nbytes: int, stream: Any = None) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def empty_tensors(self, specs: Any, stream: Any) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype) for shape, dtype, _ in specs]

    def address_of(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def stream(self) -> HostQueue:
        return HostQueue("ecoffload-cpu")

    def current_stream(self) -> Caller:
        return CALLER

    def event(self) -> HostEvent:
        return HostEvent()

    def record(self, event: HostEvent, stream: HostQueue | Caller) -> None:
        stream.record(event)

    def wait(self, stream: HostQueue | Caller, event: HostEvent) -> None:
        stream.wait(event)

    def query(self, event: HostEvent) -> bool:
        return event.query()

    def synchronize(self, target: Any = None) -> None:
        if isinstance(target, HostEvent):
            target.wait()
        elif target is not None:
            target.synchronize()

    def delay(self, stream: HostQueue | Caller, ms: float) -> None:
        stream.delay(ms)
