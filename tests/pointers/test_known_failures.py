"""Faults that users reported, as their smallest inputs with the right answers: list A, encodings. There is no A12."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ecoffload.errors import AddressError, EncodingMismatch
from ecoffload.pointers import PointerEncoding, PointerTable, as_addresses, offset_addresses, pointer_table

P = 0xFFFFD556B6400000
S = P - 2**64
INT64, UINT64 = PointerEncoding.INT64, PointerEncoding.UINT64
BOTH = pytest.mark.parametrize("encoding", [INT64, UINT64], ids=["int64", "uint64"])


def test_a1_a_high_pointer_goes_into_a_signed_numpy_table():
    assert INT64.encode([P]).tolist() == [S]
    assert UINT64.encode([P]).tolist() == [P]
    assert INT64.decode(np.array([S])).tolist() == UINT64.decode(np.array([P], dtype=np.uint64)).tolist() == [P]


def test_a2_a_high_pointer_goes_into_a_torch_table_and_low_ones_stay_what_they_are():
    assert pointer_table([P], encoding=INT64).tolist() == [S]
    low = [0, 1, 0x7FD6E0000000, 2**63 - 1]
    assert pointer_table(low, encoding=INT64).tolist() == pointer_table(low, encoding=UINT64).tolist() == low


@BOTH
def test_a3_either_spelling_is_written_on_every_torch(encoding):
    table = PointerTable(3, encoding)
    table.fill(0, [P])
    table.fill(1, np.array([S]))
    table.fill(2, torch.tensor([S]))
    assert encoding.decode(table.tensor).tolist() == [P, P, P]


def test_a3_element_assignment_still_refuses_one_of_the_two_spellings():
    # The reason why no address is ever assigned to an element: which one is refused depends on the version.
    refused = []
    for spelling in (P, S):
        try:
            torch.zeros(1, dtype=torch.uint64)[0] = spelling
        except (ValueError, OverflowError, TypeError, RuntimeError):
            refused.append(spelling)
    assert len(refused) == 1


def test_a4_one_address_list_two_encodings_one_consumer():
    def consumer(table: torch.Tensor, encoding: PointerEncoding) -> list[int]:
        return encoding.decode(table).tolist()

    for encoding in (INT64, UINT64):
        assert consumer(pointer_table([P, 1], encoding=encoding), encoding) == [P, 1]
    with pytest.raises(EncodingMismatch, match=r"uint64.*int64") as caught:
        consumer(pointer_table([P, 1], encoding=UINT64), INT64)
    assert (caught.value.expected, caught.value.actual) == ("int64", "uint64")


@BOTH
def test_a5_only_address_columns_are_re_encoded(encoding):
    low = 0x7FD6E0000000
    table = pointer_table([(low, 4096, 3), (P, -4096, 2), (0, 0, 1)], encoding=encoding, address_columns=[0])
    assert encoding.decode(table[:, 0]).tolist() == [low, P, 0]
    assert table.view(torch.int64)[:, 1:].tolist() == [[4096, 3], [-4096, 2], [0, 1]]


def test_a5_a_negative_size_is_rejected():
    with pytest.raises(AddressError, match="size at index 1") as caught:
        offset_addresses([P, P], 0, [16, -16])
    assert (caught.value.index, caught.value.value) == (1, -16)


@pytest.mark.parametrize("address", [0, 1, 2**63 - 1, 2**63, P, 2**64 - 1], ids=hex)
def test_a6_a_view_moves_no_bits(address):
    table = pointer_table([(address, 64, 1)], encoding=UINT64, address_columns=[0])
    assert table.view(torch.int64).view(torch.uint64).tolist() == [[address, 64, 1]]
    assert UINT64.decode(INT64.encode([address]).view(np.uint64)).tolist() == [address]


class NoUnsignedKernels(TorchDispatchMode):
    """A device that can name uint64 tensors (views) but computes and copies none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = (torch.ops.aten.view.dtype, torch.ops.aten.detach.default, torch.ops.aten.alias.default)
        unsigned = [a for a in args if isinstance(a, torch.Tensor) and a.dtype is torch.uint64]
        if unsigned and func not in views:
            raise RuntimeError(f"{func} is not implemented for UInt64")
        return func(*args, **(kwargs or {}))


@BOTH
def test_a7_a_device_without_uint64_kernels_is_served(encoding):
    with NoUnsignedKernels():
        table = pointer_table([[P, 1], [2, 3]], encoding=encoding, device="meta")
        again = PointerTable(2, encoding).to("meta")
    assert table.dtype is again.dtype is encoding.torch_dtype


def test_a7_tables_are_joined_on_the_host():
    first, second = as_addresses([P]), as_addresses(np.array([S, 1]))
    assert pointer_table(np.concatenate([first, second]), encoding=INT64).tolist() == [S, S, 1]


def test_a8_base_plus_int64_offsets_is_exact():
    assert offset_addresses(np.array([P], dtype=np.uint64), np.array([4097])).tolist() == [P + 4097]


def test_a9_python_and_numpy_offsets_give_one_answer():
    base = np.uint64(P)
    for offset in (4097, np.int64(4097), np.uint64(4097), np.int32(4097), np.array(4097)):
        assert int(offset_addresses(base, offset)) == P + 4097


@pytest.mark.parametrize("offset", [-1, np.int64(-1), np.array([-1])], ids=repr)
def test_a9_a_negative_offset_is_our_own_value_error(offset):
    with pytest.raises(ValueError, match="negative") as caught:
        offset_addresses(np.uint64(P), offset)
    assert type(caught.value) is AddressError


def test_a10_lists_are_never_inferred():
    assert as_addresses([P, 1]).tolist() == [P, 1]
    assert as_addresses([P, 1]).dtype == np.uint64


@pytest.mark.parametrize("bad", [-1, 2**64], ids=str)
def test_a10_what_inference_would_turn_into_float_or_object_is_refused_by_index(bad):
    with pytest.raises(AddressError) as caught:
        as_addresses([P, bad])
    assert (caught.value.index, caught.value.value) == (1, bad)


@BOTH
def test_a11_a_list_of_ints_or_numpy_scalars_builds_a_table(encoding):
    assert encoding.decode(pointer_table([P], encoding=encoding)).tolist() == [P]
    assert encoding.decode(pointer_table([np.uint64(P), np.int64(7)], encoding=encoding)).tolist() == [P, 7]


def test_a13_uint64_tensors_are_only_carriers():
    tensor = torch.tensor([P, P + 8], dtype=torch.uint64)
    assert as_addresses(tensor).tolist() == [P, P + 8]
    assert offset_addresses(tensor, [8, 1]).tolist() == [P + 8, P + 9]
    assert int(as_addresses(tensor[0])) == P


@pytest.mark.parametrize("encoding", [INT64, UINT64], ids=["int64", "uint64"])
def test_a14_what_travels_between_processes_pickles(encoding):
    table = PointerTable(1, encoding)
    table.fill(0, [P])
    assert pickle.loads(pickle.dumps(table)).words.tolist() == [P]
    assert pickle.loads(pickle.dumps(encoding)) == encoding
    assert pickle.loads(pickle.dumps(as_addresses([P]))).tolist() == [P]
    with pytest.raises(AddressError) as caught:
        as_addresses([P, 2**64])
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.index, again.value, str(again)) == (1, 2**64, str(caught.value))
