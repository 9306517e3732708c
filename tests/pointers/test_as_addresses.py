"""What is an address, what is not, and what a refusal says."""

from __future__ import annotations

from array import array
from collections import namedtuple
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecoffload.errors import AddressError
from ecoffload.pointers import as_addresses

P = 0xFFFFD556B6400000
EDGES = [0, 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 1, P, P + 4097, 2**64 - 2, 2**64 - 1]
addresses = st.one_of(
    st.sampled_from(EDGES),
    st.builds(lambda edge, near: (edge + near) % 2**64, st.sampled_from(EDGES), st.integers(-4097, 4097)),
    st.integers(0, 2**64 - 1),
)


def signed(address: int) -> int:
    return address - 2**64 if address >= 2**63 else address


# --- accepted ---------------------------------------------------------------------------------------------------------


@given(st.lists(addresses))
def test_every_way_to_write_an_address_gives_the_same_words(values):
    u64, i64 = np.array(values, dtype=np.uint64), np.array([signed(v) for v in values], dtype=np.int64)
    ways = [
        values,
        tuple(values),
        (v for v in values),
        [np.uint64(v) for v in values],
        array("Q", values),
        u64,
        i64,
        u64.astype(">u8"),
        i64.astype(">i8"),
        torch.from_numpy(u64),
        torch.from_numpy(i64),
        memoryview(u64),
    ]
    for way in ways:
        words = as_addresses(way)
        assert words.dtype == np.uint64
        assert words.tolist() == values


@given(addresses)
def test_a_single_number_keeps_its_shape(address):
    for one in (address, np.uint64(address), np.array(address, dtype=np.uint64), torch.tensor(signed(address))):
        words = as_addresses(one)
        assert words.shape == ()
        assert int(words) == address


@given(st.integers(1, 4), st.data())
def test_rows_of_equal_length_become_two_dimensions(width, data):
    rows = data.draw(st.lists(st.lists(addresses, min_size=width, max_size=width), min_size=1, max_size=5))
    assert as_addresses(rows).tolist() == rows
    assert as_addresses([tuple(row) for row in rows]).tolist() == rows
    assert as_addresses([np.array(row, dtype=np.uint64) for row in rows]).tolist() == rows


def test_rows_may_mix_lists_with_arrays_of_either_dtype():
    rows = [[P, 1], np.array([P, 2], dtype=np.uint64), np.array([signed(P), 3]), np.array([4, 5], dtype=np.int32)]
    assert as_addresses(rows).tolist() == [[P, 1], [P, 2], [P, 3], [4, 5]]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int8", "int16", "int32"])
def test_narrower_integers_are_widened_by_value(dtype):
    top = int(np.iinfo(dtype).max)
    assert as_addresses(np.array([0, 1, top], dtype=dtype)).tolist() == [0, 1, top]
    assert as_addresses(torch.tensor([0, 1, top], dtype=getattr(torch, dtype))).tolist() == [0, 1, top]


@pytest.mark.parametrize("empty", [[], (), range(0), np.zeros(0, np.uint64), np.zeros(0, np.int32), array("Q")])
def test_empty_input_gives_empty_words(empty):
    words = as_addresses(empty)
    assert words.shape == (0,)
    assert words.dtype == np.uint64


def test_rows_without_columns_are_rows_all_the_same():
    assert as_addresses([[], []]).shape == (2, 0)


def test_rows_may_be_named_tuples():
    row = namedtuple("Row", "buffer flag")
    assert as_addresses([row(P, 1), (2, 3)]).tolist() == [[P, 1], [2, 3]]


def test_a_contiguous_array_is_returned_as_it_is():
    values = np.array([P, 1], dtype=np.uint64)
    assert as_addresses(values) is values


def test_int64_bits_are_viewed_not_copied():
    values = np.array([signed(P), 1])
    assert np.shares_memory(as_addresses(values), values)


@given(st.lists(addresses, min_size=6, max_size=6))
def test_strided_and_transposed_input_is_copied_exactly(values):
    u64 = np.array(values, dtype=np.uint64)
    for array_ in (u64[::2], u64[::-1], u64.reshape(2, 3).T, u64.reshape(3, 2)[:, 1]):
        for way in (array_, array_.view(np.int64), torch.from_numpy(u64.view(np.int64))[::2]):
            words = as_addresses(way)
            assert words.flags.c_contiguous
            expected = way.tolist()
            assert words.tolist() == [
                [v % 2**64 for v in row] if isinstance(row, list) else row % 2**64 for row in expected
            ]


def test_a_transposed_tensor_is_copied_exactly():
    values = torch.tensor([[signed(P), 2, 3], [4, 5, -1]])
    assert as_addresses(values.T).tolist() == [[P, 4], [2, 5], [3, 2**64 - 1]]


# --- refused ----------------------------------------------------------------------------------------------------------

