"""Device addresses as 64-bit words, and the tables of them that kernels read.

One idea: **an encoding moves no bits**. ``int64`` and ``uint64`` are two names that a kernel gives to the same 64 bits,
so every table is built as numpy ``uint64`` words and is then *viewed* under the dtype that its reader declares. Nothing
here assigns an address to an element of a torch tensor (which values that accepts changed between torch 2.13 and 2.14),
adds a signed array to an unsigned one (numpy answers in float64, which keeps 53 bits), or lets an address wrap.

The lowest part of the house after :mod:`ecoffload.errors`; descriptors, backends, engines and kernels' callers use it.
It needs numpy and pydantic only: torch is imported when a tensor is asked for and recognised when one is passed in. It
never reads memory at an address, never calls ``data_ptr()``, and never computes on a device.

Whatever is refused is refused whole, before anything is written, by an :class:`~ecoffload.errors.AddressError` that
names and carries ``index`` and ``value``: ``index`` is an int in flat input (0 for a single number) and
``(row, column)`` in rows. Each reader first takes a fast path that is exact or fails, and looks for the culprit only
after a failure.
"""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from ecoffload.errors import AddressError, BackendUnavailable, ConfigError, EncodingMismatch

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs

__all__ = [
    "PointerEncoding",
    "PointerTable",
    "as_addresses",
    "block_addresses",
    "offset_addresses",
    "pointer_table",
]

Words: TypeAlias = npt.NDArray[np.uint64]
_Index: TypeAlias = "int | tuple[int, ...]"

_LIMIT = 2**64


