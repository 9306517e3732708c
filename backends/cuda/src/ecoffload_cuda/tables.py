"""Descriptor tables on their way to the kernel: pinned words that are filled here and read on the device.

A slot is lent for one launch and may be filled again once the event behind that launch has happened. Called by
backend.py under its lock, with the device's context current.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ecoffload_cuda.driver import Device

__all__ = ["Table", "TableRing", "words"]

Words = npt.NDArray[np.uint64]

_SMALLEST: Final = 4096
"""Descriptors of the smallest slot (a hundred kilobytes)."""
_MOST_SLOTS: Final = 16
_PINNED: Final = 3  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
_READ_IN_PLACE: Final = 256
"""Up to so many descriptors the kernel reads from pinned memory itself: one trip over the link, no copy to wait for.
Beyond, the reads would compete with the payload (they cost 2 to 5 % of the bandwidth at 2 to 16 KiB a descriptor)."""

_MEMORY: Final = ctypes.c_char * (1 << 40)  # one array type for every length: ctypes keeps each type it makes


def words(address: int, count: int) -> Words:
    """The ``count`` unsigned 64-bit words at a host address, without a copy."""
    memory: Any = _MEMORY.from_address(address)
    return np.frombuffer(memory, dtype=np.uint64, count=count)


@dataclass(frozen=True, slots=True)
class Table:
    """A filled table as a launch needs it: device-readable addresses, and how descriptors fall into pieces."""

    src: int
    dst: int
    size: int
    first: int
    count: int
    pieces: int
    each: int


class _Slot:
    __slots__ = ("alias", "capacity", "device", "event", "host", "lent", "ready", "words")

    def __init__(self, device: Device, capacity: int) -> None:
        cuda = device.cuda
        self.capacity = capacity
        nbytes = 8 * self.room(capacity)
        self.host = cuda.out(
            "MemHostAlloc", nbytes, _PINNED, what=f"no {nbytes} bytes of pinned memory for descriptors"
        )
        self.alias = cuda.out("MemHostGetDevicePointer", self.host, 0)
        self.device = cuda.out("MemAlloc", nbytes, what=f"no {nbytes} bytes of device memory for descriptors")
        self.event = cuda.out("EventCreate", 2)  # behind the launch that reads it; 2: CU_EVENT_DISABLE_TIMING
        self.ready = cuda.out("EventCreate", 2)  # behind the copy to the device
        self.words = words(self.host, self.room(capacity))
        self.lent = False

    @staticmethod
    def room(count: int) -> int:
        """Words of a table: three columns, and the 32-bit prefix of pieces."""
        return 3 * count + count // 2 + 1


class TableRing:
    """The slots of one device, lent in turn."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # Tables travel on a stream of their own: on the caller's, one would wait for the launch in front of it.
        self._stream = device.cuda.out("StreamCreateWithPriority", 1, 0)  # 1: CU_STREAM_NON_BLOCKING
        self._slots: list[_Slot] = []
        self._next = 0

    def lend(self, count: int) -> _Slot:
        """A slot for ``count`` descriptors that no launch reads any more. Waits only if all are in use."""
        cuda = self._device.cuda
        slots = self._slots
        with cuda.relaxed():
            for i in range(len(slots)):
                slot = slots[(self._next + i) % len(slots)]
                if slot.capacity >= count and (not slot.lent or cuda.EventQuery(slot.event) == 0):
                    self._next = (self._next + i + 1) % len(slots)
                    slot.lent = True
                    return slot
            if len(slots) >= _MOST_SLOTS:
                oldest = slots.pop(self._next % len(slots))
                if oldest.lent:
                    cuda.driver.check(cuda.EventSynchronize(oldest.event), "waiting for a descriptor table")
                if oldest.capacity >= count:
                    slots.append(oldest)
                    oldest.lent = True
                    return oldest
                self._free(oldest)
            capacity = _SMALLEST
            while capacity < count:
                capacity *= 2
            slot = _Slot(self._device, capacity)
        slots.append(slot)
        slot.lent = True
        return slot

    def fill(
        self, slot: _Slot, src: Words, dst: Words, size: Words, low: int, high: int, shift: int, stream: int
    ) -> Table:
        """Write a table (``low`` and ``high``: its smallest and largest size); ``stream`` waits until it is readable.

        Pieces are ``1 << shift`` bytes. The columns may be overwritten once this returns.
        """
        count = len(src)
        to = slot.words
        to[:count] = src
        to[count : 2 * count] = dst
        to[2 * count : 3 * count] = size
        used = 24 * count
        each, pieces, prefix = 1, count, False
        if high > 1 << shift:
            if low == high:
                each = (high + (1 << shift) - 1) >> shift
                pieces = each * count
            else:
                first = to[3 * count :].view(np.uint32)[: count + 1]
                first[0] = 0
                np.cumsum((size + np.uint64((1 << shift) - 1)) >> np.uint64(shift), out=first[1:], dtype=np.uint32)
                each, pieces, prefix = 0, int(first[count]), True
                used += 4 * (count + 1)
        if count <= _READ_IN_PLACE:
            at = slot.alias
        else:
            at = slot.device
            cuda = self._device.cuda
            code = cuda.MemcpyAsync(at, slot.host, used, self._stream)
            code = code or cuda.EventRecord(slot.ready, self._stream)
            code = code or cuda.StreamWaitEvent(stream, slot.ready, 0)
            cuda.driver.check(code, "copying a descriptor table to the device", index=None)
        return Table(at, at + 8 * count, at + 16 * count, at + 24 * count if prefix else 0, count, pieces, each)

    def used(self, slot: _Slot, stream: int) -> None:
        """The launch that reads ``slot`` has been enqueued on ``stream``."""
        cuda = self._device.cuda
        cuda.driver.check(cuda.EventRecord(slot.event, stream), "recording a descriptor table's event")

    def unused(self, slot: _Slot) -> None:
        """Nothing was launched."""
        self._device.cuda.StreamSynchronize(self._stream)
        slot.lent = False

    def _free(self, slot: _Slot) -> None:
        cuda: Any = self._device.cuda
        slot.words = slot.words[:0]
        cuda.EventDestroy(slot.event)
        cuda.EventDestroy(slot.ready)
        cuda.MemFree(slot.device)
        cuda.MemFreeHost(slot.host)

    def close(self) -> None:
        """Free every slot. Nothing may be reading them."""
        for slot in self._slots:
            self._free(slot)
        self._slots.clear()
        self._device.cuda.StreamDestroy(self._stream)
