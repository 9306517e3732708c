"""Tables: their dtype, their memory, their mixed rows."""

from __future__ import annotations

import pickle
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecoffload.errors import AddressError, BackendUnavailable, ConfigError, EncodingMismatch
from ecoffload.pointers import PointerEncoding, PointerTable, pointer_table

P = 0xFFFFD556B6400000
INT64, UINT64 = PointerEncoding.INT64, PointerEncoding.UINT64
BOTH = pytest.mark.parametrize("encoding", [INT64, UINT64], ids=["int64", "uint64"])
addresses = st.sampled_from([0, 1, 2**63 - 1, 2**63, P, P + 4097, 2**64 - 1]) | st.integers(0, 2**64 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)


def words_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().view(torch.int64).numpy().view(np.uint64)


# --- pointer_table ----------------------------------------------------------------------------------------------------


@BOTH
@given(values=st.lists(addresses))
def test_a_table_has_the_declared_dtype_and_the_addresses_as_its_words(encoding, values):
    table = pointer_table(values, encoding=encoding)
    assert table.dtype is encoding.torch_dtype
    assert table.device.type == "cpu"
    assert words_of(table).tolist() == values
    assert encoding.decode(table).tolist() == values


@BOTH
@given(rows=st.lists(st.tuples(addresses, int64s, addresses, int64s), min_size=1))
def test_mixed_rows_keep_addresses_and_signed_values_apart(encoding, rows):
    table = pointer_table(rows, encoding=encoding, address_columns=(0, 2))
    expected = [[v % 2**64 for v in row] for row in rows]
    assert words_of(table).tolist() == expected
    assert table.view(torch.int64)[:, [1, 3]].tolist() == [[row[1], row[3]] for row in rows]
    as_array = np.array(expected, dtype=np.uint64)
    for same in (as_array, as_array.view(np.int64), torch.from_numpy(as_array), [list(row) for row in rows]):
        assert words_of(pointer_table(same, encoding=encoding, address_columns={2, 0})).tolist() == expected


def test_rows_that_are_arrays_may_be_mixed_too():
    rows = [[P, -1], np.array([P, 7], dtype=np.uint64), np.array([P - 2**64, -3]), np.array([5, -4], dtype=np.int32)]
    table = pointer_table(rows, encoding=INT64, address_columns=[0])
    assert words_of(table)[:, 0].tolist() == [P, P, P, 5]
    assert table[:, 1].tolist() == [-1, 7, -3, -4]


def test_narrow_integers_in_value_columns_keep_their_sign():
    table = pointer_table(np.array([[1, -128]], dtype=np.int32), encoding=UINT64, address_columns=[0])
    assert table.view(torch.int64).tolist() == [[1, -128]]


@pytest.mark.parametrize(
    ("rows", "index", "value"),
    [
        ([(P, 1), (-1, 1)], (1, 0), -1),
        ([(P, 1), (P, 2**63)], (1, 1), 2**63),
        ([(P, 1), (P, -(2**63) - 1)], (1, 1), -(2**63) - 1),
        ([(P, 1), (P, True)], (1, 1), True),
        ([(P, 1), (P, 1.0)], (1, 1), 1.0),
        ([(P, 1), (None, 1)], (1, 0), None),
        ([[P, 1], np.array([-1, 1], dtype=np.int32)], (1, 0), -1),
        (np.array([[1, 1], [-1, 1]], dtype=np.int16), (1, 0), -1),
        (np.array([[1.0, 1.0]]), (0, 0), 1.0),
        ([(P, 1), (P,)], (1, 1), (P,)),
    ],
    ids=repr,
)
def test_a_wrong_cell_of_a_mixed_table_is_named_by_row_and_column(rows, index, value):
    with pytest.raises(AddressError) as caught:
        pointer_table(rows, encoding=INT64, address_columns=[0])
    assert (caught.value.index, caught.value.value) == (index, value)


@pytest.mark.parametrize("columns", [[2], [-1], [True], [0.0]], ids=repr)
def test_columns_that_rows_do_not_have_are_refused(columns):
    with pytest.raises(AddressError, match="address column"):
        pointer_table([(P, 1)], encoding=INT64, address_columns=columns)


@pytest.mark.parametrize("flat", [[P, 1], np.array([P, 1], dtype=np.uint64), torch.tensor(5)], ids=repr)
def test_address_columns_need_rows(flat):
    with pytest.raises(AddressError, match="two-dimensional"):
        pointer_table(flat, encoding=INT64, address_columns=[0])