class PointerEncoding(BaseModel):
    """How a kernel reads an address: the dtype of its table, and what the platform's addresses look like.

    A property of an accelerator, declared once by its backend. ``canonical`` and ``address_bits`` describe the
    platform for :meth:`check` alone; no value is ever refused or changed because of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["int64", "uint64"]
    """The dtype under which the words are handed to a kernel."""
    canonical: Literal["zero-extended", "sign-extended"] | None = None
    """What the bits above the ``address_bits`` lowest hold: zeros, or copies of the highest of them. None: unknown."""
    address_bits: int = Field(default=64, ge=1, le=64)
    """Number of significant low bits of an address."""

    INT64: ClassVar[PointerEncoding]
    UINT64: ClassVar[PointerEncoding]

    def encode(self, addresses: object) -> npt.NDArray[np.int64] | Words:
        """The words of ``addresses`` (anything :func:`as_addresses` takes) as an array of this dtype, same shape.

        Every 64-bit value is accepted, whatever ``canonical`` says. As a view moves no bits, the result shares memory
        with an array that was passed in; copy it if that array will change.
        """
        return as_addresses(addresses).view(self.dtype)

    def decode(self, words: object) -> Words:
        """The uint64 addresses of ``words``: an array or tensor of this dtype, or Python ints in this dtype's range.

        The result shares memory with an array that was passed in. Raises :class:`EncodingMismatch` for an array or
        tensor of any other dtype (a silent cast would hide whose table it is) and :class:`AddressError` for ints that
        no such word holds.
        """
        if _is_array(words) or _is_tensor(words):
            actual = str(words.dtype).removeprefix("torch.")
            if actual != self.dtype:
                raise EncodingMismatch(
                    f"words of dtype {actual} given to an encoding of {self.dtype}; decode them with the encoding "
                    f"that wrote them, or view them as {self.dtype} if they are the same bits",
                    expected=self.dtype,
                    actual=actual,
                )
        return _read(words, _INT64_WORD if self.dtype == "int64" else _ADDRESS)

    def check(self, addresses: object) -> None:
        """Raise :class:`AddressError` for the first of ``addresses`` that is not canonical on this platform.

        A diagnostic for people who suspect a table. Nothing in this library calls it: tagged or unusual addresses are
        the platform's business.
        """
        words = as_addresses(addresses)
        if self.canonical is None or self.address_bits == 64:
            return
        if self.canonical == "zero-extended":
            bad = words >> np.uint64(self.address_bits) != 0
        else:
            high = words.view(np.int64) >> np.int64(self.address_bits - 1)
            bad = (high != 0) & (high != -1)
        if np.any(bad):
            flat = int(np.argmax(np.reshape(bad, -1)))
            why = f"is not canonical: expected {self.address_bits} bits, {self.canonical} to 64"
            raise _refusal(_ADDRESS, _unravel(flat, words.shape), int(words.reshape(-1)[flat]), why)

    @property
    def torch_dtype(self) -> torch.dtype:
        """``torch.int64`` or ``torch.uint64``; imports torch."""
        import torch

        return torch.int64 if self.dtype == "int64" else torch.uint64


PointerEncoding.INT64 = PointerEncoding(dtype="int64")
PointerEncoding.UINT64 = PointerEncoding(dtype="uint64")


def as_addresses(values: object) -> Words:
    """``values`` as contiguous uint64 addresses of the same shape (rows of equal length are two-dimensional).

    Accepted, exactly:

    - Python ints and numpy integer scalars in [0, 2**64), alone or in a list, tuple, range or other iterable, or in
      rows of these; a row may also be a numpy array;
    - uint64 arrays and tensors, and buffers such as ``array('Q')``; a contiguous array is returned as it is;
    - int64 arrays and tensors, *read as bits* (old torch versions returned negative pointers): a view, not a copy;
    - arrays and tensors of narrower integers, whose values are widened; a negative one is refused, because a narrower
      word cannot be the bits of an address.

    Tensors are read on the host, wherever they lie (a device tensor is copied, which waits for it).

    Raises :class:`AddressError` for everything else, by index and value: bool, float, negative ints, ints >= 2**64,
    strings, bytes, None, sets, mappings, ragged rows, tensors in place of their addresses, and object, bool or float
    arrays and tensors (also empty ones: a dtype is refused, not a value; index and value are None then).
    """
    if type(values) is np.ndarray and values.dtype == _UINT64 and values.flags.c_contiguous:
        return values
    return _read(values, _ADDRESS)


def offset_addresses(base: object, offsets: object, sizes: object = 0) -> Words:
    """``base + offsets``, exactly; the three are broadcast against each other as numpy does.

    ``base`` is what :func:`as_addresses` takes. ``offsets`` and ``sizes`` are bytes: integers >= 0 of any width, as
    ints, arrays or tensors; int64 arrays are read by *value* here, and a negative one is refused. ``sizes`` is the
    length of the range at each result: its end may be 2**64, never more.

    Raises :class:`AddressError` with the index in the result and the exact value that does not fit in 64 bits: the
    address itself, or the end of its range.
    """
    starts, steps, lengths = as_addresses(base), _read(offsets, _OFFSET), _read(sizes, _SIZE)
    try:
        # asarray: a ufunc answers 0-d arrays with a scalar, and numpy warns of a scalar's overflow.
        result = np.asarray(np.add(starts, steps))
        bad = np.asarray(result < starts)
        if lengths.ndim or lengths:
            room = np.asarray(np.invert(result))  # 2**64 - 1 - address: room + 1 bytes still end at 2**64
            bad = np.asarray(bad | (lengths > room) & (np.asarray(np.subtract(lengths, room)) != 1))
    except ValueError as error:
        raise AddressError(
            f"base, offsets and sizes of shapes {starts.shape}, {steps.shape}, {lengths.shape} do not belong together",
            index=None,
            value=None,
        ) from error
    if bad.any():
        flat = int(np.argmax(bad.reshape(-1)))
        start, step, size = (int(np.broadcast_to(a, bad.shape).flat[flat]) for a in (starts, steps, lengths))
        address, index = start + step, _unravel(flat, bad.shape)
        what = f"address {address:#x}" if address >= _LIMIT else f"the end of {size} bytes at {address:#x}"
        raise AddressError(
            f"offset {step} from base {start:#x} at {_place(index)}: {what} is past 2**64; check the base, the unit of "
            "the offset and the size",
            index=index,
            value=address if address >= _LIMIT else address + size,
        )
    return result if result.shape == bad.shape else np.broadcast_to(result, bad.shape).copy()


def block_addresses(
    base: object,
    block_ids: object,
    stride: int,
    *,
    sub_blocks: int = 1,
    sub_stride: int | None = None,
    skip: int = 0,
    count: int | None = None,
) -> Words:
    """Addresses of (sub-)blocks of a paged tensor, in the order of ``block_ids``, as a 1-D uint64 array.

    Block ``b`` starts at ``base + b * stride``; its sub-block ``j`` at ``base + b * stride + j * sub_stride``. Each id
    stands for its ``sub_blocks`` sub-blocks in order. Of that sequence the first ``skip`` are left out and the next
    ``count`` are returned (None: all that remain), so that a transfer may begin and end inside a block.

    KV offload stores blocks of four of the kernel's blocks. Of blocks 7 and 2, the first kernel block is resident
    already and only six of the others are filled:

    >>> [hex(a) for a in block_addresses(0x10000, [7, 2], 0x1000, sub_blocks=4, skip=1, count=6)]
    ['0x17400', '0x17800', '0x17c00', '0x12000', '0x12400', '0x12800']

    ``base``: one address. ``block_ids``: integers >= 0, one-dimensional, of any width (int32 block tables are widened
    before they are multiplied). ``stride`` and ``sub_stride``: bytes, >= 0; ``sub_stride`` None is
    ``stride // sub_blocks``, which must divide. ``skip + count`` may not exceed the sequence.

    Raises :class:`AddressError` for a negative id, for an address past 2**64 (its index is that in the result) and for
    the other arguments when they are out of range.
    """
    start = as_addresses(base)
    if start.ndim:
        raise AddressError(f"base has shape {start.shape}; pass one address a call", index=None, value=None)
    ids = _read(block_ids, _BLOCK_ID)
    if ids.ndim > 1:
        raise AddressError(f"block ids have shape {ids.shape}; pass one dimension", index=None, value=None)
    ids = ids.reshape(-1)
    step, parts, skipped = _natural(stride, "stride"), _natural(sub_blocks, "sub_blocks"), _natural(skip, "skip")
    if not 0 < parts < 2**63:
        raise AddressError(
            f"sub_blocks is {parts}; a block has at least one, and below 2**63", index=0, value=sub_blocks
        )
    if sub_stride is None:
        if step % parts:
            raise AddressError(
                f"stride {step} is no multiple of sub_blocks {parts}; pass sub_stride", index=0, value=stride
            )
        sub_step = step // parts
    else:
        sub_step = _natural(sub_stride, "sub_stride")
    total = ids.size * parts
    if skipped > total:
        raise AddressError(f"skip {skipped} exceeds the {total} sub-blocks of {ids.size} ids", index=0, value=skip)
    taken = total - skipped if count is None else _natural(count, "count")
    if taken > total - skipped:
        raise AddressError(f"count {taken} exceeds the {total - skipped} sub-blocks after skip", index=0, value=count)

    # Only the blocks that are asked for; their first sub-block is the `before`th of them.
    first, before = divmod(skipped, parts)
    ids = ids[first : -(-(skipped + taken) // parts)]
    # Unsigned arithmetic is exact modulo 2**64; whether it wrapped is asked of the largest address, in Python ints.
    result = ids * np.uint64(step) + start
    if parts > 1 and ids.size * parts <= 4 * taken:  # whole blocks, cut to what is asked for
        result = (result[:, np.newaxis] + np.arange(parts, dtype=np.uint64) * np.uint64(sub_step)).reshape(-1)
        result = result[before : before + taken]
    elif parts > 1:  # few of many: one by one, as a division costs more than what it saves above
        every, number_of = np.uint64(parts), np.arange(taken, dtype=np.uint64) + np.uint64(before)
        result = result[number_of // every] + number_of % every * np.uint64(sub_step)
    if ids.size and int(start) + int(ids.max()) * step + (parts - 1) * sub_step >= _LIMIT:
        for index in range(taken):
            at, number = divmod(before + index, parts)
            address = int(start) + int(ids[at]) * step + number * sub_step
            if address >= _LIMIT:
                raise AddressError(
                    f"address at index {index}: sub-block {number} of block {int(ids[at])} from base {int(start):#x} "
                    f"lies at {address:#x}, past 2**64; check the base and the stride {step}",
                    index=index,
                    value=address,
                )
    return result


def pointer_table(
    rows: object,
    *,
    encoding: PointerEncoding | None = None,
    device: torch.device | str | int | None = None,
    address_columns: Collection[int] | None = None,
) -> torch.Tensor:
    """A table of its own memory for a kernel to read: a tensor of ``encoding.torch_dtype`` on ``device``.

    ``rows`` are flat addresses, or rows of equal length. With ``address_columns`` None every value is an address,
    accepted and refused as by :func:`as_addresses`. Otherwise ``rows`` are two-dimensional, the named columns hold
    addresses, and the others hold int64 values (strides, counts) by bits, whose sign is not looked at.

    ``encoding`` None is that of the backend for ``device``; ``device`` None is the CPU. The words are copied to a
    device as int64 and viewed there, since some devices have no uint64 kernels.

    Raises :class:`AddressError` for a value (or a column that ``rows`` do not have), :class:`EncodingMismatch` for an
    ``encoding`` that is none, :class:`ConfigError` for a ``device`` that torch does not know,
    :class:`BackendUnavailable` for one that torch cannot use here, and what :func:`ecoffload.get_backend` raises.
    """
    import torch

    target = torch.device("cpu") if device is None else _device(device)
    if encoding is None:
        from ecoffload.registry import get_backend

        encoding = get_backend(device=target).spec.encoding
    dtype = _an_encoding(encoding).torch_dtype
    words = as_addresses(rows) if address_columns is None else _read_columns(rows, address_columns)
    return _on(target, np.array(words)).view(dtype)


class PointerTable:
    """A table of fixed capacity that is filled again and again, for callers that rebuild one each step.

    ``words`` and ``tensor`` are one memory on the host. New tables hold zeros.
    """

    def __init__(self, capacity: int, encoding: PointerEncoding) -> None:
        """A table of ``capacity`` words, read by kernels as ``encoding`` says."""
        self.encoding = _an_encoding(encoding)
        self.words: Words = np.zeros(_natural(capacity, "capacity"), dtype=np.uint64)

    def __len__(self) -> int:
        return self.words.size

    def __repr__(self) -> str:
        return f"PointerTable({len(self)}, {self.encoding.dtype})"

    @property
    def tensor(self) -> torch.Tensor:
        """The words as a CPU tensor of the encoding's dtype: shape (capacity,), the same memory."""
        # Made on demand: a stored uint64 tensor would keep the table from being pickled.
        return _tensor_of(self.words).view(self.encoding.torch_dtype)

    def fill(self, start: int, addresses: object) -> None:
        """Write ``addresses`` (what :func:`as_addresses` takes, flattened) at ``start``; all of them, or none.

        Raises :class:`AddressError` for a bad address, and for the first one that is past the capacity.
        """
        first, words = _natural(start, "start"), as_addresses(addresses).reshape(-1)
        room = max(len(self) - first, 0)
        if words.size > room or first > len(self):
            raise AddressError(
                f"address at index {room} does not fit: {words.size} words from {first} in a table of {len(self)}",
                index=room,
                value=int(words[room]) if words.size > room else start,
            )
        self.words[first : first + words.size] = words

    def to(self, device: torch.device | str | int) -> torch.Tensor:
        """The whole table on ``device``; for the CPU it is :attr:`tensor` itself, as ``Tensor.to`` does."""
        return _on(_device(device), self.words).view(self.encoding.torch_dtype)


