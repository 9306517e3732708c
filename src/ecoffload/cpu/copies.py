"""Copying the descriptors of a batch between ranges of this process's memory, with the GIL released.

Two kernels: ``memmove`` one by one, and ``rows`` for runs of small descriptors of one size where one side is
contiguous (the tensor's) and the other lies on a grid (blocks of a region): there a foreign call each would cost as
much as its copy, and numpy's ``take`` and ``put`` move whole rows in C. Knows nothing of streams or threads.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

__all__ = ["ROWS_BELOW", "copy_descriptors", "words_at"]

ROWS_BELOW = 128 << 10  # bytes; above it one memmove call costs under 2 % of its copy
_ROWS_FROM = 16  # descriptors in a run that make the rows kernel worth its fixed cost

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
    """Copy ``size[i]`` bytes from ``src[i]`` to ``dst[i]``; 1-D uint64 arrays of one length, in no particular order."""
    n = len(size)
    if n < _ROWS_FROM or int(size.min()) >= ROWS_BELOW:
        _copy_each(src, dst, size)
        return
    # Runs: neighbours of one size that continue each other on the source's or on the destination's side.
    alike = size[1:] == size[:-1]
    follows_src = alike & (src[1:] == src[:-1] + size[:-1])
    follows_dst = alike & (dst[1:] == dst[:-1] + size[:-1])
    follows = follows_dst if np.count_nonzero(follows_dst) >= np.count_nonzero(follows_src) else follows_src
    heads = np.flatnonzero(np.concatenate(([True], ~follows)))
    ends = np.append(heads[1:], n)
    done = 0  # what lies before it is copied
    for head, end in zip(heads.tolist(), ends.tolist(), strict=True):
        if end - head < _ROWS_FROM or int(size[head]) >= ROWS_BELOW:
            continue
        part = slice(head, end)
        if _copy_rows(src[part], dst[part], int(size[head]), gather=follows is follows_dst):
            _copy_each(src[done:head], dst[done:head], size[done:head])
            done = end
    _copy_each(src[done:], dst[done:], size[done:])


def _copy_each(src: NDArray[np.uint64], dst: NDArray[np.uint64], size: NDArray[np.uint64]) -> None:
    for s, d, z in zip(src.tolist(), dst.tolist(), size.tolist(), strict=True):
        _memmove(d, s, z)


def _copy_rows(src: NDArray[np.uint64], dst: NDArray[np.uint64], nbytes: int, *, gather: bool) -> bool:
    """Move rows from a grid into one contiguous run (``gather``) or out of one into a grid; False if it is no grid.

    ``mode="clip"`` because numpy buffers the output of ``take`` otherwise; every index is in range by construction.
    """
    grid, run = (src, dst) if gather else (dst, src)
    low, high = int(grid.min()), int(grid.max())
    offsets = grid - np.uint64(low)
    index, rest = np.divmod(offsets, np.uint64(nbytes))
    if rest.any():
        return False
    row = f"|V{nbytes}"
    blocks = np.asarray(_Memory(low, ((high - low) // nbytes + 1,), row, None))
    contiguous = np.asarray(_Memory(int(run[0]), (len(run),), row, None))
    at = index.astype(np.intp)
    if gather:
        np.take(blocks, at, out=contiguous, mode="clip")
    else:
        np.put(blocks, at, contiguous, mode="clip")
    return True
