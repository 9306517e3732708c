"""The end of a mapping: views that outlive it, forks, interpreter exit, and closing twice. (C9, D10, F9)"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ecoffload.errors import CacheClosed, RegionError
from ecoffload.region import HostRegion

MIB = 1 << 20


def open_region(shm: Path, id: str = "a", **options: Any) -> HostRegion:
    return HostRegion.open(id, **{"capacity": MIB, "granule": 4096, "directory": shm, "timeout": 5.0} | options)


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_closing_twice_is_closing_once(shm: Path) -> None:
    region = open_region(shm)
    region.close()
    region.close()
    assert region.closed
    assert not mapped(region.path)


def test_after_close_everything_says_so(shm: Path) -> None:
    region = open_region(shm, warm=True, namespace="n")
    journal = region.journal
    assert journal is not None
    slot = region.claim_slot(0)
    region.begin_instance()
    region.close()
    calls: list[Callable[[], Any]] = [
        lambda: region.view([(0, 1)]), lambda: region.claim_slot(1), lambda: region.progress(1), region.take_failures,
        region.take_lost, lambda: region.journal, region.begin_instance, region.alone, lambda: region.dead_ranks(1),
        lambda: slot.finish_save(1), lambda: slot.fail_load(1), lambda: slot.adopt(1), lambda: journal.commit(0),
        journal.records, lambda: journal.drop(0),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(CacheClosed, match="was closed"):
            call()
    slot.release()
    region.end_instance()


def test_d10_a_view_that_outlives_close_keeps_the_bytes_and_a_warning_says_so(
    shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    region = open_region(shm)
    array = np.frombuffer(region.view([(4096, 8)])[0], np.uint8)
    region.close()
    assert ["closed while views of it are still held" in each.getMessage() for each in caplog.records] == [True]
    array[:] = 7
    assert array.sum() == 56
    assert mapped(region.path)
    assert region.path.exists()  # somebody maps it
    del array
    gc.collect()
    assert not mapped(region.path)
    assert list(shm.iterdir()) == []


def test_d10_closing_without_views_unmaps_at_once_and_says_nothing(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    region = open_region(shm, warm=True, namespace="n")
    region.view([(0, 4)])[0][:] = b"abcd"
    region.begin_instance()
    region.claim_slot(0).finish_save(1)
    assert region.progress(1) == (1, 0)
    assert region.journal is not None
    with caplog.at_level(logging.INFO):
        region.close()
    assert caplog.records == []
    assert not mapped(region.path)


def test_d10_views_are_writable_so_that_no_tensor_is_built_on_read_only_memory(shm: Path) -> None:
    with open_region(shm) as region:
        view = region.view([(0, 3)])[0]
        assert not view.readonly
        assert (view.format, view.itemsize, view.contiguous) == ("B", 1, True)
        assert region.view([(0, 0)])[0].nbytes == 0  # an empty entry: torch and numpy need no buffer for it
        del view


def test_d10_a_region_on_descriptor_zero_works(shm: Path, child: Callable[..., Any]) -> None:
    code = """
        os.close(0)
        from ecoffload.regions import list_regions
        region = HostRegion.open("a", capacity=1 << 20, granule=4096, directory=args[0])
        say(os.readlink("/proc/self/fd/0") == str(region.path))
        say(os.listdir(args[0]), list_regions(args[0])[0].state)
        region.claim_slot(0).finish_save(1)
        region.close()
        say(os.listdir(args[0]))
    """
    assert child(code, shm).end() == (0, "True\n['ecoffload.a'] live\n[]\n", "")


def test_c9_closing_leaves_no_descriptor_and_no_mapping_over_a_hundred_turns(shm: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(100):
        with open_region(shm, capacity=65536) as region:
            region.claim_slot(0)
            region.claim_slot(1).release()
            region.begin_instance()
            region.progress(1)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= maps + 5


def test_c9_a_worker_dropped_unreleased_lets_its_slot_go(shm: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with open_region(shm) as region:
        region.begin_instance()
        region.claim_slot(0)
        gc.collect()
        assert [each.rank for each in region.take_lost()] == [0]
    assert len(os.listdir("/proc/self/fd")) == before


def test_c9_a_process_that_ends_without_closing_leaves_no_file(shm: Path, child: Callable[..., Any]) -> None:
    code = """
        region = HostRegion.open("a", capacity=1 << 20, granule=4096, directory=args[0])
        view = region.view([(0, 4096)])[0]
        {end}
    """
    for end, status in (("pass", 0), ("sys.exit(3)", 3), ("raise SystemExit(4)", 4)):
        assert child(code.format(end=end), shm).end() == (status, "", "")
        assert list(shm.iterdir()) == []


def test_c9_a_thread_may_use_a_view_while_the_interpreter_ends(shm: Path, child: Callable[..., Any]) -> None:
    code = """
        import threading
        region = HostRegion.open("a", capacity=1 << 20, granule=4096, directory=args[0])
        def use(view):
            while True: view[:] = bytes(len(view))
        threading.Thread(target=use, args=(region.view([(0, 1 << 20)])[0],), daemon=True).start()
        time.sleep(0.05)
    """
    assert child(code, shm).end()[0] == 0
    assert list(shm.iterdir()) == []


def test_a_region_that_is_dropped_without_close_ends_with_its_last_view(shm: Path) -> None:
    region = open_region(shm)
    view = region.view([(0, 1)])[0]
    path = region.path
    del region
    gc.collect()
    assert mapped(path)
    del view
    gc.collect()
    assert not mapped(path)
    assert list(shm.iterdir()) == []


def test_f9_a_forked_child_gets_a_clear_error_and_harms_nobody(shm: Path, child: Callable[..., Any]) -> None:
    code = """
        from pathlib import Path
        from ecoffload.errors import RegionError
        region = HostRegion.open("a", capacity=1 << 20, granule=4096, directory=args[0])
        region.begin_instance()
        slot = region.claim_slot(0)
        if not (pid := os.fork()):
            calls = (lambda: region.view([(0, 1)]), lambda: region.progress(1), lambda: slot.finish_save(9),
                     lambda: region.claim_slot(1), lambda: region.alone(), lambda: slot.adopt(1))
            for call in calls:
                try: call()
                except RegionError as error: say("opened before this process was forked" in str(error))
            slot.release(); region.close()
            say("ecoffload.a" in Path("/proc/self/maps").read_text(), sum("ecoffload.a" in os.path.realpath(fd)
                for fd in Path("/proc/self/fd").iterdir()))
            with HostRegion.open("a", capacity=1 << 20, granule=4096, directory=args[0]) as own: say(own.start)
            os._exit(0)
        os.waitpid(pid, 0)
        slot.finish_save(4)
        say(region.progress(1), region.alone())
    """
    status, out, err = child(code, shm).end()
    assert (status, err) == (0, "")
    assert out.splitlines() == ["True"] * 6 + ["False 0", "joined", "(4, 0) True"]
    assert list(shm.iterdir()) == []


def test_f9_a_forked_child_does_not_keep_its_dead_parent_alive(shm: Path, child: Callable[..., Any]) -> None:
    code = """
        region = HostRegion.open("a", capacity=1 << 20, granule=4096, directory=args[0])
        slot = region.claim_slot(0)
        if not os.fork():
            say("forked"); time.sleep(20); os._exit(0)
        time.sleep(20)
    """
    with open_region(shm) as region:
        region.begin_instance()
        process = child(code, shm)
        assert process.line() == "forked"
        assert not region.alone()
        process.kill()  # the parent; its child lives on
        assert region.alone()


def test_a_region_is_not_pickled_but_names_what_to_do(shm: Path) -> None:
    with open_region(shm) as region, pytest.raises(RegionError, match="open 'a' in the other process"):
        pickle.dumps(region)


def test_closing_from_several_threads_closes_once(shm: Path) -> None:
    region = open_region(shm)
    threads = [threading.Thread(target=region.close) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert list(shm.iterdir()) == []
