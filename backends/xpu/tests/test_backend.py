"""The backend on the recorder: what is copied late, what is staged, what is refused, and what is said."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import sys
import threading
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from ecoffload_xpu import backend as module
from ecoffload_xpu import ways
from ecoffload_xpu.backend import XpuBackend, _Ranges, intel_gpu_present, queue_of
from ecoffload_xpu.plugin import SPEC, ecoffload_register_backend
from hypothesis import given
from hypothesis import strategies as st

from ecoffload.backend import D2H, H2D
from ecoffload.errors import (
    BackendUnavailable,
    ConfigError,
    DeviceLost,
    EncodingMismatch,
    RegistrationRefused,
    SwapFailed,
)

DEVICE = 0xFFFFD556B6400000


@pytest.fixture
def host() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint8)


# --- declaration -----------------------------------------------------------------------------------------------------


def test_xpu_declares_uint64_for_addresses_and_sizes():
    spec = ecoffload_register_backend()
    assert (spec.encoding.dtype, {(k.address_dtype, k.size_dtype) for k in spec.kernels}) == (
        "uint64",
        {("uint64", "uint64")},
    )


def test_a4_an_int64_table_is_refused_and_not_cast(backend):
    with pytest.raises(EncodingMismatch, match="uint64, got int64"):
        backend.check_table("queue-memcpy", torch.zeros(3, dtype=torch.int64))


def test_a_uint64_table_is_taken(backend):
    assert backend.check_table("queue-memcpy", torch.zeros(3, dtype=torch.uint64)) is None


# --- the queue -------------------------------------------------------------------------------------------------------


def test_b12_the_queue_is_the_streams_and_not_guessed_from_a_pointer(backend, recorder, table, host):
    recorder.usm_host(host.ctypes.data, host.nbytes)
    streams = [recorder.stream(), recorder.stream()]
    for stream in (*streams, *streams):
        backend.submit(table([(host.ctypes.data, DEVICE, 8)]), H2D, stream)
    assert recorder.copies[:, 0].tolist() == [recorder.queue_id(s.sycl_queue) for s in (*streams, *streams)]


@pytest.mark.parametrize("queue", [None, 0, True, "0x10"])
def test_a_stream_without_a_queue_is_refused(queue):
    with pytest.raises(ConfigError, match=r"torch\.xpu\.Stream"):
        queue_of(SimpleNamespace(sycl_queue=queue))


def test_an_out_of_order_stream_is_refused(backend, recorder, table, host):
    with pytest.raises(ConfigError, match="out of order"):
        backend.submit(table([(DEVICE, host.ctypes.data, 8)]), D2H, recorder.stream(in_order=False))


# --- host memory -----------------------------------------------------------------------------------------------------


def test_usm_host_memory_is_copied_asynchronously_both_ways(backend, recorder, table, host):
    recorder.usm_host(host.ctypes.data, host.nbytes)
    out = backend.submit(table([(DEVICE, host.ctypes.data, 8)]), D2H, recorder.stream())
    back = backend.submit(table([(host.ctypes.data, DEVICE, 8)]), H2D, recorder.stream())
    assert (out.done(), back.done()) == (False, False)
    assert backend.stats()["batches"] == {"asynchronous": 2, "staged": 0, "synchronous": 0}


def test_registered_memory_is_copied_asynchronously(backend, recorder, table, host):
    backend.register(host.ctypes.data, host.nbytes)
    completion = backend.submit(table([(DEVICE, host.ctypes.data + 5, 8)]), D2H, recorder.stream())
    before = completion.done()
    recorder.finish()
    assert (before, completion.done()) == (False, True)


def test_plain_memory_is_written_before_the_call_returns(backend, recorder, table, host):
    completion = backend.submit(table([(DEVICE, host.ctypes.data, 8)]), D2H, recorder.stream())
    assert completion.done()
    assert recorder.journal[-1].startswith("wait ")


def test_b8_plain_memory_may_change_right_after_a_submit(backend, recorder, table, host):
    completion = backend.submit(table([(host.ctypes.data + 16, DEVICE, 4)]), H2D, recorder.stream())
    host[:] = 0
    assert not completion.done()
    assert ctypes.string_at(int(recorder.copies[0, 2]), 4) == bytes([16, 17, 18, 19])


@pytest.mark.parametrize(("offset", "size"), [(-1, 8), (4089, 8), (4096, 8)])
def test_a_range_that_leaves_the_registered_one_is_not_copied_late(backend, recorder, table, host, offset, size):
    at = host.ctypes.data + 8192
    backend.register(at, 4096)
    backend.submit(table([(DEVICE, at + offset, size)]), D2H, recorder.stream())
    assert backend.stats()["batches"]["synchronous"] == 1


def test_c1_a_descriptor_across_two_registrations_is_not_copied_late(backend, recorder, table, host):
    at = host.ctypes.data
    backend.register(at, 4096)
    backend.register(at + 4096, 4096)
    backend.submit(table([(DEVICE, at + 4000, 200)]), D2H, recorder.stream())
    assert backend.stats()["batches"]["synchronous"] == 1


def test_one_plain_descriptor_makes_the_whole_batch_plain(backend, recorder, table, host):
    backend.register(host.ctypes.data, 4096)
    rows = [(DEVICE, host.ctypes.data, 8), (DEVICE, host.ctypes.data + 8192, 8)]
    assert backend.submit(table(rows), D2H, recorder.stream()).done()


def test_a_mixed_batch_is_staged_only_after_late_saves_have_landed(backend, recorder, table, host):
    at = host.ctypes.data
    backend.register(at, 4096)
    save = backend.submit(table([(DEVICE, at, 8)]), D2H, recorder.stream())
    before = save.done()
    backend.submit(table([(at, DEVICE, 8), (at + 8192, DEVICE + 8, 8)]), H2D, recorder.stream())
    assert (before, save.done()) == (False, True)
    lines = recorder.journal
    assert lines.index("allocate 1048576") > next(i for i, line in enumerate(lines) if line.startswith("wait"))


def test_plain_batches_wait_for_nothing(backend, recorder, table, host):
    for _ in range(2):
        backend.submit(table([(host.ctypes.data, DEVICE, 8)]), H2D, recorder.stream())
    assert not any(line.startswith("wait") for line in recorder.journal)


def test_staging_and_blocking_are_each_said_once(backend, recorder, table, host, caplog):
    with caplog.at_level(logging.WARNING, logger="ecoffload.xpu"):
        for _ in range(3):
            backend.submit(table([(DEVICE, host.ctypes.data, 8)]), D2H, recorder.stream())
            backend.submit(table([(host.ctypes.data, DEVICE, 8)]), H2D, recorder.stream())
    assert sorted("staged" in r.getMessage() for r in caplog.records) == [False, True]
    assert backend.stats()["batches"] == {"asynchronous": 0, "staged": 3, "synchronous": 3}


def test_a_staged_failure_names_the_callers_descriptor(backend, recorder, table, host, monkeypatch):
    cut = module.chunks
    monkeypatch.setattr(module, "chunks", lambda *arrays: cut(*arrays, 64))
    recorder.throw_at(3)  # 2 copies for 100 bytes, then one piece of the second descriptor is taken
    rows = [(host.ctypes.data, DEVICE, 100), (host.ctypes.data + 500, DEVICE + 4096, 100)]
    with pytest.raises(SwapFailed, match="descriptor 41") as caught:
        backend.submit(table(rows, first=40), H2D, recorder.stream())
    assert caught.value.index == 41


def test_a_lost_device_keeps_its_name_through_staging(backend, recorder, table, host):
    recorder.throw_at(0, "lost")
    with pytest.raises(DeviceLost):
        backend.submit(table([(host.ctypes.data, DEVICE, 100)]), H2D, recorder.stream())


ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=6)


@given(
    registered=ranges,
    asked=st.lists(st.tuples(st.integers(0, 45), st.integers(1, 8)), min_size=1, max_size=5),
    base=st.sampled_from([0, 2**63 - 20, 2**64 - 64]),
)
def test_covered_means_that_each_range_lies_within_one_registration(registered, asked, base):
    known, held = _Ranges(), []
    for start, length in registered:
        if not known.overlap(base + start, length):
            known.add(base + start, length)
            held.append((start, length))
    at = np.array([base + start for start, _ in asked], dtype=np.uint64)
    size = np.array([length for _, length in asked], dtype=np.uint64)
    expected = all(any(s <= a and a + n <= s + m for s, m in held) for a, n in asked)
    assert known.cover(at.ctypes.data, size.ctypes.data, len(asked)) == expected


# --- registration ----------------------------------------------------------------------------------------------------


def test_registering_prepares_the_range_for_device_copies(backend, recorder, host):
    registration = backend.register(host.ctypes.data, 4096)
    assert recorder.journal == [f"prepare {host.ctypes.data} 4096"]
    assert (registration.address, registration.nbytes, registration.alias) == (host.ctypes.data, 4096, host.ctypes.data)


def test_unregistering_releases_the_range_and_ends_late_copies(backend, recorder, table, host):
    backend.unregister(backend.register(host.ctypes.data, 4096))
    backend.submit(table([(DEVICE, host.ctypes.data, 8)]), D2H, recorder.stream())
    assert recorder.journal[1] == f"release {host.ctypes.data}"
    assert backend.stats()["batches"]["synchronous"] == 1


def test_c7_a_refused_registration_gives_the_reason_and_the_consequence(backend, recorder, host):
    recorder.refuse_prepare()
    with pytest.raises(RegistrationRefused, match=r"UNSUPPORTED_FEATURE.*staged") as caught:
        backend.register(host.ctypes.data, 4096)
    assert caught.value.nbytes == 4096


def test_c7_after_a_refused_registration_transfers_stay_right(backend, recorder, table, host):
    recorder.refuse_prepare()
    with pytest.raises(RegistrationRefused):
        backend.register(host.ctypes.data, 4096)
    backend.submit(table([(host.ctypes.data, DEVICE, 8)]), H2D, recorder.stream())
    assert backend.stats()["batches"]["staged"] == 1


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 4096), (4095, 1), (-10, 11)])
def test_c4_a_range_that_overlaps_a_registered_one_is_refused(backend, host, offset, nbytes):
    at = host.ctypes.data + 8192
    backend.register(at, 4096)
    with pytest.raises(RegistrationRefused, match="registered already"):
        backend.register(at + offset, nbytes)


def test_c4_a_range_may_be_registered_again_after_it_was_released(backend, host):
    backend.unregister(backend.register(host.ctypes.data, 4096))
    backend.register(host.ctypes.data, 4096)
    assert backend.stats()["registered_ranges"] == 1


def test_c4_a_range_is_released_once(backend, host):
    registration = backend.register(host.ctypes.data, 4096)
    backend.unregister(registration)
    with pytest.raises(RegistrationRefused, match="is not registered"):
        backend.unregister(registration)


def test_c2_an_empty_range_is_refused_before_sycl_sees_it(backend, recorder, host):
    with pytest.raises(RegistrationRefused, match="0 bytes"):
        backend.register(host.ctypes.data, 0)
    assert recorder.journal == []


# --- completion ------------------------------------------------------------------------------------------------------


def test_a_wait_with_a_limit_gives_up_in_time(backend, recorder, table, host):
    backend.register(host.ctypes.data, 4096)
    completion = backend.submit(table([(DEVICE, host.ctypes.data, 8)]), D2H, recorder.stream())
    before = completion.wait(0.01)
    recorder.finish()
    assert (before, completion.wait(0.01), completion.wait()) == (False, True, True)


def test_b10_a_stream_can_be_made_to_wait_for_a_batch(backend, recorder, table, host):
    backend.register(host.ctypes.data, 4096)
    completion, other = (
        backend.submit(table([(DEVICE, host.ctypes.data, 8)]), D2H, recorder.stream()),
        recorder.stream(),
    )
    completion.block(other)
    assert recorder.journal[-1].startswith(f"barrier on {recorder.queue_id(other.sycl_queue)} after")


def test_b11_a_late_failure_raises_at_the_completion_and_the_next_batch_works(backend, recorder, table, host):
    backend.register(host.ctypes.data, 4096)
    completion = backend.submit(table([(DEVICE, host.ctypes.data, 8)]), D2H, recorder.stream())
    recorder.fail_events()
    with pytest.raises(SwapFailed):
        completion.done()
    recorder.reset()
    backend.submit(table([(DEVICE, host.ctypes.data, 8)]), D2H, recorder.stream())
    assert len(recorder.copies) == 1


def test_threads_share_a_backend(backend, recorder, table, host):
    backend.register(host.ctypes.data, 4096)
    streams = [recorder.stream() for _ in range(4)]

    def work(number: int) -> None:
        for i in range(50):
            backend.submit(table([(DEVICE + number, host.ctypes.data + i, 8)]), D2H, streams[number])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    by_queue = {recorder.queue_id(s.sycl_queue): DEVICE + n for n, s in enumerate(streams)}
    assert len(recorder.copies) == 200
    assert all(by_queue[queue] == src for queue, _, src, _ in recorder.copies.tolist())


def test_no_event_outlives_its_batches(backend, recorder, table, host):
    before = recorder.live_events()
    for direction in (D2H, H2D):
        backend.submit(table([(host.ctypes.data, host.ctypes.data, 8)]), direction, recorder.stream())
    recorder.finish()
    backend.close()
    assert recorder.live_events() == before


# --- availability, and the ways --------------------------------------------------------------------------------------


def test_a_torch_without_xpu_is_named_as_the_reason():
    available = XpuBackend.availability()
    assert (available.ok, "built without XPU" in available.reason) == (False, True)


def test_listing_the_backend_initialises_nothing(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: pytest.fail("the device was asked"))
    assert not XpuBackend.availability()


@pytest.fixture
def hardware(monkeypatch, tmp_path):
    """A torch built for XPU and an Intel GPU, as far as files tell."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_xpu.so").touch()
    find = importlib.util.find_spec
    fake = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: fake if name == "torch" else find(name))
    monkeypatch.setattr(module, "intel_gpu_present", lambda: True)


