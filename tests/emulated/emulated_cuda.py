"""``ecoffload-cuda`` on the emulated driver, for the conformance suite; see ``emulated_backends``.

Kernels are not emulated: what runs here are the copy engine's batched call and copies one by one.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ecoffload_cuda.backend import CudaBackend
from ecoffload_cuda.plugin import SPEC as CUDA
from emulated_backends import Plugin, inject
from emulated_drivers import HIGH, LOW, EmulatedDeviceOps, load

from ecoffload.backend import Availability, BackendSpec

ECOFFLOAD_HOOK_API = 1


class EmulatedCuda(CudaBackend):
    """``ecoffload-cuda`` on an emulated driver; subclasses say which."""

    knobs: ClassVar[dict[str, int]] = {}

    def __init__(self, spec: BackendSpec, device_index: int = 0) -> None:
        self.emulated = load("cuda", **self.knobs)
        ops = EmulatedDeviceOps(self.emulated, device_index)
        super().__init__(spec, device_index, ops, library=self.emulated.path)

    @classmethod
    def availability(cls, *, probe: bool = False) -> Availability:
        return Availability(True, "emulated")

    def inject_fault(self, kind: str, index: int = 0) -> bool:
        return inject(self.emulated, kind, index)

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "ran_on": "an emulated CUDA driver"}


class CudaLow(EmulatedCuda):
    """Driver for CUDA 13.0, registered host memory under another address."""

    knobs: ClassVar = {"base": LOW, "alias_offset": 1 << 46}


class CudaHigh(EmulatedCuda):
    """Driver for CUDA 13.0, device memory above 2**63."""

    knobs: ClassVar = {"base": HIGH}


class CudaCopies(EmulatedCuda):
    """Driver for CUDA 12.4: no batched copy."""

    knobs: ClassVar = {"base": LOW, "version": 12040}


cuda_low = Plugin("cuda-low", CUDA, CudaLow)
cuda_high = Plugin("cuda-high", CUDA, CudaHigh)
cuda_copies = Plugin("cuda-copies", CUDA, CudaCopies)
