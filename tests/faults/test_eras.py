"""Who may still be writing: eras, writers that outlive their engine, workers that are slow and not dead."""

from __future__ import annotations

import pickle
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ecoffload import HostRegion, OffloadScheduler, OffloadWorker, get_backend, layout
from ecoffload.checksums import checksum_of

GRANULE = 4096
Fork = Callable[..., Any]


def open_region(shm: Path, **options: Any) -> HostRegion:
    options = {"capacity": 8 * GRANULE, "granule": GRANULE, "warm": True, "namespace": "n", "timeout": 20.0} | options
    return HostRegion.open("e", directory=shm, **options)


def save(scheduler: OffloadScheduler, worker: OffloadWorker, key: bytes, value: int) -> None:
    assert scheduler.plan_save(key, GRANULE, "uint8", (GRANULE,)) is not None
    plan = scheduler.take_plan()
    worker.load(plan)
    worker.save(key, torch.full((GRANULE,), value, dtype=torch.uint8), plan)
    worker.flush()
    settle(scheduler, worker)
    assert scheduler.lookup(key)


def settle(scheduler: OffloadScheduler, worker: OffloadWorker) -> None:
    end = time.monotonic() + 30
    while scheduler.has_pending():
        worker.poll()
        scheduler.poll()
        scheduler.index.check()
        assert time.monotonic() < end, "it did not end"


def carry_out(scheduler: OffloadScheduler, worker: OffloadWorker) -> None:
    worker.load(scheduler.take_plan())


def hold(pipe: socket.socket, shm: Path) -> None:
    """What is left of an engine's device: something that maps the region and may write."""
    region = open_region(shm)
    pipe.send(b"up")
    pipe.recv(1)
    region.view([(0, 1)])
    region.close()


def test_an_era_is_outlived_when_its_last_other_holder_is_gone(shm: Path, fork: Fork) -> None:
    with open_region(shm) as scheduler:
        writer = fork(hold, shm)
        assert writer.hear() == b"up"
        ended = scheduler.begin_era()
        assert not scheduler.outlived(ended)
        late = fork(hold, shm)
        assert late.hear() == b"up"
        writer.kill()
        assert scheduler.outlived(ended), "who came later knows of nothing that was planned before"
        assert not scheduler.outlived(ended + 1)
        late.kill()
        assert scheduler.outlived(ended + 1)


def test_an_era_is_outlived_when_its_last_holder_has_entered_a_later_one(shm: Path) -> None:
    with open_region(shm) as scheduler, open_region(shm) as worker:
        ended = scheduler.begin_era()
        assert not scheduler.outlived(ended)
        worker.enter_era(scheduler.era)
        assert scheduler.outlived(ended)
        worker.enter_era(ended)
        assert worker.era == ended + 1, "it never goes back"


@pytest.mark.parametrize("word", [0, 1, layout.LAST_ERA, 2**63, 2**64 - 1])
def test_any_word_in_the_header_gives_an_era(shm: Path, word: int) -> None:
    with open_region(shm) as keeper:
        with keeper.path.open("r+b") as file:
            file.seek(8 * layout.W_ERA)
            file.write(word.to_bytes(8, "little"))
        with open_region(shm) as region:
            assert 0 <= region.era <= layout.LAST_ERA
            ended = region.begin_era()
            assert 0 <= ended <= layout.LAST_ERA
            assert region.outlived(ended) in (True, False)
            assert not region.outlived(layout.LAST_ERA), "the keeper is there, in whatever era"


@pytest.mark.parametrize("early", [True, False])
def test_what_a_dead_engines_device_may_write_is_free_once_it_has_gone_although_workers_live(
    shm: Path, fork: Fork, early: bool
) -> None:
    def dies(pipe: socket.socket) -> None:
        scheduler = OffloadScheduler(open_region(shm))
        scheduler.plan_save(b"torn", 3 * GRANULE, "uint8", (3 * GRANULE,))
        scheduler.take_plan()
        pipe.send(b"planned")
        signal.pause()

    device = fork(hold, shm)
    assert device.hear() == b"up"
    engine = fork(dies)
    assert engine.hear() == b"planned"
    mine = open_region(shm) if early else None  # a worker may come before the scheduler, or after it
    engine.kill()
    region = open_region(shm)
    scheduler = OffloadScheduler(region)
    worker = OffloadWorker(mine or open_region(shm), get_backend("cpu"))
    carry_out(scheduler, worker)
    assert scheduler.stats().quarantined_bytes == 3 * GRANULE
    assert scheduler.plan_save(b"large", 6 * GRANULE, "uint8", (6 * GRANULE,)) is None
    save(scheduler, worker, b"small", 5)
    device.kill()
    carry_out(scheduler, worker)
    scheduler.take_plan()
    assert scheduler.stats().quarantined_bytes == 0
    scheduler.index.check()
    assert scheduler.plan_save(b"large", 6 * GRANULE, "uint8", (6 * GRANULE,)) is not None
    worker.close()
    worker.region.close()
    scheduler.close()
    region.close()


