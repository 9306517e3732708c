"""The shim alone: what reaches the queue, and what comes back when SYCL throws."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ecoffload_xpu.ways import SYMBOLS, Event, ShimWay
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ecoffload.errors import BackendUnavailable, ConfigError, DeviceLost, SwapFailed

XPU_ADDRESS = 0xFFFFD556B6400000
"""Device USM as an Intel GPU handed it out."""

TOP = 2**64

words = st.one_of(
    st.integers(0, TOP - 1),
    st.integers(-64, 64).map(lambda d: 2**63 + d),
    st.integers(0, 2**20).map(lambda d: XPU_ADDRESS + d),
    st.sampled_from([0, 1, 2**47, 2**63 - 1, 2**63, 0xFFFF800000000000, 0xFF00FFFFFFE00000, TOP - 4096, TOP - 1]),
)


@pytest.fixture
def way(recorder, built) -> ShimWay:
    return ShimWay(recorder.library, built / "_shim.so")


def copy(way, queue, batch) -> Event:
    return way.copy(queue, batch.dst, batch.src, batch.size, batch.count, batch.first)


def test_the_recorder_exports_every_function_that_the_shim_needs(recorder):
    assert [s for s, needed in SYMBOLS if needed and not hasattr(recorder.library, s)] == []


@given(st.lists(st.tuples(words, words, st.integers(1, TOP - 1)), min_size=1, max_size=40))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_every_64_bit_word_reaches_the_queue_unchanged(way, recorder, table, rows):
    recorder.reset()
    queue = recorder.queue()
    copy(way, queue, table(rows))
    assert [(src, dst, size) for _, dst, src, size in recorder.copies.tolist()] == rows
    assert set(recorder.copies[:, 0].tolist()) == {recorder.queue_id(queue)}


def test_a7_a_real_xpu_address_is_neither_sign_extended_nor_cut(way, recorder, table):
    copy(way, recorder.queue(), table([(XPU_ADDRESS + 4097, 0x7F0000000001, 3)]))
    assert recorder.copies[0, 1:].tolist() == [0x7F0000000001, 0xFFFFD556B6401001, 3]


def test_one_barrier_stands_behind_a_batch(way, recorder, table):
    copy(way, recorder.queue(), table([(1, 2, 3), (4, 5, 6)]))
    assert recorder.journal == ["barrier"]


def test_an_event_is_done_only_when_sycl_says_so(way, recorder, table):
    event = copy(way, recorder.queue(), table([(1, 2, 3)]))
    before = event.done()
    recorder.finish()
    assert (before, event.done()) == (False, True)


def test_waiting_for_an_event_waits_for_its_barrier(way, recorder, table):
    copy(way, recorder.queue(), table([(1, 2, 3)])).wait()
    assert recorder.journal[-1].startswith("wait ")


def test_a_blocked_queue_waits_for_the_event_and_not_the_host(way, recorder, table):
    event, other = copy(way, recorder.queue(), table([(1, 2, 3)])), recorder.queue()
    event.block(other)
    assert recorder.journal[-1].startswith(f"barrier on {recorder.queue_id(other)} after ")


def test_events_are_freed_with_their_owner(way, recorder, table):
    before = recorder.live_events()
    event = copy(way, recorder.queue(), table([(1, 2, 3)]))
    during = recorder.live_events()
    del event
    assert (during - before, recorder.live_events() - before) == (1, 0)


def test_host_blocks_are_freed_with_their_owner(way, recorder):
    before = recorder.live_blocks()
    block = way.allocate(recorder.queue(), 100)
    during = recorder.live_blocks()
    del block
    assert (during - before, recorder.live_blocks() - before) == (1, 0)


@pytest.mark.parametrize("kind", ["std", "other"])
@pytest.mark.parametrize("at", [0, 3, 9])
def test_a_cpp_exception_names_the_global_descriptor(way, recorder, table, kind, at):
    recorder.throw_at(at, kind)
    with pytest.raises(SwapFailed) as caught:
        copy(way, recorder.queue(), table([(XPU_ADDRESS + i, i + 1, 7) for i in range(10)], first=8192))
    assert caught.value.index == 8192 + at
    assert f"{XPU_ADDRESS + at:#x}" in str(caught.value)


def test_after_an_exception_the_queue_has_drained(way, recorder, table):
    recorder.throw_at(1)
    with pytest.raises(SwapFailed):
        copy(way, recorder.queue(), table([(1, 2, 3)] * 3))
    assert recorder.journal == ["drain"]


def test_after_an_exception_the_next_batch_works(way, recorder, table):
    recorder.throw_at(0)
    queue = recorder.queue()
    with pytest.raises(SwapFailed):
        copy(way, queue, table([(1, 2, 3)]))
    copy(way, queue, table([(1, 2, 3)]))
    assert len(recorder.copies) == 1


def test_a_lost_device_is_told_from_a_refused_copy(way, recorder, table):
    recorder.throw_at(0, "lost")
    with pytest.raises(DeviceLost, match="DEVICE_LOST"):
        copy(way, recorder.queue(), table([(1, 2, 3)]))


def test_a_barrier_that_throws_blames_no_descriptor(way, recorder, table):
    recorder.barrier_throws()
    with pytest.raises(SwapFailed, match="no barrier") as caught:
        copy(way, recorder.queue(), table([(1, 2, 3)]))
    assert caught.value.index is None


def test_a_copy_that_fails_late_raises_when_it_is_looked_at(way, recorder, table):
    event = copy(way, recorder.queue(), table([(1, 2, 3)]))
    recorder.fail_events()
    with pytest.raises(SwapFailed, match="failed late"):
        event.done()
    with pytest.raises(DeviceLost):
        event.wait()


def test_an_out_of_order_queue_is_refused_before_anything_is_enqueued(way, recorder, table):
    with pytest.raises(ConfigError, match="in_order"):
        copy(way, recorder.queue(in_order=False), table([(1, 2, 3)]))
    assert len(recorder.copies) == 0


def test_usm_host_memory_is_known_by_its_first_and_last_byte(way, recorder, table):
    recorder.usm_host(XPU_ADDRESS, 100)
    answers = [
        way.all_usm_host(recorder.queue(), batch.src, batch.size, batch.count)
        for batch in (
            table([(XPU_ADDRESS, 0, 100)]),
            table([(XPU_ADDRESS + 1, 0, 100)]),
            table([(XPU_ADDRESS - 1, 0, 5)]),
        )
    ]
    assert answers == [True, False, False]


def test_ranges_are_gathered_one_behind_the_other(way, table):
    source, packed = np.arange(100, dtype=np.uint8), np.zeros(7, dtype=np.uint8)
    at = source.ctypes.data
    batch = table([(at + 50, 0, 3), (at + 7, 0, 1), (at + 90, 0, 3)])
    way.gather(packed.ctypes.data, batch.src, batch.size, batch.count)
    assert packed.tolist() == [50, 51, 52, 7, 90, 91, 92]


def test_a_missing_shim_says_how_to_get_one(recorder, tmp_path):
    with pytest.raises(BackendUnavailable, match=r"install g\+\+ and reinstall ecoffload-xpu"):
        ShimWay(recorder.library, tmp_path / "_shim.so")


def test_a_libsycl_without_the_functions_is_named_as_too_old(built):
    with pytest.raises(BackendUnavailable, match=r"2025\.0 or newer"):
        ShimWay(ctypes.CDLL(None), built / "_shim.so")


FIND = "import sys, ctypes; from ecoffload_xpu.ways import sycl_library; [ctypes.CDLL(p) for p in sys.argv[1:]]; "


def _ask(*libraries: Path) -> str:
    code = FIND + "\ntry: print(sycl_library()[1])\nexcept Exception as e: print(type(e).__name__, e)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, libraries)], capture_output=True, text=True, check=True, env=environment
    )
    return run.stdout


def test_the_libsycl_that_the_process_holds_is_the_one_used(built):
    assert _ask(built / "libsycl.so.8").strip() == str(built / "libsycl.so.8")


def test_a_second_libsycl_in_the_process_is_refused(built, tmp_path):
    other = tmp_path / "libsycl.so.9"
    other.write_bytes((built / "libsycl.so.8").read_bytes())
    assert "2 SYCL runtimes" in _ask(built / "libsycl.so.8", other)


def test_no_libsycl_is_loaded_on_our_own_account():
    assert _ask().startswith("BackendUnavailable")


def test_without_a_compiler_the_build_says_so_and_makes_a_pure_wheel(build_hook, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    warnings: list[str] = []
    (tmp_path / "src" / "ecoffload_xpu").mkdir(parents=True)
    hook = build_hook.ShimHook.__new__(build_hook.ShimHook)
    hook.__dict__["_BuildHookInterface__root"] = str(tmp_path)
    hook.__dict__["_BuildHookInterface__app"] = SimpleNamespace(display_warning=warnings.append)
    data: dict = {"force_include": {}}
    hook.initialize("standard", data)
    hook.finalize("standard", data, "")
    assert data == {"force_include": {}}
    assert "no-such-compiler" in warnings[0]
    assert "WITHOUT its shim" in warnings[0]


def test_a_shim_that_does_not_compile_leaves_no_library_behind(build_hook, tmp_path):
    (tmp_path / "shim.cpp").write_text("this is no C++")
    problem = build_hook.compile_shim(tmp_path / "shim.cpp", tmp_path / "_shim.so")
    assert "failed with exit status" in (problem or "")
    assert [p.name for p in tmp_path.iterdir()] == ["shim.cpp"]
