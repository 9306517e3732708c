"""Declaration of the ``rocm`` backend. Imports no torch and no HIP."""

from __future__ import annotations

from ecoffload.backend import BackendSpec, Capabilities, KernelSpec
from ecoffload.hookspecs import hookimpl
from ecoffload.pointers import PointerEncoding

ECOFFLOAD_HOOK_API = 1

SPEC = BackendSpec(
    name="rocm",
    device_type="cuda",  # torch's name for HIP devices; torch.version.hip tells them from NVIDIA's
    encoding=PointerEncoding.INT64,
    kernels=(
        KernelSpec(name="hipMemcpyBatchAsync", address_dtype="int64", max_descriptors=8192),
        KernelSpec(name="hipMemcpyAsync", address_dtype="int64"),
    ),
    capabilities=Capabilities(
        submission="async",
        host_memory="register",
        ordering="streams",
        error_scope="descriptor",
        # Up to 7.12 the call is a loop over the arrays; newer ones are taken to read them during the call as CUDA's
        # does, which nobody has promised or measured: so they are left alone until the copies have ended.
        snapshots_descriptors=False,
        needs_record_stream=True,
        fork_safe=False,
    ),
    factory="ecoffload_rocm.backend:RocmBackend",
)


@hookimpl
def ecoffload_register_backend() -> BackendSpec:
    return SPEC
