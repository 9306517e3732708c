"""Declarations of the simulated devices, and the plugins that hand them to the registry. Imports no torch.

Between the three, every value of every capability occurs that the core treats differently.
"""

from __future__ import annotations

from ecoffload.backend import BackendSpec, Capabilities, KernelSpec
from ecoffload.hookspecs import hookimpl
from ecoffload.pointers import PointerEncoding

__all__ = ["DECLARED", "sim_int64", "sim_top", "sim_uint64"]

ECOFFLOAD_HOOK_API = 1

DECLARED = {
    spec.name: spec
    for spec in (
        BackendSpec(
            name="sim-int64",
            device_type="sim-int64",
            encoding=PointerEncoding(dtype="int64", canonical="sign-extended", address_bits=48),
            kernels=(
                KernelSpec(name="copy", address_dtype="int64", size_dtype="int64", max_descriptors=100),
                KernelSpec(name="gather", address_dtype="int64", size_dtype="int64", placement="device"),
            ),
            capabilities=Capabilities(
                submission="async",
                host_memory="register",
                ordering="streams",
                error_scope="descriptor",
                snapshots_descriptors=True,
                needs_record_stream=True,
            ),
            factory="ecoffload.testing.devices:SimInt64",
            test_only=True,
        ),
        BackendSpec(
            name="sim-uint64",
            device_type="sim-uint64",
            encoding=PointerEncoding.UINT64,
            kernels=(KernelSpec(name="copy", address_dtype="uint64", max_descriptors=37, max_bytes=3 << 20),),
            capabilities=Capabilities(
                submission="async",
                host_memory="register",
                ordering="streams",
                error_scope="batch",
                snapshots_descriptors=False,
                needs_record_stream=False,
            ),
            factory="ecoffload.testing.devices:SimUint64",
            test_only=True,
        ),
        BackendSpec(
            name="sim-top",
            device_type="sim-top",
            encoding=PointerEncoding.UINT64,
            kernels=(
                KernelSpec(name="copy", address_dtype="uint64"),
                KernelSpec(name="gather", address_dtype="uint64", placement="device"),
            ),
            capabilities=Capabilities(
                submission="blocking",
                host_memory="none",
                ordering="single-queue",
                error_scope="deferred",
                snapshots_descriptors=False,
                needs_record_stream=False,
            ),
            factory="ecoffload.testing.devices:SimTop",
            test_only=True,
        ),
    )
}


class _Plugin:
    def __init__(self, name: str) -> None:
        self._spec = DECLARED[name]

    @hookimpl
    def ecoffload_register_backend(self) -> BackendSpec:
        return self._spec


sim_int64 = _Plugin("sim-int64")
sim_uint64 = _Plugin("sim-uint64")
sim_top = _Plugin("sim-top")