def test_with_device_and_shim_the_backend_is_available(hardware, built, monkeypatch):
    monkeypatch.setattr(module, "SHIM", built / "_shim.so")
    assert XpuBackend.availability().ok


def test_a_probe_starts_the_device_and_gives_its_reason(hardware, built, monkeypatch):
    monkeypatch.setattr(module, "SHIM", built / "_shim.so")
    available = XpuBackend.availability(probe=True)
    assert (available.ok, "torch has no xpu device" in available.reason) == (False, True)


def test_without_a_gpu_the_reason_says_what_a_container_needs(hardware, monkeypatch):
    monkeypatch.setattr(module, "intel_gpu_present", lambda: False)
    assert "--device /dev/dri" in XpuBackend.availability().reason


def test_without_any_way_the_reason_says_what_to_install(hardware, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "SHIM", tmp_path / "_shim.so")
    monkeypatch.setattr(module, "dpctl_library", lambda: None)
    assert "install g++ and reinstall ecoffload-xpu" in XpuBackend.availability().reason


@pytest.mark.parametrize(("vendor", "found"), [("0x8086\n", True), ("0x10de\n", False), (None, True)])
def test_an_intel_gpu_is_known_by_its_render_node(tmp_path, vendor, found):
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "renderD128").touch()
    if vendor is not None:
        (tmp_path / "drm" / "renderD128" / "device").mkdir(parents=True)
        (tmp_path / "drm" / "renderD128" / "device" / "vendor").write_text(vendor)
    assert intel_gpu_present(tmp_path, tmp_path / "drm") is found


