"""Workers that die, leave and come back: what they may still be writing is nobody's, and nothing waits for them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_kit import GRANULE, Engine

from ecoffload.errors import RegionError
from ecoffload.region import HostRegion
from ecoffload.scheduler import OffloadScheduler
from ecoffload.testing.devices import sim_of, simulated
from ecoffload.worker import OffloadWorker

Start = Callable[..., Engine]
pytestmark = pytest.mark.usefixtures("look_at_once")


def in_mid_save(e: Engine, *, writing: bool, key: bytes = b"torn", nbytes: int = 4 * GRANULE) -> None:
    """Rank 0 dies with this save on its stream."""
    e.plan_save(key, nbytes)
    each = e.workers[0]
    each.backend.ops.delay(each.worker._save_stream, 100)
    e.step()
    e.poll()
    each.die(writing=writing)


def restart(e: Engine, rank: int = 0) -> None:
    e.workers[rank] = type(e.workers[rank])(e, rank, "sim-int64")


def test_what_a_dead_worker_was_writing_is_kept_aside_while_others_map_the_region(engine: Start) -> None:
    e = engine(world=2, capacity=8 * GRANULE)
    in_mid_save(e, writing=True)
    e.poll()
    assert not e.scheduler.known(b"torn")
    assert e.scheduler.stats().workers_lost == 1
    assert e.scheduler.stats().quarantined_bytes == 4 * GRANULE
    assert not e.scheduler.saving(), "nobody will report it"
    restart(e)
    e.save(b"a", nbytes=4 * GRANULE)
    e.orphans[0].backend.ops.synchronize()  # what was under way has landed, where it hurts nobody
    e.verify(e.load(b"a")[0])
    assert e.index.quarantined_bytes == 4 * GRANULE
    e.assert_idle()


def test_what_was_kept_aside_is_used_once_nobody_else_maps_the_region(engine: Start) -> None:
    e = engine(world=2, capacity=8 * GRANULE)
    in_mid_save(e, writing=True)
    e.poll()
    assert e.plan_save(b"all", 8 * GRANULE) is None
    e.orphans.pop().bury()
    assert e.plan_save(b"all", 8 * GRANULE) is None
    e.workers.pop().close()
    e.workers.clear()
    assert e.plan_save(b"all", 8 * GRANULE) is not None
    assert e.index.quarantined_bytes == 0


def test_alone_again_a_scheduler_survives_the_return_of_the_worker(engine: Start) -> None:
    e = engine(capacity=8 * GRANULE)
    e.save(b"a")
    in_mid_save(e, writing=False)
    e.poll()
    assert e.index.quarantined_bytes == 0, "the dead one was the only other process"
    assert not e.scheduler.known(b"torn")
    restart(e)
    e.assert_works()
    e.verify(e.load(b"a")[0])
    e.assert_idle()


def test_saves_told_to_nobody_between_a_death_and_a_restart_are_dropped(engine: Start) -> None:
    e = engine(world=2)
    e.save(b"a")
    e.workers[0].die()
    e.plan_save(b"b")
    e.give(1, e.take())
    e.poll()
    restart(e)
    e.assert_works()
    assert not e.scheduler.known(b"b")
    assert e.scheduler.lookup(b"a")
    e.assert_idle()


@pytest.mark.parametrize("told", [True, False])
def test_saves_told_to_nobody_between_a_clean_end_and_a_new_worker_are_dropped(engine: Start, told: bool) -> None:
    e = engine(world=2)
    e.save(b"a")
    e.workers[0].close()
    e.plan_save(b"b")
    e.give(1, e.take())
    if told:
        e.poll()
    restart(e)
    e.assert_works()
    assert not e.scheduler.known(b"b")
    e.verify(e.load(b"a")[0])
    e.assert_idle()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_rank_holds_no_pin(engine: Start, rank: int) -> None:
    e = engine(world=2)
    e.save(b"a")
    e.plan_load(b"a")
    message = e.take()
    e.workers[rank].die()
    other = 1 - rank
    loaded = e.give(other, message)
    e.workers[other].settle()
    e.poll()
    e.poll()
    assert e.index.pinned == 0
    e.verify(loaded) if other else None
    restart(e, rank)
    e.assert_works()


def test_a_silent_worker_keeps_its_pins_until_it_speaks(engine: Start) -> None:
    e = engine(world=2)
    e.save(b"a")
    e.plan_load(b"a")
    message = e.take()
    e.give(0, message)
    e.workers[0].settle()
    for _ in range(5):
        e.poll()
        assert e.index.pinned == 1
    e.give(1, message)
    e.settle()
    assert e.index.pinned == 0


def test_a_newer_worker_of_a_rank_replaces_the_one_before(engine: Start) -> None:
    e = engine(world=1)
    e.save(b"a")
    old = e.workers[0]
    restart(e)
    e.assert_works()
    e.verify(e.load(b"a")[0])
    old.close()
    e.assert_works(b"and still")


def test_what_a_dead_scheduler_left_is_refused_while_its_workers_live(engine: Start) -> None:
    e = engine()
    e.plan_save(b"a")
    e.step()
    other = e.map()
    with pytest.raises(RegionError, match="another live process schedules"):
        OffloadScheduler(other)
    other.close()
    e.settle()


def test_a_worker_that_still_holds_its_rank_is_not_replaced_in_its_own_process(engine: Start) -> None:
    e = engine()
    first = e.workers[0]
    with pytest.raises(RegionError, match="close that worker first"):
        OffloadWorker(first.region, first.backend)
    e.assert_works()


def test_a_region_with_a_worker_of_its_own_enters_an_era_with_that_worker_only(shm: Path) -> None:
    """Scheduler and worker share one mapping, as in a cache: what it may be writing is not outlived by a promise."""
    with HostRegion.open(capacity=4 * GRANULE, granule=GRANULE, directory=shm) as region:
        scheduler, backend = OffloadScheduler(region), simulated("sim-int64")
        worker = OffloadWorker(region, backend)
        sim_of(backend).device.latency = 0.05
        scheduler.plan_save(b"a", GRANULE, "uint8", (GRANULE,))
        plan = scheduler.take_plan()
        worker.save(b"a", backend.ops.empty(GRANULE), plan)
        worker.flush()
        ended = region.begin_era()
        assert not region.outlived(ended)
        worker.load(scheduler.take_plan())
        assert not worker.pending(), "it waited for what it was told in the era before"
        assert region.outlived(ended)
        worker.close()
        scheduler.close()
        backend.close()


def test_a_worker_that_is_dropped_unclosed_keeps_its_rank(shm: Path) -> None:
    with HostRegion.open(capacity=4 * GRANULE, granule=GRANULE, directory=shm) as region:
        backend = simulated("sim-uint64")
        OffloadWorker(region, backend, register="off")
        gc.collect()
        with pytest.raises(RegionError, match="dropped unclosed"):
            OffloadWorker(region, backend, register="off")
        backend.close()