def test_a_journal_whose_unfinished_saves_overlap_keeps_a_scheduler_from_nothing(shm: Path, fork: Fork) -> None:
    def damages(pipe: socket.socket) -> None:
        region = open_region(shm)
        region.begin_instance()
        journal = region.journal
        good = journal.intent(b"good", 1, [(0, GRANULE)], 4, "uint8", (4,))
        journal.commit(good, checksum_of(region, [(0, GRANULE)], 4))
        for key in (b"one", b"two"):
            journal.intent(key, 1, [(2 * GRANULE, 2 * GRANULE)], 2 * GRANULE, "uint8", (2 * GRANULE,))
        pipe.send(b"done")
        signal.pause()

    device = fork(hold, shm)
    assert device.hear() == b"up"
    engine = fork(damages)
    assert engine.hear() == b"done"
    engine.kill()
    with open_region(shm) as region:
        scheduler = OffloadScheduler(region)
        scheduler.index.check()
        assert scheduler.recovery_dropped == 2
        assert scheduler.stats().quarantined_bytes == 7 * GRANULE, "anything but the good one may be written"
        assert scheduler.plan_save(b"new", 4, "uint8", (4,)) is None
        device.kill()
        assert scheduler.plan_save(b"new", 4, "uint8", (4,)) is not None
        scheduler.index.check()
        end = time.monotonic() + 10
        while not scheduler.lookup(b"good"):
            scheduler.poll()
            assert time.monotonic() < end, "it was not verified"
        scheduler.close()


def test_a_plan_from_before_a_loss_is_carried_out_by_nobody_who_came_after_it(shm: Path, fork: Fork) -> None:
    def one_save_and_death(pipe: socket.socket) -> None:
        worker = OffloadWorker(open_region(shm), get_backend("cpu"))
        pipe.send(b"up")
        worker.load(pickle.loads(pipe.recv(1 << 16)))
        pipe.send(b"took it")
        signal.pause()

    with open_region(shm) as region:
        scheduler = OffloadScheduler(region)
        dead = fork(one_save_and_death)
        assert dead.hear() == b"up"
        assert scheduler.plan_save(b"torn", GRANULE, "uint8", (GRANULE,)) is not None
        old = scheduler.take_plan()
        dead.send(pickle.dumps(old))
        assert dead.hear() == b"took it"
        scheduler.poll()
        dead.kill()
        end = time.monotonic() + 10
        while scheduler.known(b"torn"):
            scheduler.poll()
            assert time.monotonic() < end, "the loss was not noticed"
        worker = OffloadWorker(open_region(shm), get_backend("cpu"))
        worker.load(old)
        worker.save(b"torn", torch.ones(GRANULE, dtype=torch.uint8), old)
        worker.flush()
        assert worker.plans_ignored >= 1
        assert worker.bytes_saved == 0
        save(scheduler, worker, b"next", 3)
        worker.close()
        worker.region.close()
        scheduler.close()


def test_the_numbers_of_saves_in_flight_for_an_earlier_scheduler_mean_nothing_to_the_next(shm: Path) -> None:
    from ecoffload.testing.devices import sim_of, simulated

    device = simulated("sim-int64")
    mine = open_region(shm)
    worker = OffloadWorker(mine, device)
    first_region = open_region(shm)
    first = OffloadScheduler(first_region)
    for number in range(4):
        assert first.plan_save(b"%d" % number, GRANULE, "uint8", (GRANULE,)) is not None
    plan = first.take_plan()
    device.ops.delay(worker._save_stream, 50)
    for number in range(4):
        worker.save(b"%d" % number, device.ops.empty(GRANULE).fill_(number), plan)
    worker.flush()
    first_region.close()  # as if killed: four saves are in flight
    region = open_region(shm)
    second = OffloadScheduler(region)
    assert second.plan_save(b"new", GRANULE, "uint8", (GRANULE,)) is not None
    plan = second.take_plan()
    sim_of(device).device.latency = 0.2
    worker.save(b"new", device.ops.empty(GRANULE).fill_(77), plan)
    worker.flush()
    for _ in range(20):
        worker.poll()
        second.poll()
        assert not second.lookup(b"new"), "its bytes are still on their way"
        time.sleep(0.002)
    settle(second, worker)
    assert second.lookup(b"new")
    assert bytes(region.view(second.index.lookup(b"new").extents)[0]) == bytes([77]) * GRANULE
    worker.close()
    device.close()
    mine.close()
    second.close()
    region.close()


def test_a_stopped_worker_is_slow_and_not_dead(shm: Path, fork: Fork) -> None:
    def works(pipe: socket.socket) -> None:
        worker = OffloadWorker(open_region(shm), get_backend("cpu"))
        pipe.send(b"up")
        while message := pipe.recv(1 << 16):
            plan = pickle.loads(message)
            loaded = worker.load(plan)
            for op in plan.saves:
                worker.save(op.key, torch.full((op.nbytes,), 9, dtype=torch.uint8), plan)
            worker.flush()
            worker.poll()
            pipe.send(bytes(loaded[b"a"].numpy()[:4]) if loaded else b"nothing")
        worker.close()
        worker.region.close()

    with open_region(shm) as region:
        scheduler = OffloadScheduler(region)
        process = fork(works)
        assert process.hear() == b"up"
        assert scheduler.plan_save(b"a", GRANULE, "uint8", (GRANULE,)) is not None
        process.send(pickle.dumps(scheduler.take_plan()))
        assert process.hear() == b"nothing"
        end = time.monotonic() + 30
        while scheduler.has_pending():
            scheduler.poll()
            assert time.monotonic() < end
        process.signal(signal.SIGSTOP)
        assert scheduler.plan_load(b"a") is not None
        process.send(pickle.dumps(scheduler.take_plan()))
        quiet = time.monotonic() + 0.3  # six times what it takes to notice a death
        while time.monotonic() < quiet:
            scheduler.poll()
            scheduler.index.check()
            assert scheduler.stats().pinned_entries == 1
        assert scheduler.stats().workers_lost == 0
        assert region.dead_ranks(1) == frozenset()
        process.signal(signal.SIGCONT)
        assert process.hear() == bytes([9] * 4)
        while scheduler.has_pending():
            scheduler.poll()
            assert time.monotonic() < end
        assert scheduler.stats().pinned_entries == 0
        process.pipe.shutdown(socket.SHUT_WR)
        assert process.wait() == 0
        scheduler.close()
