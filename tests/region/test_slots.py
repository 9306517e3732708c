"""What workers tell and a scheduler reads: numbers, failures, deaths. The kernel's locks say who is alive."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ecoffload import layout, slots
from ecoffload.errors import RegionError
from ecoffload.region import HostRegion
from ecoffload.slots import RING, SLOT_BYTES, Failure, LostSlot, WorkerSlot

MIB = 1 << 20


def open_region(shm: Path, **options: Any) -> HostRegion:
    return HostRegion.open("a", **{"capacity": 65536, "granule": 4096, "directory": shm, "timeout": 5.0} | options)


@pytest.fixture
def region(shm: Path) -> Iterator[HostRegion]:
    with open_region(shm) as region:
        region.begin_instance()
        yield region


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deaths are noticed at the next call, so that no test has to wait."""
    monkeypatch.setattr(slots, "_PROBE_SECONDS", -1.0)


def die(slot: WorkerSlot) -> None:
    """What the kernel does when the process ends."""
    slot._let_go()


WORKER = """
    region = HostRegion.open("a", capacity=65536, granule=4096, directory=args[0])
    slot = region.claim_slot(int(args[1]))
    for line in iter(sys.stdin.readline, ""):
        eval(line)
        say("done")
"""


@pytest.fixture
def worker(shm: Path, child: Callable[..., Any]) -> Callable[[int], Any]:
    def start(rank: int) -> Any:
        process = child("say('up')\n" + "\n".join(each[4:] for each in WORKER.splitlines()), shm, rank)
        assert process.line() == "up"
        do(process, "None")
        return process

    return start


def do(process: Any, text: str) -> None:
    process.tell(text)
    assert process.line() == "done"


def test_the_least_finished_number_over_all_ranks_counts(region: HostRegion) -> None:
    first, second = region.claim_slot(0), region.claim_slot(1)
    first.finish_save(7)
    first.finish_load(3)
    second.finish_save(5)
    second.finish_load(4)
    assert region.progress(2) == (5, 3)
    assert region.progress(1) == (7, 3)


def test_a_rank_that_never_claimed_holds_everything_at_zero(region: HostRegion) -> None:
    slot = region.claim_slot(0)
    slot.finish_save(7)
    assert region.progress(1) == (7, 0)
    assert region.progress(2) == (7, 0)  # what was finished by all then is finished for ever
    slot.finish_save(8)
    assert region.progress(2) == (7, 0)


def test_a_number_is_there_for_another_process_at_once(region: HostRegion, worker: Callable[[int], Any]) -> None:
    process = worker(0)
    do(process, "slot.finish_save(2**62)")
    assert region.progress(1) == (2**62, 0)


def test_a_dead_worker_stands_still_until_it_was_handed_out_and_is_left_out_then(
    region: HostRegion, worker: Callable[[int], Any]
) -> None:
    mine = region.claim_slot(0)
    process = worker(1)
    do(process, "slot.finish_save(3) or slot.finish_load(2)")
    mine.finish_save(9)
    mine.finish_load(9)
    assert region.progress(2) == (3, 2)
    process.kill()
    assert region.progress(2) == (3, 2)
    assert region.lost_waiting
    assert region.dead_ranks(2) == {1}
    assert region.take_lost() == [LostSlot(1, 3, 2)]
    assert region.progress(2) == (9, 9)
    assert region.dead_ranks(2) == {1}
    assert region.take_lost() == []


