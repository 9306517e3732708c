"""The backend on the real SYCL runtime's CPU device, through each way that runtime offers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from ecoffload_xpu.backend import WAY_VARIABLE, XpuBackend
from ecoffload_xpu.plugin import SPEC
from ecoffload_xpu.sycl_cpu import SyclCpuOps


@pytest.fixture(scope="session")
def ops() -> SyclCpuOps:
    return SyclCpuOps()


@pytest.fixture(params=["shim", "dpctl"])
def backend(request: pytest.FixtureRequest, ops: SyclCpuOps, monkeypatch) -> Iterator[XpuBackend]:
    monkeypatch.setenv(WAY_VARIABLE, request.param)
    made = XpuBackend(SPEC, 0, ops)
    yield made
    made.close()


class Rig:
    """Device memory and both kinds of host memory of one size, and batches between them."""

    def __init__(self, backend: XpuBackend, ops: SyclCpuOps, nbytes: int) -> None:
        import dpctl.memory

        self.backend, self.ops, self.nbytes = backend, ops, nbytes
        self.stream = ops.stream()
        self.device = ops.empty(nbytes, self.stream)
        self._usm = dpctl.memory.MemoryUSMHost(nbytes, alignment=64, queue=self.stream.queue)
        self.usm = torch.frombuffer(memoryview(self._usm), dtype=torch.uint8)
        self.plain = torch.zeros(nbytes, dtype=torch.uint8)

    def rows(self, source: torch.Tensor, target: torch.Tensor, cuts: list[tuple[int, int, int]] | None = None):
        """(source offset, destination offset, bytes) as a batch's rows; without cuts all bytes at once."""
        a, b = source.data_ptr(), target.data_ptr()
        return [(a + s, b + d, n) for s, d, n in cuts or [(0, 0, self.nbytes)]]

    def settle(self) -> None:
        self.stream.synchronize()


@pytest.fixture
def rig(backend, ops) -> Iterator[Rig]:
    made = Rig(backend, ops, 1 << 16)
    yield made
    made.settle()


@pytest.fixture
def noise() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(5).integers(1, 255, 1 << 16, dtype=np.uint8))
