"""torch's memory, streams and events, with two things that a copy beside an engine's compute needs."""

from __future__ import annotations

from typing import Any

import torch

from ecoffload.torch_ops import TorchDeviceOps
from ecoffload_cuda.driver import Cuda

__all__ = ["CudaDeviceOps"]


class CudaDeviceOps(TorchDeviceOps):
    """Side streams of high priority, and event queries that leave other threads' graph captures alone.

    Priority: a gather kernel needs two multiprocessors, and on a stream of normal priority it would wait until every
    block of the compute kernel in front of it has been handed out.
    """

    def __init__(self, cuda: Cuda, device_index: int) -> None:
        super().__init__("cuda", device_index)
        self._cuda = cuda

    def stream(self) -> Any:
        module: Any = torch.cuda
        return module.Stream(self.device, priority=min(module.Stream.priority_range()))

    def query(self, event: Any) -> bool:
        with self._cuda.relaxed():
            return bool(event.query())
