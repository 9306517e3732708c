"""What holds on the real SYCL runtime: bytes, order, lateness, refusals, and that nothing kills the process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from ecoffload_xpu.backend import XpuBackend
from ecoffload_xpu.plugin import SPEC as XPU
from ecoffload_xpu.sycl_cpu import SyclCpuBackend, SyclCpuOps, SyclCpuPlainBackend, SyclStream
from ecoffload_xpu.ways import SYMBOLS, sycl_library

from ecoffload import get_backend, list_backends
from ecoffload.backend import D2H, H2D
from ecoffload.errors import ConfigError, RegistrationRefused, SwapFailed

DELAY_MS = 250
"""Far above what a submit takes on a busy machine; a held queue costs no time but the test's own."""


def test_the_runtime_exports_every_function_that_the_shim_needs(ops):
    library, _ = sycl_library()
    assert [symbol for symbol, needed in SYMBOLS if needed and not hasattr(library, symbol)] == []


def test_the_shim_finds_a_pointer_query_and_registration_in_this_runtime(ops):
    library, _ = sycl_library()
    optional = [hasattr(library, symbol) for symbol, needed in SYMBOLS if not needed]
    assert any(optional[:2])
    assert all(optional[2:])


def test_the_way_asked_for_is_the_way_taken(backend, request):
    assert backend.stats()["way"] == request.node.callspec.params["backend"]


# --- bytes -----------------------------------------------------------------------------------------------------------


