"""The last way: ``swap_blocks_batch`` of vllm-xpu-kernels, a torch operator that enqueues a whole batch.

The backend takes it where neither the shim nor dpctl can be used. The operator looks at pointers itself: it stages
plain sources, blocks for plain destinations, and uses no registered memory.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ecoffload.backend import BatchView, Completion, DeviceOps, EventCompletion
from ecoffload.drivers import loaded_libraries
from ecoffload.errors import BackendUnavailable, SwapFailed
from ecoffload_xpu.ways import words

__all__ = ["Operator"]


class Operator:
    """``torch.ops._C_cache_ops.swap_blocks_batch`` as vllm-xpu-kernels registers it."""

    def __init__(self) -> None:
        """Raises :class:`BackendUnavailable` if it is not installed, too old, or brings a second SYCL runtime."""
        import torch

        try:
            import_module("vllm_xpu_kernels._C")
        except ImportError as exc:
            raise _unavailable(f"vllm-xpu-kernels cannot be imported ({exc})") from exc
        try:
            self._swap: Callable[..., Any] = torch.ops._C_cache_ops.swap_blocks_batch
        except AttributeError as exc:
            raise _unavailable("vllm-xpu-kernels has no swap_blocks_batch; upgrade it") from exc
        runtimes = loaded_libraries("libsycl")
        if len(runtimes) > 1:
            raise _unavailable(f"vllm-xpu-kernels brought a second SYCL runtime: {', '.join(runtimes)}")

    def submit(self, batch: BatchView, ops: DeviceOps, device_index: int, stream: Any) -> Completion:
        """Enqueue on ``stream`` of that device; both are made current, since the operator takes the current ones.

        Its three tables are uint64 tensors on the host. Raises :class:`SwapFailed`.
        """
        import torch

        tables = [torch.from_numpy(words(at, batch.count)) for at in (batch.src, batch.dst, batch.size)]
        event = ops.event()
        with torch.xpu.device(device_index), torch.xpu.stream(stream):
            try:
                self._swap(*tables)
            except Exception as exc:
                raise SwapFailed(
                    f"vllm-xpu-kernels' swap_blocks_batch failed on {batch.count} descriptors: {exc}", index=None
                ) from exc
            ops.record(event, stream)
        return EventCompletion(ops, event)


def _unavailable(reason: str) -> BackendUnavailable:
    return BackendUnavailable(f"backend 'xpu' is unavailable: {reason}", name="xpu", reason=reason)
