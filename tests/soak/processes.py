"""The processes of the killing test: a scheduler, workers, and the copier that stands for a worker's device.

Each is forked by `killing.py`, talks to it over one socket in whole messages, and may be killed at any instruction.
The copier maps the region itself and goes on writing after its worker was killed, as a device's DMA does. What a
scheduler says is said before it is done (evictions) or after it is done (commits), so that whoever reads it knows what
a kill may have left.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import random
import signal
import socket
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from ecoffload.errors import DeviceLost
from ecoffload.eviction import EvictionPolicy, make_policy
from ecoffload.host_queue import QueuedCompletion
from ecoffload.plan import Plan
from ecoffload.region import HostRegion
from ecoffload.scheduler import OffloadScheduler
from ecoffload.testing.declarations import DECLARED
from ecoffload.testing.devices import SimInt64
from ecoffload.worker import OffloadWorker

GRANULE = 4096
CAPACITY = 4 << 20
KEYS = 160
DEVICE_LOST = 3  # exit status of a worker whose copier was killed
OPEN: dict[str, Any] = {
    "id": "killed",
    "capacity": CAPACITY,
    "granule": GRANULE,
    "namespace": "killing test",
    "warm": True,
    "takeover_limit": (10**9, 600.0),  # takeovers are what this test is made of
    "timeout": 60.0,
}
Words = np.ndarray[Any, np.dtype[np.uint64]]


class Line:
    """One end of a socket that carries whole messages between a process and the one that runs the test."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def send(self, *message: Any) -> None:
        self.socket.send(pickle.dumps(message))

    def offer(self, *message: Any) -> None:
        """Send, unless the other end is gone or does not read."""
        self.socket.setblocking(False)
        try:
            self.send(*message)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EAGAIN, errno.ENOBUFS):
                raise
        finally:
            self.socket.setblocking(True)

    def receive(self, timeout: float = 0.0) -> tuple[Any, ...] | None:
        """The next message, or None if none came in time. Raises EOFError when the other end is gone."""
        self.socket.settimeout(timeout)
        try:
            data = self.socket.recv(1 << 20)
        except (TimeoutError, BlockingIOError):
            return None
        except ConnectionResetError:
            data = b""
        finally:
            self.socket.settimeout(None)
        if not data:
            raise EOFError
        message: tuple[Any, ...] = pickle.loads(data)
        return message


# --- content: what a key's bytes are --------------------------------------------------------------------------------


def nbytes_of(key: bytes) -> int:
    """The size of a key's entry: 4 KiB to 256 KiB, whole words, mostly no whole granules."""
    seed = random.Random(key)
    return 8 * seed.randrange(512, (512 << seed.randrange(7)) + 1)


def content(key: bytes, generation: int) -> Words:
    """The words of a key: every one of them tells key, generation and place, so that no mix of two is taken for one."""
    count = nbytes_of(key) // 8
    seed = random.Random(b"%b/%d" % (key, generation)).getrandbits(64)
    words = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    words ^= words >> np.uint64(29)
    words[0] = generation
    return words


def generation_in(key: bytes, words: Words) -> int | None:
    """The generation that all the words of `key` belong to; None if they are not one entry's."""
    generation = int(words[0])
    return generation if generation < 1 << 62 and np.array_equal(words, content(key, generation)) else None


# --- what a process holds -------------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings(directory: Path) -> int:
    return sum(str(directory) in line for line in Path("/proc/self/maps").read_text().splitlines())


# --- the scheduler --------------------------------------------------------------------------------------------------


class Watched(EvictionPolicy[bytes]):
    """A policy that says what becomes of entries: "ready" after the journal knows, "gone" before it is told."""

    def __init__(self, line: Line) -> None:
        self._inner: EvictionPolicy[bytes] = make_policy("lru", capacity=CAPACITY)
        self._line = line

    def add(self, key: bytes, nbytes: int, cost: float = 0.0) -> None:
        self._inner.add(key, nbytes, cost)
        self._line.send("ready", key)

    def touch(self, key: bytes) -> None:
        self._inner.touch(key)

    def evict(self, key: bytes) -> None:
        self._line.send("going", key, "evicted")
        self._inner.evict(key)

    def remove(self, key: bytes) -> None:
        self._line.send("going", key, "removed")
        self._inner.remove(key)

    def unpin(self, key: bytes) -> None:
        self._inner.unpin(key)

    def victims(self) -> Iterator[bytes]:
        return self._inner.victims()

    def __len__(self) -> int:
        return len(self._inner)

    def __contains__(self, key: object) -> bool:
        return key in self._inner


