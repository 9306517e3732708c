"""Declaration of the ``xpu`` backend. Imports no torch and no SYCL."""

from __future__ import annotations

from ecoffload.backend import BackendSpec, Capabilities, KernelSpec
from ecoffload.hookspecs import hookimpl
from ecoffload.pointers import PointerEncoding

ECOFFLOAD_HOOK_API = 1

SPEC = BackendSpec(
    name="xpu",
    device_type="xpu",
    # Device USM is sign-extended canonical: its addresses have bit 63 set, and no signed table takes them by value.
    encoding=PointerEncoding.UINT64,
    kernels=(
        KernelSpec(name="queue-memcpy", address_dtype="uint64", size_dtype="uint64", placement="host"),
        KernelSpec(name="swap_blocks_batch", address_dtype="uint64", size_dtype="uint64", placement="host"),
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
    factory="ecoffload_xpu.backend:XpuBackend",
)


@hookimpl
def ecoffload_register_backend() -> BackendSpec:
    return SPEC
