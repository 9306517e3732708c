"""Declaration of the ``cuda`` backend. Imports no torch and no driver."""

from __future__ import annotations

from ecoffload.backend import BackendSpec, Capabilities, KernelSpec
from ecoffload.hookspecs import hookimpl
from ecoffload.pointers import PointerEncoding

ECOFFLOAD_HOOK_API = 1

SPEC = BackendSpec(
    name="cuda",
    device_type="cuda",
    encoding=PointerEncoding.INT64,
    kernels=(
        KernelSpec(name="memcpy-batch", address_dtype="int64", size_dtype="int64", placement="host"),
        KernelSpec(name="gather", address_dtype="int64", size_dtype="int64", placement="device"),
        KernelSpec(name="memcpy", address_dtype="int64", size_dtype="int64", placement="host"),
    ),
    capabilities=Capabilities(
        submission="async",
        host_memory="register",
        ordering="streams",
        error_scope="descriptor",
        snapshots_descriptors=True,
        needs_record_stream=True,
        fork_safe=False,
    ),
    factory="ecoffload_cuda.backend:CudaBackend",
)


@hookimpl
def ecoffload_register_backend() -> BackendSpec:
    return SPEC
