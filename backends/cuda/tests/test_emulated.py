"""The backend on the emulated driver: routes, order, registration and every error path. Emulated, not on hardware."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ecoffload_cuda.backend import CudaBackend
from ecoffload_cuda.plugin import SPEC
from ecoffload_cuda.tuning import Tuning, Way
from emulated_drivers import HIGH, LOW, STRADDLE, EmulatedDeviceOps, load
from emulated_kernel import EmulatedGather
from hypothesis import given, settings
from hypothesis import strategies as st

from ecoffload import EncoderCache
from ecoffload.backend import D2H, H2D, Completion, Direction
from ecoffload.descriptors import DescriptorPool
from ecoffload.errors import DeviceLost, RegistrationRefused, SwapFailed
from ecoffload.submission import submit_batch

NBYTES = 1 << 20


class Rig:
    """A backend on an emulated driver of its own, a device tensor and a registered host buffer."""

    def __init__(self, *, kernel: bool = False, register: bool = True, nbytes: int = NBYTES, **knobs: int) -> None:
        self.emulated = load("cuda", **knobs)
        self.ops = EmulatedDeviceOps(self.emulated)
        self.backend = CudaBackend(SPEC, ops=self.ops, library=self.emulated.path)
        self.gather = EmulatedGather(self.emulated)
        if kernel:
            live = self.backend.live()
            live.gathers.update({H2D: self.gather, D2H: self.gather})  # type: ignore[dict-item]
        else:
            self.backend._kernel_off = "not in this test"
        self.tensor = self.ops.empty(nbytes)
        self.device = self.tensor.numpy()
        self.memory = mmap.mmap(-1, nbytes)
        self.host = np.frombuffer(self.memory, np.uint8)
        self.host[:] = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
        self.device[:] = 7
        self.registration = self.backend.register(self.host.ctypes.data, nbytes) if register else None
        self.stream = self.ops.stream()
        self.pool = DescriptorPool()

    @property
    def host_base(self) -> int:
        return self.registration.alias if self.registration else self.host.ctypes.data

    def submit(self, direction: Direction, triples: list[tuple[int, int, int]], stream: Any = None) -> Completion:
        """``triples``: (host offset, device offset, bytes)."""
        batch = self.pool.lease(len(triples))
        for h, d, n in triples:
            host, device = self.host_base + h, self.ops.address_of(self.tensor) + d
            batch.append(*((host, device, n) if direction == H2D else (device, host, n)))
        return submit_batch(self.backend, batch, direction, self.stream if stream is None else stream)

    def expect(self, direction: Direction, triples: list[tuple[int, int, int]]) -> None:
        to, source = (self.device, self.host) if direction == H2D else (self.host, self.device)
        for h, d, n in triples:
            a, b = (d, h) if direction == H2D else (h, d)
            np.testing.assert_array_equal(to[a : a + n], source[b : b + n])


def blocks(count: int, size: int) -> list[tuple[int, int, int]]:
    order = np.random.default_rng(count).permutation(count)
    return [(int(order[i]) * size, i * size, size) for i in range(count)]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.emulated.heal()
    made.backend.close()


@pytest.mark.parametrize("base", [LOW, HIGH, STRADDLE])
@pytest.mark.parametrize("direction", [H2D, D2H])
def test_every_byte_arrives_wherever_device_memory_lies(base: int, direction: Direction) -> None:
    rig = Rig(base=base)
    triples = blocks(64, 4096)
    rig.submit(direction, triples).wait()
    rig.expect(direction, triples)


def test_a_registered_range_is_named_by_its_alias() -> None:
    rig = Rig(alias_offset=1 << 40)
    assert rig.host_base == rig.host.ctypes.data + (1 << 40)
    triples = blocks(16, 4096)
    rig.submit(H2D, triples).wait()
    rig.expect(H2D, triples)


def test_a_completion_is_not_done_before_the_bytes_are_there(rig: Rig) -> None:
    with rig.emulated.gate():
        completion = rig.submit(H2D, blocks(4, 4096))
        assert not completion.done()
        assert not completion.wait(0.01)
        assert (rig.device == 7).all()
    assert completion.wait(10)
    assert completion.done()


@pytest.mark.parametrize("handle", [0, 1, None])
def test_the_default_stream_is_served_by_a_side_stream_in_its_order(rig: Rig, handle: int | None) -> None:
    class Default:
        cuda_stream = handle

    default = rig.ops.current_stream()
    rig.ops.delay(default, 30)
    completion = rig.submit(H2D, blocks(8, 64), Default)
    assert not completion.done()  # behind what the default stream holds
    event = rig.ops.event()
    rig.ops.record(event, default)
    rig.ops.synchronize(event)  # and before what comes on it afterwards
    rig.expect(H2D, blocks(8, 64))


def test_a_driver_without_the_batch_call_copies_one_by_one_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ecoffload.cuda"):
        rig = Rig(version=12040)
        rig.submit(H2D, blocks(8, 64)).wait()
        rig.submit(D2H, blocks(8, 64)).wait()
    rig.expect(D2H, blocks(8, 64))
    assert sum("no cuMemcpyBatchAsync" in r.message for r in caplog.records) == 1
    assert "12.4" in rig.backend.stats()["batch_call"]
    assert rig.emulated.get("single_copies") == 16


def test_the_nine_argument_entry_is_called_on_a_driver_that_has_both() -> None:
    rig = Rig(version=13000)
    rig.submit(H2D, blocks(8, 64)).wait()
    rig.expect(H2D, blocks(8, 64))
    assert rig.emulated.get("batch_calls") == 1


def test_per_copy_never_calls_the_batch_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOFFLOAD_PER_COPY", "1")
    rig = Rig(kernel=True)
    rig.submit(H2D, blocks(32, 64)).wait()
    rig.expect(H2D, blocks(32, 64))
    assert rig.emulated.get("batch_calls") == 0
    assert not rig.gather.launches


def test_a_failing_descriptor_is_named_by_its_index_in_the_callers_batch(rig: Rig) -> None:
    rig.emulated.set("fail_submit", 1)
    rig.emulated.set("fail_submit_index", 5)
    with pytest.raises(SwapFailed, match=r"descriptor 5 .*CUDA_ERROR_INVALID_VALUE \(1\)") as caught:
        rig.submit(H2D, blocks(8, 64))
    assert caught.value.details["index"] == 5
    assert caught.value.details["code"] == 1


def test_an_index_past_the_batch_blames_no_descriptor(rig: Rig) -> None:
    rig.emulated.set("fail_submit", 1)
    rig.emulated.set("fail_submit_index", 2**64 - 1)
    with pytest.raises(SwapFailed, match="whole batch") as caught:
        rig.submit(H2D, blocks(8, 64))
    assert caught.value.details["index"] is None


def test_a_long_batch_is_cut_and_an_error_in_a_later_part_names_the_global_index() -> None:
    rig = Rig(nbytes=40000)
    triples = [(i, i, 1) for i in range(40000)]
    rig.submit(H2D, triples).wait()
    rig.expect(H2D, [(0, 0, 40000)])
    assert rig.emulated.get("largest_batch") == 256
    rig.emulated.set("batch_limit", 0)
    rig.emulated.set("fail_submit", 1)
    rig.emulated.set("fail_submit_index", 3)
    with pytest.raises(SwapFailed) as caught:
        rig.submit(H2D, triples)
    assert caught.value.details["index"] == 3


def test_a_copy_that_fails_late_is_a_lost_device_at_the_next_look(rig: Rig) -> None:
    rig.emulated.set("fail_late", 719)
    completion = rig.submit(H2D, blocks(8, 64))
    with pytest.raises(DeviceLost, match=r"CUDA_ERROR_LAUNCH_FAILED \(719\)"):
        completion.wait(10)


def test_a_stream_that_is_being_captured_is_refused(rig: Rig) -> None:
    with rig.ops.capturing(rig.stream), pytest.raises(SwapFailed, match="captured into a graph"):
        rig.submit(H2D, blocks(8, 64))


def test_polling_registering_and_submitting_leave_another_threads_capture_alone(rig: Rig) -> None:
    other = rig.ops.stream()
    memory = mmap.mmap(-1, 4096)
    view = np.frombuffer(memory, np.uint8)
    failures: list[BaseException] = []

    def background() -> None:
        try:
            completion = rig.submit(H2D, blocks(8, 64))
            while not completion.done():
                pass
            completion.wait()
            rig.backend.unregister(rig.backend.register(view.ctypes.data, 4096))
            rig.backend.pointer_range(rig.host_base)
        except BaseException as exc:
            failures.append(exc)

    with rig.ops.capturing(other):  # leaving raises if the capture was invalidated
        thread = threading.Thread(target=background)
        thread.start()
        thread.join()
    assert not failures


def test_a_thread_without_a_context_may_submit_and_keeps_having_none(rig: Rig) -> None:
    current: list[int] = []

    def elsewhere() -> None:
        completion = rig.submit(D2H, blocks(8, 64))
        completion.wait()
        completion.block(rig.stream)
        current.append(rig.backend.live().cuda.out("CtxGetCurrent"))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert current == [0]
    rig.expect(D2H, blocks(8, 64))


def test_a_forked_child_gets_a_clear_error(rig: Rig) -> None:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is being tried
        child = os.fork()
    if child == 0:
        try:
            rig.submit(H2D, blocks(8, 64))
        except SwapFailed as exc:
            os.write(writing, str(exc).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert b"spawn" in os.read(reading, 4096)
    os.close(reading)
    os.close(writing)


def test_events_are_used_again(rig: Rig) -> None:
    for _ in range(50):
        rig.submit(H2D, blocks(8, 64)).wait()
    assert len(rig.backend.live().events) <= 2


def test_a_closed_backend_starts_anew_when_it_is_used(rig: Rig) -> None:
    rig.submit(H2D, blocks(8, 64)).wait()
    rig.backend.close()
    rig.backend.close()
    rig.device[:] = 0
    rig.submit(H2D, blocks(8, 64)).wait()
    rig.expect(H2D, blocks(8, 64))


# --- registration ---------------------------------------------------------------------------------------------------


def test_confidential_computing_is_named_as_the_likely_cause(rig: Rig) -> None:
    rig.emulated.set("refuse_registration", 801)
    memory = mmap.mmap(-1, 4096)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    with pytest.raises(
        RegistrationRefused, match=r"confidential computing.*CUDA_ERROR_NOT_SUPPORTED \(801\)"
    ) as caught:
        rig.backend.register(address, 4096)
    assert caught.value.details == {"code": 801, "address": address, "nbytes": 4096}


@pytest.mark.parametrize(("start", "nbytes"), [(0, NBYTES), (4096, 4096), (-4096, 8192), (NBYTES - 4096, 8192)])
def test_registering_twice_or_overlapping_is_our_own_error(rig: Rig, start: int, nbytes: int) -> None:
    before = rig.emulated.get("registrations")
    with pytest.raises(RegistrationRefused, match="registered already") as caught:
        rig.backend.register(rig.host.ctypes.data + start, nbytes)
    assert caught.value.details["code"] == 712
    assert rig.emulated.get("registrations") == before


def test_an_empty_registration_is_refused(rig: Rig) -> None:
    with pytest.raises(RegistrationRefused, match="at least one byte"):
        rig.backend.register(rig.host.ctypes.data, 0)


def test_unregistering_twice_is_our_own_error(rig: Rig) -> None:
    assert rig.registration is not None
    rig.backend.unregister(rig.registration)
    with pytest.raises(SwapFailed, match="not registered"):
        rig.backend.unregister(rig.registration)


def test_a_range_can_be_registered_again_after_it_was_unregistered(rig: Rig) -> None:
    assert rig.registration is not None
    rig.backend.unregister(rig.registration)
    again = rig.backend.register(rig.registration.address, rig.registration.nbytes)
    assert again == rig.registration


def test_the_driver_knows_the_range_around_an_address(rig: Rig) -> None:
    device = rig.backend.pointer_range(rig.ops.address_of(rig.tensor) + 100)
    host = rig.backend.pointer_range(rig.host.ctypes.data + 100)
    assert device is not None
    assert host is not None
    assert (device.start, device.nbytes, device.kind) == (rig.ops.address_of(rig.tensor), NBYTES, "device")
    assert (host.start, host.kind) == (rig.host.ctypes.data, "host")
    assert rig.backend.pointer_range(0x10) is None


# --- the route of a batch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [H2D, D2H])
def test_short_descriptors_are_the_kernels(direction: Direction) -> None:
    rig = Rig(kernel=True)
    triples = blocks(64, 4096)
    rig.submit(direction, triples).wait()
    rig.expect(direction, triples)
    assert rig.backend.stats()["descriptors"] == {"engine": 0, "kernel": 64}
    assert rig.emulated.get("batch_calls") == 0


def test_long_descriptors_are_the_copy_engines() -> None:
    rig = Rig(kernel=True, nbytes=9 << 20)
    triples = blocks(9, 1 << 20)
    rig.submit(H2D, triples).wait()
    rig.expect(H2D, triples)
    assert rig.backend.stats()["descriptors"] == {"engine": 9}


def test_few_descriptors_never_start_a_kernel() -> None:
    rig = Rig(kernel=True)
    rig.submit(H2D, blocks(7, 64)).wait()
    assert rig.backend.stats()["descriptors"] == {"engine": 7}


def test_a_mixed_batch_goes_both_ways_at_once() -> None:
    rig = Rig(kernel=True, nbytes=4 << 20)
    triples = [(i * 4096, i * 4096, 1000 + i) for i in range(100)] + [
        (1 << 20, 1 << 20, 1 << 20),
        (2 << 20, 2 << 20, 1 << 20),
    ]
    np.random.default_rng(0).shuffle(triples)
    completion = rig.submit(H2D, [(int(a), int(b), int(c)) for a, b, c in triples])
    completion.wait()
    rig.expect(H2D, triples)
    assert rig.backend.stats()["descriptors"] == {"engine": 2, "kernel": 100}
    assert rig.gather.launches[0][1] == rig.backend.live().kernel_streams[H2D]


def test_the_end_of_a_mixed_batch_is_the_end_of_both_parts() -> None:
    rig = Rig(kernel=True, nbytes=4 << 20)
    live = rig.backend.live()
    triples = [(i * 4096, i * 4096, 1000) for i in range(100)] + [(1 << 20, 1 << 20, 1 << 20)]

    class Kernel:
        cuda_stream = live.kernel_streams[H2D]

    rig.ops.delay(Kernel, 30)  # type: ignore[arg-type]
    rig.submit(H2D, triples).wait()
    rig.expect(H2D, triples)


def test_an_error_in_a_mixed_batch_names_the_index_in_the_callers_batch() -> None:
    rig = Rig(kernel=True, nbytes=4 << 20)
    triples = [(i * 4096, i * 4096, 1000) for i in range(100)]
    triples.insert(60, (1 << 20, 1 << 20, 1 << 20))
    rig.emulated.set("fail_submit", 1)
    rig.emulated.set("fail_submit_index", 0)
    with pytest.raises(SwapFailed, match="descriptor 60") as caught:
        rig.submit(H2D, triples)
    assert caught.value.details["index"] == 60
    assert len(rig.gather.copied) == 100  # the kernel's share is not left on its way


def test_middling_descriptors_are_shared() -> None:
    rig = Rig(kernel=True, nbytes=40 * 49152)
    triples = blocks(40, 49152)
    rig.submit(H2D, triples).wait()
    rig.expect(H2D, triples)
    assert rig.backend.stats()["descriptors"] == {"engine": 20, "kernel": 20}


def test_host_memory_that_no_one_pinned_is_kept_from_the_kernel() -> None:
    rig = Rig(kernel=True, register=False)
    rig.submit(H2D, blocks(64, 4096)).wait()
    rig.expect(H2D, blocks(64, 4096))
    assert not rig.gather.launches
    assert "neither registered nor pinned" in str(rig.backend.stats()["batches"])


def test_tables_are_filled_again_only_after_their_launch_has_run() -> None:
    rig = Rig(kernel=True)
    everything = []
    with rig.emulated.gate():
        rig.ops.delay(rig.stream, 20)
        completions = [
            rig.submit(H2D, [(i * 64 + k * 4096, i * 64 + k * 4096, 64) for i in range(16)]) for k in range(12)
        ]
        everything = [(i * 64 + k * 4096, i * 64 + k * 4096, 64) for k in range(12) for i in range(16)]
    for completion in completions:
        completion.wait()
    rig.expect(H2D, everything)


def test_a_table_above_the_smallest_slot_goes_through_device_memory() -> None:
    rig = Rig(kernel=True)
    triples = blocks(10000, 100)
    rig.submit(D2H, triples).wait()
    rig.expect(D2H, triples)
    assert rig.backend.stats()["descriptors"]["kernel"] == 10000


def test_a_batch_of_many_short_descriptors_is_launched_in_parts() -> None:
    rig = Rig(kernel=True)
    triples = blocks(40000, 24)
    rig.submit(H2D, triples).wait()
    np.testing.assert_array_equal(
        rig.device[: 40000 * 24].reshape(40000, 24),
        rig.host[: 40000 * 24].reshape(40000, 24)[[h // 24 for h, _, _ in triples]],
    )
    assert [table.count for _, _, table in rig.gather.launches] == [16384, 16384, 40000 - 2 * 16384]


sizes = st.lists(
    st.one_of(st.integers(1, 300), st.integers(4090, 4100), st.integers(1, 30000)), min_size=8, max_size=40
)


@settings(max_examples=40, deadline=None)
@given(sizes=sizes, direction=st.sampled_from([H2D, D2H]), skew=st.integers(0, 15))
def test_any_sizes_are_cut_into_pieces_that_fit_a_slot_and_cover_every_byte(
    sizes: list[int], direction: Direction, skew: int
) -> None:
    rig = _shared_rig()
    rig.gather.copied.clear()
    rig.host[:] = np.random.default_rng(len(sizes)).integers(0, 256, len(rig.host), dtype=np.uint8)
    rig.device[:] = 7
    triples, at = [], 0
    for i, n in enumerate(sizes):
        triples.append((at + (i * skew) % 16, at + (i * 5) % 16, n))
        at += (n + 47) & ~15
    live = rig.backend.live()
    way = Way((), ((0, 2),))
    live.tuning = Tuning(way, way, 1, "all to the kernel")
    rig.submit(direction, triples).wait()
    rig.expect(direction, triples)
    assert sum(n for _, _, n in rig.gather.copied) == sum(sizes)
    for _, to, n in rig.gather.copied:
        head = min(n, -to % 16)
        assert n > 0
        assert (n - head) & ~15 <= 4096


_rigs: list[Rig] = []


def _shared_rig() -> Rig:
    if not _rigs:
        _rigs.append(Rig(kernel=True, nbytes=2 << 20))
    return _rigs[0]


def test_a_cache_leaves_the_callers_own_capture_alone(rig: Rig) -> None:
    with EncoderCache("64KiB", backend=rig.backend) as cache:
        tensor = rig.ops.empty(4096)
        assert cache.put("there", tensor)
        assert cache.flush(10)
        with rig.ops.use(rig.stream), rig.ops.capturing(rig.stream):  # leaving raises if the capture was invalidated
            assert not cache.put("k", tensor)
            with pytest.raises(SwapFailed, match="captured into a graph"):
                cache.get("there")
        assert cache.contains("there")
        assert not cache.contains("k")
