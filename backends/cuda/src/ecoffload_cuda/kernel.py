"""The gather kernel: source compiled at run time for the device at hand, cached on disk, loaded and launched.

Owned here: shapes (how a kernel divides shared memory), NVRTC, the cache of machine code, the launch. backend.py
decides when to use it and hands over the addresses of a descriptor table; nothing here reads descriptors.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import tempfile
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from ecoffload.backend import D2H, H2D, Direction
from ecoffload_cuda.driver import Device
from ecoffload_cuda.tables import Table

__all__ = [
    "BULK",
    "PLAIN",
    "PLAIN_BLOCKS",
    "Gather",
    "Shape",
    "cache_directory",
    "compile_kernel",
    "shape_for",
    "write_whole",
]

_log = logging.getLogger("ecoffload.cuda")

_BULK_SINCE: Final = (9, 0)
"""Compute capability from which ``cp.async.bulk`` exists."""
_STATIC_SHARED: Final = 2048
"""Barriers, and what the driver keeps of a block's shared memory (1 KiB)."""
_MAX_DYNAMIC_SHARED: Final = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@dataclass(frozen=True)
class Shape:
    """How one kernel is built: ``warps`` a block, each with ``depth`` slots of ``chunk`` bytes (a power of two).

    Of the slots ``lag`` may still be draining while the others fill. ``depth`` 0 is the load/store kernel, which has no
    slots; ``chunk`` is then only how long descriptors are divided among warps.
    """

    warps: int
    depth: int
    lag: int
    chunk: int
    extra: tuple[str, ...] = ()

    @property
    def shared_bytes(self) -> int:
        return self.warps * self.depth * self.chunk

    @property
    def entry(self) -> str:
        return "gather_bulk" if self.depth else "gather_plain"

    def describe(self) -> str:
        slots = f"{self.warps} warps x {self.depth} slots of" if self.depth else f"{self.warps} warps, pieces of"
        return f"{self.entry}: {slots} {self.chunk} bytes"

    def macros(self) -> list[str]:
        names = [f"WARPS={self.warps}"]
        if self.depth:
            names += [f"DEPTH={self.depth}", f"LAG={self.lag}", f"CHUNK={self.chunk}"]
        return [*names, *self.extra]


BULK: Final[dict[Direction, Shape]] = {
    # Loads: every SM's memory filled with 4 KiB slots keeps enough reads in flight for descriptors of 2 KiB too.
    # Evict-first: what is loaded passes through the L2 and should not push out what a GEMM beside it keeps there.
    H2D: Shape(14, 4, 1, 4096, ("HINT",)),
    # Stores: few bytes on their way, since writes that queue for the link hold up every other SM's; half as many again
    # as filled the link of the first host, because another got 0.83 of its own at 2 KiB with those (why: not measured).
    D2H: Shape(6, 4, 2, 4096, ("SETTLE",)),
}
PLAIN: Final = Shape(16, 0, 0, 16384)
PLAIN_BLOCKS: Final = 16
"""Multiprocessors for the load/store kernel of devices older than compute capability 9.0: a small, fixed grid."""


def shape_for(device: Device, direction: Direction) -> Shape:
    """The shape that fits this device's shared memory."""
    if device.compute < _BULK_SINCE:
        return PLAIN
    shape = BULK[direction]
    room = device.shared_memory - _STATIC_SHARED
    return replace(shape, warps=max(1, min(shape.warps, room // (shape.depth * shape.chunk))))


def cache_directory() -> Path:
    """Where machine code and tuning live: ``ECOFFLOAD_CACHE_DIR``, or ``ecoffload`` under the user's cache folder."""
    named = os.environ.get("ECOFFLOAD_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ecoffload"


def source() -> str:
    return files("ecoffload_cuda").joinpath("gather.cu").read_text(encoding="utf-8")


def compile_kernel(shape: Shape, compute: tuple[int, int]) -> bytes:
    """Machine code of ``shape`` for a compute capability, from the cache or from NVRTC.

    Raises ImportError where NVIDIA's ``cuda-core`` is missing and whatever it raises for a failed compilation.
    """
    from cuda.bindings import nvrtc
    from cuda.core import Program, ProgramOptions

    arch = f"sm_{compute[0]}{compute[1]}"
    text = source()
    _, major, minor = nvrtc.nvrtcVersion()
    key = hashlib.sha256("\0".join([text, arch, f"{major}.{minor}", *shape.macros()]).encode()).hexdigest()[:32]
    path = cache_directory() / "cuda" / f"gather-{arch}-{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    macros: list[Any] = [tuple(m.split("=")) if "=" in m else m for m in shape.macros()]
    program = Program(text, "c++", ProgramOptions(arch=arch, std="c++17", define_macro=macros))
    code = bytes(program.compile("cubin").code)
    _store(path, code)
    return code


_said_unwritable = False


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: processes that start together must never read half of one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _store(path: Path, code: bytes) -> None:
    global _said_unwritable
    try:
        write_whole(path, code)
    except OSError as exc:
        if not _said_unwritable:
            _said_unwritable = True
            _log.warning(
                "%s cannot be written (%s): kernels stay in memory and are compiled again by every process; "
                "set ECOFFLOAD_CACHE_DIR to a writable folder",
                path.parent,
                exc.strerror or exc,
            )


class _Table(ctypes.Structure):
    """``Table`` of gather.cu."""

    _fields_ = (
        ("src", ctypes.c_uint64),
        ("dst", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("pieces", ctypes.c_uint32),
        ("each", ctypes.c_uint32),
        ("chunk", ctypes.c_uint32),
    )


class Gather:
    """One compiled and loaded kernel on one device. The device's context must be current when a method is called."""

    def __init__(self, device: Device, shape: Shape) -> None:
        cuda = device.cuda
        self._device = device
        self.shape = shape
        self.shift = shape.chunk.bit_length() - 1
        """Descriptors are divided into pieces of ``1 << shift`` bytes."""
        code = compile_kernel(shape, device.compute)
        self._module = cuda.out("ModuleLoadData", code, what=f"the kernel {shape} could not be loaded")
        self._function = cuda.out("ModuleGetFunction", self._module, shape.entry.encode())
        if shape.shared_bytes:
            cuda.driver.check(
                cuda.FuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shape.shared_bytes),
                f"the kernel {shape} wants {shape.shared_bytes} bytes of shared memory",
            )
        self._table = _Table(chunk=shape.chunk)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._table))
        self._parameters_at = ctypes.addressof(self._parameters)
        self._launch = cuda.LaunchKernel

    def launch(self, blocks: int, stream: int, table: Table) -> int:
        """Enqueue the copy of a descriptor table on ``blocks`` blocks, one to a multiprocessor.

        Returns the driver's code. Not thread-safe: parameters are read during the call, under the backend's lock.
        """
        to, shape = self._table, self.shape
        to.src, to.dst, to.size, to.first = table.src, table.dst, table.size, table.first
        to.count, to.pieces, to.each = table.count, table.pieces, table.each
        code: int = self._launch(
            self._function, blocks, 1, 1, shape.warps * 32, 1, 1, shape.shared_bytes, stream, self._parameters_at, None
        )
        return code

    def unload(self) -> None:
        self._device.cuda.ModuleUnload(self._module)
