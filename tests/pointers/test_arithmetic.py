"""Offsets and blocks: exact, or an error that names the index. The model is Python's integers."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecoffload import pointers
from ecoffload.errors import AddressError
from ecoffload.pointers import block_addresses, offset_addresses

P = 0xFFFFD556B6400000
TOP = 2**64
bases = st.sampled_from([0, 1, 2**53, 2**63 - 1, 2**63, P, TOP - 4097, TOP - 1]) | st.integers(0, TOP - 1)
offsets = st.integers(0, 8193) | st.sampled_from([2**31, 2**32, 2**53 + 1, 2**63, TOP - 1]) | st.integers(0, TOP - 1)


# --- offset_addresses -------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(bases, offsets, offsets), min_size=1))
def test_offsets_are_exact_or_refused_at_the_first_that_leaves_64_bits(rows):
    base, steps, sizes = (list(column) for column in zip(*rows, strict=True))
    wrong = [i for i, (b, o, s) in enumerate(rows) if b + o >= TOP or b + o + s > TOP]
    if not wrong:
        assert offset_addresses(base, steps, sizes).tolist() == [b + o for b, o, _ in rows]
        return
    with pytest.raises(AddressError) as caught:
        offset_addresses(base, steps, sizes)
    b, o, s = rows[wrong[0]]
    assert caught.value.index == wrong[0]
    assert caught.value.value == (b + o if b + o >= TOP else b + o + s)


@given(bases, st.lists(st.integers(0, 4097)))
def test_one_base_serves_many_offsets(base, steps):
    steps = [o for o in steps if base + o < TOP]
    expected = [base + o for o in steps]
    assert offset_addresses(base, steps).tolist() == expected
    assert offset_addresses(base, np.array(steps, dtype=np.int64)).tolist() == expected
    assert offset_addresses(base, torch.tensor(steps, dtype=torch.int64)).tolist() == expected
    assert offset_addresses(np.uint64(base), np.array(steps, dtype=np.int16)).tolist() == expected


def test_rows_and_columns_are_broadcast():
    assert offset_addresses([[P], [1]], [1, 4097]).tolist() == [[P + 1, P + 4097], [2, 4098]]


def test_sizes_are_broadcast_as_well():
    assert offset_addresses(P, 4097, [0, 8]).tolist() == [P + 4097, P + 4097]
    assert offset_addresses([P, 1], 1, [[0], [0]]).tolist() == [[P + 1, 2], [P + 1, 2]]
    with pytest.raises(AddressError) as caught:
        offset_addresses(TOP - 8, 0, [[8, 8], [8, 9]])
    assert (caught.value.index, caught.value.value) == ((1, 1), TOP + 1)


def test_two_numbers_give_one_address():
    assert int(offset_addresses(P, 4097)) == P + 4097


def test_a_wrap_past_two_to_the_64_is_refused():
    with pytest.raises(AddressError, match=r"index 1.*past 2\*\*64") as caught:
        offset_addresses([P, P], [TOP - P - 1, TOP - P])
    assert caught.value.value == TOP


def test_a_range_may_end_at_two_to_the_64_but_not_beyond():
    assert offset_addresses([TOP - 8], 0, 8).tolist() == [TOP - 8]
    assert offset_addresses([0, 1], 0, [TOP - 1, TOP - 1]).tolist() == [0, 1]
    with pytest.raises(AddressError, match="the end of 9 bytes") as caught:
        offset_addresses([TOP - 8], 0, 9)
    assert (caught.value.index, caught.value.value) == (0, TOP + 1)


@pytest.mark.parametrize("bad", [-1, True, 1.0, "1", None, 2**64], ids=repr)
@pytest.mark.parametrize("argument", ["offsets", "sizes"])
def test_offsets_and_sizes_that_are_no_byte_counts_are_refused(argument, bad):
    arguments = {"offsets": [0, 0], "sizes": [0, 0], argument: [1, bad]}
    with pytest.raises(AddressError, match=argument[:-1]) as caught:
        offset_addresses([P, P], **arguments)
    assert caught.value.index == 1
    assert caught.value.value is bad


@pytest.mark.parametrize("negative", [np.array([0, -4096]), torch.tensor([0, -4096]), np.array([0, -96], np.int8)])
def test_a_negative_offset_array_is_refused_not_read_as_bits(negative):
    with pytest.raises(AddressError) as caught:
        offset_addresses(P, negative)
    assert caught.value.index == 1
    assert caught.value.value == int(negative[1])


@pytest.mark.parametrize("argument", [np.array([1.0]), torch.tensor([True])], ids=repr)
def test_offset_arrays_of_another_dtype_are_refused(argument):
    with pytest.raises(AddressError):
        offset_addresses(P, argument)


def test_shapes_that_do_not_belong_together_are_refused():
    with pytest.raises(AddressError, match=r"\(2,\), \(3,\)"):
        offset_addresses([P, P], [1, 2, 3])


def test_inputs_are_left_as_they_were():
    base, steps = np.array([P], dtype=np.uint64), np.array([4097])
    offset_addresses(base, steps)
    assert base.tolist() == [P]
    assert steps.tolist() == [4097]


# --- block_addresses --------------------------------------------------------------------------------------------------


@st.composite
def block_calls(draw):
    ids = draw(st.lists(st.integers(0, 40) | st.integers(0, 2**31 - 1) | st.integers(0, TOP - 1), max_size=6))
    sub_blocks = draw(st.integers(1, 4))
    sub_stride = draw(st.integers(0, 8193) | st.sampled_from([2**62, TOP - 1]))
    skip = draw(st.integers(0, len(ids) * sub_blocks))
    count = draw(st.none() | st.integers(0, len(ids) * sub_blocks - skip))
    stride = draw(st.integers(0, 2**20) | st.integers(0, TOP - 1))
    return draw(bases), ids, stride, {"sub_blocks": sub_blocks, "sub_stride": sub_stride, "skip": skip, "count": count}


@given(block_calls())
def test_block_addresses_are_exact_or_refused_at_the_first_that_leaves_64_bits(call):
    base, ids, stride, options = call
    sequence = [base + b * stride + j * options["sub_stride"] for b in ids for j in range(options["sub_blocks"])]
    sequence = sequence[options["skip"] :]
    sequence = sequence if options["count"] is None else sequence[: options["count"]]
    wrong = [i for i, address in enumerate(sequence) if address >= TOP]
    if not wrong:
        result = block_addresses(base, ids, stride, **options)
        assert result.dtype == np.uint64
        assert result.tolist() == sequence
        return
    with pytest.raises(AddressError, match=r"past 2\*\*64") as caught:
        block_addresses(base, ids, stride, **options)
    assert (caught.value.index, caught.value.value) == (wrong[0], sequence[wrong[0]])


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64", "int16"])
def test_ids_of_every_width_are_widened_before_they_are_multiplied(dtype):
    top = min(int(np.iinfo(dtype).max), 2**31 - 1)
    ids = np.array([0, top], dtype=dtype)
    assert block_addresses(P, ids, 16385).tolist() == [P, P + top * 16385]
    assert block_addresses(P, torch.from_numpy(ids), 16385).tolist() == [P, P + top * 16385]


def test_a_transfer_may_begin_and_end_inside_a_block():
    got = block_addresses(P, [7, 2], 4096, sub_blocks=4, skip=1, count=6).tolist()
    seven, two = P + 7 * 4096, P + 2 * 4096
    assert got == [seven + 1024, seven + 2048, seven + 3072, two, two + 1024, two + 2048]


def test_sub_blocks_may_lie_apart_by_more_than_their_share():
    assert block_addresses(0, [1], 64, sub_blocks=2, sub_stride=4097).tolist() == [64, 64 + 4097]


@pytest.mark.parametrize("ids", [[3, -1], np.array([3, -1], np.int32), np.array([3, -1]), torch.tensor([3, -1])])
def test_a_negative_block_id_is_refused_by_index(ids):
    with pytest.raises(AddressError, match="block id at index 1") as caught:
        block_addresses(P, ids, 4096)
    assert (caught.value.index, caught.value.value) == (1, -1)


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        ((P, [1], -1), {}, "stride"),
        ((P, [1], 1.5), {}, "stride"),
        ((P, [1], True), {}, "stride"),
        ((P, [1], 10), {"sub_blocks": 3}, "sub_stride"),
        ((P, [1], 10), {"sub_blocks": 0}, "sub_blocks"),
        ((P, [1], 10), {"sub_blocks": 2**63, "sub_stride": 0}, "sub_blocks"),
        ((P, [1], 10), {"sub_stride": -1}, "sub_stride"),
        ((P, [1], 10), {"skip": 2}, "skip"),
        ((P, [1], 10), {"skip": -1}, "skip"),
        ((P, [1], 10), {"skip": 1, "count": 1}, "count"),
        ((P, [1], 10), {"count": -1}, "count"),
        (([P], [1], 10), {}, "base"),
        ((P, [[1]], 10), {}, "block ids"),
        ((P, [True], 10), {}, "block id"),
        ((-1, [1], 10), {}, "address"),
    ],
)  # fmt: skip
def test_an_argument_out_of_range_is_refused_by_name(arguments, options, named):
    with pytest.raises(AddressError, match=named):
        block_addresses(*arguments, **options)


def test_no_blocks_have_no_addresses():
    assert block_addresses(P, [], 4096, sub_blocks=4).tolist() == []


def test_a_few_of_very_many_sub_blocks_are_made_alone():
    many = 2**40
    assert block_addresses(P, [7, 2], 0, sub_blocks=many, sub_stride=1, skip=many - 1, count=2).tolist() == [
        P + many - 1,
        P,
    ]
    assert block_addresses(P, [7] * 100_000, 4096, sub_blocks=many, sub_stride=0, count=1).tolist() == [P + 7 * 4096]


def test_skipped_blocks_may_lie_anywhere():
    assert block_addresses(P, [TOP - 1, 1], 4096, skip=1).tolist() == [P + 4096]


def test_the_documented_example_holds():
    assert doctest.testmod(pointers).failed == 0
