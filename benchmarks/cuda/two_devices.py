"""One region, one scheduler, a worker process a device: correctness over random steps, then what the devices reach.

    python benchmarks/cuda/two_devices.py --devices 0,1 --out results.json       two GPUs
    python benchmarks/cuda/two_devices.py --devices 0,0                          two processes on one GPU
    python benchmarks/cuda/two_devices.py --backend cpu --devices 0,0 --steps 40 no GPU at all

Every process maps and registers the same region. Rank 0 saves; all ranks load the same entries at the same time; every
loaded byte is compared on its device with what the key's seed gives. One rank is held back so that pins wait for the
slower one; one is killed in mid-load and started again. Then each rank alone and all together are timed, with events on
the host's clock, over the same entries; registration alone and together as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import random
import secrets
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ecoffload import HostRegion, OffloadScheduler, OffloadWorker, get_backend
from ecoffload.plan import LoadOp, SaveOp

HIDDEN = 3584
GRANULE = 4096


@dataclass(frozen=True)
class Options:
    """What every process needs to open the same region."""

    backend: str
    region_id: str
    capacity: int
    numa_node: int | None = None

    def open(self, *, create: bool) -> HostRegion:
        return HostRegion.open(
            self.region_id, capacity=self.capacity, granule=GRANULE, create=create, numa_node=self.numa_node
        )


def content(key: bytes, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The bytes that belong to a key, the same on every device: made on the CPU's generator."""
    generator = torch.Generator().manual_seed(int.from_bytes(key[-6:], "big"))
    return torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16).to(device)


def worker(options: Options, rank: int, world: int, device: int, pipe: Connection) -> None:
    """Carry out what comes through the pipe; answer each message once."""
    backend = get_backend(options.backend, device=device)
    backend.ops.synchronize()
    region = options.open(create=False)
    start = time.perf_counter()
    engine = OffloadWorker(region, backend, rank, world)
    pipe.send(("ready", time.perf_counter() - start, engine.registered))
    ops = backend.ops
    sources: dict[bytes, torch.Tensor] = {}
    while True:
        if not pipe.poll(0.0005):
            engine.poll()
            continue
        what, plan, extra = pipe.recv()
        if what == "stop":
            break
        if what == "make":  # sources of saves, outside the timed part
            sources = {op.key: content(op.key, op.shape, ops.device) for op in plan.saves} if rank == 0 else {}
            ops.synchronize()
            pipe.send(("made",))
            continue
        if extra.get("delay_ms"):
            ops.delay(engine._load_stream, extra["delay_ms"])
        start = time.perf_counter()
        for op in plan.saves:
            tensor = sources.pop(op.key, None)
            if tensor is None and rank == 0:
                tensor = content(op.key, op.shape, ops.device)
            if tensor is not None:
                engine.save(op.key, tensor, plan)
        engine.flush()
        loaded = engine.load(plan)
        issued = time.perf_counter() - start
        wrong = missing = 0
        if extra.get("verify", True):
            for op in plan.loads:
                got = loaded.get(op.key)
                missing += got is None
                if got is not None:
                    same = torch.equal(got.view(torch.int16), content(op.key, op.shape, ops.device).view(torch.int16))
                    wrong += not same
        engine.synchronize()
        took = time.perf_counter() - start
        engine.poll()
        pipe.send(("done", issued, took, len(loaded), wrong, missing))
    engine.close()
    region.close()


