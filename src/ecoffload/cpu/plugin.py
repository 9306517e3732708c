"""Declaration of the ``cpu`` backend."""

from __future__ import annotations

from ecoffload.backend import BackendSpec, Capabilities, KernelSpec
from ecoffload.hookspecs import hookimpl
from ecoffload.pointers import PointerEncoding

ECOFFLOAD_HOOK_API = 1


@hookimpl
def ecoffload_register_backend() -> BackendSpec:
    return BackendSpec(
        name="cpu",
        device_type="cpu",
        encoding=PointerEncoding.INT64,
        kernels=(
            KernelSpec(name="memmove", address_dtype="int64", size_dtype="int64"),
            KernelSpec(name="rows", address_dtype="int64", size_dtype="int64"),
        ),
        capabilities=Capabilities(
            submission="async",
            host_memory="none",
            ordering="streams",
            error_scope="batch",
            snapshots_descriptors=False,
            fork_safe=True,
        ),
        factory="ecoffload.cpu.backend:CpuBackend",
    )
