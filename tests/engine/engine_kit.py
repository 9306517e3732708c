"""A whole engine in one process: a scheduler, and workers that map the region for themselves, on simulated devices.

Plans travel pickled, as they do between processes. Every tensor that a worker allocates is poisoned first, so that a
byte which never arrived shows.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ecoffload.backend import Completion, SwapBackend
from ecoffload.errors import DeviceLost, SwapFailed
from ecoffload.plan import LoadOp, Plan, SaveOp
from ecoffload.region import HostRegion
from ecoffload.scheduler import OffloadScheduler
from ecoffload.testing.devices import SimBackend, sim_of, simulated
from ecoffload.worker import OffloadWorker

POISON = 0xAB
GRANULE = 4096
LIMIT = 30.0


def content(key: bytes, nbytes: int, version: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a key; another version has others."""
    return np.random.default_rng([version, *key]).integers(0, 256, nbytes, dtype=np.uint8)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def eventually(ready: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not ready():
        assert time.monotonic() < end, f"{what} did not happen within {LIMIT:.0f} s"
        time.sleep(0.0002)


class QueryFails(Completion):
    """A completion whose query raises what no backend should, ``times`` times; the copy itself goes on."""

    def __init__(self, inner: Completion, times: int = 1 << 60) -> None:
        self.inner = inner
        self.times = times

    def done(self) -> bool:
        self.times -= 1
        if self.times >= 0:
            raise RuntimeError("the event is not to be asked")
        return self.inner.done()

    def wait(self, timeout: float | None = None) -> bool:
        return self.inner.wait(timeout)

    def block(self, stream: Any) -> None:
        self.inner.block(stream)


class Worker:
    """One rank: its own mapping of the region, its own device."""

    def __init__(self, engine: Engine, rank: int, device: str, register: Any = "prefer") -> None:
        self.engine = engine
        self.rank = rank
        self.region = engine.map()
        self.backend: SwapBackend = simulated(device)
        self.sim: SimBackend = sim_of(self.backend)
        self._poison()
        self.worker = OffloadWorker(self.region, self.backend, rank, engine.world, register=register)
        self.failures: list[SwapFailed] = []

    def _poison(self) -> None:
        ops = self.backend.ops
        plain = ops.empty_tensors

        def empty_tensors(specs: Sequence[Any], stream: Any) -> list[torch.Tensor]:
            tensors = plain(specs, stream)
            for tensor in tensors:
                tensor.reshape(-1).view(torch.uint8).fill_(POISON)
            return tensors

        ops.empty_tensors = empty_tensors  # type: ignore[method-assign]

    def tensor(self, data: np.ndarray[Any, Any]) -> torch.Tensor:
        return self.backend.ops.empty(len(data)).copy_(torch.from_numpy(data))

    def queries_fail(self, times: int = 1 << 60) -> None:
        """The completion of the next submit cannot be asked (so many times)."""
        submit = self.backend.submit

        def wrapped(batch: Any, direction: Any, stream: Any) -> Any:
            completion = submit(batch, direction, stream)
            del self.backend.submit  # type: ignore[method-assign]
            return QueryFails(completion, times)

        self.backend.submit = wrapped  # type: ignore[method-assign]

    def settle(self, *, asking: bool = False) -> None:
        """Everything in flight has ended and was reported; what it raised is kept in ``failures``.

        ``asking``: nobody waits, as in an engine whose steps go on.
        """
        if asking:
            eventually(self._nothing_left, "the end of what a worker was given")
        else:
            assert self.worker.synchronize(LIMIT)
        try:
            self.worker.poll()
        except SwapFailed as exc:
            self.failures.append(exc)

    def _nothing_left(self) -> bool:
        try:
            self.worker.poll()
        except SwapFailed as exc:
            self.failures.append(exc)
        return not self.worker.pending()

    def close(self) -> None:
        self.worker.close()
        self.backend.close()
        self.region.close()

    def die(self, *, writing: bool = False) -> None:
        """What the kernel does when the process is killed: its locks go, and nobody says a word.

        ``writing``: its device goes on with what it was given, as DMA does, and keeps the memory mapped; else
        that has ended by the time anybody looks.
        """
        self.worker._slot._let_go()
        self.worker._closed = True
        if writing:
            self.engine.orphans.append(self)
        else:
            self.bury()

    def bury(self) -> None:
        """Its device has come to rest: the mapping goes."""
        self.backend.close()
        self.region.close()


class Engine:
    def __init__(
        self,
        directory: Path,
        *,
        id: str = "e",
        world: int = 1,
        devices: Sequence[str] = ("sim-int64",),
        register: Sequence[Any] = ("prefer",),
        capacity: int = 16 * GRANULE,
        checksum: bool = False,
        warm: bool = False,
        chunk_bytes: int = 64 << 30,
        policy: str = "lru",
    ) -> None:
        self.world = world
        self._open: dict[str, Any] = {
            "capacity": capacity,
            "granule": GRANULE,
            "directory": directory,
            "chunk_bytes": chunk_bytes,
            "warm": warm,
            "timeout": 5.0,
        }
        self._id = id
        self.region = self.map()
        self.scheduler = OffloadScheduler(self.region, world=world, checksum=checksum, policy=policy)
        self.index = self.scheduler.index
        self.workers = [
            Worker(self, rank, devices[rank % len(devices)], register[rank % len(register)]) for rank in range(world)
        ]
        self.truth: dict[bytes, bytes] = {}
        self.orphans: list[Worker] = []
        self._versions = 0

    def map(self) -> HostRegion:
        return HostRegion.open(self._id, **self._open)

    def plan_save(self, key: bytes, nbytes: int = GRANULE) -> SaveOp | None:
        op = self.scheduler.plan_save(key, nbytes, "uint8", (nbytes,))
        if op is not None:
            self._versions += 1
            self.truth[key] = content(key, nbytes, self._versions).tobytes()
        return op

    def plan_load(self, key: bytes) -> LoadOp | None:
        return self.scheduler.plan_load(key)

    def take(self) -> bytes:
        """The plan as it travels."""
        return pickle.dumps(self.scheduler.take_plan())

    def give(self, rank: int, message: bytes, *, without: Iterable[bytes] = ()) -> dict[bytes, torch.Tensor]:
        """One worker carries a plan out: loads, then the saves of what the encoder made, then the flush."""
        plan: Plan = pickle.loads(message)
        each = self.workers[rank]
        loaded = each.worker.load(plan)
        for op in plan.saves:
            if op.key not in without:
                data = np.frombuffer(self.truth[op.key], dtype=np.uint8).copy()
                each.worker.save(op.key, each.tensor(data), plan)
        each.worker.flush()
        return loaded

    def step(self) -> list[dict[bytes, torch.Tensor]]:
        """All workers carry out what is planned."""
        message = self.take()
        return [self.give(rank, message) for rank in range(len(self.workers))]

    def poll(self) -> None:
        self.scheduler.poll()
        self.index.check()

    def settle(self, *, asking: bool = False) -> None:
        """Everything that is in flight has ended, and the scheduler knows."""
        for each in self.workers:
            each.settle(asking=asking)

        def idle() -> bool:
            self.poll()
            return not self.scheduler.has_pending()

        eventually(idle, "the end of what is in flight")

    def save(self, *keys: bytes, nbytes: int = GRANULE) -> None:
        """Save these and wait; they must be there in the end."""
        for key in keys:
            assert self.plan_save(key, nbytes) is not None
        self.step()
        self.settle()
        assert all(self.scheduler.lookup(key) for key in keys)

    def load(self, *keys: bytes) -> list[dict[bytes, torch.Tensor]]:
        """Load these everywhere and wait."""
        for key in keys:
            assert self.plan_load(key) is not None
        loaded = self.step()
        self.settle()
        return loaded

    def load_now(self, *keys: bytes) -> list[dict[bytes, torch.Tensor]]:
        """Load these everywhere and wait for the workers only: some save may never end."""
        for key in keys:
            assert self.plan_load(key) is not None
        loaded = self.step()
        for each in self.workers:
            each.settle()
        self.poll()
        return loaded

    def verify(self, loaded: dict[bytes, torch.Tensor]) -> None:
        for each in self.workers:
            with suppress(DeviceLost):
                each.backend.ops.synchronize()
        for key, tensor in loaded.items():
            assert raw(tensor) == self.truth[key], f"wrong bytes for {key!r}"

    def assert_works(self, key: bytes = b"next") -> None:
        """The next operation works: a save, and a load of it everywhere."""
        self.save(key)
        for loaded in self.load(key):
            assert set(loaded) == {key}
            self.verify(loaded)

    def assert_idle(self) -> None:
        """Nothing is pinned, and every granule is free or belongs to an entry that can be found."""
        self.index.check()
        assert self.index.pinned == 0
        assert self.index.used_bytes == self.index.quarantined_bytes + sum(e.held_bytes for e in self.index)
        for each in self.workers:
            each.worker._pool.lease().release()  # looks after arrays that were given up
            assert each.worker._pool.leased == 0

    def close(self) -> None:
        for each in self.orphans:
            each.bury()
        for each in self.workers:
            each.close()
        self.scheduler.poll()
        self.index.check()
        self.scheduler.close()
        self.region.close()
