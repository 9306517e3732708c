"""Asked: that addresses reach a kernel as the bits they are, whatever dtype they travel under."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecoffload import offset_addresses, pointer_table
from ecoffload.testing.conformance.conditions import echoes
from ecoffload.testing.harness import DeviceUnderTest, asked
from ecoffload.testing.strategies import addresses, examples, offsets

EXAMPLES = examples(60)
EDGES = [0, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 4097, 0xFFFF_D556_B640_0001, 2**64 - 4097, 2**64 - 1]


@asked("encoding.round-trip")
@given(values=st.lists(addresses(), max_size=40))
@EXAMPLES
def test_encoding_and_decoding_gives_every_address_back(device: DeviceUnderTest, values: list[int]) -> None:
    encoding = device.spec.encoding
    words = encoding.encode(values)
    assert words.dtype == np.dtype(encoding.dtype)
    assert words.tobytes() == b"".join(value.to_bytes(8, "little") for value in values)
    assert encoding.decode(words).tolist() == values


@asked("encoding.table")
@given(values=st.lists(addresses(), min_size=1, max_size=40))
@EXAMPLES
def test_a_pointer_table_holds_the_bits_of_its_addresses(device: DeviceUnderTest, values: list[int]) -> None:
    table = pointer_table(values, encoding=device.spec.encoding)
    assert table.dtype == device.spec.encoding.torch_dtype
    assert [word % 2**64 for word in table.tolist()] == values


@asked("encoding.offsets")
@given(steps=st.lists(offsets(), min_size=1, max_size=20))
@EXAMPLES
def test_addresses_inside_an_allocation_are_computed_exactly(device: DeviceUnderTest, steps: list[int]) -> None:
    base = device.address(device.scratch.tensor)
    within = [step % device.scratch.nbytes for step in steps]
    assert offset_addresses(base, within).tolist() == [base + step for step in within]


@asked("encoding.on-device")
def test_a_table_comes_back_from_device_memory_bit_for_bit(device: DeviceUnderTest) -> None:
    encoding = device.spec.encoding
    words = np.asarray(encoding.encode(EDGES)).view(np.uint8)
    table = device.tensor(words.nbytes, words).view(encoding.torch_dtype)
    assert [int(word) % 2**64 for word in table.cpu().tolist()] == EDGES


@asked("encoding.echo", when=echoes)
def test_a_kernel_reads_the_addresses_that_were_written(device: DeviceUnderTest) -> None:
    for kernel in device.spec.kernels:
        dtype = getattr(torch, kernel.address_dtype)
        words = np.array(EDGES, dtype=np.uint64)
        if kernel.placement == "host":
            table = torch.from_numpy(words.view(np.int64)).view(dtype)
        else:
            table = device.tensor(words.nbytes, words.view(np.uint8)).view(dtype)
        seen = device.inner.echo(kernel.name, table)  # type: ignore[attr-defined]
        assert list(seen) == EDGES, kernel.name


@asked("encoding.canonical")
def test_addresses_of_the_device_are_what_the_encoding_calls_canonical(device: DeviceUnderTest) -> None:
    address = device.address(device.tensor(4096))
    device.spec.encoding.check([address, address + 4095])
    assert 0 < address < 2**64


@asked("encoding.views")
def test_a_view_lies_at_its_offset_from_the_tensor(device: DeviceUnderTest) -> None:
    tensor = device.tensor(4099)
    address = device.address(tensor)
    for offset in (0, 1, 7, 4097):
        assert device.address(tensor[offset:]) == address + offset
