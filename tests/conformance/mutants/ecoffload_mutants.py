"""Simulated backends with one seeded fault each. The conformance suite must fail every one of them.

Not a test module: ``test_mutants.py`` installs it as a distribution of test backends and runs the suite on it. As a
pytest plugin it picks, of the suite, what was made for a mutant's fault; of healthy devices, all of those tests.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from ecoffload.backend import BackendSpec, Completed, Registration
from ecoffload.errors import RegistrationRefused, SwapFailed
from ecoffload.hookspecs import hookimpl
from ecoffload.host_queue import HostQueue, QueuedCompletion
from ecoffload.testing.declarations import DECLARED
from ecoffload.testing.devices import SimInt64, SimTop, SimUint64

ECOFFLOAD_HOOK_API = 1

Moves = list[tuple[int, int, int]]


class SignedWrap(SimUint64):
    """Adds to addresses as int64: those at and above 2**63 turn negative."""

    def _addresses(self, src: list[int], dst: list[int], size: list[int]) -> Moves:
        def signed(word: int) -> int:
            return word - 2**64 if word >= 2**63 else word

        return [(signed(s), signed(d), n) for s, d, n in zip(src, dst, size, strict=True)]


class Float64(SimInt64):
    """Computes addresses in float64, as uint64 and int64 arrays do together: 53 bits."""

    def _addresses(self, src: list[int], dst: list[int], size: list[int]) -> Moves:
        return [(int(float(s)), int(float(d)), n) for s, d, n in zip(src, dst, size, strict=True)]


class EarlyCompletion(SimInt64):
    """Says "done" as soon as the copies are enqueued."""

    def submit(self, batch: Any, direction: Any, stream: Any) -> Any:
        super().submit(batch, direction, stream)
        return Completed()


class DroppedLast(SimUint64):
    """Off by one: the last of several descriptors is left out."""

    def _addresses(self, src: list[int], dst: list[int], size: list[int]) -> Moves:
        moves = super()._addresses(src, dst, size)
        return moves[:-1] if len(moves) > 1 else moves


class SwappedDirection(SimTop):
    """Copies from the destination to the source."""

    def _copy(self, moves: Moves) -> None:
        super()._copy([(dst, src, n) for src, dst, n in moves])


class LostOffset(SimTop):
    """Copies from the start of the page in which the source lies."""

    def _copy(self, moves: Moves) -> None:
        super()._copy([(src - src % 4096, dst, n) for src, dst, n in moves])


class LateRead(SimInt64):
    """Declares that descriptors are consumed at submit, and reads them when the copy runs."""

    def submit(self, batch: Any, direction: Any, stream: Any) -> Any:
        at, count, first = (batch.src, batch.dst, batch.size), batch.count, batch.first
        return QueuedCompletion(
            stream, partial(self._run, partial(self._read, at, count, first, direction), first, count)
        )


class WrongAlias(SimUint64):
    """Hands the host's address out where the device needs its own."""

    def register(self, address: int, nbytes: int) -> Registration:
        return dataclasses.replace(super().register(address, nbytes), alias=address)


class MergedAcrossEdge(SimInt64):
    """Joins neighbouring descriptors without looking where a registration ends."""

    def _addresses(self, src: list[int], dst: list[int], size: list[int]) -> Moves:
        merged: Moves = []
        for s, d, n in super()._addresses(src, dst, size):
            if merged and (merged[-1][0] + merged[-1][2], merged[-1][1] + merged[-1][2]) == (s, d):
                merged[-1] = (merged[-1][0], merged[-1][1], merged[-1][2] + n)
            else:
                merged.append((s, d, n))
        return merged


class OwnStream(SimInt64):
    """Copies on a stream of its own, whatever the caller's stream holds."""

    def submit(self, batch: Any, direction: Any, stream: Any) -> Any:
        own = self.__dict__.setdefault("own", HostQueue("mutant"))
        return super().submit(batch, direction, own)


class LocalIndex(SimInt64):
    """Names the index within the part of a split batch."""

    def _failed(self, why: str, index: int | None) -> SwapFailed:
        return super()._failed(why, None if index is None else index % 100)


class SwallowedError(SimUint64):
    """A copy that failed late is done as any other."""

    def _run(self, *work: Any) -> None:
        try:
            super()._run(*work)
        except SwapFailed:
            return


class TwiceRegistered(SimUint64):
    """Takes a range that is registered already, as HIP does."""

    def register(self, address: int, nbytes: int) -> Registration:
        try:
            return super().register(address, nbytes)
        except RegistrationRefused:
            if nbytes == 0:
                raise
            return Registration(address, nbytes, address + self.alias_offset)


class AnyTable(SimTop):
    """Casts a table of another dtype in silence."""

    def check_table(self, kernel: str, tensor: Any, *, sizes: bool = False) -> None:
        self.kernel(kernel)


class ForgottenStream(SimInt64):
    """Asks for record_stream, and its allocator does not listen."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ops.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]


FAULTS: dict[type, str] = {
    SignedWrap: "copies.odd-sizes",
    Float64: "copies.odd-sizes",
    EarlyCompletion: "completion.never-early",
    DroppedLast: "copies.counts",
    SwappedDirection: "copies.sizes",
    LostOffset: "copies.odd-sizes",
    LateRead: "completion.snapshot",
    WrongAlias: "registration.accepted",
    MergedAcrossEdge: "copies.registration-edge",
    OwnStream: "ordering.save-after-producer-control",
    LocalIndex: "errors.global-index",
    SwallowedError: "errors.late",
    TwiceRegistered: "registration.twice",
    AnyTable: "declaration.tables-refused",
    ForgottenStream: "ordering.record-stream",
}
"""Each mutant, and the test that was made for its fault."""


def backend_name(mutant: type) -> str:
    return "mutant-" + mutant.__name__.lower()


class _Plugin:
    def __init__(self, mutant: type) -> None:
        (healthy,) = (b for b in (SimInt64, SimUint64, SimTop) if issubclass(mutant, b))
        like = DECLARED[{SimInt64: "sim-int64", SimUint64: "sim-uint64", SimTop: "sim-top"}[healthy]]
        name = backend_name(mutant)
        changed = {"name": name, "device_type": name, "factory": f"ecoffload_mutants:{mutant.__name__}"}
        self._spec = like.model_copy(update=changed)

    @hookimpl
    def ecoffload_register_backend(self) -> BackendSpec:
        return self._spec


def pytest_collection_modifyitems(items: list[Any]) -> None:
    wanted = {backend_name(mutant): {test} for mutant, test in FAULTS.items()}
    for name in DECLARED:
        wanted[name] = set(FAULTS.values())

    def picked(item: Any) -> bool:
        return item.get_closest_marker("conformance").kwargs["id"] in wanted[item.callspec.params["ecoffload_device"]]

    items[:] = [item for item in items if picked(item)]


for _mutant in FAULTS:
    globals()["plugin_" + _mutant.__name__] = _Plugin(_mutant)