def test_a_death_is_noticed_within_a_tenth_of_a_second(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with open_region(shm) as region:
        region.begin_instance()
        slot = region.claim_slot(0)
        slot.finish_save(1)
        region.progress(1)
        die(slot)
        end = time.monotonic() + 0.1
        while not region.lost_waiting and time.monotonic() < end:
            region.progress(1)
        assert region.lost_waiting


def test_a_released_worker_is_left_out_and_is_not_lost(region: HostRegion) -> None:
    first, second = region.claim_slot(0), region.claim_slot(1)
    first.finish_save(9)
    second.finish_save(4)
    assert region.progress(2) == (4, 0)
    second.release()
    second.release()
    assert region.progress(2) == (9, 0)
    assert region.take_lost() == []
    assert region.dead_ranks(2) == frozenset()


def test_a_restarted_worker_takes_its_rank_over_and_the_dead_one_is_handed_out_once(
    region: HostRegion, worker: Callable[[int], Any]
) -> None:
    process = worker(0)
    do(process, "slot.finish_save(5)")
    assert region.progress(1) == (5, 0)
    process.kill()
    again = region.claim_slot(0)
    again.adopt(region.instance, saved=8, loaded=2)
    assert region.progress(1) == (5, 0)  # what the dead one had not finished must be settled first
    assert region.take_lost() == [LostSlot(0, 5, 0)]
    assert region.progress(1) == (8, 2)
    assert region.dead_ranks(1) == frozenset()


def test_a_second_living_claim_of_a_rank_makes_the_first_a_lost_one(region: HostRegion, shm: Path) -> None:
    first = region.claim_slot(0)
    first.finish_save(5)
    assert region.progress(1) == (5, 0)
    with open_region(shm) as other:
        second = other.claim_slot(0)
        assert region.take_lost() == [LostSlot(0, 5, 0)]
        first.finish_save(100)
        second.finish_save(6)
        assert region.progress(1) == (6, 0)


def test_a_rank_is_not_claimed_twice_through_one_mapping(region: HostRegion) -> None:
    first = region.claim_slot(0)
    with pytest.raises(RegionError, match="close that worker first"):
        region.claim_slot(0)
    first.release()
    assert region.claim_slot(0).rank == 0


def test_the_slot_of_a_worker_that_was_dropped_is_kept_and_counts_as_dead_in_the_end(shm: Path) -> None:
    with open_region(shm) as scheduler:
        scheduler.begin_instance()
        with open_region(shm) as region:
            region.keep_slot(region.claim_slot(0))
            assert scheduler.progress(1) == (0, 0)
            assert scheduler.take_lost() == []
            with pytest.raises(RegionError, match="dropped unclosed"):
                region.claim_slot(0)
        assert scheduler.take_lost() == [LostSlot(0, 0, 0)]


def test_a_worker_that_came_and_died_between_two_looks_is_handed_out(
    region: HostRegion, worker: Callable[[int], Any]
) -> None:
    process = worker(0)
    do(process, "slot.finish_save(2)")
    process.kill()
    assert region.progress(1) == (2, 0)
    assert region.take_lost() == [LostSlot(0, 2, 0)]


def test_a_worker_that_was_replaced_before_anybody_looked_is_handed_out_too(region: HostRegion) -> None:
    first = region.claim_slot(0)
    first.finish_save(2)
    die(first)
    second = region.claim_slot(0)
    second.finish_save(7)
    assert region.progress(1) == (2, 0)
    assert region.take_lost() == [LostSlot(0, 2, 0)]
    assert region.progress(1) == (7, 0)


def test_progress_never_goes_back(region: HostRegion) -> None:
    slot = region.claim_slot(0)
    slot.finish_save(9)
    assert region.progress(1) == (9, 0)
    slot.finish_save(3)
    assert region.progress(1) == (9, 0)
    second = region.claim_slot(1)
    second.finish_save(1)
    assert region.progress(2) == (9, 0)


def test_what_one_rank_has_saved_is_told_apart_from_the_others_and_outlives_it(region: HostRegion) -> None:
    assert region.saved_by(0) == 0
    saver, other = region.claim_slot(0), region.claim_slot(1)
    saver.finish_save(3)
    other.finish_save(9)
    region.progress(2)
    assert (region.saved_by(0), region.saved_by(1), region.saved_by(2)) == (3, 9, 0)
    die(saver)
    region.progress(2)
    assert region.saved_by(0) == 3
    region.take_lost()
    assert region.progress(2) == (9, 0)
    assert region.saved_by(0) == 3  # however far the others are


def test_failures_of_an_earlier_instance_are_not_told_again(region: HostRegion) -> None:
    slot = region.claim_slot(0)
    slot.fail_save(1)
    slot.adopt(region.begin_instance())
    region.progress(1)
    assert region.take_failures() == []
    slot.fail_load(1)
    assert region.take_failures() == [Failure(0, "load", 1)]


def test_numbers_of_another_instance_do_not_count_until_it_is_adopted(region: HostRegion) -> None:
    slot = region.claim_slot(0)
    slot.finish_save(9)
    assert region.progress(1) == (9, 0)
    old = region.instance
    new = region.begin_instance()
    assert new != old
    assert region.progress(1) == (0, 0)
    slot.finish_save(12)  # it has not heard yet
    assert region.progress(1) == (0, 0)
    slot.adopt(new, saved=0)
    assert region.progress(1) == (0, 0)
    slot.finish_save(1)
    assert region.progress(1) == (1, 0)
    assert region.take_lost() == []


def test_a_worker_that_claims_after_the_scheduler_began_belongs_to_it(shm: Path) -> None:
    with open_region(shm) as scheduler, open_region(shm) as worker:
        instance = scheduler.begin_instance()
        slot = worker.claim_slot(0)
        assert slot.instance == worker.instance == instance
        slot.finish_load(1)
        assert scheduler.progress(1) == (0, 1)


def test_failures_are_handed_out_once_and_in_order(region: HostRegion) -> None:
    slot = region.claim_slot(3)
    for number in (1, 4):
        slot.fail_save(number)
    slot.fail_load(2)
    slot.finish_save(4)
    assert region.progress(4) == (0, 0)
    expected = [Failure(3, "save", 1), Failure(3, "save", 4), Failure(3, "load", 2)]
    assert region.take_failures() == expected
    assert region.take_failures() == []
    assert tuple(expected[0]) == (3, "save", 1)


def test_failures_of_one_that_died_or_left_are_not_lost(region: HostRegion) -> None:
    first, second = region.claim_slot(0), region.claim_slot(1)
    region.progress(2)
    first.fail_save(5)
    second.fail_load(6)
    first.release()
    die(second)
    region.progress(2)
    assert sorted(region.take_failures()) == [Failure(0, "save", 5), Failure(1, "load", 6)]


@pytest.mark.parametrize("count", [RING - 1, RING, RING + 1, 3 * RING + 5])
def test_a_ring_that_overflowed_says_that_all_may_have_failed(region: HostRegion, count: int) -> None:
    slot = region.claim_slot(0)
    region.progress(1)
    for number in range(1, count + 1):
        slot.fail_save(number)
    slot.finish_save(count + 10)
    slot.finish_load(7)
    failures = region.take_failures()
    exact = {each.number for each in failures if each.kind == "save"}
    assert exact == set(range(max(1, count - RING + 1), count + 1))
    through = [each for each in failures if each.kind not in ("save", "load")]
    if count <= RING:
        assert through == []
    else:
        assert through == [Failure(0, "saves-through", count + 10), Failure(0, "loads-through", 7)]
    assert region.take_failures() == []


def test_any_number_of_lost_saves_is_told_in_one_word_and_puts_no_load_in_doubt(region: HostRegion) -> None:
    slot = region.claim_slot(0)
    slot.fail_load(3)
    slot.lose_saves(10**6)
    slot.finish_save(10**6)
    region.progress(1)
    assert region.take_failures() == [Failure(0, "load", 3), Failure(0, "saves-lost", 10**6)]


def test_slots_run_out_with_the_number_to_ask_for(shm: Path) -> None:
    with open_region(shm, slots=2) as region:
        held = [region.claim_slot(0), region.claim_slot(1)]
        with pytest.raises(RegionError, match=r"all 2 slots .* slots=4"):
            region.claim_slot(2)
        held[0].release()
        assert region.claim_slot(2).rank == 2


def test_the_dead_make_room_when_no_other_slot_is_left(shm: Path, worker: Callable[[int], Any]) -> None:
    with open_region(shm, slots=64) as region:
        region.begin_instance()
        process = worker(0)
        do(process, "slot.finish_save(3)")
        assert region.progress(1) == (3, 0)
        process.kill()
        held = [region.claim_slot(rank) for rank in range(1, 65)]
        assert len({each.index for each in held}) == 64
        assert region.take_lost() == [LostSlot(0, 3, 0)]  # its slot has gone to another, its last numbers had been seen


@pytest.mark.parametrize("rank", [-1, 1 << 32])
def test_a_rank_out_of_range_is_refused(region: HostRegion, rank: int) -> None:
    with pytest.raises(RegionError, match="rank is"):
        region.claim_slot(rank)


def test_workers_of_several_processes_claim_different_slots(region: HostRegion, worker: Callable[[int], Any]) -> None:
    processes = [worker(rank) for rank in range(4)]
    for rank, process in enumerate(processes):
        do(process, f"slot.finish_save({10 + rank})")
    assert region.progress(4) == (10, 0)
    processes[0].kill()
    region.progress(4)
    assert region.take_lost() == [LostSlot(0, 10, 0)]
    assert region.progress(4) == (11, 0)


def test_reading_progress_asks_the_kernel_rarely(region: HostRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(slots, "_PROBE_SECONDS", 0.05)
    board = slots.SlotBoard(region._table, region.instance, clock=lambda: now)
    held = [region.claim_slot(rank) for rank in range(2)]
    board.progress(2)
    probes = []
    monkeypatch.setattr(slots, "lock_is_held", lambda *range_: probes.append(range_) or True)
    for number in range(1, 1001):
        for slot in held:
            slot.finish_save(number)
        assert board.progress(2) == (number, 0)
    assert probes == []
    now += 0.06
    board.progress(2)
    assert len(probes) == 2


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.dictionaries(
        st.integers(0, 64 * SLOT_BYTES // 8 - 1),
        st.one_of(st.integers(0, 5), st.integers(2**63 - 2, 2**63 + 2), st.integers(0, 2**64 - 1)),
        max_size=30,
    ),
    near=st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 7)), st.integers(0, 2**64 - 1), max_size=12),
)
def test_no_content_of_the_slots_makes_a_reader_fail(
    region: HostRegion, edits: dict[int, int], near: dict[tuple[int, int], int]
) -> None:
    held = [region.claim_slot(rank) for rank in range(2)]
    held[0].fail_save(1)
    with region.path.open("r+b") as file:
        writes = list(edits.items()) + [
            (index * SLOT_BYTES // 8 + word, value) for (index, word), value in near.items()
        ]
        for word, value in writes:
            file.seek(layout.HEADER_BYTES + 8 * word)
            file.write(struct.pack("<Q", value))
    for _ in range(2):
        saved, loaded = region.progress(2)
        assert 0 <= saved < 2**64
        assert 0 <= loaded < 2**64
        assert len(region.take_failures()) <= 4 * (RING + 2)
        assert region.dead_ranks(2) <= {0, 1}
        region.take_lost()
    for slot in held:
        slot.finish_save(1)
        slot.release()
    fresh = region.claim_slot(0)
    fresh.adopt(region.begin_instance())
    fresh.finish_save(3)
    assert region.progress(1) == (3, 0)
    fresh.release()


class Slots(RuleBasedStateMachine):
    """Workers of two ranks come, work, fail, die and leave in any order; a model says what the scheduler must see.

    Safe means: progress never covers a save that a lost worker had not finished before it was handed out, no failure
    of a finished number is missed, and every loss is told exactly once.
    """

    @initialize()
    def start(self) -> None:
        self.region = HostRegion.open(
            capacity=65536, granule=4096, directory=os.environ.get("ECOFFLOAD_TEST_SHM", "/dev/shm")
        )
        self.region.begin_instance()
        self.maps = [self.region]
        self.workers: dict[int, WorkerSlot] = {}
        self.numbers: dict[int, list[int]] = {}
        self.failed: list[tuple[int, str, int]] = []
        self.lost: list[tuple[int, int, int]] = []
        self.before = (0, 0)

    def teardown(self) -> None:
        for each in getattr(self, "maps", ()):
            each.close()

    @rule(rank=st.integers(0, 1))
    def claim(self, rank: int) -> None:
        if rank in self.workers:
            self.lost.append((rank, *self.numbers[rank]))
            self.maps.append(
                HostRegion.open(
                    self.region.id, capacity=65536, granule=4096, directory=self.region.path.parent, timeout=5.0
                )
            )
        self.workers[rank] = self.maps[-1].claim_slot(rank)
        self.numbers[rank] = [0, 0]

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), kind=st.integers(0, 1), ahead=st.integers(1, 5), fails=st.booleans())
    def finish(self, data: st.DataObject, kind: int, ahead: int, fails: bool) -> None:
        rank = data.draw(st.sampled_from(sorted(self.workers)))
        slot, numbers = self.workers[rank], self.numbers[rank]
        numbers[kind] += ahead
        if fails:
            (slot.fail_load if kind else slot.fail_save)(numbers[kind])
            self.failed.append((rank, "load" if kind else "save", numbers[kind]))
        (slot.finish_load if kind else slot.finish_save)(numbers[kind])

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), dies=st.booleans())
    def leave(self, data: st.DataObject, dies: bool) -> None:
        rank = data.draw(st.sampled_from(sorted(self.workers)))
        slot = self.workers.pop(rank)
        if dies:
            die(slot)
            self.lost.append((rank, *self.numbers[rank]))
        else:
            slot.release()
        # Looked at before anything else happens: the model knows nothing of losses that overtake each other.
        self.look()

    @rule()
    def look(self) -> None:
        now = self.region.progress(2)
        for at in (0, 1):
            bounds = [each[1 + at] for each in self.lost] + [self.numbers[rank][at] for rank in self.workers]
            if len(self.numbers) < 2:
                bounds.append(0)
            assert now[at] <= max(self.before[at], min(bounds, default=self.before[at]))
        self.before = now

    @rule()
    def take(self) -> None:
        assert sorted(tuple(each) for each in self.region.take_lost()) == sorted(self.lost)
        self.lost = []
        assert sorted(tuple(each) for each in self.region.take_failures()) == sorted(self.failed)
        self.failed = []

    @invariant()
    def numbers_do_not_go_back(self) -> None:
        if hasattr(self, "region"):
            now = self.region.progress(2)
            assert now >= self.before or (now[0] >= self.before[0] and now[1] >= self.before[1])
            self.before = now


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_failure_that_is_overwritten_while_it_is_read_puts_all_in_doubt(
    region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = region.claim_slot(0)
    region.progress(1)
    for number in range(1, RING + 1):
        slot.fail_save(number)
    slot.finish_save(RING + 100)
    table = region._table
    words, counted = table.words, slot._at + slots._FAILED

    class Racing:
        """The worker fails two more right after the reader has asked for the count."""

        def __getitem__(self, index: int) -> int:
            value = words[index]
            if index == counted and value == RING:
                slot.fail_save(RING + 1)
                slot.fail_save(RING + 2)
            return value

    with monkeypatch.context() as patch:
        patch.setattr(table, "words", Racing())
        first = region.take_failures()
    assert Failure(0, "saves-through", RING + 100) in first
    later = region.take_failures()
    assert {each.number for each in later if each.kind == "save"} == {RING + 1, RING + 2}
