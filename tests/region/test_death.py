"""Processes that die: what they leave is taken over or reclaimed, what anybody still maps is never touched. (D3, D5)"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ecoffload import hostmem, layout
from ecoffload.errors import RegionError
from ecoffload.region import HostRegion
from ecoffload.regions import list_regions, reclaim

MIB = 1 << 20

HOLD = """
    region = HostRegion.open(args[1], directory=args[0], **{{"capacity": 1 << 20, "granule": 4096, **eval(args[2])}})
    {then}
    say(region.start)
    sys.stdin.readline()
    region.close()
    say("closed")
"""


def open_region(shm: Path, id: str = "a", **options: Any) -> HostRegion:
    options = {"capacity": MIB, "granule": 4096, "directory": shm, "timeout": 5.0} | options
    return HostRegion.open(id, **options)


@pytest.fixture
def holder(shm: Path, child: Callable[..., Any]) -> Callable[..., Any]:
    """A process that has a region open; `holder(id, then="code", **options)` returns once it has."""

    def start(id: str = "a", then: str = "", **options: Any) -> Any:
        process = child(HOLD.format(then=then), shm, id, options)
        assert process.line() in ("created", "joined", "warm", "cold")
        return process

    return start


def test_d3_after_a_kill_the_same_id_is_taken_over_on_a_tmpfs_that_fits_one(in_tmpfs: Callable[..., Any]) -> None:
    code = """
        import signal
        for turn in range(4):
            child = os.fork()
            if not child:
                region = HostRegion.open("a", capacity=5 << 20, granule=4096, directory=args[0])
                os.kill(os.getpid(), signal.SIGKILL)
            os.waitpid(child, 0)
            say(os.listdir(args[0]))
        with HostRegion.open("a", capacity=5 << 20, granule=4096, directory=args[0]) as region:
            say(region.start)
        say(os.listdir(args[0]))
    """
    assert in_tmpfs("8m", code).end() == (0, "['ecoffload.a']\n" * 4 + "cold\n[]\n", "")


def test_d3_after_a_kill_another_geometry_takes_the_memory_over(in_tmpfs: Callable[..., Any]) -> None:
    code = """
        import signal
        if not (child := os.fork()):
            region = HostRegion.open("a", capacity=5 << 20, granule=4096, directory=args[0])
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        with HostRegion.open("a", capacity=6 << 20, granule=8192, directory=args[0]) as region:
            say(region.start, region.capacity)
    """
    assert in_tmpfs("8m", code).end() == (0, "cold 6291456\n", "")


def test_d3_killed_engines_without_an_id_do_not_fill_the_tmpfs(in_tmpfs: Callable[..., Any]) -> None:
    code = """
        import signal
        for turn in range(4):
            if not (child := os.fork()):
                region = HostRegion.open(capacity=5 << 20, granule=4096, directory=args[0])
                os.kill(os.getpid(), signal.SIGKILL)
            os.waitpid(child, 0)
            say(len(os.listdir(args[0])))
    """
    assert in_tmpfs("8m", code).end() == (0, "1\n" * 4, "")


def test_a_region_that_a_living_process_maps_survives_everybody_elses_death(
    shm: Path, holder: Callable[..., Any]
) -> None:
    creator, worker = holder(), holder()
    creator.kill()
    assert [each.state for each in list_regions(shm)] == ["live"]
    assert reclaim(shm) == []
    with open_region(shm) as region:
        assert region.start == "joined"
    worker.tell("end")
    assert worker.line() == "closed"
    assert list(shm.iterdir()) == []


def test_a_late_close_never_unlinks_a_successors_file(shm: Path) -> None:
    late = open_region(shm)
    late.path.unlink()  # as an operator does who believes that it is stale
    with open_region(shm) as successor:
        assert successor.start == "created"
        late.close()
        assert successor.path.exists()
        successor.view([(0, 1)])[0][0] = 1
        with open_region(shm) as joined:
            assert bytes(joined.view([(0, 1)])[0]) == b"\1"
    assert list(shm.iterdir()) == []


def test_d5_a_file_of_size_zero_that_nobody_holds_is_created_anew(shm: Path) -> None:
    (shm / "ecoffload.a").touch(0o600)
    with open_region(shm) as region:
        assert region.capacity == MIB
    assert list(shm.iterdir()) == []


@pytest.mark.parametrize("size", [0, 4096, MIB // 2])
def test_d5_a_joiner_of_a_file_whose_creator_died_gives_up_in_time(shm: Path, size: int) -> None:
    path = shm / "ecoffload.a"
    path.touch(0o600)
    os.truncate(path, size)
    started = time.monotonic()
    with pytest.raises(RegionError, match="nobody maps it: who made it has ended"):
        open_region(shm, create=False, timeout=0.2)
    assert time.monotonic() - started < 2
    assert path.stat().st_size == size


@pytest.mark.parametrize("create", [True, False])
def test_d5_a_joiner_of_a_creator_that_never_ends_gives_up_in_time(shm: Path, create: bool) -> None:
    path = shm / "ecoffload.a"
    path.touch(0o600)
    fd = os.open(path, os.O_RDWR)
    try:
        assert hostmem.try_lock(fd, layout.LIFE, 1)
        started = time.monotonic()
        with pytest.raises(RegionError, match="another process is still creating it"):
            open_region(shm, create=create, timeout=0.2)
        assert time.monotonic() - started < 2
        assert path.exists()
    finally:
        os.close(fd)


def test_d5_a_joiner_waits_longer_than_its_limit_for_a_creator_that_makes_progress(
    shm: Path, child: Callable[..., Any]
) -> None:
    path = shm / "ecoffload.a"
    path.touch(0o600)
    fd = os.open(path, os.O_RDWR)
    try:
        assert hostmem.try_lock(fd, layout.LIFE, 1)
        code = """
            from ecoffload.errors import RegionError
            say("up")
            try: HostRegion.open("a", capacity=1 << 20, granule=4096, directory=args[0], timeout=0.5)
            except RegionError: say("gave up")
        """
        joiner = child(code, shm)
        assert joiner.line() == "up"
        started = time.monotonic()
        while time.monotonic() - started < 1.2:
            os.posix_fallocate(fd, 0, 4096 * int(1 + 50 * (time.monotonic() - started)))
            time.sleep(0.01)
            assert joiner.process.poll() is None
        assert joiner.line() == "gave up"
    finally:
        os.close(fd)


def test_d5_a_file_shorter_than_its_header_says_is_refused_with_both_sizes(shm: Path) -> None:
    with open_region(shm) as region:
        size = region.path.stat().st_size
        os.truncate(region.path, size - 4096)
        with pytest.raises(RegionError, match=f"size of its file: expected {size}, found {size - 4096}"):
            open_region(shm)
        os.truncate(region.path, size)  # a hole at its end: a write there could fail
        with pytest.raises(RegionError, match="memory behind its file"):
            open_region(shm)


def test_d5_a_region_of_another_layout_version_that_lives_is_named(shm: Path) -> None:
    with open_region(shm) as region, region.path.open("r+b") as file:
        file.seek(8)
        file.write((layout.VERSION + 1).to_bytes(4, "little"))
        file.flush()
        with pytest.raises(RegionError, match="version of its layout: expected 1, found 2"):
            open_region(shm)


def test_d5_the_next_to_come_finishes_what_a_killed_creator_began(shm: Path, child: Callable[..., Any]) -> None:
    code = """
        import signal
        def die(done, total): os.kill(os.getpid(), signal.SIGKILL)
        HostRegion.open("a", capacity=1 << 20, granule=4096, directory=args[0], progress=die)
    """
    assert child(code, shm).end()[0] == -9
    assert [each.state for each in list_regions(shm)] == ["unfinished"]
    with open_region(shm) as region:
        assert region.start == "cold"
        assert "its creator died" in region.start_reason
        assert bytes(region.view([(0, MIB)])[0]) == bytes(MIB)


def test_an_unfinished_file_is_reclaimed_by_the_next_start_whatever_its_id(
    shm: Path, child: Callable[..., Any]
) -> None:
    code = """
        import signal
        def die(done, total): os.kill(os.getpid(), signal.SIGKILL)
        HostRegion.open("other", capacity=1 << 20, granule=4096, directory=args[0], namespace="x", progress=die)
    """
    assert child(code, shm).end()[0] == -9
    with open_region(shm):
        assert [each.id for each in list_regions(shm)] == ["a"]


def test_waiters_see_a_killed_creators_region_through(shm: Path, child: Callable[..., Any]) -> None:
    slow = """
        def wait(done, total):
            say("populating"); time.sleep(60)
        HostRegion.open("a", capacity=1 << 20, granule=4096, directory=args[0], progress=wait)
    """
    creator = child(slow, shm)
    assert creator.line() == "populating"
    waiters = [child(HOLD.format(then=""), shm, "a", {}) for _ in range(3)]
    time.sleep(0.2)
    assert all(each.process.poll() is None for each in waiters)
    creator.kill()
    assert sorted(each.line() for each in waiters) == ["cold", "joined", "joined"]


def test_kills_at_random_moments_leave_nothing_that_the_next_start_does_not_take(
    shm: Path, child: Callable[..., Any]
) -> None:
    code = """
        say("go")
        while True:
            with HostRegion.open("a", capacity=1 << 20, granule=4096, directory=args[0], warm=True, namespace="n",
                                 takeover_limit=(10**9, 600.0)) as region:
                region.begin_instance()
                region.journal.clear()
                slot = region.claim_slot(0)
                for number in range(1, 9):
                    handle = region.journal.intent(b"k%d" % number, 1, [(4096 * number, 4096)], 8, "uint64", (1,))
                    region.view([(4096 * number, 8)])[0][:] = number.to_bytes(8, "little")
                    region.journal.commit(handle, number)
                    slot.finish_save(number)
    """
    options: dict[str, Any] = {"warm": True, "namespace": "n", "takeover_limit": (10**9, 600.0)}
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    for _ in range(8):
        victim = child(code, shm)
        victim.line()
        time.sleep(chance.random() * 0.03)
        victim.kill()
        with open_region(shm, **options) as region:
            assert region.start != "joined"
            assert region.journal is not None
            scan = region.journal.records()
            assert scan.dropped == 0, f"seed {seed}"
            assert scan.pending == ()
            for record in scan.records:
                stored = int.from_bytes(region.view(record.extents)[0][:8], "little")
                assert record.key == b"k%d" % stored
                assert record.checksum == stored
    assert [each.state for each in list_regions(shm)] == ["ownerless"]


@pytest.mark.parametrize("warm", [True, False])
def test_no_file_that_anybody_maps_is_ever_unlinked_whoever_is_killed(
    shm: Path, child: Callable[..., Any], warm: bool
) -> None:
    # Processes come, stay for a moment and go, or are killed, all on one id. Whoever maps the region must find its own
    # file at the path all the time, and what it wrote into its own granule unchanged.
    code = """
        import random, signal
        from ecoffload.regions import is_at
        seed = int(args[1]); chance = random.Random(seed)
        def live(number):
            mine = random.Random(seed + number)
            region = HostRegion.open("a", capacity=65536, granule=4096, directory=args[0], timeout=20, reclaim_after=0,
                                     warm=args[2] == "True", namespace="n", takeover_limit=(10**9, 1.0))
            place = [(4096 * (number % 16), 8)]
            for turn in range(mine.randrange(1, 20)):
                region.view(place)[0][:] = number.to_bytes(8, "little")
                time.sleep(mine.random() * 0.002)
                if not is_at(region._fd, region.path): say("unlinked under", region.start)
                if int.from_bytes(region.view(place)[0], "little") != number: say("overwritten")
            if mine.random() < 0.5: region.close()
        living, number, kills = {}, 0, 0
        while kills < 60:
            while len(living) < 5:
                number += 1
                while number % 16 in [each % 16 for each in living.values()]: number += 1
                pid = os.fork()
                if not pid:
                    try: live(number)
                    except BaseException as error: say(type(error), error)
                    os._exit(0)
                living[pid] = number
            time.sleep(chance.random() * 0.01)
            living = {pid: each for pid, each in living.items() if not os.waitpid(pid, os.WNOHANG)[0]}
            if living:
                victim = chance.choice(sorted(living))
                os.kill(victim, signal.SIGKILL); os.waitpid(victim, 0); del living[victim]
                kills += 1
        for pid in living: os.waitpid(pid, 0)
        say("end")
    """
    seed = random.randrange(1 << 30)
    status, out, err = child(code, shm, seed, warm).end(60)
    assert (status, out) == (0, "end\n"), f"seed {seed}: {err}"
    assert all("starting cold: the file found had no valid header" in line for line in err.splitlines())
    with open_region(shm, capacity=65536, warm=warm, namespace="n", takeover_limit=(10**9, 1.0)) as region:
        assert region.start in (("warm",) if warm else ("cold", "created"))


def test_a_scheduler_that_finds_a_living_writer_of_a_dead_engine_is_told_what_it_may_write(
    shm: Path, holder: Callable[..., Any]
) -> None:
    then = (
        "region.begin_instance(); journal = region.journal; "
        "journal.commit(journal.intent(b'whole', 1, [(0, 4096)], 4096, 'uint8', (4096,)), 5); "
        "journal.intent(b'torn', 1, [(8192, 4096)], 4096, 'uint8', (4096,))"
    )
    engine = holder(then=then, warm=True, namespace="n")
    copier = holder(warm=True, namespace="n")
    engine.kill()
    with open_region(shm, warm=True, namespace="n") as region:
        assert region.start == "joined"
        region.begin_instance()
        assert region.journal is not None
        scan = region.journal.records()
        assert [each.key for each in scan.records] == [b"whole"]
        assert [each.extents for each in scan.pending] == [((8192, 4096),)]
        assert not region.alone()
        copier.kill()
        assert region.alone()


def test_without_a_journal_a_region_of_a_dead_scheduler_is_not_joined_while_its_workers_live(
    shm: Path, holder: Callable[..., Any]
) -> None:
    engine = holder(then="region.begin_instance()")
    worker = holder()
    engine.kill()
    with pytest.raises(RegionError, match="whose scheduler died still map it"):
        open_region(shm, timeout=0.3)
    worker.kill()
    with open_region(shm) as region:
        assert region.start == "cold"


def test_a_scheduler_that_ended_with_nothing_in_flight_leaves_its_workers_to_the_next(shm: Path) -> None:
    worker = open_region(shm)
    first = open_region(shm)
    first.begin_instance()
    first.end_instance()
    first.close()
    with open_region(shm) as second:
        assert second.begin_instance() != 0
    worker.close()


def test_two_schedulers_on_one_region_are_refused(shm: Path) -> None:
    with open_region(shm) as first, open_region(shm) as second:
        first.begin_instance()
        with pytest.raises(RegionError, match="another live process schedules"):
            second.begin_instance()


def test_a_scheduler_that_joined_a_cold_region_before_the_old_one_died_does_not_take_its_place(shm: Path) -> None:
    first = open_region(shm)
    with open_region(shm) as second, open_region(shm):
        first.begin_instance()
        first.close()  # with saves in flight, for all that the others know
        with pytest.raises(RegionError, match="an engine that died"):
            second.begin_instance()


def test_a_scheduler_that_died_frees_its_place(shm: Path, holder: Callable[..., Any]) -> None:
    engine = holder(then="region.begin_instance()", warm=True, namespace="n")
    with open_region(shm, warm=True, namespace="n") as region:
        with pytest.raises(RegionError, match="another live process schedules"):
            region.begin_instance()
        engine.kill()
        assert region.begin_instance() == region.instance


# --- other namespaces' regions ------------------------------------------------------------------------------------


def test_another_namespaces_region_is_kept_until_it_was_ownerless_for_long_enough(
    shm: Path, holder: Callable[..., Any]
) -> None:
    holder("other", namespace="x").kill()
    with open_region(shm, namespace="y"):
        assert {each.id for each in list_regions(shm)} == {"a", "other"}
    other = next(each for each in list_regions(shm) if each.id == "other")
    assert other.ownerless is not None
    assert other.ownerless < 60  # counted from when it was first seen
    with (shm / "ecoffload.other").open("r+b") as file:
        file.seek(8 * layout.W_OWNERLESS_SINCE)
        file.write((int(time.time()) - 3601).to_bytes(8, "little"))
    with open_region(shm, namespace="y"):
        assert {each.id for each in list_regions(shm)} == {"a"}


def test_a_warm_region_of_the_same_namespace_is_not_taken_for_space(shm: Path) -> None:
    open_region(shm, "kept", warm=True, namespace="n").close()
    with open_region(shm, namespace="n"):
        assert {each.id for each in list_regions(shm)} == {"a", "kept"}


def test_a_living_region_of_another_namespace_is_never_reclaimed(shm: Path, holder: Callable[..., Any]) -> None:
    holder("other", namespace="x")
    with open_region(shm, namespace="y", reclaim_after=0):
        assert {each.id for each in list_regions(shm)} == {"a", "other"}


def test_reclaim_after_zero_seconds_takes_ownerless_regions_at_once(shm: Path) -> None:
    open_region(shm, "other", namespace="x", warm=True).close()
    with open_region(shm, namespace="y", reclaim_after=0):
        assert {each.id for each in list_regions(shm)} == {"a"}


def test_the_command_reclaims_what_nobody_maps_and_only_the_ids_it_was_given(
    shm: Path, holder: Callable[..., Any]
) -> None:
    for id in ("one", "two"):
        open_region(shm, id, namespace="x", warm=True).close()
    holder("living")
    (shm / "unrelated").touch()
    assert [each.id for each in reclaim(shm, ids=("one", "living"))] == ["one"]
    assert [each.id for each in reclaim(shm)] == ["two"]
    assert sorted(each.name for each in shm.iterdir()) == ["ecoffload.living", "unrelated"]


def test_a_listing_tells_whose_a_region_is_and_who_maps_it(shm: Path, holder: Callable[..., Any]) -> None:
    then = "region.journal.commit(region.journal.intent(b'k', 1, [(0, 4096)], 4096, 'uint8', (4096,)), 5)"
    process = holder(then=then, warm=True, namespace="model 7")
    with open_region(shm, warm=True, namespace="model 7"):
        (info,) = list_regions(shm)
    assert info.mappers == tuple(sorted((os.getpid(), process.pid)))
    assert (info.id, info.state, info.live, info.uid) == ("a", "live", True, os.geteuid())
    assert (info.namespace, info.warm, info.entries, info.ownerless) == ("model 7", True, 1, None)
    assert info.nbytes == (shm / "ecoffload.a").stat().st_size
    assert 0 <= info.age < 60


def test_a_listing_of_an_empty_directory_is_empty(shm: Path) -> None:
    (shm / "other").touch()
    assert list_regions(shm) == []