# --- reading ----------------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """What a number means, and so which values are it."""

    noun: str
    signed: bool  # its Python ints are in [-2**63, 2**63) rather than [0, 2**64)
    by_bits: bool  # a 64-bit array of the other signedness holds the same bits rather than values to be checked


_ADDRESS = _Kind("address", signed=False, by_bits=True)
_INT64_WORD = _Kind("word", signed=True, by_bits=True)
_VALUE = _Kind("value", signed=True, by_bits=True)
_OFFSET = _Kind("offset", signed=False, by_bits=False)
_SIZE = _Kind("size", signed=False, by_bits=False)
_BLOCK_ID = _Kind("block id", signed=False, by_bits=False)

_UINT64 = np.dtype(np.uint64)
_Source: TypeAlias = "npt.NDArray[Any] | list[Any]"
_Locate: TypeAlias = "Callable[[int], _Index]"  # from a position in what is read to the index that a caller knows


def _read(values: object, kind: _Kind) -> Words:
    """``values`` of any accepted shape as contiguous words; every public reader ends here."""
    if _is_integer(type(values)):
        return _read_list([values], kind, _identity).reshape(())
    source = _source(values, kind)
    if _is_array(source):
        return _read_array(source, kind)
    if source and _is_row(source[0]):
        return _read_rows(source, [kind] * _width(source, kind))
    return _read_list(source, kind, _identity)


