"""The one way in to a backend: the lease is given back when the swap has ended, however it ends and whoever looks."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import QueryFails, eventually

from ecoffload.backend import Completion, KernelSpec, Limits, SwapBackend
from ecoffload.cpu.backend import CpuBackend
from ecoffload.cpu.plugin import ecoffload_register_backend
from ecoffload.descriptors import AddressRanges, DescriptorPool
from ecoffload.drivers import words_at
from ecoffload.errors import DescriptorError, StaleBatch, SwapFailed
from ecoffload.host_queue import BlockingBackend, QueuedCompletion
from ecoffload.submission import submit_batch
from ecoffload.testing.declarations import DECLARED
from ecoffload.testing.devices import sim_of, simulated
from ecoffload.testing.harness import DeviceUnderTest, random_bytes

DEVICES = ["sim-int64", "sim-uint64", "sim-top"]
SIZE = 3000


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> DeviceUnderTest:
    return DeviceUnderTest(simulated(request.param))


def test_an_empty_batch_has_ended_and_given_its_lease_back(device: DeviceUnderTest) -> None:
    completion = device.submit("d2h", [(1, 2, 0)])
    assert completion.done()
    assert completion.wait(0)
    assert device.pool.leased == 0


def test_b8_a_dropped_completion_still_moves_its_bytes_and_gives_its_lease_back(device: DeviceUnderTest) -> None:
    data = random_bytes(50 * SIZE, 3)
    with device.host(50 * SIZE, 0) as host:
        tensor = device.tensor(50 * SIZE, data)
        device.hold(device.side)
        base = device.address(tensor)
        device.submit("d2h", [(base + i * SIZE, host.alias + i * SIZE, SIZE) for i in range(50)])
        gc.collect()
        for _ in range(20):  # others lease meanwhile, and fill what they get
            batch = device.pool.lease()
            batch.extend(np.zeros(50, np.uint64), np.zeros(50, np.uint64), np.full(50, 7, np.uint64))
            batch.release()
        eventually(lambda: np.array_equal(host.array, data), "the arrival of the bytes")
        device.ops.synchronize()

        def returned() -> bool:
            device.pool.lease().release()
            return device.pool.leased == 0

        eventually(returned, "the return of the lease")


def test_a_batch_is_its_submitters_no_more(device: DeviceUnderTest) -> None:
    with device.host(SIZE, 0) as host:
        tensor = device.tensor(SIZE, 1)
        batch = device.pool.lease()
        batch.append(device.address(tensor), host.alias, SIZE)
        device.finish(submit_batch(device.backend, batch, "d2h", device.side))
    with pytest.raises(StaleBatch):
        batch.append(1, 2, 3)


def test_a_refused_batch_gives_its_lease_back_and_reaches_no_device(device: DeviceUnderTest) -> None:
    with pytest.raises(DescriptorError, match="descriptor 1 "):
        device.submit("d2h", [(16, 16, 4), (32, 16, 4)], sources=AddressRanges([(16, 16)]))
    assert device.pool.leased == 0


def test_two_kinds_of_wait_see_the_same_failure(device: DeviceUnderTest) -> None:
    with device.host(SIZE, 0) as host:
        tensor = device.tensor(SIZE, 1)
        device.inject("late")
        completion = device.save(tensor, host)
        for _ in range(2):
            with pytest.raises(SwapFailed):
                completion.wait(device.limit_s)
            with pytest.raises(SwapFailed):
                completion.done()
    assert device.pool.leased == 0


def test_a_wait_with_a_limit_says_no_in_time(device: DeviceUnderTest) -> None:
    with device.host(SIZE, 0) as host:
        tensor = device.tensor(SIZE, 1)
        device.hold(device.side)
        completion = device.save(tensor, host)
        assert completion.wait(0.001) is False
        assert device.pool.leased == (0 if device.capabilities.snapshots_descriptors else 1)
        device.finish(completion)
        assert (host.array == 1).all()


def test_a_completion_that_can_never_be_asked_keeps_its_arrays_and_breaks_no_later_lease() -> None:
    device = DeviceUnderTest(simulated("sim-uint64"))
    submit = device.backend.submit
    device.backend.submit = lambda *args: QueryFails(submit(*args))  # type: ignore[method-assign]
    with device.host(SIZE, 0) as host:
        completion = device.save(device.tensor(SIZE, 1), host)
        with pytest.raises(RuntimeError):
            completion.done()
        del completion
        gc.collect()
        device.backend.submit = submit  # type: ignore[method-assign]
        for _ in range(3):
            device.finish(device.save(device.tensor(SIZE, 2), host))
        assert device.pool.leased == 1, "it may still be reading them"
        device.ops.synchronize()


def test_a_part_whose_wait_raises_anything_does_not_keep_the_lease_of_a_failed_batch() -> None:
    device = DeviceUnderTest(simulated("sim-uint64"))
    plain = device.backend.submit

    class WaitFails(QueryFails):
        def wait(self, timeout: float | None = None) -> bool:
            raise RuntimeError("not to be waited for")

    def submit(batch: Any, direction: Any, stream: Any) -> Completion:
        if batch.first:
            raise SwapFailed("the second part")
        return WaitFails(plain(batch, direction, stream))

    device.backend.submit = submit  # type: ignore[method-assign]
    with device.host(100, 0) as host:
        tensor = device.tensor(100, 1)
        rows = [(device.address(tensor) + i, host.alias + i, 1) for i in range(100)]  # 37 a submit
        with pytest.raises(SwapFailed, match="the second part"):
            device.submit("d2h", rows)
        assert device.pool.leased == 0
        device.ops.synchronize()


# --- blocking backends, on a thread of the core


class Slow(CpuBackend):
    """Copies in its submit, when it is let; reads its descriptors only then."""

    def __init__(self) -> None:
        like = ecoffload_register_backend()
        capabilities = like.capabilities.model_copy(update={"submission": "blocking"})
        super().__init__(like.model_copy(update={"capabilities": capabilities}))
        self.go = threading.Event()

    def submit(self, batch: Any, direction: Any, stream: Any) -> None:  # type: ignore[override]
        self.go.wait()
        self._copy(batch.src, batch.dst, batch.size, batch.count)


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dropped"])
def test_a_blocking_backend_copies_late_from_the_descriptors_it_was_given(keep: bool) -> None:
    inner = Slow()
    backend, pool = BlockingBackend(inner), DescriptorPool()
    src, dst = torch.arange(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    batch = pool.lease()
    for i in range(256):
        batch.append(src.data_ptr() + i, dst.data_ptr() + i, 1)
    completion: Completion | None = submit_batch(backend, batch, "h2d", backend.ops.stream())
    assert completion is not None
    assert not completion.done()
    if not keep:
        completion = None
        gc.collect()
    pool.lease().release()
    inner.go.set()
    eventually(lambda: torch.equal(src, dst), "the copy")
    if completion is not None:
        assert completion.wait(30)
        assert pool.leased == 0
    backend.close()


def test_a_blocking_backend_waits_for_the_stream_it_was_given() -> None:
    inner = Slow()
    inner.go.set()
    backend, pool = BlockingBackend(inner), DescriptorPool()
    stream = backend.ops.stream()
    src, dst = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    backend.ops.delay(stream, 40)
    stream.put(lambda: src.fill_(9))
    batch = pool.lease()
    batch.append(src.data_ptr(), dst.data_ptr(), 64)
    assert submit_batch(backend, batch, "h2d", stream).wait(30)
    assert (dst == 9).all()
    backend.close()


def held_back(ordering: str) -> tuple[BlockingBackend, Any, Callable[[str, Any, int], Completion]]:
    """A blocking backend, a stream that is held back until ``go`` is set, and a copy of 64 bytes by direction."""
    inner = Slow()
    inner.go.set()
    capabilities = inner.spec.capabilities.model_copy(update={"ordering": ordering})
    inner.spec = inner.spec.model_copy(update={"capabilities": capabilities})
    backend, pool = BlockingBackend(inner), DescriptorPool()

    def copy(direction: str, stream: Any, at: int) -> Completion:
        batch = pool.lease()
        batch.append(MEMORY.data_ptr() + 64 * at, MEMORY.data_ptr() + 64 * (at + 1), 64)
        return submit_batch(backend, batch, direction, stream)  # type: ignore[arg-type]

    return backend, backend.ops.stream(), copy


MEMORY = torch.zeros(4 * 64, dtype=torch.uint8)


def test_a_load_of_a_blocking_backend_does_not_wait_behind_a_save_that_waits_for_compute() -> None:
    backend, saving, copy = held_back("streams")
    go = threading.Event()
    saving.put(go.wait)
    save = copy("d2h", saving, 0)
    assert copy("h2d", backend.ops.stream(), 2).wait(30)
    assert not save.done()
    go.set()
    assert save.wait(30)
    backend.close()


def test_a_device_with_a_single_queue_is_given_one_copy_at_a_time_in_order() -> None:
    backend, saving, copy = held_back("single-queue")
    go = threading.Event()
    saving.put(go.wait)
    save = copy("d2h", saving, 0)
    load = copy("h2d", backend.ops.stream(), 2)
    assert not load.wait(0.02)
    go.set()
    assert save.wait(30)
    assert load.wait(30)
    backend.close()


@pytest.mark.parametrize("first", ["d2h", "h2d"])
def test_both_directions_of_a_blocking_backend_keep_the_order_of_one_stream(first: str) -> None:
    backend, stream, copy = held_back("streams")
    inner: Any = backend.inner
    inner.go.clear()
    MEMORY[:] = 0
    MEMORY[:64] = 5
    one = copy(first, stream, 0)
    two = copy("h2d" if first == "d2h" else "d2h", stream, 1)
    inner.go.set()
    assert two.wait(30)
    assert one.done()
    assert (MEMORY[128:192] == 5).all()
    backend.close()


def test_threads_that_submit_at_once_forget_no_copy_of_a_blocking_backend_that_is_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, stream, copy = held_back("streams")
    inner: Any = backend.inner
    gates = {MEMORY.data_ptr() + 64 * at: threading.Event() for at in range(2)}

    def submit(batch: Any, direction: Any, stream: Any) -> None:
        gates.get(words_at(batch.src, 1)[0], inner.go).wait()

    inner.submit = submit
    one, two = copy("d2h", stream, 0), copy("d2h", stream, 1)
    first, second = gates.values()
    first.set()
    assert one.wait(30)
    meet, plain = threading.Barrier(2), QueuedCompletion.ended

    def both_see_it(completion: QueuedCompletion, timeout: float | None = None) -> bool:
        found = plain(completion, timeout)
        if found and timeout == 0:
            with suppress(threading.BrokenBarrierError):
                meet.wait(0.1)
        return found

    monkeypatch.setattr(QueuedCompletion, "ended", both_see_it)
    threads = [threading.Thread(target=copy, args=("h2d", backend.ops.stream(), 2)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    behind = copy("h2d", stream, 2)
    assert not behind.wait(0.05), "what is on its stream before it has not ended"
    second.set()
    assert two.wait(30)
    assert behind.wait(30)
    backend.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_its_parents_copies() -> None:
    backend, stream, copy = held_back("streams")
    inner: Any = backend.inner
    inner.go.clear()
    mine = copy("d2h", stream, 0)
    child = os.fork()
    if not child:
        inner.go.set()
        os._exit(0 if copy("h2d", stream, 1).wait(10) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    inner.go.set()
    assert mine.wait(30)
    backend.close()


@pytest.mark.parametrize("name", DEVICES)
def test_an_interrupt_between_two_parts_waits_for_the_first_before_its_descriptors_are_lent_again(name: str) -> None:
    device = DeviceUnderTest(simulated(name))
    backend, submit, calls = device.backend, device.backend.submit, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return submit(*args)

    backend.per_copy = True
    backend.submit = interrupted  # type: ignore[method-assign]
    sim_of(backend).device.latency = 0.05
    with device.host(2 * SIZE, 0) as host:
        tensor = device.tensor(2 * SIZE, random_bytes(2 * SIZE, 3))
        base = device.address(tensor)
        with pytest.raises(KeyboardInterrupt):
            device.submit("d2h", [(base + i * SIZE, host.alias + i * SIZE, SIZE) for i in range(2)])
        assert sim_of(backend)._counts["descriptors"] == 1, "the first part has ended"
        assert device.pool.leased == 0


def test_limits_that_cannot_be_asked_give_the_lease_back() -> None:
    device = DeviceUnderTest(simulated("sim-int64"))

    def gone(direction: Any) -> Any:
        raise RuntimeError("no such device")

    device.backend.limits = gone  # type: ignore[method-assign]
    with pytest.raises(SwapFailed, match="no such device"):
        device.submit("d2h", [(1, 2, 3)])
    assert device.pool.leased == 0


def test_a_wrapped_blocking_backend_answers_all_that_its_author_wrote() -> None:
    inner = Slow()
    inner.per_copy = True
    inner.has_pointer_query = True  # type: ignore[misc]
    backend = BlockingBackend(inner)
    assert backend.per_copy
    assert backend.has_pointer_query
    assert backend.ops is inner.ops
    own = {"submit", "stats", "close", "ops", "availability"}  # the last is asked of a class
    public = {name for name, value in vars(SwapBackend).items() if callable(value) and not name.startswith("_")}
    for name in public - own:
        assert getattr(backend, name) == getattr(inner, name), name


def choosy(name: str = "sim-uint64") -> SwapBackend:
    """A device whose kernels copy multiples of 16 and of 24 bytes, at least 96 of them and at most 1000."""
    spec = DECLARED[name]
    kernels = tuple(
        KernelSpec(name=f"by-{unit}", address_dtype="uint64", alignment=unit, min_bytes=96, max_bytes=1000)
        for unit in (16, 24)
    )
    spec = spec.model_copy(update={"kernels": kernels})
    return spec.load_class()(spec)


def test_declared_limits_are_those_that_every_kernel_can_take() -> None:
    assert choosy().limits("d2h") == Limits(None, 1000, 48, 96)


@pytest.mark.parametrize("odd", [(8, 0, 96), (0, 8, 96), (0, 0, 100), (0, 0, 48)])
def test_what_no_declared_kernel_can_copy_is_refused(odd: tuple[int, int, int]) -> None:
    device = DeviceUnderTest(choosy())
    tensor = device.tensor(4096, 1)
    at = -(-device.address(tensor) // 48) * 48
    with device.host(4096, 0) as host:
        to = -(-host.alias // 48) * 48
        device.finish(device.submit("d2h", [(at, to, 96)]))
        with pytest.raises(DescriptorError, match=r"descriptor 1 .*multiples of 48"):
            device.submit("d2h", [(at, to, 96), (at + odd[0], to + odd[1], odd[2])])
    assert device.pool.leased == 0


def test_long_descriptors_are_cut_where_the_kernels_can_go_on() -> None:
    device = DeviceUnderTest(choosy())
    backend, submit, sizes = device.backend, device.backend.submit, []

    def noted(batch: Any, direction: Any, stream: Any) -> Any:
        sizes.extend(words_at(batch.size, batch.count))
        return submit(batch, direction, stream)

    backend.submit = noted  # type: ignore[method-assign]
    tensor = device.tensor(4096, 1)
    with device.host(4096, 0) as host:
        at, to = -(-device.address(tensor) // 48) * 48, -(-host.alias // 48) * 48
        device.finish(device.submit("d2h", [(at, to, 48 * 42)]))
    assert sizes == [960, 960, 96]