def scheduler(line: Line, directory: Path, seed: int, first_generation: int) -> None:
    """Plan loads, saves and invalidations without end; be quiet, and count what is held, when told so."""
    chance = random.Random(seed)
    before = descriptors()
    region = HostRegion.open(directory=directory, **OPEN)
    line.send("start", region.start, region.start_reason)
    engine = OffloadScheduler(region, world=2, policy=Watched(line))
    adopted = [entry.key for entry in engine.index]
    line.send("adopted", adopted)
    wanted = deque(chance.sample(adopted, len(adopted)))  # to be loaded as soon as they are verified
    patience = time.monotonic() + 20
    verified = False
    generation = first_generation
    quiet = 0.0
    plans = 0
    while True:
        message = line.receive()
        if message == ("quit",):
            break
        if message == ("quiet",):
            quiet = time.monotonic()
        engine.poll()
        engine.index.check()
        if not verified and (engine.recovered + engine.recovery_dropped >= len(adopted) or not engine.saving()):
            verified = True
            line.send("dropped", engine.recovery_dropped)
        generations: dict[bytes, int] = {}
        if not quiet:
            for _ in range(chance.randrange(6)):
                if wanted:
                    key = wanted.popleft()
                    if engine.known(key) and not engine.lookup(key) and time.monotonic() < patience:
                        wanted.append(key)
                        continue
                else:
                    number = min(chance.randrange(KEYS), chance.randrange(KEYS))
                    key = b"%s%d" % (b"c" if number % 8 == 7 else b"k", number)
                if chance.random() < 0.01:
                    line.send("invalidate", key)
                    engine.invalidate(key)
                    line.send("invalidated", key)
                elif engine.lookup(key):
                    load = engine.plan_load(key)
                    if load is not None:
                        line.send("loading", region.instance, load.number, key)
                elif not engine.known(key):
                    nbytes = nbytes_of(key)
                    if engine.plan_save(key, nbytes, "uint64", (nbytes // 8,), durable=key.startswith(b"k")):
                        generation += 1
                        generations[key] = generation
        plan = engine.take_plan()
        plans += 1
        if generations:
            line.send("planned", generations)
        if plan.saves or plan.loads or plans % 10 == 0:
            line.send("plan", pickle.dumps(plan), generations)
        stats = engine.stats()
        if quiet and not engine.has_pending() and not (stats.quarantined_bytes and time.monotonic() - quiet < 5):
            line.send("quiet", stats.pinned_entries, stats.quarantined_bytes)
            quiet = 0.0
        elif quiet and time.monotonic() - quiet > 30:
            line.send("stuck", len(engine._saving) + len(engine._loading), repr(engine.stats()))
            quiet = 0.0
        time.sleep(0.001 + 0.003 * chance.random())
    engine.close()
    region.close()
    line.send("closed", descriptors() - before, mappings(directory))


# --- the worker and its device --------------------------------------------------------------------------------------

# What goes through the pipe: number of the batch, offset in the region, bytes that follow. Without bytes, the end of
# that batch; number 0 is no batch, but says which era its client has entered.
_JOB = struct.Struct("<QQQ")


class CopierDevice(SimInt64):
    """A simulated device whose copies to the host another process makes, late; see `copier`. Rank 1 has no pipe."""

    memory = 64 << 20

    def __init__(self, region: HostRegion, pipe: socket.socket | None) -> None:
        super().__init__(DECLARED["sim-int64"])
        self.device.latency = 0.002
        self._region = region
        self._pipe = pipe
        self._era = -1  # the copier's, which came before its client
        self._batches = 0
        self._ended = 0

    def submit(self, batch: Any, direction: Any, stream: Any) -> Any:
        pipe = self._pipe
        if direction == "h2d" or pipe is None:
            return super().submit(batch, direction, stream)
        read = self._read((batch.src, batch.dst, batch.size), batch.count, batch.first, direction)
        self._batches += 1
        number = self._batches

        def send_and_wait() -> None:
            try:
                for src, dst, nbytes in read:
                    data = ctypes.string_at(src, nbytes)
                    pipe.sendall(_JOB.pack(number, dst - self._region.address, nbytes) + data)
                pipe.sendall(_JOB.pack(number, 0, 0))
                while self._ended < number:
                    word = pipe.recv(8, socket.MSG_WAITALL)
                    if len(word) < 8:
                        raise ConnectionResetError
                    self._ended = int.from_bytes(word, "little")
            except OSError as error:
                raise DeviceLost("the copier is gone", code=999) from error

        return QueuedCompletion(stream, send_and_wait)

    def enter_era(self) -> None:
        """The copier maps the region for itself, so it has to be told, behind all that it was told before."""
        if self._pipe is not None and self._era != self._region.era:
            self._era = self._region.era
            try:
                self._pipe.sendall(_JOB.pack(0, self._era, 0))
            except OSError as error:
                raise DeviceLost("the copier is gone", code=999) from error


def copier(line: Line, directory: Path, seed: int, pipe: socket.socket) -> None:
    """Write into the region what comes through the pipe, slowly, to the last byte, whether or not anybody waits.

    What is left when the client has been killed is written late: others have had the time to use its extents by then,
    if anybody lets them.
    """
    chance = random.Random(seed)
    alone = threading.Event()
    with HostRegion.open(directory=directory, **OPEN) as region:
        pipe.send(bytes(8))
        jobs: deque[tuple[int, int, bytes]] = deque()
        came = threading.Semaphore(0)

        def read() -> None:
            try:
                while True:
                    head = pipe.recv(_JOB.size, socket.MSG_WAITALL)
                    if len(head) < _JOB.size:
                        break
                    number, offset, nbytes = _JOB.unpack(head)
                    data = pipe.recv(nbytes, socket.MSG_WAITALL) if nbytes else b""
                    if len(data) < nbytes:
                        break
                    jobs.append((number, offset, data))
                    came.release()
            except OSError:
                pass
            alone.set()
            came.release()

        threading.Thread(target=read, daemon=True).start()
        while True:
            came.acquire()
            if not jobs:
                return
            number, offset, data = jobs.popleft()
            if data:
                view = region.view([(offset, len(data))])[0]
                step = chance.choice((1024, 4096, 16384, 1 << 20))
                for at in range(0, len(data), step):
                    if alone.is_set() and chance.random() < 0.3:
                        time.sleep(chance.random() * 0.3)
                    if chance.random() < 0.2:
                        time.sleep(chance.random() * 0.004)
                    view[at : at + step] = data[at : at + step]
                view.release()
            elif not number:
                region.enter_era(offset)
            else:
                try:
                    pipe.send(number.to_bytes(8, "little"))
                except OSError:
                    continue  # the worker was killed; the rest is written all the same


def _first(pipe: socket.socket) -> bytes:
    try:
        return pipe.recv(8)
    except OSError:
        return b""


def worker(line: Line, directory: Path, rank: int, pipe: socket.socket | None) -> None:
    """Carry out plans; look at every loaded byte and say whose it is."""
    before = descriptors()
    if pipe is not None and not _first(pipe):  # its copier comes first: it must not be of a later era than its client
        raise DeviceLost("the copier is gone", code=999)
    region = HostRegion.open(directory=directory, **OPEN)
    device = CopierDevice(region, pipe)
    self = OffloadWorker(region, device, rank, 2)
    while True:
        self.poll()
        message = line.receive(0.002)
        if message is None:
            continue
        if message == ("quit",):
            break
        _, data, generations = message
        plan: Plan = pickle.loads(data)
        loaded = self.load(plan)
        device.enter_era()
        for key, generation in generations.items():
            source = torch.from_numpy(content(key, generation).view(np.uint8))
            self.save(key, device.ops.empty(source.numel()).copy_(source).view(torch.uint64), plan)
        self.flush()
        if loaded:
            device.ops.synchronize(self._load_stream)
            found = {key: generation_in(key, tensor.numpy()) for key, tensor in loaded.items()}
            served = [(op.number, op.key, found[op.key]) for op in plan.loads if op.key in found]
            line.send("served", plan.instance, served)
    self.close()
    device.close()
    del self, device
    region.close()
    line.send("closed", descriptors() - before, mappings(directory))


def run(main: Callable[..., None], line: Line, *args: Any) -> NoReturn:
    """In the forked child: do `main`, then end without a look back."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        main(line, *args)
        status = 0
    except DeviceLost:
        status = DEVICE_LOST  # its copier was killed: it ends, as an engine whose device is gone does
    except (EOFError, BrokenPipeError):
        pass  # who runs the test is gone
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