def _read_columns(rows: object, address_columns: Collection[int]) -> Words:
    """Rows whose columns mean different things."""
    source = _source(rows, _ADDRESS)
    if not _is_array(source) and not source:
        return np.zeros(0, dtype=np.uint64)
    if source.ndim != 2 if _is_array(source) else not _is_row(source[0]):
        raise AddressError("address_columns is for two-dimensional rows; leave it out here", index=None, value=None)
    width = source.shape[1] if _is_array(source) else _width(source, _ADDRESS)
    for position, column in enumerate(address_columns):
        if _natural(column, "address column") >= width:
            raise AddressError(
                f"address column {column} does not exist: rows have {width}", index=position, value=column
            )
    return _read_rows(source, [_ADDRESS if column in address_columns else _VALUE for column in range(width)])


def _read_rows(rows: _Source, kinds: Sequence[_Kind]) -> Words:
    """``rows`` of one width, whose columns are of ``kinds``."""
    width, flat = len(kinds), []
    if not _is_array(rows):
        if not _are_lists(rows):
            return _assemble(rows, kinds)
        flat = list(chain.from_iterable(rows))
        if len(set(kinds)) == 1:
            return _read_list(flat, kinds[0], lambda i: divmod(i, width)).reshape(len(rows), width)
    words = np.empty((len(rows), width), dtype=np.uint64)
    for column, kind in enumerate(kinds):
        cells = rows[:, column] if _is_array(rows) else flat[column::width]
        words[:, column] = _read_cells(cells, kind, partial(_in_column, column))
    return words


