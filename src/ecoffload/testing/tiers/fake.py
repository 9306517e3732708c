"""A store in this process that behaves as badly as one in a network can: late, lying, half-written, gone.

Several :class:`FakeTier` objects share one :class:`FakeStore`, as the clients of several machines do. Faults are armed
by tests; bytes move through memory by address, as in a real client.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from ecoffload.errors import CacheClosed, ConfigError
from ecoffload.tiers.interface import Answer, RemoteTier, TierObject

__all__ = ["FakeStore", "FakeTier"]


class FakeStore:
    """What all its clients see. ``capacity`` in bytes: a full one refuses."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.objects: dict[str, bytes] = {}
        self.capacity = capacity
        self.lock = threading.Lock()
        self.up = threading.Event()
        """Cleared: calls block, as with a frozen peer."""
        self.up.set()
        self.dead = False
        """Calls raise, as with a dead peer."""
        self.forgetful = False
        """Publishing is acknowledged and nothing is kept."""
        self.spoil: Callable[[str, bytes], bytes | None] | None = None
        """What a reader gets in place of an object's bytes; None: half of them, and no answer."""
        self.calls: list[tuple[str, str]] = []
        """Every call, with the name of the thread that made it."""


class FakeTier(RemoteTier):
    """One client of a :class:`FakeStore`."""

    scheme: ClassVar[str] = "fake"

    def __init__(self, address: str = "", options: Mapping[str, str] | None = None, store: FakeStore | None = None):
        super().__init__(address, options or {})
        self.store = store or FakeStore()
        self.closed = False
        self._memory: list[tuple[int, int]] = []

    def connect(self, memory: Sequence[tuple[int, int]]) -> None:
        self._enter("connect")
        self._memory = list(memory)

    def _enter(self, call: str) -> None:
        if self.closed:
            raise CacheClosed(f"{call} on a tier that is closed")
        self.store.calls.append((call, threading.current_thread().name))
        self.store.up.wait()
        if self.store.dead:
            raise ConnectionError("the peer is dead")

    def _check(self, objects: Sequence[TierObject]) -> None:
        for each in objects:
            for address, length in each.parts:
                if not any(base <= address and address + length <= base + size for base, size in self._memory):
                    raise ConfigError(
                        f"part {address:#x} of {length} bytes is outside the memory that the tier was told of",
                        option="parts",
                        value=address,
                    )

    def publish(self, objects: Sequence[TierObject]) -> list[Answer]:
        self._enter("publish")
        self._check(objects)
        answers = []
        for each in objects:
            data = b"".join(ctypes.string_at(address, length) for address, length in each.parts)
            with self.store.lock:
                kept = self.store.objects
                if each.name not in kept and sum(map(len, kept.values())) + len(data) > self.store.capacity:
                    answers.append(Answer.REFUSED)
                    continue
                if not self.store.forgetful:
                    kept.setdefault(each.name, data)
                answers.append(Answer.DONE if each.name in kept else Answer.ABSENT)
        return answers

    def exists(self, names: Sequence[str]) -> list[int | None]:
        self._enter("exists")
        with self.store.lock:
            return [len(self.store.objects[name]) if name in self.store.objects else None for name in names]

    def fetch_many(self, objects: Sequence[TierObject]) -> list[Answer]:
        self._enter("fetch_many")
        self._check(objects)
        return [self._fetch(each) for each in objects]

    def _fetch(self, each: TierObject) -> Answer:
        data: bytes | None = self.store.objects.get(each.name)
        if data is None:
            return Answer.ABSENT
        if len(data) != each.nbytes:
            return Answer.REFUSED
        partial = False
        if self.store.spoil is not None:
            spoilt = self.store.spoil(each.name, data)
            partial = spoilt is None
            data = data[: len(data) // 2] if spoilt is None else spoilt
        for address, length in each.parts:
            piece, data = data[:length], data[length:]
            ctypes.memmove(address, piece, len(piece))
        return Answer.UNCONFIRMED if partial else Answer.DONE

    def close(self) -> None:
        self.closed = True
