"""Creating, joining and taking over a region: who comes first, who comes later, and what does not fit together."""

from __future__ import annotations

import errno
import logging
import math
import os
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecoffload import layout
from ecoffload.errors import ConfigError, RegionError
from ecoffload.region import HostRegion

MIB = 1 << 20


def open_region(shm: Path, id: str | None = "a", **options: Any) -> HostRegion:
    return HostRegion.open(id, **{"capacity": MIB, "granule": 4096, "directory": shm, "timeout": 5.0} | options)


def test_the_first_to_come_creates_and_the_second_joins_the_same_bytes(shm: Path) -> None:
    with open_region(shm) as first, open_region(shm) as second:
        assert (first.start, second.start) == ("created", "joined")
        first.view([(4096, 3)])[0][:] = b"abc"
        assert bytes(second.view([(4096, 3)])[0]) == b"abc"


def test_the_file_is_private_whatever_the_umask(shm: Path) -> None:
    before = os.umask(0)
    try:
        with open_region(shm) as region:
            assert stat.S_IMODE(region.path.stat().st_mode) == 0o600
        os.umask(0o177)
        with open_region(shm) as region:
            assert stat.S_IMODE(region.path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_the_last_to_close_unlinks_the_file(shm: Path) -> None:
    first, second = open_region(shm), open_region(shm)
    first.close()
    assert second.path.exists()
    second.close()
    assert list(shm.iterdir()) == []


def test_capacity_is_rounded_up_to_granules_and_the_memory_to_pages(shm: Path) -> None:
    with open_region(shm, capacity=1_000_000, granule=7168) as region:
        assert region.capacity == math.ceil(1_000_000 / 7168) * 7168
        assert region.nbytes == math.ceil(region.capacity / 4096) * 4096
        assert region.address % 4096 == 0


@settings(deadline=None)
@given(
    capacity=st.integers(1, 1 << 40), granule=st.integers(1, 1 << 20), chunk=st.integers(1 << 16, 1 << 36),
    page=st.sampled_from([4096, 65536, 2 << 20]), warm=st.booleans(), namespace=st.text(max_size=3000),
)  # fmt: skip
def test_every_layout_reads_back_and_its_chunks_start_on_pages_and_granules(
    capacity: int, granule: int, chunk: int, page: int, warm: bool, namespace: str
) -> None:
    capacity = max(capacity, granule)
    header = layout.plan(
        capacity=capacity, granule=granule, page=page, chunk_bytes=max(page, chunk), slots=64,
        warm=warm, scrub=False, namespace=namespace, incarnation=7,
    )  # fmt: skip
    assert layout.parse(header.pack() + bytes(2048)) == header
    assert capacity <= header.capacity < capacity + granule
    assert header.capacity <= header.nbytes < header.capacity + page
    assert header.chunk_bytes % page == header.chunk_bytes % granule == 0
    assert header.chunk_bytes <= max(chunk, page, math.lcm(granule, page))
    assert header.data_offset % page == header.nbytes % page == 0


def test_namespaces_that_differ_only_beyond_what_the_header_shows_are_different() -> None:
    def digest(namespace: str) -> bytes:
        return layout.plan(
            capacity=4096, granule=4096, page=4096, chunk_bytes=4096, slots=1,
            warm=False, scrub=False, namespace=namespace, incarnation=1,
        ).digest  # fmt: skip

    assert digest("x" * 5000 + "a") != digest("x" * 5000 + "b")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("directory", None), ("directory", b"/dev/shm"), ("namespace", b"n"), ("namespace", 3), ("warm", "no"),
        ("create", None), ("scrub_on_close", 1), ("timeout", "30s"), ("timeout", math.nan), ("reclaim_after", -1),
        ("chunk_bytes", "64GiB"), ("chunk_bytes", 1.5), ("takeover_limit", 3), ("takeover_limit", ("3", "10min")),
        ("takeover_limit", (3, -1)),
    ],
)  # fmt: skip
def test_an_option_of_another_kind_is_refused_by_name(shm: Path, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        open_region(shm, **{option: value})
    assert list(shm.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value"),
    [("capacity", 0), ("capacity", -1), ("capacity", True), ("granule", 0), ("granule", 2 * MIB), ("slots", 0)],
)
def test_a_number_that_makes_no_region_is_refused_by_name(shm: Path, option: str, value: int) -> None:
    with pytest.raises(ConfigError) as caught:
        open_region(shm, **{option: value})
    assert caught.value.details["value"] in (value, MIB)
    assert list(shm.iterdir()) == []


def test_a_view_outside_the_region_is_refused(shm: Path) -> None:
    with open_region(shm) as region:
        for extent in ((MIB, 1), (MIB - 4096, 4097), (-1, 4), (0, -1), (1 << 64, 1)):
            with pytest.raises(RegionError, match="outside the region"):
                region.view([extent])
        assert region.view([(MIB, 0)])[0].nbytes == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [("capacity", 2 * MIB), ("granule", 8192), ("namespace", "other"), ("warm", True), ("slots", 8)],
)
def test_joining_with_another_geometry_or_namespace_names_both_values(shm: Path, option: str, value: Any) -> None:
    with open_region(shm) as region:
        started = time.monotonic()
        with pytest.raises(RegionError) as caught:
            open_region(shm, **{option: value})
        assert time.monotonic() - started < 2
        assert caught.value.details["expected"][option] == value
        assert caught.value.details["actual"][option] == getattr(region, option, 64)
        assert option in str(caught.value)