NOT_ADDRESSES = [
    True,
    False,
    1.0,
    1.5,
    float("nan"),
    -1,
    -(2**63),
    2**64,
    2**70,
    "4096",
    b"4096",
    None,
    3 + 0j,
    Fraction(4),
    object(),
    np.bool_(True),
    np.float64(4096.0),
    np.float32(1.5),
    np.int64(-1),
    np.int8(-1),
    np.timedelta64(5, "s"),
    np.array(5),
    torch.tensor(5),
    torch.tensor([5]),
    {1},
]


@pytest.mark.parametrize("bad", NOT_ADDRESSES, ids=repr)
def test_what_is_no_address_is_refused_by_index_and_value(bad):
    with pytest.raises(AddressError, match="index 2") as caught:
        as_addresses([P, 0, bad, 7, bad])
    assert caught.value.index == 2
    assert caught.value.value is bad


@pytest.mark.parametrize("bad", NOT_ADDRESSES, ids=repr)
def test_in_rows_it_is_refused_by_row_and_column(bad):
    with pytest.raises(AddressError, match="row 1, column 0") as caught:
        as_addresses([[P, 0], [bad, 7], [bad, 8]])
    assert caught.value.index == (1, 0)
    assert caught.value.value is bad


@pytest.mark.parametrize("bad", [True, 1.5, -1, 2**64, "4096", b"4096", bytearray(b"1"), None, {1}, {1: 2}], ids=repr)
def test_a_lone_value_that_is_no_address_is_refused_at_index_zero(bad):
    with pytest.raises(AddressError) as caught:
        as_addresses(bad)
    assert caught.value.index == 0
    assert caught.value.value is bad


@given(st.lists(addresses, max_size=8), st.integers(max_value=-1) | st.integers(2**64), st.lists(addresses, max_size=8))
def test_the_first_int_outside_64_bits_is_named_wherever_it_stands(before, bad, after):
    with pytest.raises(AddressError) as caught:
        as_addresses([*before, bad, *after, -1])
    assert caught.value.index == len(before)
    assert caught.value.value == bad


@pytest.mark.parametrize(
    ("values", "index", "value"),
    [
        (np.array([1.0, 2.0]), 0, 1.0),
        (np.array([True]), 0, True),
        (np.array([P, -1], dtype=object), 1, -1),
        (np.array([P, 1], dtype=object), 0, P),
        (np.array(["1"]), 0, "1"),
        (np.array([1j]), 0, 1j),
        (torch.tensor([1.5]), 0, 1.5),
        (torch.tensor([1.5], requires_grad=True), 0, 1.5),
        (torch.tensor([1.5], dtype=torch.bfloat16), 0, 1.5),
        (torch.tensor([[True]]), (0, 0), True),
        (torch.tensor([1j]), 0, 1j),
    ],
    ids=repr,
)
def test_arrays_and_tensors_of_another_dtype_are_refused(values, index, value):
    with pytest.raises(AddressError) as caught:
        as_addresses(values)
    assert caught.value.index == index
    assert caught.value.value == value


@pytest.mark.parametrize("values", [np.array([]), torch.tensor([]), np.array([], dtype=bool)], ids=repr)
def test_an_empty_array_of_another_dtype_is_refused_for_its_dtype(values):
    with pytest.raises(AddressError, match=r"float|bool") as caught:
        as_addresses(values)
    assert caught.value.index is None


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_a_negative_narrow_integer_is_refused_since_it_is_not_the_bits_of_an_address(dtype):
    for values in (
        np.array([[3, 2], [1, -1]], dtype=dtype),
        torch.tensor([[3, 2], [1, -1]], dtype=getattr(torch, dtype)),
    ):
        with pytest.raises(AddressError, match="row 1, column 1") as caught:
            as_addresses(values)
        assert caught.value.index == (1, 1)
        assert caught.value.value == -1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(2, dtype=torch.int64, device="meta"),
        torch.empty(2, device="meta"),
        torch.tensor([[0, 5]]).to_sparse(),
        torch.tensor([[0, 1.5]]).to_sparse(),
    ],
    ids=["meta", "meta float", "sparse", "sparse float"],
)
def test_a_tensor_without_readable_words_is_refused(tensor):
    with pytest.raises(AddressError):
        as_addresses(tensor)


@pytest.mark.parametrize(
    ("rows", "index"),
    [([[1, 2], [3]], (1, 1)), ([[1], [3, 4]], (1, 1)), ([[1, 2], 3], (1, 0)), ([1, [2]], 1), ([[[1]]], (0, 0))],
    ids=repr,
)
def test_ragged_and_deeper_nesting_is_refused_where_it_starts(rows, index):
    with pytest.raises(AddressError) as caught:
        as_addresses(rows)
    assert caught.value.index == index


def test_a_message_stays_short_for_a_huge_value():
    with pytest.raises(AddressError) as caught:
        as_addresses(["x" * 100_000])
    assert len(str(caught.value)) < 400
