"""Scheduler, two workers and every fault, in any order: sound ownership after each step, no wrong byte unreported.

Messages may be late, lost or doubled; workers die and come back; submits, copies, queries and devices fail. The model
knows what each entry's bytes were when its load was planned: a tensor that a worker handed out has them, or its key is
among those that the worker raised.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import torch
from engine_kit import GRANULE, Engine, Worker, raw
from hypothesis import event, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ecoffload import slots
from ecoffload.errors import SwapFailed
from ecoffload.plan import Plan

KEYS = st.integers(0, 5).map(lambda i: b"key-%d" % i)
RANKS = st.integers(0, 1)
BASE = Path(os.environ.get("ECOFFLOAD_TEST_SHM", "/dev/shm"))
DEVICES = [("sim-int64", "sim-uint64"), ("sim-uint64", "sim-top"), ("sim-top", "sim-int64")]


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        devices=st.sampled_from(DEVICES),
        policy=st.sampled_from(["lru", "fifo", "auto"]),
        checksum=st.booleans(),
        chunk=st.sampled_from([5, 1 << 20]),
    )
    def open(self, devices: tuple[str, str], policy: str, checksum: bool, chunk: int) -> None:
        self.probe, slots._PROBE_SECONDS = slots._PROBE_SECONDS, -1.0
        self.directory = Path(tempfile.mkdtemp(prefix="ecoffload-test-", dir=BASE))
        self.devices = devices
        self.engine = e = Engine(
            self.directory,
            world=2,
            devices=devices,
            policy=policy,
            checksum=checksum,
            capacity=15 * GRANULE,
            chunk_bytes=chunk * GRANULE,
        )
        self.queues: list[deque[bytes]] = [deque(), deque()]
        self.old: list[bytes] = []
        self.alive: list[Worker | None] = list(e.workers)
        self.expected: dict[int, bytes] = {}  # by load number
        self.sources: dict[int, bytes] = {}  # by save number
        self.handed: list[list[tuple[bytes, torch.Tensor, bytes]]] = [[], []]

    # -- the scheduler

    @rule(key=KEYS, granules=st.integers(0, 7), short=st.integers(0, 99))
    def plan_save(self, key: bytes, granules: int, short: int) -> None:
        nbytes = max(0, granules * GRANULE - short)
        op = self.engine.plan_save(key, nbytes)
        if op is not None:
            self.sources[op.number] = self.engine.truth[key]

    @rule(key=KEYS, cancel=st.booleans())
    def plan_load(self, key: bytes, cancel: bool) -> None:
        there = self.engine.scheduler.lookup(key)
        op = self.engine.plan_load(key)
        assert (op is not None) == there
        if op is None:
            return
        if cancel and len(key) % 2:
            assert self.engine.scheduler.cancel_load(op)
        else:
            self.expected[op.number] = self.engine.truth[key]

    @rule(key=st.none() | KEYS)
    def invalidate(self, key: bytes | None) -> None:
        self.engine.scheduler.invalidate(key)

    @rule()
    def send(self) -> None:
        message = self.engine.take()
        for queue in self.queues:
            queue.append(message)

    @rule()
    def scheduler_polls(self) -> None:
        self.engine.scheduler.poll()

    # -- the workers

    @rule(rank=RANKS, how=st.sampled_from(["whole", "whole", "whole", "no saves", "no loads", "no flush"]))
    def deliver(self, rank: int, how: str) -> None:
        if self.queues[rank] and self.alive[rank] is not None:
            message = self.queues[rank].popleft()
            self.old.append(message)
            self.carry_out(rank, message, how)

    @rule(rank=RANKS)
    def lose_a_message(self, rank: int) -> None:
        if self.queues[rank]:
            self.queues[rank].popleft()

    @rule(rank=RANKS, data=st.data())
    def deliver_again(self, rank: int, data: Any) -> None:
        # A worker that has seen nothing yet cannot know that a message is an old one; queues of new processes are new.
        each = self.alive[rank]
        if self.old and each is not None and each.worker._plan is not None:
            message = data.draw(st.sampled_from(self.old))
            if pickle.loads(message).saved <= each.worker._plan.saved:
                self.carry_out(rank, message, "whole")

    def carry_out(self, rank: int, message: bytes, how: str) -> None:
        each = self.alive[rank]
        assert each is not None
        plan: Plan = pickle.loads(message)
        numbers = {op.key: op.number for op in plan.loads}
        for attempt in range(2):
            try:
                if how != "no loads":
                    for key, tensor in each.worker.load(plan).items():
                        self.handed[rank].append((key, tensor, self.expected[numbers[key]]))
                for op in plan.saves:
                    if how != "no saves":
                        data = torch.frombuffer(bytearray(self.sources[op.number] or b"\0"), dtype=torch.uint8)
                        tensor = each.backend.ops.empty(op.nbytes).copy_(data[: op.nbytes])
                        each.worker.save(op.key, tensor, plan)
                if how != "no flush":
                    each.worker.flush()
                break
            except SwapFailed as exc:
                self.told(rank, exc)
                each.sim.device.lost = False
                if attempt:
                    break

    def told(self, rank: int, failure: SwapFailed) -> None:
        keys = getattr(failure, "keys", ()) or ()
        event("failures told" if keys else "failures without keys")
        self.handed[rank] = [each for each in self.handed[rank] if each[0] not in keys]

    @rule(rank=RANKS)
    def worker_polls(self, rank: int) -> None:
        if (each := self.alive[rank]) is not None:
            try:
                each.worker.poll()
            except SwapFailed as exc:
                self.told(rank, exc)

    @rule(rank=RANKS)
    def worker_settles(self, rank: int) -> None:
        self.settle(rank)

    def settle(self, rank: int) -> None:
        each = self.alive[rank]
        if each is None:
            return
        each.settle()
        for failure in each.failures:
            self.told(rank, failure)
        each.failures.clear()
        with suppress(SwapFailed):
            each.backend.ops.synchronize()
        for key, tensor, expected in self.handed[rank]:
            event("loads verified")
            assert raw(tensor) == expected, f"rank {rank} was given wrong bytes for {key!r}, and nobody told it"
        self.handed[rank].clear()

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4, unique=True), granules=st.integers(1, 5), settle=st.booleans())
    def a_step_of_an_engine(self, keys: list[bytes], granules: int, settle: bool) -> None:
        """Look each key up, load what is there, save what is not; everybody carries it out."""
        for key in keys:
            self.plan_load(key, cancel=False)
            self.plan_save(key, granules, 1)
        self.send()
        for rank in range(2):
            while self.queues[rank] and self.alive[rank] is not None:
                self.deliver(rank, "whole")
            if settle:
                self.settle(rank)
        self.engine.scheduler.poll()

    # -- what goes wrong

    @rule(rank=RANKS, kind=st.sampled_from(["submit", "late", "lost"]), index=st.integers(0, 3))
    def fault(self, rank: int, kind: Any, index: int) -> None:
        if (each := self.alive[rank]) is not None:
            each.sim.inject_fault(kind, index)

    @rule(rank=RANKS)
    def queries_fail(self, rank: int) -> None:
        if (each := self.alive[rank]) is not None and "submit" not in vars(each.backend):
            each.queries_fail(1)

    @rule(rank=RANKS)
    def late(self, rank: int) -> None:
        if (each := self.alive[rank]) is not None:
            each.backend.ops.delay(each.worker._save_stream, 2)

    @rule(rank=RANKS, kindly=st.booleans(), writing=st.booleans())
    def end(self, rank: int, kindly: bool, writing: bool) -> None:
        if (each := self.alive[rank]) is not None:
            if kindly:
                each.close()
            else:
                each.die(writing=writing)
            self.alive[rank] = None
            self.handed[rank].clear()

    @rule(rank=RANKS)
    def start(self, rank: int) -> None:
        if self.alive[rank] is None:
            self.alive[rank] = Worker(self.engine, rank, self.devices[rank])
            self.queues[rank].clear()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "engine"):
            self.engine.index.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        e = self.engine
        try:
            for rank in range(2):
                self.settle(rank)
                self.end(rank, True, False)
            while e.orphans:
                e.orphans.pop().bury()
            e.scheduler.poll()
            e.scheduler._release_quarantine()
            assert e.index.quarantined_bytes == 0, "nobody is left who could write"
            for rank in range(2):
                self.start(rank)
            e.workers = [each for each in self.alive if each is not None]
            for each in e.workers:
                each.sim.device.reset()
                vars(each.backend).pop("submit", None)
            e.step()  # what was planned meanwhile, and what the new ones were never told
            e.settle()
            e.scheduler.invalidate()
            e.assert_works(b"last")
            for rank in range(2):
                self.settle(rank)
            e.assert_idle()
            assert [entry.key for entry in e.index] == [b"last"]
        finally:
            e.close()
            shutil.rmtree(self.directory)
            slots._PROBE_SECONDS = self.probe


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