def _assemble(rows: list[Any], kinds: Sequence[_Kind]) -> Words:
    """Rows of which some are arrays: cell by cell, since their dtypes may differ. Convenience, not speed."""
    words = np.empty((len(rows), len(kinds)), dtype=np.uint64)
    for number, row in enumerate(rows):
        for column, kind in enumerate(kinds):
            locate = partial(_in_row, number, column)
            words[number, column] = _read_cells(row[column : column + 1], kind, locate)[0]
    return words


def _read_cells(cells: Any, kind: _Kind, locate: _Locate) -> Words:
    return _read_array(cells, kind, locate) if _is_array(cells) else _read_list(cells, kind, locate)


def _read_array(values: npt.NDArray[Any], kind: _Kind, locate: _Locate | None = None) -> Words:
    locate = locate or (lambda flat: _unravel(flat, values.shape))
    if values.dtype.kind not in "iu":
        cells = values.reshape(-1).tolist()
        flat = next((i for i, cell in enumerate(cells) if _why_not(cell, kind)), 0)
        raise _wrong_dtype(kind, str(values.dtype), cells[flat] if cells else None, locate(flat) if cells else None)
    same = (values.dtype.kind == "i") == kind.signed
    if values.dtype.itemsize == 8 and (same or kind.by_bits):
        native = np.asarray(values, dtype=values.dtype.newbyteorder("="), order="C")
        return native.view(np.uint64)
    if not kind.signed and not same and values.size and values.min() < 0:
        flat = int(np.argmax((values < 0).reshape(-1)))
        value = int(values.reshape(-1)[flat])
        raise _refusal(kind, locate(flat), value, _why_not(value, kind))
    # Sign or zero extension to 64 bits, which keeps every value.
    return np.asarray(values, dtype=np.int64 if kind.signed else np.uint64, order="C").view(np.uint64)