def test_no_render_node_is_no_gpu(tmp_path):
    assert not intel_gpu_present(tmp_path, tmp_path)


@pytest.fixture
def nothing(monkeypatch, tmp_path):
    """Neither shim nor dpctl nor vllm-xpu-kernels."""
    monkeypatch.setattr(ways, "SHIM", tmp_path / "_shim.so")
    monkeypatch.setattr(ways, "dpctl_library", lambda: None)
    monkeypatch.setitem(sys.modules, "vllm_xpu_kernels", None)


def make() -> XpuBackend:
    return XpuBackend(SPEC, 0, SimpleNamespace(event=object, record=lambda event, stream: None))


def test_without_any_way_every_reason_is_given(recorder, nothing):
    with pytest.raises(BackendUnavailable) as caught:
        make()
    assert [name for name in ("shim: ", "dpctl: ", "operator: ") if name not in str(caught.value)] == []


def test_the_way_in_use_is_visible(backend):
    stats = backend.stats()
    assert (stats["way"], stats["skipped"], stats["libsycl"].endswith("libsycl.so.8")) == ("shim", {}, True)


def test_a_way_that_does_not_exist_is_a_configuration_error(recorder, monkeypatch):
    monkeypatch.setenv("ECOFFLOAD_XPU_WAY", "shm")
    with pytest.raises(ConfigError, match="shim, dpctl, operator"):
        make()