def test_a_joiner_never_creates_and_gives_up_in_time(shm: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RegionError, match="nobody has created it"):
        open_region(shm, create=False, timeout=0.2)
    assert time.monotonic() - started < 2
    assert list(shm.iterdir()) == []


def test_a_joiner_waits_for_a_creator_that_comes_later(shm: Path) -> None:
    opened: list[HostRegion] = []
    joiner = threading.Thread(target=lambda: opened.append(open_region(shm, create=False, timeout=10)))
    joiner.start()
    with open_region(shm):
        joiner.join()
        assert opened[0].start == "joined"
        opened[0].close()


def test_many_that_come_at_once_share_one_region(shm: Path, child: Callable[..., Any]) -> None:
    code = """
        region = HostRegion.open("a", capacity=2 << 20, granule=4096, directory=args[0], timeout=30)
        say(region.start)
        sys.stdin.readline()
        region.close()
    """
    children = [child(code, shm) for _ in range(4)]
    assert sorted(each.line() for each in children) == ["created"] + ["joined"] * 3
    for each in children:
        each.tell("go")
        assert each.end() == (0, "", "")
    assert list(shm.iterdir()) == []


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_start_method_share_it_and_leave_no_noise(shm: Path, tmp_path: Path, method: str) -> None:
    script = tmp_path / "engine.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing, sys
        from ecoffload.region import HostRegion

        def open_region():
            return HostRegion.open("a", capacity=1 << 20, granule=4096, directory=sys.argv[1], timeout=20)

        def work(rank):
            with open_region() as region:
                region.view([(4096 * rank, 4096)])[0][:] = bytes([rank + 1]) * 4096
                slot = region.claim_slot(rank)
                slot.finish_save(1)

        if __name__ == "__main__":
            context = multiprocessing.get_context(sys.argv[2])
            with open_region() as region:
                workers = [context.Process(target=work, args=(rank,)) for rank in range(2)]
                for worker in workers: worker.start()
                for worker in workers: worker.join()
                for rank in range(2):
                    assert bytes(region.view([(4096 * rank, 4096)])[0]) == bytes([rank + 1]) * 4096
                print([worker.exitcode for worker in workers], region.alone())
        """)
    )
    done = subprocess.run(
        [sys.executable, script, shm, method], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("[0, 0] True\n", "")
    assert list(shm.iterdir()) == []


def test_two_roles_in_one_process_each_have_their_own_lock(shm: Path) -> None:
    worker, scheduler = open_region(shm), open_region(shm)
    assert not worker.alone()
    worker.close()
    assert scheduler.alone()
    assert scheduler.path.exists()
    scheduler.close()


def test_a_region_without_an_id_gets_one_of_its_own(shm: Path) -> None:
    with open_region(shm, None) as first, open_region(shm, None) as second:
        assert first.id != second.id


def test_a_warm_region_without_an_id_is_found_by_its_namespace(shm: Path) -> None:
    first = open_region(shm, None, warm=True, namespace="model 1")
    with open_region(shm, None, warm=True, namespace="model 2") as other:
        assert other.id != first.id
    first.close()
    with open_region(shm, None, warm=True, namespace="model 1") as second:
        assert (second.id, second.start) == (first.id, "warm")


def test_a_warm_region_keeps_its_entries_over_a_restart(shm: Path) -> None:
    first = open_region(shm, warm=True, namespace="n")
    journal = first.journal
    assert journal is not None
    first.view([(8192, 5)])[0][:] = b"hello"
    handle = journal.intent(b"key", 3, [(8192, 4096)], 5, "uint8", (5,))
    assert handle is not None
    journal.commit(handle, 99)
    assert journal.intent(b"unfinished", 3, [(0, 4096)], 5, "uint8", (5,)) is not None
    first.close()
    with open_region(shm, warm=True, namespace="n") as second:
        assert second.start == "warm"
        assert second.journal is not None
        scan = second.journal.records()
        assert [(each.key, each.checksum) for each in scan.records] == [(b"key", 99)]
        assert scan.pending == ()
        assert bytes(second.view([(8192, 5)])[0]) == b"hello"


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ({"namespace": "a"}, {"namespace": "b"}, "namespace 'a', not 'b'"),
        ({"warm": False}, {}, "geometry"),
        ({"granule": 8192}, {}, "granule 8192, not 4096"),
        ({"capacity": 2 * MIB}, {}, "capacity 2097152, not 1048576"),
    ],
)
def test_what_does_not_fit_is_taken_over_cold_and_said_once(
    shm: Path, caplog: pytest.LogCaptureFixture, child: Callable[..., Any], first: Any, second: Any, why: str
) -> None:
    code = """
        options = eval(args[1])
        region = HostRegion.open("a", directory=args[0], **options)
        if region.journal: region.journal.commit(region.journal.intent(b"k", 1, [], 0, "uint8", (0,)))
        say("up")
        time.sleep(60)
    """
    process = child(code, shm, {"capacity": MIB, "granule": 4096, "warm": True, "namespace": "n"} | first)
    assert process.line() == "up"
    process.kill()
    with caplog.at_level(logging.WARNING), open_region(shm, **{"warm": True, "namespace": "n"} | second) as region:
        assert region.start == "cold"
        assert why in region.start_reason
        assert region.journal is not None
        assert len(region.journal) == 0
    assert [why in each.getMessage() for each in caplog.records] == [True]


def test_a_file_of_another_size_is_taken_over_cold_and_its_size_said(shm: Path) -> None:
    with open_region(shm, warm=True, namespace="n") as region:
        path, size = region.path, region.path.stat().st_size
    os.truncate(path, size - 4096)
    with open_region(shm, warm=True, namespace="n") as region:
        assert region.start == "cold"
        assert f"not whole: size {size - 4096}" in region.start_reason
        assert f"{size} expected" in region.start_reason


def test_the_third_takeover_within_ten_minutes_is_cold_and_the_next_is_warm_again(
    shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starts = []
    for _ in range(5):
        with open_region(shm, warm=True, namespace="n") as region:
            starts.append(region.start)
    assert starts == ["created", "warm", "warm", "cold", "warm"]
    assert ["3 takeovers within 600 s" in each.getMessage() for each in caplog.records] == [True]


def test_takeovers_that_lie_further_apart_stay_warm(shm: Path) -> None:
    starts = []
    for _ in range(5):
        with open_region(shm, warm=True, namespace="n") as region:
            starts.append(region.start)
            path = region.path
        with path.open("r+b") as file:  # 400 seconds pass
            page = file.read(layout.HEADER_BYTES)
            for word in range(layout.W_TAKEOVERS, layout.W_TAKEOVERS + layout.TAKEOVERS):
                file.seek(8 * word)
                file.write(max(0, layout.word_of(page, word) - 400).to_bytes(8, "little"))
    assert starts == ["created"] + ["warm"] * 4


def test_scrubbing_and_keeping_for_a_restart_contradict_each_other(shm: Path) -> None:
    with pytest.raises(ConfigError, match="contradict"):
        open_region(shm, warm=True, scrub_on_close=True)


def test_the_last_to_close_scrubs(shm: Path) -> None:
    first, second = open_region(shm, scrub_on_close=True), open_region(shm)
    first.view([(0, 6)])[0][:] = b"secret"
    seen = os.open(first.path, os.O_RDONLY)
    try:
        first.close()
        assert bytes(second.view([(0, 6)])[0]) == b"secret"
        second.close()
        content = os.pread(seen, 4 * MIB, layout.HEADER_BYTES)
        assert b"secret" not in content
        assert len(content) > MIB
    finally:
        os.close(seen)


def test_progress_counts_every_byte_once_on_the_callers_thread(shm: Path) -> None:
    seen: list[tuple[int, int, int]] = []
    with open_region(shm, progress=lambda done, total: seen.append((done, total, threading.get_ident()))) as region:
        size = region.path.stat().st_size
    assert seen[-1] == (size, size, threading.get_ident())
    assert [each[0] for each in seen] == sorted(each[0] for each in seen)


def test_an_error_of_the_progress_callback_comes_through_and_leaves_nothing(shm: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_region(shm, progress=stop)
    assert list(shm.iterdir()) == []


def test_node_zero_can_be_asked_for_and_a_missing_node_is_named(shm: Path) -> None:
    if not Path("/sys/devices/system/node/node0").is_dir():
        pytest.skip("the kernel knows no NUMA nodes")
    with open_region(shm, numa_node=0) as region:
        region.view([(0, 1)])[0][0] = 1
    with pytest.raises(RegionError, match="numa_node is 4000"):
        open_region(shm, numa_node=4000)
    assert list(shm.iterdir()) == []


def test_a_directory_on_a_disk_is_refused(tmp_path: Path) -> None:
    from ecoffload.hostmem import mount_of

    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        if mount_of(fd).in_memory:
            pytest.skip(f"{tmp_path} lies in a tmpfs itself")
    finally:
        os.close(fd)
    with pytest.raises(RegionError, match="needs a tmpfs or hugetlbfs"):
        open_region(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_does_not_exist_is_named(shm: Path) -> None:
    with pytest.raises(RegionError, match=r"missing: No such file.*; name a tmpfs or hugetlbfs that is there"):
        open_region(shm / "missing")


def test_core_dumps_leave_the_region_out(shm: Path) -> None:
    with open_region(shm) as region:
        flags, wanted = "", False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            wanted = str(region.path) in line if "-" in line.split(" ")[0] else wanted
            if wanted and line.startswith("VmFlags"):
                flags = line
        assert " dd" in flags  # VM_DONTDUMP


def test_a_directory_that_is_mounted_read_only_is_said_with_the_remedy(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *mode: Any, **more: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RegionError, match=rf"{shm} is mounted read-only; remount it read-write, or name another"):
        open_region(shm)