def _read_list(values: Sequence[object], kind: _Kind, locate: _Locate) -> Words:
    """Python and numpy ints only. ``array`` is exact or raises, where numpy would round, parse or wrap."""
    types = set(map(type, values))
    if types <= {int} or all(map(_is_integer, types)):
        try:
            words = array("q" if kind.signed else "Q", cast("Sequence[int]", values))
        except OverflowError:
            pass  # found below
        else:
            return np.frombuffer(words, dtype=np.uint64)
    flat = next(i for i, value in enumerate(values) if _why_not(value, kind))
    raise _refusal(kind, locate(flat), values[flat], _why_not(values[flat], kind))


def _source(values: object, kind: _Kind) -> _Source:
    """An array of what has a dtype (arrays, tensors, typed buffers), a list of what has not."""
    if isinstance(values, list):
        return values
    if _is_tensor(values):
        return _host_array(values, kind)
    if isinstance(values, (np.ndarray, array, memoryview)):
        return np.asarray(values)
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, bytearray, Set, Mapping)):
        return list(values)
    raise _refusal(kind, 0, values, _why_not(values, kind))


def _width(rows: list[Any], kind: _Kind) -> int:
    width = len(rows[0])
    if _are_lists(rows) and set(map(len, rows)) == {width}:
        return width
    for number, row in enumerate(rows):
        if not _is_row(row):
            raise _refusal(kind, (number, 0), row, "stands among rows; make it a row, or flatten the others")
        if len(row) != width:
            raise _refusal(kind, (number, min(len(row), width)), row, f"is a row of {len(row)}, the first has {width}")
    return width


