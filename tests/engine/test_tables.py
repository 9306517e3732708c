"""A table lies where its kernel reads it, or is refused."""

from __future__ import annotations

import pytest
import torch

from ecoffload import EncodingMismatch, PointerEncoding, pointer_table
from ecoffload.backend import BackendSpec, KernelSpec
from ecoffload.testing.devices import simulated


@pytest.fixture
def device_kernel() -> object:
    backend = simulated("sim-int64")
    kernel = KernelSpec(name="reads-on-device", address_dtype="int64", placement="device")
    backend.spec = BackendSpec(**{**dict(backend.spec), "kernels": (*backend.spec.kernels, kernel)})
    yield backend
    backend.close()


def test_a_table_without_memory_is_refused_for_a_kernel_that_reads_on_the_device(device_kernel: object) -> None:
    with pytest.raises(EncodingMismatch, match="placement device, got meta"):
        device_kernel.check_table("reads-on-device", torch.empty(4, dtype=torch.int64, device="meta"))


def test_a_table_in_host_memory_is_refused_for_a_kernel_that_reads_on_the_device(device_kernel: object) -> None:
    with pytest.raises(EncodingMismatch, match="placement device"):
        device_kernel.check_table("reads-on-device", pointer_table([1, 2], encoding=PointerEncoding.INT64))


def test_a_table_on_the_device_is_taken_by_a_kernel_that_reads_there(device_kernel: object) -> None:
    table = device_kernel.ops.empty(32).view(torch.int64)
    assert device_kernel.check_table("reads-on-device", table) is None
