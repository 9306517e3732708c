"""What only a GPU can show: the kernel's bytes, order among real streams, capture, forks, registration, contexts."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ecoffload_cuda.backend import CudaBackend
from ecoffload_cuda.kernel import PLAIN, Gather
from ecoffload_cuda.plugin import SPEC
from ecoffload_cuda.tuning import Tuning, Way

from ecoffload.backend import D2H, H2D, Completion, Direction
from ecoffload.descriptors import DescriptorPool
from ecoffload.errors import RegistrationRefused, SwapFailed
from ecoffload.submission import submit_batch

pytestmark = pytest.mark.hardware

NBYTES = int(os.environ.get("ECOFFLOAD_TEST_BYTES", str(64 << 20)))
ALL_KERNEL = Tuning(Way((), ((0, 2),)), Way((), ((0, 2),)), 1, "all to the kernel")
ALL_ENGINE = Tuning(Way(((0, 1.0),), ((0, 2),)), Way(((0, 1.0),), ((0, 2),)), 1, "all to the engine")
HALVES = Tuning(Way(((0, 0.5),), ((0, 2),)), Way(((0, 0.5),), ((0, 2),)), 1, "half and half")


class Rig:
    """A backend, a device tensor and a registered host buffer of the same size."""

    def __init__(self) -> None:
        self.backend = CudaBackend(SPEC)
        self.tensor = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")
        self.memory = mmap.mmap(-1, NBYTES)
        self.host = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.host.random_(0, 256)
        self.registration = self.backend.register(self.host.data_ptr(), NBYTES)
        self.stream = self.backend.ops.stream()
        self.pool = DescriptorPool()
        self.default = self.backend.live().tuning

    def submit(self, direction: Direction, host: Any, device: Any, sizes: Any, stream: Any = None) -> Completion:
        """Arrays of offsets and sizes."""
        batch = self.pool.lease(len(host))
        h = np.uint64(self.registration.alias) + np.asarray(host, np.uint64)
        d = np.uint64(self.tensor.data_ptr()) + np.asarray(device, np.uint64)
        src, dst = (h, d) if direction == H2D else (d, h)
        batch.extend(src, dst, np.asarray(sizes, np.uint64))
        return submit_batch(self.backend, batch, direction, self.stream if stream is None else stream)

    def check(self, direction: Direction, host: Any, device: Any, sizes: Any, span: int) -> None:
        """Swap, and compare every byte of the target, also those between the copies."""
        to, source = (self.tensor, self.host) if direction == H2D else (self.host, self.tensor)
        source[:span].random_(0, 256)
        to[:span].fill_(0xA5)
        torch.cuda.synchronize()
        expected = np.full(span, 0xA5, np.uint8)
        data = source[:span].cpu().numpy()
        for h, d, n in zip(host, device, sizes, strict=True):
            a, b = (d, h) if direction == H2D else (h, d)
            expected[a : a + n] = data[b : b + n]
        self.submit(direction, host, device, sizes).wait()
        torch.cuda.synchronize()
        wrong = np.flatnonzero(to[:span].cpu().numpy() != expected)
        assert wrong.size == 0, f"{wrong.size} wrong bytes, the first at {wrong[0]}"


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    torch.cuda.synchronize()
    rig.backend.unregister(rig.registration)
    rig.backend.close()


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    yield shared
    shared.backend.live().tuning = shared.default


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tuning", [ALL_KERNEL, HALVES, ALL_ENGINE], ids=lambda t: t.source.replace(" ", "-"))
@pytest.mark.parametrize("direction", [H2D, D2H])
@pytest.mark.parametrize("seed", range(3))
def test_every_byte_is_right_for_random_sizes_and_alignments(
    rig: Rig, direction: Direction, tuning: Tuning, seed: int
) -> None:
    rig.backend.live().tuning = tuning
    random = np.random.default_rng(seed)
    n, stride = 900, NBYTES // 1024
    sizes = np.concatenate(
        [random.integers(1, 70, n // 3), random.integers(1, 5000, n // 3), random.integers(1, stride - 64, n // 3)]
    )
    random.shuffle(sizes)
    host = random.permutation(n) * stride + random.integers(0, 48, n)
    device = np.arange(n) * stride + np.where(random.random(n) < 0.5, host % 16 + 16, random.integers(0, 48, n))
    rig.check(direction, host, device, sizes, n * stride)


@pytest.mark.parametrize("direction", [H2D, D2H])
def test_every_pair_of_misalignments_is_right_for_short_sizes(rig: Rig, direction: Direction) -> None:
    rig.backend.live().tuning = ALL_KERNEL
    sizes, host, device = [], [], []
    for size in (1, 2, 15, 16, 17, 31, 33, 47, 63, 64, 65, 129, 4097):
        for a in range(16):
            for b in range(16):
                slot = len(sizes) * 4224
                sizes.append(size)
                host.append(slot + a)
                device.append(slot + b)
    rig.check(direction, host, device, sizes, len(sizes) * 4224)


@pytest.mark.parametrize("direction", [H2D, D2H])
@pytest.mark.parametrize("skew", [(0, 0), (3, 3), (5, 8)])
def test_descriptors_of_many_megabytes_are_right(rig: Rig, direction: Direction, skew: tuple[int, int]) -> None:
    rig.backend.live().tuning = ALL_KERNEL
    sizes = [9_000_001, 123, 20_000_000, 1, 4096, 7 << 20, 16, 65_537]
    starts = np.concatenate(([0], np.cumsum([(n + 127) & ~63 for n in sizes[:-1]])))
    rig.check(direction, starts + skew[0], starts + skew[1], sizes, NBYTES)


@pytest.mark.parametrize("direction", [H2D, D2H])
def test_the_load_store_kernel_of_older_devices_is_right(rig: Rig, direction: Direction) -> None:
    live = rig.backend.live()
    live.tuning = ALL_KERNEL
    kept = dict(live.gathers)
    with live.device.current():
        plain = Gather(live.device, PLAIN)
    live.gathers = {H2D: plain, D2H: plain}
    try:
        random = np.random.default_rng(5)
        n, stride = 900, NBYTES // 1024
        sizes = random.integers(1, stride - 64, n)
        host = random.permutation(n) * stride + random.integers(0, 48, n)
        device = np.arange(n) * stride + random.integers(0, 48, n)
        rig.check(direction, host, device, sizes, n * stride)
    finally:
        live.gathers = kept


def test_descriptors_may_be_overwritten_as_soon_as_submit_returns(rig: Rig) -> None:
    rig.backend.live().tuning = HALVES
    n, size = 4000, 4096
    order = np.random.default_rng(0).permutation(n)
    rig.tensor.fill_(0)
    torch.cuda.synchronize()
    rig.backend.ops.delay(rig.stream, 50)
    completions = [rig.submit(H2D, order[k::4] * size, np.arange(n)[k::4] * size, [size] * 1000) for k in range(4)]
    for completion in completions:
        completion.wait()
    want = rig.host[: n * size].view(n, size)[torch.from_numpy(order)]
    assert torch.equal(rig.tensor[: n * size].cpu().view(n, size), want)


# --- order (known-failures B1, B10) ---------------------------------------------------------------------------------


def _late_fill(rig: Rig, stream: torch.cuda.Stream, value: int) -> None:
    with torch.cuda.stream(stream):
        rig.backend.ops.delay(stream, 20)
        rig.tensor[: 16 << 20].fill_(value)


@pytest.mark.parametrize("tuning", [ALL_KERNEL, HALVES, ALL_ENGINE], ids=lambda t: t.source.replace(" ", "-"))
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "negative-control"])
def test_a_save_reads_what_compute_wrote_before_it_only_where_it_waits(rig: Rig, tuning: Tuning, ordered: bool) -> None:
    rig.backend.live().tuning = tuning
    rig.tensor.fill_(1)
    rig.host[: 16 << 20] = 0
    torch.cuda.synchronize()
    compute = torch.cuda.Stream()
    _late_fill(rig, compute, 9)
    if ordered:
        rig.stream.wait_stream(compute)
    at = np.arange(4096) * 4096
    rig.submit(D2H, at, at, [4096] * 4096).wait()
    saved = rig.host[: 16 << 20]
    torch.cuda.synchronize()
    assert bool((saved == 9).all()) is ordered


@pytest.mark.parametrize("tuning", [ALL_KERNEL, HALVES, ALL_ENGINE], ids=lambda t: t.source.replace(" ", "-"))
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "negative-control"])
def test_compute_reads_what_a_load_brought_only_where_it_waits(rig: Rig, tuning: Tuning, ordered: bool) -> None:
    rig.backend.live().tuning = tuning
    rig.tensor.fill_(1)
    rig.host[: 16 << 20] = 9
    torch.cuda.synchronize()
    rig.backend.ops.delay(rig.stream, 20)
    at = np.arange(4096) * 4096
    completion = rig.submit(H2D, at, at, [4096] * 4096)
    compute = torch.cuda.Stream()
    if ordered:
        completion.block(compute)
    with torch.cuda.stream(compute):
        seen = rig.tensor[: 16 << 20].clone()
    torch.cuda.synchronize()
    assert bool((seen == 9).all()) is ordered


@pytest.mark.parametrize("tuning", [ALL_KERNEL, HALVES, ALL_ENGINE], ids=lambda t: t.source.replace(" ", "-"))
def test_eight_copies_of_eight_bytes_on_the_legacy_default_stream(rig: Rig, tuning: Tuning) -> None:
    rig.backend.live().tuning = tuning
    rig.tensor.fill_(0)
    rig.host[:64] = torch.arange(64, dtype=torch.uint8)
    at = np.arange(8) * 8
    completion = rig.submit(H2D, at, at, [8] * 8, torch.cuda.default_stream())
    after = rig.tensor[:64].clone()  # on the default stream, behind the swap
    completion.wait()
    assert after.tolist() == list(range(64))
    assert rig.tensor[:64].tolist() == list(range(64))


def test_a_swap_on_the_default_stream_waits_for_what_the_default_stream_holds(rig: Rig) -> None:
    rig.tensor.fill_(1)
    torch.cuda.synchronize()
    rig.backend.ops.delay(torch.cuda.default_stream(), 20)
    rig.tensor[:4096].fill_(77)
    rig.submit(D2H, [0], [0], [4096], torch.cuda.default_stream()).wait()
    assert (rig.host[:4096] == 77).all()


def test_the_per_thread_default_stream_works(rig: Rig) -> None:
    rig.host[:4096] = 5
    rig.submit(H2D, np.arange(8) * 512, np.arange(8) * 512, [512] * 8, 2).wait()
    assert (rig.tensor[:4096] == 5).all()


# --- capture --------------------------------------------------------------------------------------------------------


def test_background_calls_leave_a_graph_capture_of_another_thread_alone(rig: Rig) -> None:
    x = torch.ones(1024, device="cuda")
    torch.cuda.synchronize()
    begun, finish = threading.Event(), threading.Event()
    failures: list[BaseException] = []
    memory = mmap.mmap(-1, 1 << 20)
    view = np.frombuffer(memory, np.uint8)
    view[:] = 1
    address = view.ctypes.data
    at = np.arange(12000) * 4096

    def background() -> None:
        try:
            begun.wait(10)
            for tuning in (ALL_ENGINE, HALVES, ALL_KERNEL):
                rig.backend.live().tuning = tuning
                completion = rig.submit(H2D, at, at, [4096] * len(at))  # a table of a size that was not there before
                while not completion.done():
                    pass
                completion.wait()
            event = rig.backend.ops.event()
            event.record(rig.stream)
            while not rig.backend.ops.query(event):
                pass
            registration = rig.backend.register(address, 1 << 20)
            rig.backend.pointer_range(address)
            rig.backend.unregister(registration)
        except BaseException as exc:
            failures.append(exc)
        finally:
            finish.set()

    thread = threading.Thread(target=background)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # capture_error_mode "global": the strictest, and the default
        y = x * 2
        begun.set()
        finish.wait(30)
        y = y + 1
    thread.join()
    assert not failures, failures
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 3).all()


def test_a_stream_that_is_being_captured_is_refused_and_the_capture_survives(rig: Rig) -> None:
    x = torch.ones(16, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(SwapFailed, match="captured into a graph"):
            rig.submit(H2D, [0], [0], [64], torch.cuda.current_stream())
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 2).all()


# --- the driver (known-failures B3, C2) -----------------------------------------------------------------------------


def test_the_batch_call_is_the_one_of_nine_arguments(rig: Rig) -> None:
    driver = rig.backend.live().cuda.driver
    nine, eight = driver.resolve("cuMemcpyBatchAsync", 12080), driver.resolve("cuMemcpyBatchAsync", 13000)
    assert nine is not None
    assert nine != eight
    assert driver.resolve("cuMemcpyBatchAsync", 12000) is None


def test_without_the_batch_call_copies_go_one_by_one_and_are_right(rig: Rig) -> None:
    live = rig.backend.live()
    live.tuning = ALL_ENGINE
    kept, live.batch = live.batch, None
    try:
        at = np.arange(64) * 4096
        rig.check(H2D, at, at[::-1], [4096] * 64, 64 * 4096)
    finally:
        live.batch = kept


def test_a_failed_registration_leaves_no_error_behind_for_torch(rig: Rig) -> None:
    with pytest.raises(RegistrationRefused):
        rig.backend.register(0x10, 4096)
    assert torch.ones(4, device="cuda").sum().item() == 4
    torch.cuda.synchronize()


def test_registering_twice_is_our_own_error_and_the_drivers_is_named_where_another_did_it(rig: Rig) -> None:
    with pytest.raises(RegistrationRefused, match="registered already"):
        rig.backend.register(rig.registration.address + 4096, 4096)
    other = CudaBackend(SPEC)
    with pytest.raises(RegistrationRefused, match=r"ALREADY_REGISTERED \(712\)"):
        other.register(rig.registration.address, 4096)
    other.close()


def test_a_failing_descriptor_is_named(rig: Rig) -> None:
    rig.backend.live().tuning = ALL_ENGINE
    batch = rig.pool.lease(3)
    base = rig.registration.alias
    batch.extend([base, base + 64, base + 128], [rig.tensor.data_ptr(), 1, rig.tensor.data_ptr() + 128], [64, 64, 64])
    batch._arrays[1][1] = 0  # what no check let through: the driver names it
    with pytest.raises(SwapFailed, match="descriptor 1 ") as caught:
        rig.backend.submit(batch, H2D, rig.stream)
    assert caught.value.details["index"] == 1
    batch.release()
    assert torch.ones(4, device="cuda").sum().item() == 4


def test_the_driver_knows_the_range_around_an_address(rig: Rig) -> None:
    host = rig.backend.pointer_range(rig.registration.address + 5000)
    device = rig.backend.pointer_range(rig.tensor.data_ptr() + 5000)
    assert host is not None
    assert device is not None
    assert (host.start, host.nbytes, host.kind) == (rig.registration.address, NBYTES, "host")
    assert device.kind == "device"
    assert device.start <= rig.tensor.data_ptr()
    assert rig.backend.pointer_range(0x10) is None
    assert rig.backend.pointer_range(np.zeros(10).ctypes.data) is None


def test_pinned_memory_of_torchs_is_served_by_the_kernel_and_pageable_memory_is_not(rig: Rig) -> None:
    live = rig.backend.live()
    live.tuning = ALL_KERNEL
    n, size = 64, 4096
    for memory, ways in (
        (torch.empty(n * size, dtype=torch.uint8).pin_memory(), "kernel"),
        (torch.empty(n * size, dtype=torch.uint8), "engine"),
    ):
        memory.random_(0, 256)
        before = rig.backend.stats()["descriptors"].get(ways, 0)
        batch = rig.pool.lease(n)
        at = np.arange(n, dtype=np.uint64) * np.uint64(size)
        batch.extend(np.uint64(memory.data_ptr()) + at, np.uint64(rig.tensor.data_ptr()) + at, size)
        submit_batch(rig.backend, batch, H2D, rig.stream).wait()
        assert torch.equal(rig.tensor[: n * size].cpu(), memory)
        assert rig.backend.stats()["descriptors"][ways] == before + n


# --- threads and processes ------------------------------------------------------------------------------------------


def test_a_thread_that_never_used_cuda_may_submit_poll_and_wait(rig: Rig) -> None:
    failures: list[BaseException] = []
    at = np.arange(64) * 4096

    def work() -> None:
        try:
            completion = rig.submit(H2D, at, at, [4096] * 64)
            completion.block(rig.stream)
            while not completion.done():
                pass
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert torch.equal(rig.tensor[: 64 * 4096].cpu(), rig.host[: 64 * 4096])


def test_a_thread_that_never_used_cuda_may_order_streams_by_events(rig: Rig) -> None:
    seen: list[bool] = []
    rig.tensor[:4096] = 1
    torch.cuda.synchronize()
    other = rig.backend.ops.stream()
    rig.backend.ops.delay(rig.stream, 20)
    with torch.cuda.stream(rig.stream):
        rig.tensor[:4096] = 2

    def work() -> None:
        ops = rig.backend.ops
        event = ops.event()
        ops.record(event, rig.stream)
        ops.wait(other, event)
        seen.append(ops.query(event))
        rig.submit(D2H, [0], [0], [4096], other).wait()
        seen.append(ops.query(event))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, True]
    assert (rig.host[:4096] == 2).all()


def test_a_forked_child_gets_a_clear_error() -> None:
    script = """
        import os, torch, ecoffload
        from ecoffload_cuda.backend import CudaBackend
        from ecoffload_cuda.plugin import SPEC
        from ecoffload.errors import SwapFailed
        backend = CudaBackend(SPEC)
        backend.live()
        child = os.fork()
        if child == 0:
            try:
                backend.pointer_range(4096)
            except SwapFailed as exc:
                os._exit(17 if "spawn" in str(exc) else 1)
            os._exit(2)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "17"


