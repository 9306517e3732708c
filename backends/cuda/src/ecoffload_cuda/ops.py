"""torch's memory, streams and events, with what a copy beside an engine's compute needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ecoffload.torch_ops import TorchDeviceOps
from ecoffload_cuda.driver import Cuda

__all__ = ["CudaDeviceOps"]


class CudaDeviceOps(TorchDeviceOps):
    """Side streams of high priority, event queries that leave other threads' graph captures alone, quicker look-ups.

    Priority: a gather kernel needs two multiprocessors, and on a stream of normal priority it would wait until every
    block of the compute kernel in front of it has been handed out.
    """

    def __init__(self, cuda: Cuda, device_index: int) -> None:
        super().__init__("cuda", device_index)
        self._cuda = cuda
        # torch makes a new object for each question about the current stream (9 us where caches are cold); the raw
        # handle comes for a twentieth of that, and a handle names one stream for as long as it is current.
        self._handle: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._streams: dict[int, Any] = {}

    def stream(self) -> Any:
        module: Any = torch.cuda
        return module.Stream(self.device, priority=min(module.Stream.priority_range()))

    def current_stream(self) -> Any:
        if self._handle is None:
            return super().current_stream()
        raw = self._handle(self._index)
        found = self._streams.get(raw)
        if found is None:
            found = self._streams[raw] = super().current_stream()
        return found

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and tensor.get_device() == self._index

    def empty_tensors(
        self, specs: Sequence[tuple[tuple[int, ...], torch.dtype, int]], stream: Any
    ) -> list[torch.Tensor]:
        if torch.cuda.current_device() != self._index:  # switching streams would switch devices too
            return super().empty_tensors(specs, stream)
        device, before = self.device, self.current_stream()
        torch.cuda.set_stream(stream)
        try:
            return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in specs]
        finally:
            torch.cuda.set_stream(before)

    def query(self, event: Any) -> bool:
        with self._cuda.relaxed():
            return bool(event.query())