def test_a_way_asked_for_is_not_replaced_by_another(recorder, built, monkeypatch):
    monkeypatch.setattr(ways, "SHIM", built / "_shim.so")
    monkeypatch.setattr(ways, "dpctl_library", lambda: None)
    monkeypatch.setenv("ECOFFLOAD_XPU_WAY", "dpctl")
    with pytest.raises(BackendUnavailable, match="dpctl is not installed"):
        make()


def test_a_dpctl_of_another_generation_is_refused_before_it_is_loaded(recorder, nothing, tmp_path):
    library = tmp_path / "libDPCTLSyclInterface.so"
    library.write_bytes(b"\x7fELF libsycl.so.9\0")
    with pytest.raises(BackendUnavailable, match=r"dpctl needs libsycl\.so\.9"):
        ways.DpctlWay(str(recorder.path), library)


@pytest.fixture
def operator(recorder, nothing, monkeypatch):
    """vllm-xpu-kernels' operator as it registers itself, with a body that keeps what it is given."""
    package, extension = ModuleType("vllm_xpu_kernels"), ModuleType("vllm_xpu_kernels._C")
    monkeypatch.setitem(sys.modules, "vllm_xpu_kernels", package)
    monkeypatch.setitem(sys.modules, "vllm_xpu_kernels._C", extension)
    calls: list = []
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    library.define("swap_blocks_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes) -> ()")

    def swap(src, dst, size):
        if len(src) == 13:
            raise RuntimeError("the operator says no")
        calls.append((src.clone(), dst.clone(), size.clone(), tuple(current)))

    library.impl("swap_blocks_batch", swap, "CPU")
    current: list = []

    def entering(what):
        @contextmanager
        def enter(value):
            current.append((what, value))
            yield
            current.pop()

        return enter

    monkeypatch.setattr(torch.xpu, "device", entering("device"))
    monkeypatch.setattr(torch.xpu, "stream", entering("stream"))
    yield calls
    library._destroy()