@dataclass
class Rank:
    """A worker process as the scheduler's side sees it."""

    options: Options
    rank: int
    world: int
    device: int
    outstanding: int = 0
    verified: int = 0
    wrong: int = 0
    missing: int = 0
    registration: float = 0.0
    answers: list[Any] = field(default_factory=list)

    def start(self) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=worker, args=(self.options, self.rank, self.world, self.device, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self.outstanding = 0

    def ready(self) -> None:
        kind, self.registration, self.registered = self.receive(180)
        if kind != "ready":
            raise RuntimeError(f"rank {self.rank} said {kind!r} instead of ready")

    def receive(self, timeout: float) -> Any:
        if not self.pipe.poll(timeout):
            raise TimeoutError(f"rank {self.rank} did not answer within {timeout} s")
        return self.pipe.recv()

    def send(self, what: str, plan: Any, **extra: Any) -> None:
        self.pipe.send((what, plan, extra))
        self.outstanding += 1

    def collect(self, *, wait: bool) -> None:
        while self.outstanding and (wait or self.pipe.poll(0)):
            answer = self.receive(120)
            self.outstanding -= 1
            self.answers.append(answer)
            if answer[0] == "done":
                _, _, _, loaded, wrong, missing = answer
                self.verified += loaded - wrong
                self.wrong += wrong
                self.missing += missing


class Engine:
    """Scheduler and ranks, with the steps that the parts below share."""

    def __init__(self, options: Options, devices: list[int], seed: int) -> None:
        self.random = random.Random(seed)
        self.region = options.open(create=True)
        self.scheduler = OffloadScheduler(self.region, world=len(devices))
        self.ranks = [Rank(options, i, len(devices), device) for i, device in enumerate(devices)]
        for rank in self.ranks:
            rank.start()
        for rank in self.ranks:
            rank.ready()
        self.serial = 0
        self.keys: dict[bytes, tuple[int, ...]] = {}

    def plan_save(self, tokens: int) -> SaveOp | None:
        self.serial += 1
        key = b"entry-" + self.serial.to_bytes(6, "big")
        shape = (tokens, HIDDEN)
        op = self.scheduler.plan_save(key, tokens * HIDDEN * 2, "bfloat16", shape)
        if op is not None:
            self.keys[key] = shape
        return op

    def plan_some_loads(self, most: int) -> list[LoadOp]:
        ready = [key for key in self.keys if self.scheduler.lookup(key)]
        chosen = self.random.sample(ready, min(len(ready), self.random.randint(0, most)))
        return [op for key in chosen if (op := self.scheduler.plan_load(key)) is not None]

    def step(self, *, wait: bool, **extra: Any) -> None:
        plan = self.scheduler.take_plan()
        for rank in self.ranks:
            rank.send("step", plan, **extra)
        for rank in self.ranks:
            rank.collect(wait=wait or rank.outstanding > 3)
        self.scheduler.poll()

    def settle(self, seconds: float = 30.0) -> None:
        for rank in self.ranks:
            rank.collect(wait=True)
        end = time.monotonic() + seconds
        while self.scheduler.has_pending() and time.monotonic() < end:
            self.scheduler.poll()
            time.sleep(0.001)

    def close(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.pipe.send(("stop", None, {}))
        for rank in self.ranks:
            rank.process.join(30)
        self.scheduler.close()
        self.region.close()


def correctness(engine: Engine, steps: int) -> dict[str, Any]:
    """Random steps, one rank slow now and then; a rank killed in mid-load and started again."""
    scheduler, draw = engine.scheduler, engine.random
    held_back = kills = 0
    slowest_pins = []
    for number in range(steps):
        for _ in range(draw.randint(0, 2)):
            engine.plan_save(draw.randint(16, 600))
        engine.plan_some_loads(4)
        slow = draw.random() < 0.05
        engine.step(wait=False, **({"delay_ms": 20} if slow else {}))
        held_back += slow
        if slow and scheduler.index.pinned:
            slowest_pins.append(scheduler.index.pinned)
        if number % 50 == 0:
            scheduler.index.check()
        if number in (steps // 3, 2 * steps // 3) and len(engine.ranks) > 1:
            victim = engine.ranks[-1]
            engine.plan_some_loads(4)
            engine.step(wait=False, delay_ms=30)
            os.kill(victim.process.pid or 0, signal.SIGKILL)
            victim.process.join()
            victim.outstanding = 0
            kills += 1
            victim.start()
            victim.ready()
    engine.settle()
    scheduler.index.check()
    stats = scheduler.stats()
    return {
        "steps": steps,
        "verified": [rank.verified for rank in engine.ranks],
        "wrong": sum(rank.wrong for rank in engine.ranks),
        "missing": sum(rank.missing for rank in engine.ranks),
        "pins_left": stats.pinned_entries,
        "steps_with_a_slow_rank": held_back,
        "kills": kills,
        "saves": stats.saves,
        "evictions": stats.evictions,
    }


def speed(engine: Engine, entries: int, tokens: int, rounds: int) -> dict[str, Any]:
    """GB/s of each rank alone and of all together, loading (and for rank 0 saving) the same entries."""
    scheduler = engine.scheduler
    scheduler.invalidate()
    nbytes = entries * tokens * HIDDEN * 2
    saves = []
    for _ in range(rounds):
        scheduler.invalidate()
        engine.keys.clear()
        for _ in range(entries):
            if engine.plan_save(tokens) is None:
                raise RuntimeError("the region is too small for the entries of the timing")
        plan = scheduler.take_plan()
        for rank in engine.ranks:
            rank.send("make", plan)
            rank.collect(wait=True)
        for rank in engine.ranks:
            rank.send("step", plan)
        engine.settle()
        saves.append(nbytes / engine.ranks[0].answers[-1][2] / 1e9)

    def loads(active: list[Rank], **extra: Any) -> list[list[float]]:
        """Seconds a round of every active rank; the others get the plan too, when it is over, so that pins end."""
        times: list[list[float]] = [[] for _ in active]
        for _ in range(rounds):
            for key in engine.keys:
                scheduler.plan_load(key)
            plan = scheduler.take_plan()
            for rank in active:
                rank.send("step", plan, verify=False, **extra)
            for i, rank in enumerate(active):
                rank.collect(wait=True)
                times[i].append(rank.answers[-1][2])
            for rank in engine.ranks:
                if rank not in active:
                    rank.send("step", plan, verify=False)
            engine.settle()
        return times

    def gb_per_s(times: list[float]) -> float:
        return nbytes / statistics.median(times[1:]) / 1e9

    alone = [gb_per_s(loads([rank])[0]) for rank in engine.ranks]
    together = [gb_per_s(times) for times in loads(engine.ranks)]
    # A rank never waits for another: the fast rank's time to issue must not see that the last one is held back.
    issued_before = [answer[1] for answer in engine.ranks[0].answers[-rounds:]]
    for _ in range(rounds):
        for key in engine.keys:
            scheduler.plan_load(key)
        plan = scheduler.take_plan()
        for rank in engine.ranks:
            slow = rank is engine.ranks[-1] and rank is not engine.ranks[0]
            rank.send("step", plan, verify=False, **({"delay_ms": 50} if slow else {}))
        engine.settle()
    issued_beside_slow = [answer[1] for answer in engine.ranks[0].answers[-rounds:]]
    return {
        "bytes": nbytes,
        "save_rank_0_gb_s": statistics.median(saves[1:]),
        "load_alone_gb_s": alone,
        "load_together_gb_s": together,
        "issue_ms": 1e3 * statistics.median(issued_before),
        "issue_ms_beside_a_slow_rank": 1e3 * statistics.median(issued_beside_slow),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="0,1", help="device index of each rank, comma-separated")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--capacity-mib", type=int, default=2048)
    parser.add_argument("--entries", type=int, default=64, help="entries of the timing")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--numa-node", type=int, help="where the region's memory shall lie")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    devices = [int(each) for each in options.devices.split(",")]
    shared = Options(
        options.backend, f"two-{secrets.token_hex(6)}", options.capacity_mib << 20, numa_node=options.numa_node
    )
    engine = Engine(shared, devices, options.seed)
    try:
        result: dict[str, Any] = {"backend": options.backend, "devices": devices}
        result["registration_together_s"] = [rank.registration for rank in engine.ranks]
        result["registered"] = [rank.registered for rank in engine.ranks]
        result["correctness"] = correctness(engine, options.steps)
        result["registration_alone_s"] = engine.ranks[-1].registration  # of the restart, when the others had registered
        result["speed"] = speed(engine, options.entries, options.tokens, options.rounds)
    finally:
        engine.close()
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    done = result["correctness"]
    failed = done["wrong"] or done["pins_left"]
    print(
        f"{sum(done['verified'])} loads verified on {len(devices)} ranks, {done['wrong']} wrong, "
        f"{done['missing']} missing, {done['kills']} kills, {done['pins_left']} pins left"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
