"""What ecoffload finds through the entry point: a number and one hook. Imports no driver."""

from ecoffload import BackendSpec, Capabilities, KernelSpec, PointerEncoding, hookimpl

ECOFFLOAD_HOOK_API = 1


@hookimpl
def ecoffload_register_backend() -> BackendSpec:
    return BackendSpec(
        name="toy",
        device_type="cpu",
        encoding=PointerEncoding.UINT64,
        kernels=(KernelSpec(name="memmove", address_dtype="uint64", max_descriptors=1000),),
        capabilities=Capabilities(submission="blocking", host_memory="none", ordering="streams", fork_safe=True),
        factory="ecoffload_toy.backend:ToyBackend",
        test_only=True,  # a toy is never chosen unless it is named
    )