@BOTH
def test_empty_tables_are_tables(encoding):
    assert pointer_table([], encoding=encoding).shape == (0,)
    assert pointer_table([], encoding=encoding, address_columns=[0]).shape == (0,)
    empty = pointer_table(np.zeros((0, 3), dtype=np.uint64), encoding=encoding, address_columns=[0])
    assert empty.shape == (0, 3)
    assert empty.dtype is encoding.torch_dtype


@pytest.mark.parametrize("read_only", [False, True])
def test_a_table_is_memory_of_its_own(read_only):
    values = np.array([P, 1], dtype=np.uint64)
    values.flags.writeable = not read_only
    table = pointer_table(values, encoding=INT64)
    table[1] = 9
    assert values.tolist() == [P, 1]


def test_an_encoding_that_is_none_is_refused():
    with pytest.raises(EncodingMismatch, match="PointerEncoding"):
        pointer_table([P], encoding="uint64")


@BOTH
def test_the_encoding_of_the_devices_backend_is_taken_when_none_is_named(encoding, monkeypatch):
    asked = []

    def get_backend(name=None, *, device=None):
        asked.append((name, torch.device(device)))
        return types.SimpleNamespace(spec=types.SimpleNamespace(encoding=encoding))

    monkeypatch.setitem(sys.modules, "ecoffload.registry", types.SimpleNamespace(get_backend=get_backend))
    assert pointer_table([P]).dtype is encoding.torch_dtype
    assert pointer_table([P], device="meta").device.type == "meta"
    assert asked == [(None, torch.device("cpu")), (None, torch.device("meta"))]


@pytest.mark.parametrize("device", ["bogus", "", "cuda:x", 3.5, []])
def test_a_device_that_torch_does_not_know_is_refused_by_name(device):
    with pytest.raises(ConfigError, match="device"):
        pointer_table([P], encoding=INT64, device=device)
    with pytest.raises(ConfigError, match="device"):
        PointerTable(1, INT64).to(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_torch_cannot_use_here_is_unavailable():
    with pytest.raises(BackendUnavailable, match="cannot use cuda here"):
        pointer_table([P], encoding=INT64, device="cuda")


def test_the_cpus_backend_declares_int64():
    assert pointer_table([P]).tolist() == [P - 2**64]


# --- PointerTable -----------------------------------------------------------------------------------------------------


@BOTH
@given(st.data())
def test_fills_land_where_they_were_put_and_nowhere_else(encoding, data):
    table, model = PointerTable(8, encoding), [0] * 8
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, 8))
        values = data.draw(st.lists(addresses, max_size=8 - start))
        table.fill(start, values)
        model[start : start + len(values)] = values
        assert table.words.tolist() == model
        assert encoding.decode(table.tensor).tolist() == model


@BOTH
def test_words_and_tensor_are_one_memory(encoding):
    table = PointerTable(2, encoding)
    tensor = table.tensor
    table.fill(0, [P, 5])
    assert tensor.dtype is encoding.torch_dtype
    assert words_of(tensor).tolist() == [P, 5]
    assert tensor.data_ptr() == table.words.ctypes.data == table.tensor.data_ptr()


def test_a_fill_past_the_capacity_is_refused_and_writes_nothing():
    table = PointerTable(3, UINT64)
    with pytest.raises(AddressError, match="does not fit") as caught:
        table.fill(2, [P, 7])
    assert (caught.value.index, caught.value.value) == (1, 7)
    assert table.words.tolist() == [0, 0, 0]


def test_a_fill_with_one_wrong_address_writes_nothing():
    table = PointerTable(3, UINT64)
    with pytest.raises(AddressError):
        table.fill(0, [P, 7, -1])
    assert table.words.tolist() == [0, 0, 0]


@pytest.mark.parametrize("start", [-1, 4, True, 1.0, None], ids=repr)
def test_a_fill_cannot_start_outside_the_table(start):
    with pytest.raises(AddressError):
        PointerTable(3, UINT64).fill(start, [])


@pytest.mark.parametrize("capacity", [-1, 1.5, True, None], ids=repr)
def test_a_capacity_is_a_count(capacity):
    with pytest.raises(AddressError, match="capacity"):
        PointerTable(capacity, UINT64)


@BOTH
def test_to_gives_the_declared_dtype_on_the_device(encoding):
    table = PointerTable(2, encoding)
    assert table.to("cpu").data_ptr() == table.tensor.data_ptr()
    on_meta = table.to("meta")
    assert (on_meta.dtype, on_meta.device.type, on_meta.shape) == (encoding.torch_dtype, "meta", (2,))


@BOTH
def test_a_table_pickles_after_its_tensor_was_taken(encoding):
    table = PointerTable(2, encoding)
    table.fill(0, [P])
    assert table.tensor.numel() == 2
    again = pickle.loads(pickle.dumps(table))
    assert again.words.tolist() == [P, 0]
    assert again.encoding == encoding
