"""Plans between processes: plain data, carried out once, by whom they are for, and never out of date."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_kit import GRANULE, Engine, raw

from ecoffload.backend import Completion
from ecoffload.errors import ConfigError
from ecoffload.plan import PLAN_VERSION, Plan
from ecoffload.scheduler import OffloadScheduler
from ecoffload.slots import RING
from ecoffload.worker import OffloadWorker

Start = Callable[..., Engine]
DEVICES = ["sim-int64", "sim-uint64", "sim-top"]


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_saved_is_loaded_by_every_rank(engine: Start, device: str) -> None:
    e = engine(world=2, devices=(device,))
    e.save(b"a", b"b", nbytes=3 * GRANULE - 5)
    for loaded in e.load(b"b", b"a"):
        assert set(loaded) == {b"a", b"b"}
        e.verify(loaded)
    e.assert_idle()
    stats = e.scheduler.stats()
    assert (stats.saves, stats.loads, stats.bytes_saved) == (2, 2, 2 * (3 * GRANULE - 5))


def test_a_plan_is_plain_data(engine: Start) -> None:
    e = engine()
    e.save(b"a")
    e.plan_load(b"a")
    e.plan_save(b"b")
    plan = e.scheduler.take_plan()

    def plain(value: Any) -> bool:
        if isinstance(value, tuple):
            return all(plain(each) for each in value)
        return type(value) in (int, str, bytes, bool)

    assert plain(plan)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert bool(plan)
    assert bool(e.scheduler.take_plan()), "an empty plan is not false: engines drop what is"
    e.workers[0].worker.load(plan)
    e.workers[0].worker.flush()
    e.settle()


@pytest.mark.parametrize(
    "change",
    [{"version": PLAN_VERSION + 1}, {"region_id": "other"}, {"instance": 12345}],
    ids=["another version", "another region", "another engine"],
)
def test_a_foreign_plan_is_ignored_and_counted(engine: Start, change: dict[str, Any]) -> None:
    e = engine()
    e.save(b"a")
    assert e.plan_load(b"a")
    e.plan_save(b"b")
    plan = e.scheduler.take_plan()
    foreign = plan._replace(**change)
    worker = e.workers[0].worker
    assert worker.load(foreign) == {}
    worker.save(b"b", torch.zeros(1), foreign)
    assert worker.plans_ignored == 2
    assert worker.stats()["plans_ignored"] == 2
    e.give(0, pickle.dumps(plan))
    e.settle()
    assert e.scheduler.lookup(b"b")
    e.assert_works()


def test_a_plan_that_comes_twice_is_carried_out_once(engine: Start) -> None:
    e = engine()
    e.save(b"old")
    e.plan_load(b"old")
    e.plan_save(b"a")
    message = e.take()
    first = e.give(0, message)
    e.verify(first)
    e.settle()
    e.scheduler.invalidate()
    e.save(b"b", b"c", nbytes=8 * GRANULE)  # into the extents that a and old had
    worker = e.workers[0].worker
    ignored = worker.plans_ignored
    assert e.give(0, message) == {}, "its extents belong to others now"
    assert worker.plans_ignored > ignored
    e.verify(e.load(b"b", b"c")[0])
    e.assert_works()


def test_a_late_plan_of_earlier_saves_writes_nothing(engine: Start) -> None:
    e = engine(capacity=4 * GRANULE)
    e.plan_save(b"a", 4 * GRANULE)
    stale = e.take()
    e.give(0, stale, without=[b"a"])
    e.settle()
    assert not e.scheduler.known(b"a")
    e.save(b"b", nbytes=4 * GRANULE)
    e.truth[b"a"] = bytes(4 * GRANULE)
    e.give(0, stale)
    e.verify(e.load(b"b")[0])


def test_saves_of_a_plan_that_was_lost_are_dropped(engine: Start) -> None:
    e = engine(world=2)
    e.save(b"a")
    e.plan_save(b"lost")
    e.take()
    e.plan_save(b"b")
    e.step()
    e.settle()
    assert not e.scheduler.known(b"lost"), "nobody wrote its bytes"
    assert e.scheduler.lookup(b"b")
    assert e.scheduler.stats().saves_failed == 1
    e.assert_idle()


def test_a_first_plan_that_was_lost_is_no_save_either(engine: Start) -> None:
    e = engine(world=2)
    e.plan_save(b"lost")
    e.take()
    e.plan_save(b"b")
    e.step()
    e.settle()
    assert not e.scheduler.known(b"lost")
    assert e.scheduler.lookup(b"b")


def test_more_saves_than_a_slot_remembers_may_be_lost(engine: Start) -> None:
    e = engine(capacity=300 * GRANULE)
    for i in range(RING + 50):
        assert e.plan_save(b"lost-%d" % i)
    e.take()
    e.plan_save(b"in doubt as well")
    e.step()
    e.settle()
    assert e.scheduler.stats().saves_failed >= RING + 50
    assert not any(entry.key.startswith(b"lost") for entry in e.index)
    e.assert_works()
    e.assert_idle()


def test_failures_that_a_slot_forgot_before_its_number_moved_are_failures(engine: Start) -> None:
    e = engine(capacity=300 * GRANULE)
    for i in range(RING + 50):
        assert e.plan_save(b"%d" % i)
    plan = e.scheduler.take_plan()
    slot = e.workers[0].worker._slot
    e.workers[0].worker.load(plan)
    for op in plan.saves:
        slot.fail_save(op.number)
    e.poll()  # between the failures and the number that covers them
    slot.finish_save(plan.saves[-1].number)
    e.poll()
    assert e.scheduler.stats().saves_failed == RING + 50
    assert e.index.used_bytes == 0


def test_loads_of_a_plan_that_was_lost_release_their_pins(engine: Start) -> None:
    e = engine(world=2)
    e.save(b"a")
    e.plan_load(b"a")
    e.take()
    e.assert_works()
    assert e.index.pinned == 0


def test_a_save_that_is_not_given_is_dropped_at_the_flush(engine: Start) -> None:
    e = engine(world=2)
    e.plan_save(b"a"), e.plan_save(b"b")
    message = e.take()
    e.give(0, message, without=[b"a"])
    e.give(1, message)
    e.settle()
    assert not e.scheduler.known(b"a")
    assert e.scheduler.lookup(b"b")
    e.assert_idle()


def test_a_step_that_was_never_flushed_ends_with_the_next(engine: Start) -> None:
    e = engine()
    e.plan_save(b"a"), e.plan_save(b"b")
    plan = e.scheduler.take_plan()
    each = e.workers[0]
    data = torch.frombuffer(bytearray(e.truth[b"a"]), dtype=torch.uint8)
    each.worker.save(b"a", each.backend.ops.empty(GRANULE).copy_(data), plan)
    e.assert_works()
    assert e.scheduler.lookup(b"a")
    assert not e.scheduler.known(b"b")


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.view(torch.int8),
        lambda t: t.view(2, -1),
        lambda t: t[:-1],
        lambda t: torch.zeros(GRANULE, dtype=torch.uint8),
    ],
    ids=["another dtype", "another shape", "too short", "on another device"],
)
def test_a_tensor_that_is_not_the_planned_one_fails_its_save_only(engine: Start, make: Callable[..., Any]) -> None:
    e = engine()
    e.plan_save(b"a"), e.plan_save(b"b")
    plan = e.scheduler.take_plan()
    each = e.workers[0]
    good = each.backend.ops.empty(GRANULE).copy_(torch.frombuffer(bytearray(e.truth[b"b"]), dtype=torch.uint8))
    each.worker.save(b"a", make(each.backend.ops.empty(GRANULE)), plan)
    each.worker.save(b"b", good, plan)
    each.worker.flush()
    e.settle()
    assert not e.scheduler.known(b"a")
    e.verify(e.load(b"b")[0])


def test_a_key_that_the_plan_does_not_ask_for_is_left_alone(engine: Start) -> None:
    e = engine()
    e.plan_save(b"a")
    plan = e.scheduler.take_plan()
    each = e.workers[0]
    each.worker.save(b"other", each.backend.ops.empty(GRANULE), plan)
    each.worker.flush()
    e.settle()
    assert len(e.index) == 0


@pytest.mark.parametrize(
    "extents",
    [((-GRANULE, GRANULE),), ((1 << 40, GRANULE),), ((0, 10),), (), ((0, -5),), ((0, 2 * GRANULE), (0, GRANULE))],
)
def test_extents_that_do_not_hold_the_entry_are_a_miss_and_touch_nothing(engine: Start, extents: Any) -> None:
    e = engine()
    e.save(b"a")
    e.plan_load(b"a")
    plan = e.scheduler.take_plan()
    bad = plan._replace(loads=(plan.loads[0]._replace(extents=extents),))
    assert e.workers[0].worker.load(bad) == {}
    e.settle()
    assert not e.scheduler.known(b"a")
    e.assert_works()


@pytest.mark.parametrize("change", [{"dtype": "float99"}, {"dtype": "__name__"}, {"shape": (7,)}, {"nbytes": 17}])
def test_e13_an_entry_of_another_dtype_shape_or_length_is_a_miss(engine: Start, change: dict[str, Any]) -> None:
    e = engine()
    e.save(b"a")
    e.plan_load(b"a")
    plan = e.scheduler.take_plan()
    bad = plan._replace(loads=(plan.loads[0]._replace(**change),))
    assert e.workers[0].worker.load(bad) == {}
    e.settle()
    assert not e.scheduler.known(b"a")
    e.assert_idle()


def test_e1_the_same_key_twice_in_a_step_is_held_until_its_last_use(engine: Start) -> None:
    e = engine(capacity=4 * GRANULE)
    e.save(b"a", nbytes=4 * GRANULE)
    e.plan_load(b"a")
    message = e.take()
    e.plan_load(b"a")
    e.give(0, message)
    e.workers[0].settle()
    e.poll()
    assert e.plan_save(b"b") is None, "the second use pins it"
    e.verify(e.step()[0])
    e.settle()
    assert e.plan_save(b"b") is not None


def test_e1_the_same_key_twice_in_a_plan_gives_one_tensor(engine: Start) -> None:
    e = engine()
    e.save(b"a")
    e.plan_load(b"a"), e.plan_load(b"a")
    (loaded,) = e.step()
    e.settle()
    e.verify(loaded)
    e.assert_idle()


def test_e4_a_lookup_says_no_until_the_save_has_landed(engine: Start) -> None:
    e = engine()
    e.plan_save(b"a")
    each = e.workers[0]
    each.backend.ops.delay(each.worker._save_stream, 100)
    e.step()
    for _ in range(3):  # three steps of an engine that has nothing else to do
        each.worker.poll()
        e.poll()
        assert not e.scheduler.lookup(b"a")
        assert e.plan_load(b"a") is None
        assert e.scheduler.has_pending(), "the engine must go on asking"
        e.step()
    e.settle()
    assert e.scheduler.lookup(b"a")


def test_e5_room_of_a_save_in_flight_is_given_to_nobody_even_if_its_key_is_forgotten(engine: Start) -> None:
    e = engine(capacity=4 * GRANULE)
    e.plan_save(b"a", 4 * GRANULE)
    each = e.workers[0]
    each.backend.ops.delay(each.worker._save_stream, 60)
    e.step()
    assert e.scheduler.invalidate() == 1
    assert e.plan_save(b"b") is None
    e.settle()
    e.save(b"b", nbytes=4 * GRANULE)
    e.verify(e.load(b"b")[0])


@pytest.mark.parametrize("world", [1, 2])
def test_e3_e9_what_is_being_loaded_is_evicted_only_after_the_slowest_rank(engine: Start, world: int) -> None:
    e = engine(world=world, capacity=4 * GRANULE)
    e.save(b"a", nbytes=4 * GRANULE)
    e.plan_load(b"a")
    message = e.take()
    slow = e.workers[-1]
    slow.backend.ops.delay(slow.worker._load_stream, 60)
    loaded = [e.give(rank, message) for rank in range(world)]
    for each in e.workers[:-1]:
        each.settle()
    e.poll()
    assert e.plan_save(b"b") is None
    assert e.index.pinned == 1
    e.settle()
    for each in loaded:
        e.verify(each)
    e.save(b"b", nbytes=4 * GRANULE)


def test_pins_are_not_released_by_steps_of_the_faster_rank(engine: Start) -> None:
    e = engine(world=2)
    e.save(b"a")
    e.plan_load(b"a")
    message = e.take()
    for _ in range(4):
        e.give(0, message)
        e.workers[0].settle()
        message = e.take()
        e.poll()
    assert e.index.pinned == 1, "rank 1 has been told of nothing yet"
    e.workers[1].worker.flush()
    assert e.index.pinned == 1


def test_a_load_taken_back_before_it_was_told_releases_its_pin(engine: Start) -> None:
    e = engine()
    e.save(b"a")
    op, other = e.plan_load(b"a"), e.plan_load(b"a")
    assert op is not None
    assert e.scheduler.cancel_load(op)
    assert not e.scheduler.cancel_load(op)
    e.verify(e.step()[0])
    e.settle()
    assert other is not None
    assert not e.scheduler.cancel_load(other), "it was carried out"
    assert e.scheduler.lookup(b"a")
    e.assert_idle()


def test_a_save_taken_back_before_it_was_told_frees_its_room(engine: Start) -> None:
    e = engine()
    kept, op = e.plan_save(b"kept"), e.plan_save(b"a")
    assert op is not None
    assert kept is not None
    assert e.scheduler.cancel_save(op)
    assert not e.scheduler.cancel_save(op)
    assert not e.scheduler.known(b"a")
    e.step()
    e.settle()
    assert [entry.key for entry in e.index] == [b"kept"]
    assert not e.scheduler.cancel_save(kept)
    e.save(b"a")
    e.verify(e.load(b"a")[0])


def test_e10_everything_that_is_cancelled_or_forgotten_leaves_no_pin_and_no_room(engine: Start) -> None:
    e = engine()
    e.save(b"a", b"b")
    loads = [e.plan_load(key) for key in (b"a", b"b", b"a")]
    saves = [e.plan_save(key) for key in (b"c", b"d")]
    e.scheduler.invalidate()
    for load in loads[:2]:
        assert load is not None
        assert e.scheduler.cancel_load(load)
    assert saves[0] is not None
    assert e.scheduler.cancel_save(saves[0])
    e.step()
    e.settle()
    assert (e.index.used_bytes, len(e.index)) == (0, 0)
    e.assert_idle()


def test_a_rank_outside_the_world_is_refused(engine: Start) -> None:
    e = engine()
    for rank, world in ((1, 1), (-1, 1), (2, 2)):
        with pytest.raises(ConfigError, match=f"rank {rank} is not in 0..{world - 1}"):
            OffloadWorker(e.region, e.workers[0].backend, rank, world)


def test_a_worker_may_serve_the_next_engine_of_its_region(engine: Start) -> None:
    e = engine(world=2)
    e.plan_save(b"a"), e.plan_save(b"b")
    e.give(0, message := e.take(), without=[b"a"])
    e.give(1, message)
    e.settle()
    e.scheduler.close()
    e.scheduler = OffloadScheduler(e.region, world=2)
    e.index = e.scheduler.index
    assert not e.scheduler.known(b"b")
    e.assert_works()
    assert e.scheduler.stats().saves_failed == 0, "what failed for the engine before is none of this one's"
    e.assert_works(b"again")


# --- where loaded bytes land


@pytest.mark.parametrize("device", DEVICES)
def test_a_source_may_be_dropped_at_once_and_a_load_lands_in_memory_of_its_own(engine: Start, device: str) -> None:
    e = engine(devices=(device,))
    each = e.workers[0]
    each.sim.device.latency = 0.01
    e.plan_save(b"a", GRANULE)
    e.step()
    gc.collect()
    for _ in range(4):  # new tensors must not get the source's memory before it was read
        each.backend.ops.empty(GRANULE).fill_(0x55)
    e.settle()
    (first,), (second,) = (e.load(b"a") for _ in range(2))
    first[b"a"].fill_(0)
    assert raw(second[b"a"]) == e.truth[b"a"]


def test_every_batch_is_of_one_direction_and_carries_all_that_came(engine: Start) -> None:
    e = engine(capacity=64 * GRANULE)
    seen: list[tuple[str, int]] = []
    each = e.workers[0]
    submit = each.backend.submit

    def watched(batch: Any, direction: Any, stream: Any) -> Completion | None:
        seen.append((direction, batch.count))
        return submit(batch, direction, stream)

    each.backend.submit = watched  # type: ignore[method-assign]
    e.save(*(b"%d" % i for i in range(12)))
    e.load(*(b"%d" % i for i in range(12)))
    assert seen == [("d2h", 12), ("h2d", 12)]


def test_a_plan_names_its_version_first() -> None:
    assert Plan._fields[0] == "version"
