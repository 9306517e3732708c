"""An encoding moves no bits."""

from __future__ import annotations

import pickle

import numpy as np
import pydantic
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecoffload.errors import AddressError, EncodingMismatch
from ecoffload.pointers import PointerEncoding

P = 0xFFFFD556B6400000
INT64, UINT64 = PointerEncoding.INT64, PointerEncoding.UINT64
BOTH = pytest.mark.parametrize("encoding", [INT64, UINT64], ids=["int64", "uint64"])
edges = st.sampled_from([0, 1, 2**63 - 1, 2**63, P, 2**64 - 1])
addresses = edges | st.integers(0, 2**64 - 1)


@BOTH
@given(values=st.lists(addresses))
def test_decoding_what_was_encoded_gives_the_addresses(encoding, values):
    words = encoding.encode(values)
    assert words.dtype == np.dtype(encoding.dtype)
    assert encoding.decode(words).tolist() == values
    assert encoding.decode(torch.from_numpy(words)).tolist() == values
    assert encoding.decode(words.tolist()).tolist() == values


@given(st.lists(addresses))
def test_both_encodings_write_the_same_bytes(values):
    assert INT64.encode(values).tobytes() == UINT64.encode(values).tobytes()


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_low_addresses_are_the_same_numbers_in_both(values):
    assert INT64.encode(values).tolist() == UINT64.encode(values).tolist() == values


@pytest.mark.parametrize("canonical", [None, "zero-extended", "sign-extended"])
@given(value=addresses)
def test_encode_takes_every_word_whatever_is_canonical(canonical, value):
    encoding = PointerEncoding(dtype="int64", canonical=canonical, address_bits=47)
    assert encoding.decode(encoding.encode([value])).tolist() == [value]


@BOTH
def test_words_of_another_dtype_are_refused_by_name(encoding):
    other = "uint64" if encoding.dtype == "int64" else "int64"
    for words in (np.zeros(1, other), torch.zeros(1, dtype=getattr(torch, other)), np.zeros(1, "int32"), np.zeros(1)):
        with pytest.raises(EncodingMismatch) as caught:
            encoding.decode(words)
        assert caught.value.expected == encoding.dtype
        assert caught.value.actual == str(words.dtype).removeprefix("torch.")


def test_a_word_outside_its_dtype_is_refused():
    with pytest.raises(AddressError) as caught:
        INT64.decode([0, P])
    assert (caught.value.index, caught.value.value) == (1, P)
    with pytest.raises(AddressError):
        UINT64.decode([-1])


@BOTH
def test_the_torch_dtype_is_the_declared_one(encoding):
    assert encoding.torch_dtype is getattr(torch, encoding.dtype)


def test_an_encoding_is_frozen_compared_by_value_hashable_and_pickles():
    with pytest.raises(pydantic.ValidationError):
        INT64.dtype = "uint64"
    again = pickle.loads(pickle.dumps(INT64))
    assert again == INT64 == PointerEncoding(dtype="int64")
    assert hash(again) == hash(INT64)


@pytest.mark.parametrize(
    "fields",
    [{}, {"dtype": "int32"}, {"dtype": "int64", "bits": 48}, {"dtype": "int64", "address_bits": 65},
     {"dtype": "int64", "address_bits": 0}, {"dtype": "int64", "canonical": "low"}],
    ids=repr,
)  # fmt: skip
def test_an_encoding_that_does_not_exist_cannot_be_declared(fields):
    with pytest.raises(pydantic.ValidationError):
        PointerEncoding(**fields)


# --- check ------------------------------------------------------------------------------------------------------------


@given(st.integers(2, 64), st.integers(0, 2**64 - 1))
def test_sign_extended_means_that_the_high_bits_repeat_the_top_significant_one(bits, value):
    encoding = PointerEncoding(dtype="uint64", canonical="sign-extended", address_bits=bits)
    low = value % 2**bits
    extended = low + (2**64 - 2**bits if low >= 2 ** (bits - 1) else 0)
    encoding.check([extended])
    if value != extended:
        with pytest.raises(AddressError) as caught:
            encoding.check([extended, value])
        assert (caught.value.index, caught.value.value) == (1, value)


@given(st.integers(1, 64), st.integers(0, 2**64 - 1))
def test_zero_extended_means_that_the_high_bits_are_zero(bits, value):
    encoding = PointerEncoding(dtype="uint64", canonical="zero-extended", address_bits=bits)
    encoding.check([value % 2**bits])
    if value >= 2**bits:
        with pytest.raises(AddressError, match="canonical") as caught:
            encoding.check(value)
        assert (caught.value.index, caught.value.value) == (0, value)


@given(st.lists(addresses))
def test_without_a_declared_form_every_address_passes(values):
    assert UINT64.check(values) is None


def test_check_names_row_and_column():
    with pytest.raises(AddressError, match="row 1, column 0"):
        PointerEncoding(dtype="int64", canonical="zero-extended", address_bits=47).check([[1, 2], [2**47, 3]])