def test_constructing_a_backend_and_asking_for_availability_starts_no_context() -> None:
    script = """
        import ctypes
        from ecoffload_cuda.backend import CudaBackend
        from ecoffload_cuda.plugin import SPEC
        assert CudaBackend.availability().ok, CudaBackend.availability().reason
        CudaBackend(SPEC)
        count = ctypes.c_int()
        print(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3"  # CUDA_ERROR_NOT_INITIALIZED


def test_kernels_come_from_the_cache_the_second_time(rig: Rig, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOFFLOAD_CACHE_DIR", str(tmp_path))
    live = rig.backend.live()
    with live.device.current():
        Gather(live.device, PLAIN).unload()
        files = list((tmp_path / "cuda").iterdir())
        assert len(files) == 1
        written = files[0].stat().st_mtime_ns
        Gather(live.device, PLAIN).unload()
    assert [f.stat().st_mtime_ns for f in (tmp_path / "cuda").iterdir()] == [written]


def test_tuning_is_measured_kept_and_read_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOFFLOAD_CACHE_DIR", str(tmp_path))
    backend = CudaBackend(SPEC)
    said: list[str] = []
    result = backend.tune(said.append)
    assert result["file"]
    assert said
    fresh = CudaBackend(SPEC)
    assert fresh.live().tuning == backend.live().tuning
    assert fresh.stats()["tuning"] == result["file"]
    for each in (backend, fresh):
        each.close()
