"""Copying the descriptors of a batch between ranges of this process's memory, with the GIL released.

Two kernels: ``memmove`` one by one for large descriptors, and ``rows`` for many small ones of one size, where a call
each would cost as much as the copy. Knows nothing of streams or threads: a caller hands it a slice of a batch.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ROWS_BELOW", "copy_descriptors", "words_at"]

ROWS_BELOW = 128 << 10  # bytes; above it one memmove call costs under 2 % of its copy
_ROWS_FROM = 4  # descriptors of one size that make the rows kernel worth its fixed cost
_ROWS_CHUNK = 256 << 10  # bytes of scratch that stay in a core's L2 between the gather and the scatter

_memmove = ctypes.memmove  # a foreign call: it releases the GIL


class _Memory:
    """A range of raw memory for numpy, which reads it through the array interface."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str, strides: tuple[int, ...] | None) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": typestr,
            "strides": strides,
            "version": 3,
        }


def words_at(address: int, count: int) -> NDArray[np.uint64]:
    """The uint64 array of ``count`` words at ``address``, without a copy."""
    if count == 0:
        return np.empty(0, dtype=np.uint64)
    return np.asarray(_Memory(address, (count,), "<u8", None))


def copy_descriptors(src: NDArray[np.uint64], dst: NDArray[np.uint64], size: NDArray[np.uint64]) -> None:
    """Copy ``size[i]`` bytes from ``src[i]`` to ``dst[i]``, in no particular order; 1-D uint64 arrays of one length."""
    n = len(size)
    if n >= _ROWS_FROM:
        small = size < ROWS_BELOW
        if small.any():
            if small.all():
                _copy_small(src, dst, size)
                return
            _copy_small(src[small], dst[small], size[small])
            large = ~small
            src, dst, size = src[large], dst[large], size[large]
    for s, d, z in zip(src.tolist(), dst.tolist(), size.tolist(), strict=True):
        _memmove(d, s, z)


def _copy_small(src: NDArray[np.uint64], dst: NDArray[np.uint64], size: NDArray[np.uint64]) -> None:
    first = size[0]
    if (size == first).all():
        _copy_rows(src, dst, int(first))
        return
    values, inverse, counts = np.unique(size, return_inverse=True, return_counts=True)
    for i, (value, count) in enumerate(zip(values.tolist(), counts.tolist(), strict=True)):
        chosen = inverse == i if count > 1 else slice(int((inverse == i).argmax()), None)
        if count >= _ROWS_FROM:
            _copy_rows(src[chosen], dst[chosen], value)
        else:
            for s, d in zip(src[chosen].tolist()[:count], dst[chosen].tolist()[:count], strict=True):
                _memmove(d, s, value)


def _copy_rows(src: NDArray[np.uint64], dst: NDArray[np.uint64], nbytes: int) -> None:
    """Rows of one size at any addresses: a gather into cache-sized scratch and a scatter out of it.

    The rows of a side are items of a void dtype in a view whose stride is one byte, so that any address is an index;
    numpy then copies item by item in C. A side that is one contiguous run is sliced instead, which saves a pass.
    """
    (src_view, src_at), (dst_view, dst_at) = _rows(src, nbytes), _rows(dst, nbytes)
    n = len(src)
    if src_at is None and dst_at is None:
        _memmove(int(dst[0]), int(src[0]), n * nbytes)
    elif src_at is None:
        dst_view[dst_at] = src_view
    else:
        step = max(1, _ROWS_CHUNK // nbytes)
        for i in range(0, n, step):
            part = slice(i, i + step)
            dst_view[part if dst_at is None else dst_at[part]] = src_view[src_at[part]]


def _rows(addresses: NDArray[np.uint64], nbytes: int) -> tuple[NDArray[Any], NDArray[np.intp] | None]:
    low, high = int(addresses.min()), int(addresses.max())
    n = len(addresses)
    if high - low == (n - 1) * nbytes and (np.diff(addresses) == np.uint64(nbytes)).all():
        return np.asarray(_Memory(low, (n,), f"|V{nbytes}", None)), None
    view = np.asarray(_Memory(low, (high - low + 1,), f"|V{nbytes}", (1,)))
    return view, (addresses - np.uint64(low)).astype(np.intp)