def cuts(seed: int, nbytes: int, count: int) -> list[tuple[int, int, int]]:
    """``count`` pieces of odd sizes at odd offsets; destinations do not overlap."""
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.choice(np.arange(1, nbytes), 2 * count, replace=False)).tolist()
    ends = [(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return [(int(rng.integers(0, nbytes - n)), d, n) for d, n in ends]


def expected(source: torch.Tensor, before: torch.Tensor, pieces: list[tuple[int, int, int]]) -> torch.Tensor:
    wanted = before.clone()
    for s, d, n in pieces:
        wanted[d : d + n] = source[s : s + n]
    return wanted


@pytest.mark.parametrize("memory", ["usm", "plain"])
@pytest.mark.parametrize("count", [1, 7, 500])
def test_bytes_arrive_from_the_host_as_they_were(rig, noise, table, memory, count):
    host = getattr(rig, memory)
    host.copy_(noise)
    rig.device.zero_()
    pieces = cuts(count, rig.nbytes, count)
    rig.backend.submit(table(rig.rows(host, rig.device, pieces)), H2D, rig.stream).wait()
    assert torch.equal(rig.device, expected(noise, torch.zeros_like(noise), pieces))


@pytest.mark.parametrize("memory", ["usm", "plain"])
@pytest.mark.parametrize("count", [1, 7, 500])
def test_bytes_arrive_from_the_device_as_they_were(rig, noise, table, memory, count):
    host = getattr(rig, memory)
    host.zero_()
    rig.device.copy_(noise)
    pieces = cuts(count, rig.nbytes, count)
    rig.backend.submit(table(rig.rows(rig.device, host, pieces)), D2H, rig.stream).wait()
    assert torch.equal(host, expected(noise, torch.zeros_like(noise), pieces))


def test_a_batch_larger_than_a_staging_block_arrives_whole(backend, ops, table):
    nbytes = 40 << 20
    stream, device = ops.stream(), ops.empty(40 << 20)
    host = torch.arange(nbytes // 8, dtype=torch.int64).view(torch.uint8)
    third = nbytes // 3
    rows = [
        (host.data_ptr() + a, device.data_ptr() + a, b - a)
        for a, b in ((0, 5), (5, third), (third, 2 * third), (2 * third, nbytes))
    ]
    completion = backend.submit(table(rows), H2D, stream)
    host_before = host.clone()
    host.zero_()
    completion.wait()
    assert torch.equal(device, host_before)


# --- lateness and order ----------------------------------------------------------------------------------------------


def test_a_copy_of_usm_memory_runs_late(rig, noise, table):
    rig.ops.delay(rig.stream, DELAY_MS)
    completion = rig.backend.submit(table(rig.rows(rig.device, rig.usm)), D2H, rig.stream)
    assert not completion.done()
    assert completion.wait()


def test_a_wait_with_a_limit_returns_in_time(rig, table):
    rig.ops.delay(rig.stream, DELAY_MS)
    completion = rig.backend.submit(table(rig.rows(rig.device, rig.usm)), D2H, rig.stream)
    assert not completion.wait(0.001)
    assert completion.wait(30)


def test_a_save_waits_for_the_work_before_it_on_its_stream(rig, noise, table):
    """The producer is itself a late copy onto the device; the save must see its bytes."""
    rig.usm.copy_(noise)
    rig.device.zero_()
    out = torch.zeros_like(noise)
    rig.ops.delay(rig.stream, DELAY_MS)
    rig.backend.submit(table(rig.rows(rig.usm, rig.device)), H2D, rig.stream)
    rig.backend.submit(table(rig.rows(rig.device, out)), D2H, rig.stream).wait()
    assert torch.equal(out, noise)


def test_negative_control_without_an_order_the_save_reads_too_early(rig, noise, table):
    rig.usm.copy_(noise)
    rig.device.zero_()
    out, other = torch.zeros_like(noise), rig.ops.stream()
    rig.ops.delay(rig.stream, 4 * DELAY_MS)
    rig.backend.submit(table(rig.rows(rig.usm, rig.device)), H2D, rig.stream)
    rig.backend.submit(table(rig.rows(rig.device, out)), D2H, other).wait()
    assert not out.any()


def test_an_event_of_the_ops_orders_two_streams(rig, noise, table):
    rig.usm.copy_(noise)
    rig.device.zero_()
    out, other, event = torch.zeros_like(noise), rig.ops.stream(), rig.ops.event()
    rig.ops.delay(rig.stream, DELAY_MS)
    rig.backend.submit(table(rig.rows(rig.usm, rig.device)), H2D, rig.stream)
    rig.ops.record(event, rig.stream)
    rig.ops.wait(other, event)
    rig.backend.submit(table(rig.rows(rig.device, out)), D2H, other).wait()
    assert torch.equal(out, noise)


def test_a_blocked_stream_waits_for_the_batch(rig, noise, table):
    rig.usm.copy_(noise)
    rig.device.zero_()
    out, other = torch.zeros_like(noise), rig.ops.stream()
    rig.ops.delay(rig.stream, DELAY_MS)
    completion = rig.backend.submit(table(rig.rows(rig.usm, rig.device)), H2D, rig.stream)
    completion.block(other)
    assert not completion.done()
    rig.backend.submit(table(rig.rows(rig.device, out)), D2H, other).wait()
    assert torch.equal(out, noise)


def test_b8_plain_memory_may_change_right_after_the_call(rig, noise, table):
    rig.plain.copy_(noise)
    rig.ops.delay(rig.stream, DELAY_MS)
    completion = rig.backend.submit(table(rig.rows(rig.plain, rig.device)), H2D, rig.stream)
    rig.plain.zero_()
    assert not completion.done()
    completion.wait()
    assert torch.equal(rig.device, noise)


def test_negative_control_usm_memory_changed_too_early_is_seen_by_the_copy(rig, noise, table):
    rig.usm.copy_(noise)
    rig.ops.delay(rig.stream, DELAY_MS)
    completion = rig.backend.submit(table(rig.rows(rig.usm, rig.device)), H2D, rig.stream)
    rig.usm.zero_()
    completion.wait()
    assert not torch.equal(rig.device, noise)


def test_b8_descriptors_may_be_overwritten_right_after_the_call(rig, noise, table):
    rig.usm.copy_(noise)
    rig.device.zero_()
    batch = table(rig.rows(rig.usm, rig.device))
    rig.ops.delay(rig.stream, DELAY_MS)
    completion = rig.backend.submit(batch, H2D, rig.stream)
    batch.words[:] = 0
    completion.wait()
    assert torch.equal(rig.device, noise)


def test_a_mixed_load_sees_the_save_that_is_still_on_its_way(rig, noise, table):
    """Ordered by an event on the device only; the half of the load that is plain forces the host to read all of it."""
    rig.device.copy_(noise)
    rig.usm.zero_()
    rig.plain.fill_(3)
    half, other, event = rig.nbytes // 2, rig.ops.stream(), rig.ops.event()
    loaded = rig.ops.empty(rig.nbytes)
    rig.ops.delay(rig.stream, DELAY_MS)
    rig.backend.submit(table(rig.rows(rig.device, rig.usm)), D2H, rig.stream)
    rig.ops.record(event, rig.stream)
    rig.ops.wait(other, event)
    rows = rig.rows(rig.usm, loaded, [(0, 0, half)]) + rig.rows(rig.plain, loaded, [(0, half, half)])
    rig.backend.submit(table(rows), H2D, other).wait()
    assert torch.equal(loaded[:half], noise[:half])
    assert bool((loaded[half:] == 3).all())


def test_plain_memory_is_complete_when_the_call_returns(rig, noise, table):
    rig.device.copy_(noise)
    rig.ops.delay(rig.stream, DELAY_MS)
    rig.backend.submit(table(rig.rows(rig.device, rig.plain)), D2H, rig.stream)
    assert torch.equal(rig.plain, noise)


def test_a_dropped_completion_leaves_the_copy_alone(rig, noise, table):
    rig.plain.copy_(noise)
    rig.ops.delay(rig.stream, DELAY_MS)
    rig.backend.submit(table(rig.rows(rig.plain, rig.device)), H2D, rig.stream)
    rig.settle()
    assert torch.equal(rig.device, noise)


def test_threads_copy_at_the_same_time(backend, ops, table):
    failures: list[str] = []

    def work(number: int) -> None:
        stream, device = ops.stream(), ops.empty(4096)
        host, back = torch.full((4096,), number, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
        for i in range(25):
            host.fill_(number + i)
            backend.submit(table([(host.data_ptr(), device.data_ptr(), 4096)]), H2D, stream)
            host.fill_(0)
            backend.submit(table([(device.data_ptr(), back.data_ptr(), 4096)]), D2H, stream)
            if not bool((back == number + i).all()):
                failures.append(f"thread {number}, turn {i}")

    threads = [threading.Thread(target=work, args=(40 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_null_address_is_our_error_with_the_descriptors_index(rig, table, capfd):
    rows = [(rig.usm.data_ptr(), rig.device.data_ptr(), 8)] * 4
    rows[2] = (0, rig.device.data_ptr(), 8)
    # Of a null source the whole batch counts as plain memory, so it would be read by the CPU: ask the way itself.
    batch = table(rows, first=100)
    with pytest.raises(SwapFailed) as caught:
        rig.backend._way.copy(rig.stream.sycl_queue, batch.dst, batch.src, batch.size, batch.count, batch.first)
    assert caught.value.index == 102


def test_after_a_refused_batch_the_next_one_works(rig, noise, table, capfd):
    with pytest.raises(SwapFailed):
        rig.backend.submit(table([(0, rig.usm.data_ptr(), 8)]), D2H, rig.stream)
    rig.device.copy_(noise)
    rig.backend.submit(table(rig.rows(rig.device, rig.usm)), D2H, rig.stream).wait()
    assert torch.equal(rig.usm, noise)


def test_an_out_of_order_queue_is_refused(rig, table):
    import dpctl

    stream = SyclStream(dpctl.SyclQueue("opencl:cpu"))
    with pytest.raises(ConfigError, match="out of order"):
        rig.backend.submit(table(rig.rows(rig.device, rig.usm)), D2H, stream)


def test_c7_this_device_refuses_registration_and_copies_stay_right(rig, noise, table):
    with pytest.raises(RegistrationRefused, match="prepare_for_device_copy"):
        rig.backend.register(rig.plain.data_ptr(), rig.nbytes)
    rig.plain.copy_(noise)
    rig.backend.submit(table(rig.rows(rig.plain, rig.device)), H2D, rig.stream).wait()
    assert torch.equal(rig.device, noise)


def test_what_was_done_is_counted_and_said_once(rig, table, caplog):
    with caplog.at_level(logging.WARNING, logger="ecoffload.xpu"):
        for host in (rig.usm, rig.plain, rig.plain):
            rig.backend.submit(table(rig.rows(host, rig.device)), H2D, rig.stream).wait()
            rig.backend.submit(table(rig.rows(rig.device, host)), D2H, rig.stream).wait()
    assert rig.backend.stats()["batches"] == {"asynchronous": 2, "staged": 2, "synchronous": 2}
    assert len(caplog.records) == 2


def test_b12_of_two_devices_in_one_context_the_streams_one_copies(ops, table, noise):
    """Pointers look alike to both devices; were the first one's queue taken, the copy would wait for its work."""
    import dpctl

    parts = dpctl.SyclDevice("opencl:cpu").create_sub_devices(partition=1)[:2]
    context = dpctl.SyclContext(parts)
    first, second = (SyclCpuOps(part, context) for part in parts)
    backend, stream, busy = XpuBackend(XPU, 1, second), second.stream(), first.stream()
    target, event = first.empty(noise.nbytes), first.event()
    first.delay(busy, 4 * DELAY_MS)
    first.record(event, busy)
    backend.submit(table([(noise.data_ptr(), target.data_ptr(), noise.nbytes)]), H2D, stream).wait()
    assert not first.query(event)
    assert torch.equal(target, noise)
    busy.synchronize()
    backend.close()


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)


def test_a_second_runtime_in_the_process_is_refused_and_kills_nothing():
    other = sorted(Path(sys.prefix).parent.glob(".venv-xpu-*/lib/libsycl.so.[0-9]"))
    other = [p for p in other if not str(p).startswith(sys.prefix + os.sep)]
    if not other:
        pytest.skip("the other generation's environment is not there; tests/xpu.sh makes both")
    run = _run(
        "import ctypes\n"
        "from ecoffload_xpu.sycl_cpu import SPEC, SyclCpuBackend, SyclCpuOps\n"
        "ops = SyclCpuOps()\n"
        f"ctypes.CDLL({str(other[0])!r})\n"
        "try: SyclCpuBackend(SPEC, 0, ops)\n"
        "except Exception as e: print(type(e).__name__, e)\n"
    )
    assert run.returncode == 0, run.stderr
    assert "BackendUnavailable" in run.stdout
    assert "2 SYCL runtimes" in run.stdout


def test_a_process_that_ends_with_copies_in_flight_ends_cleanly():
    run = _run(
        "import ctypes, torch, numpy as np\n"
        "from types import SimpleNamespace as N\n"
        "from ecoffload_xpu.sycl_cpu import SPEC, SyclCpuBackend\n"
        "b = SyclCpuBackend(SPEC)\n"
        "s = b.ops.stream(); d = b.ops.empty(4096, s); h = torch.zeros(4096, dtype=torch.uint8)\n"
        "w = np.array([[h.data_ptr()], [d.data_ptr()], [4096]], dtype=np.uint64)\n"
        "b.ops.delay(s, 100)\n"
        "a, z, n = (row.ctypes.data for row in w)\n"
        "c = b.submit(N(count=1, src=a, dst=z, size=n, first=0), 'h2d', s)\n"
        "print(c.done())\n"
    )
    assert (run.returncode, run.stdout.strip()) == (0, "False"), run.stderr


def test_xpu_itself_is_unavailable_here_with_a_reason():
    available = XpuBackend.availability()
    assert (available.ok, "built without XPU" in available.reason) == (False, True)


def test_the_registry_lends_the_test_devices_by_name_only():
    lent = get_backend("sycl-cpu"), get_backend("sycl-cpu-plain").inner
    assert isinstance(lent[0], SyclCpuBackend)
    assert isinstance(lent[1], SyclCpuPlainBackend)
    assert not {"sycl-cpu", "sycl-cpu-plain"} & {record.name for record in list_backends()}