def _host_array(tensor: torch.Tensor, kind: _Kind) -> npt.NDArray[Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    try:
        if dtype.startswith(("int", "uint")):
            return tensor.detach().cpu().numpy()
        value = tensor.detach().reshape(-1)[0].item() if tensor.numel() else None
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise AddressError(
            f"{kind.noun}: a tensor of {dtype} on {tensor.device} with layout {tensor.layout} has no words to read; "
            "pass a dense one of integers that has data",
            index=None,
            value=None,
        ) from error
    raise _wrong_dtype(kind, dtype, value, _unravel(0, tuple(tensor.shape)) if tensor.numel() else None)


def _is_array(value: object) -> TypeIs[npt.NDArray[Any]]:
    return isinstance(value, np.ndarray)


def _is_tensor(value: object) -> TypeIs[torch.Tensor]:
    torch = sys.modules.get("torch")  # where nobody has imported torch, nothing can be a tensor
    return torch is not None and isinstance(value, torch.Tensor)


def _is_integer(kind: type) -> bool:
    return issubclass(kind, (int, np.integer)) and not issubclass(kind, (bool, np.timedelta64))


def _is_row(value: object) -> TypeIs[Sequence[object]]:
    # No tensors: a list of them is far likelier one of tensors whose addresses were meant than a list of rows.
    return isinstance(value, (list, tuple)) or (_is_array(value) and value.ndim == 1)


def _are_lists(rows: list[Any]) -> bool:
    return all(issubclass(kind, (list, tuple)) for kind in set(map(type, rows)))


def _natural(value: object, noun: str) -> int:
    """One int in [0, 2**64)."""
    if type(value) is int and 0 <= value < _LIMIT:
        return value
    kind = _Kind(noun, signed=False, by_bits=False)
    why = _why_not(value, kind)
    if why:
        raise _refusal(kind, 0, value, why)
    return operator.index(cast("int", value))


def _an_encoding(encoding: object) -> PointerEncoding:
    if isinstance(encoding, PointerEncoding):
        return encoding
    raise EncodingMismatch(
        f"encoding {encoding!r} is a {type(encoding).__name__}; pass PointerEncoding.INT64 or PointerEncoding.UINT64",
        expected="PointerEncoding",
        actual=type(encoding).__name__,
    )


def _tensor_of(words: Words) -> torch.Tensor:
    """The words as int64, the dtype that every device can copy; the caller views it once it has arrived."""
    import torch

    return torch.from_numpy(words.view(np.int64))


def _device(device: torch.device | str | int) -> torch.device:
    import torch

    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as exc:
        raise ConfigError(
            f"device {device!r} is none that torch knows here; write for example 'cuda' or 'cuda:1'",
            option="device",
            value=device,
        ) from exc


def _on(device: torch.device, words: Words) -> torch.Tensor:
    """The words as int64 on ``device``; on the CPU the same memory."""
    import torch

    try:
        return _tensor_of(words).to(device)
    except Exception as exc:
        module = getattr(torch, device.type, None)
        if module is not None and module.is_available():
            raise  # the device's own error says more
        raise BackendUnavailable(
            f"torch {torch.__version__} cannot use {device} here ({exc}); install the torch for that device, and see "
            "'ecoffload doctor'",
            name=device.type,
            reason=str(exc),
        ) from exc


# --- refusing ---------------------------------------------------------------------------------------------------------


def _why_not(value: object, kind: _Kind) -> str:
    """Why ``value`` is not of ``kind``; empty if it is."""
    if isinstance(value, (bool, np.bool_)):
        return "is a bool; pass the integer itself"
    if _is_integer(type(value)):
        number = operator.index(cast("int", value))
        if kind.signed:
            return "" if -(2**63) <= number < 2**63 else "does not fit in a signed 64-bit word"
        if number < 0:
            remedy = "; if these are the bits of an address, pass them in an int64 array" if kind.by_bits else ""
            return f"is negative{remedy}"
        return "" if number < _LIMIT else "needs more than 64 bits"
    if isinstance(value, (float, np.floating)):
        return "is a float, which keeps 53 of 64 bits; pass an int"
    if _is_tensor(value):
        return "is a tensor; pass the address of its memory, as tensor.data_ptr() tells it"
    return f"is a {type(value).__name__}; pass an int"


def _refusal(kind: _Kind, index: _Index, value: object, why: str) -> AddressError:
    shown = f"{value!r} ({int(value):#x})" if _is_integer(type(value)) else repr(value)  # type: ignore[call-overload]
    if len(shown) > 200:
        shown = shown[:197] + "..."
    return AddressError(f"{kind.noun} at {_place(index)}: {shown} {why}", index=index, value=value)


def _wrong_dtype(kind: _Kind, dtype: str, value: object, index: _Index | None) -> AddressError:
    where = "" if index is None else f" at {_place(index)}: {value!r}"
    return AddressError(
        f"{kind.noun}{where} in an array of {dtype}, which holds none; pass integers, best of uint64",
        index=index,
        value=value,
    )


def _unravel(flat: int, shape: tuple[int, ...]) -> _Index:
    if len(shape) < 2:
        return flat
    return tuple(int(i) for i in np.unravel_index(flat, shape))


def _place(index: _Index) -> str:
    if isinstance(index, int):
        return f"index {index}"
    return f"row {index[0]}, column {index[1]}" if len(index) == 2 else f"index {index}"


def _identity(flat: int) -> _Index:
    return flat


def _in_column(column: int, row: int) -> _Index:
    return row, column


def _in_row(row: int, column: int, _: int) -> _Index:
    return row, column
