"""The gather kernel's stand-in on the emulated driver: it reads the same table and copies piece by piece, late.

What it checks is the table: columns, pieces, the prefix of pieces. That the real kernel reads it alike is for the tests
on hardware.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ecoffload_cuda.kernel import Shape
from ecoffload_cuda.tables import Table
from emulated_drivers import Emulated


def pieces_of(table: Table, chunk: int, src: list[int], dst: list[int], size: list[int], first: list[int]) -> Any:
    """(source, destination, bytes) of every piece, as ``piece_at`` of gather.cu computes it."""
    for p in range(table.pieces):
        if first:
            d = max(i for i in range(table.count) if first[i] <= p)
            k, n = p - first[d], first[d + 1] - first[d]
        else:
            n = table.each
            d, k = divmod(p, n)
        if n == 1:
            yield src[d], dst[d], size[d]
            continue
        step = ((size[d] + n - 1) // n + 127) & ~127
        skew = dst[d] & 15
        start = 0 if k == 0 else k * step - skew
        end = size[d] if k == n - 1 else (k + 1) * step - skew
        yield src[d] + start, dst[d] + start, end - start


class EmulatedGather:
    """Same face as :class:`ecoffload_cuda.kernel.Gather`; ``launches`` remembers (blocks, stream, table)."""

    def __init__(self, emulated: Emulated, chunk: int = 4096) -> None:
        self.shape = Shape(14, 4, 1, chunk)
        self.shift = chunk.bit_length() - 1
        self.launches: list[tuple[int, int, Table]] = []
        self.copied: list[tuple[int, int, int]] = []
        driver = emulated.driver
        self._real = driver.function("emu_real", ctypes.c_uint64, restype=ctypes.c_void_p)
        self._host_function = driver.function("cuLaunchHostFunc", ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
        self._callbacks: list[Any] = []

    def _at(self, address: int) -> int:
        return self._real(address) or address

    def _words(self, address: int, count: int, ctype: Any = ctypes.c_uint64) -> list[int]:
        return (ctype * count).from_address(self._at(address))[:]

    def launch(self, blocks: int, stream: int, table: Table) -> int:
        def run(_: Any) -> None:
            columns = [self._words(at, table.count) for at in (table.src, table.dst, table.size)]
            first = self._words(table.first, table.count + 1, ctypes.c_uint32) if table.first else []
            for source, to, nbytes in pieces_of(table, 1 << self.shift, *columns, first):
                ctypes.memmove(self._at(to), self._at(source), nbytes)
                self.copied.append((source, to, nbytes))

        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(run)
        self._callbacks.append(callback)
        self.launches.append((blocks, stream, table))
        code: int = self._host_function(stream, ctypes.cast(callback, ctypes.c_void_p), None)
        return code

    def unload(self) -> None:
        self._callbacks.clear()