def test_the_operator_gets_uint64_tables_on_the_host(operator, table):
    make().submit(table([(DEVICE, 4096, 8), (2**63, 1, 2)]), D2H, "a stream")
    src, dst, size, _ = operator[0]
    assert {t.dtype for t in (src, dst, size)} == {torch.uint64}
    assert (src.tolist(), dst.tolist(), size.tolist()) == ([DEVICE, 2**63], [4096, 1], [8, 2])


def test_b12_the_operator_runs_with_device_and_stream_made_current(operator, table):
    make().submit(table([(DEVICE, 4096, 8)]), D2H, "a stream")
    assert operator[0][3] == (("device", 0), ("stream", "a stream"))


def test_the_operator_is_visible_and_the_skipped_ways_are_said(operator, caplog):
    with caplog.at_level(logging.WARNING, logger="ecoffload.xpu"):
        stats = make().stats()
    assert (stats["way"], set(stats["skipped"])) == ("operator", {"shim", "dpctl"})
    assert "go through operator, because shim" in caplog.text


def test_an_operator_that_raises_is_a_failed_swap(operator, table):
    with pytest.raises(SwapFailed, match="the operator says no"):
        make().submit(table([(DEVICE, 4096, 8)] * 13), D2H, "a stream")


def test_the_operator_registers_nothing_and_says_so(operator):
    with pytest.raises(RegistrationRefused, match="build the shim"):
        make().register(4096, 4096)
