"""Faults of batched copies that users of this field reported (B2, B4, B8, B11, B12), as small inputs."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest

from ecoffload import DescriptorError, DeviceLost, StaleBatch, SwapFailed
from ecoffload.backend import Capabilities
from ecoffload.descriptors import AddressRanges, DescriptorPool
from ecoffload.submission import submit_batch
from ecoffload.testing.declarations import DECLARED
from ecoffload.testing.devices import SimBackend, sim_of, simulated
from ecoffload.testing.harness import DeviceUnderTest, random_bytes

SIZE = 512


def under_test(name: str = "sim-uint64") -> DeviceUnderTest:
    return DeviceUnderTest(simulated(name))


def limited(limit: int, *, scope: str = "descriptor", snapshots: bool = True) -> DeviceUnderTest:
    """A device that takes ``limit`` descriptors a submit."""
    like = DECLARED["sim-int64"]
    kernel = like.kernels[0].model_copy(update={"max_descriptors": limit})
    capabilities = Capabilities(
        **{**like.capabilities.model_dump(), "error_scope": scope, "snapshots_descriptors": snapshots}
    )
    spec = like.model_copy(update={"kernels": (kernel,), "capabilities": capabilities})
    backend: SimBackend = spec.load_class()(spec, 0)  # type: ignore[assignment]
    return DeviceUnderTest(backend)


def pairs(device: DeviceUnderTest, tensor: Any, host: Any, count: int, size: int) -> list[tuple[int, int, int]]:
    base = device.address(tensor)
    return [(base + i * size, host.alias + i * size, size) for i in range(count)]


def shut(device: DeviceUnderTest) -> threading.Event:
    """Hold the device's side stream back until the event is set."""
    gate = threading.Event()
    device.side.put(gate.wait)
    return gate


# --- B2: "failed at index N, error 1" tells nothing


def test_b2_a_destination_past_the_region_is_named_before_the_driver_sees_it() -> None:
    device = under_test()
    with device.host(3 * SIZE, 0) as host:
        tensor = device.tensor(3 * SIZE, 1)
        batch = pairs(device, tensor, host, 3, SIZE)
        region = AddressRanges([(host.alias, 3 * SIZE)])
        src, dst, size = batch[1]
        batch[1] = (src, dst + SIZE + 256, size)
        with pytest.raises(DescriptorError, match=r"descriptor 1 .*destination: it ends 256 bytes past") as caught:
            device.submit("d2h", batch, destinations=region)
        assert (caught.value.index, caught.value.src, caught.value.size) == (1, src, SIZE)
        assert sim_of(device.backend).stats()["submits"] == 0


@pytest.mark.parametrize(
    ("descriptor", "why"),
    [((2**64 - 1, 0, 2), r"past 2\*\*64"), ((0, 2**64 - 1, 2), r"past 2\*\*64"), ((-1, 0, 1), "must be ints")],
)
def test_b2_a_descriptor_that_leaves_64_bits_is_refused(descriptor: tuple[int, int, int], why: str) -> None:
    with pytest.raises(DescriptorError, match=why):
        under_test().submit("h2d", [descriptor])


def test_b2_a_range_that_ends_exactly_at_the_top_is_no_wrap() -> None:
    device = under_test("sim-top")
    tensor = device.tensor(SIZE, 3)
    assert device.address(tensor) + SIZE == 2**64
    with device.host(SIZE, 0) as host:
        ours = AddressRanges([(device.address(tensor), SIZE)])
        device.finish(device.submit("d2h", pairs(device, tensor, host, 1, SIZE), sources=ours))
        assert (host.array == 3).all()


# --- B4: batches that are too long


@pytest.mark.parametrize("limit", [1, 2, 7])
@pytest.mark.parametrize("around", [-1, 0, 1])
def test_b4_a_batch_is_split_at_the_declared_limit(limit: int, around: int) -> None:
    device, count = limited(limit), 3 * limit + around
    data = random_bytes(count * 3, 1)
    with device.host(count * 3, 0) as host:
        tensor = device.tensor(count * 3, data)
        device.swap("d2h", pairs(device, tensor, host, count, 3))
        assert np.array_equal(host.array, data)
    assert sim_of(device.backend).stats()["submits"] == -(-count // limit)


@pytest.mark.parametrize("failing", [0, 3, 4, 9])
def test_b4_a_failure_in_any_part_names_the_global_index(failing: int) -> None:
    device = limited(4)
    with device.host(10 * 8, 0) as host:
        tensor = device.tensor(10 * 8, 1)
        device.inject("submit", failing)
        with pytest.raises(SwapFailed) as caught:
            device.submit("d2h", pairs(device, tensor, host, 10, 8))
        assert getattr(caught.value, "index", None) == failing
        device.ops.synchronize()
    assert device.pool.leased == 0


def test_b4_a_split_batch_is_done_only_after_its_last_part() -> None:
    device = limited(2)
    with device.host(64, 0) as host:
        tensor = device.tensor(64, 9)
        sim_of(device.backend).device.latency = 0.02
        completion = device.submit("d2h", pairs(device, tensor, host, 8, 8))
        while not completion.done():
            time.sleep(0.001)
        assert (host.array == 9).all()


# --- B8: descriptors reused before the copy read them


@pytest.mark.parametrize("snapshots", [True, False])
def test_b8_the_next_batch_does_not_change_the_one_before(snapshots: bool) -> None:
    device = limited(100, snapshots=snapshots)
    data = random_bytes(8 * SIZE, 2)
    with device.host(8 * SIZE, 0) as host:
        tensor = device.tensor(8 * SIZE, data)
        device.hold(device.side)
        completions = [device.submit("d2h", [pair]) for pair in pairs(device, tensor, host, 8, SIZE)]
        for completion in completions:
            device.finish(completion)
        assert np.array_equal(host.array, data)
    assert device.pool.leased == 0


def test_b8_a_batch_is_of_no_use_after_its_swap() -> None:
    device, pool = under_test("sim-int64"), DescriptorPool()
    batch = pool.lease()
    with device.host(SIZE, 0) as host:
        tensor = device.tensor(SIZE, 1)
        batch.append(device.address(tensor), host.alias, SIZE)
        device.finish(submit_batch(device.backend, batch, "d2h", device.side))
    with pytest.raises(StaleBatch):
        batch.append(1, 2, 3)


def test_b8_a_submit_that_raises_returns_the_lease_exactly_once() -> None:
    device = limited(4, snapshots=False)
    with device.host(10 * 8, 0) as host:
        tensor = device.tensor(10 * 8, 1)
        for _ in range(3):
            device.inject("submit", 9)
            with pytest.raises(SwapFailed):
                device.submit("d2h", pairs(device, tensor, host, 10, 8))
            assert device.pool.leased == 0
        one, two = device.pool.lease(), device.pool.lease()
        assert one.src != two.src


def test_b8_the_descriptors_of_a_completion_that_nobody_kept_outlive_its_copy() -> None:
    device = limited(100, snapshots=False)
    data = random_bytes(4 * SIZE, 3)
    with device.host(4 * SIZE, 0) as host:
        tensor = device.tensor(4 * SIZE, data)
        gate = shut(device)
        device.submit("d2h", pairs(device, tensor, host, 4, SIZE))
        gc.collect()
        others = [device.pool.lease(4) for _ in range(16)]  # would be given the arrays, were they free
        for other in others:
            other.extend(np.zeros(4, np.uint64), np.zeros(4, np.uint64), np.full(4, 2**40, np.uint64))
        gate.set()
        device.ops.synchronize()
        assert np.array_equal(host.array, data)
        for other in others:
            other.release()
        assert device.pool.leased == 1
        device.pool.lease().release()
        assert device.pool.leased == 0


# --- B11: a copy failure takes the engine down


@pytest.mark.parametrize("name", ["sim-int64", "sim-uint64", "sim-top"])
@pytest.mark.parametrize("kind", ["submit", "late"])
def test_b11_after_a_failure_the_next_swap_works(name: str, kind: str) -> None:
    device = under_test(name)
    data = random_bytes(SIZE, 4)
    with device.host(SIZE, 0xAB) as host:
        tensor = device.tensor(SIZE, data)
        device.inject(kind)
        with pytest.raises(SwapFailed):
            device.finish(device.save(tensor, host))
        assert (host.array == 0xAB).all(), "a failed copy moved bytes, and the poison would go unnoticed"
        device.finish(device.save(tensor, host))
        assert np.array_equal(host.array, data)


def test_b11_anything_that_a_backend_raises_becomes_our_error_with_its_cause() -> None:
    device = under_test("sim-int64")
    device.backend.submit = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with device.host(SIZE, 0) as host, pytest.raises(SwapFailed, match="ZeroDivisionError") as caught:
        device.save(device.tensor(SIZE, 1), host)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert device.pool.leased == 0


@pytest.mark.parametrize("name", ["sim-int64", "sim-uint64", "sim-top"])
def test_b11_a_lost_device_fails_what_is_in_flight_and_all_that_follows(name: str) -> None:
    device = under_test(name)
    with device.host(SIZE, 0) as host:
        tensor = device.tensor(SIZE, 1)
        gate = shut(device)
        pending = device.save(tensor, host)
        sim_of(device.backend).device.lost = True
        gate.set()
        with pytest.raises(DeviceLost):
            pending.wait(30)
        with pytest.raises(DeviceLost):
            device.finish(device.save(tensor, host))


# --- B12: zero sizes, empty batches, wrong direction


@pytest.mark.parametrize("name", ["cpu", "sim-int64", "sim-uint64", "sim-top"])
def test_b12_an_empty_batch_and_one_of_empty_copies_are_done_at_once(name: str) -> None:
    device = DeviceUnderTest.named(name)
    before = device.pool.leased
    for batch in ([], [(0, 0, 0)], [(1, 2, 0), (2**64 - 1, 2**64 - 1, 0)]):
        completion = device.submit("d2h", batch)
        assert completion.done()
        assert completion.wait(0)
    assert device.pool.leased == before


def test_b12_an_empty_copy_among_others_never_reaches_the_driver() -> None:
    device = under_test("sim-int64")
    with device.host(2 * SIZE, 0) as host:
        tensor = device.tensor(2 * SIZE, 7)
        base = device.address(tensor)
        device.swap("d2h", [(base, host.alias, 0), (base, host.alias, SIZE), (base, host.alias, 0)])
        assert (host.array[:SIZE] == 7).all()
    assert sim_of(device.backend).stats()["descriptors"] == 1


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_b12_the_direction_is_what_the_caller_says_and_a_wrong_one_is_an_error(direction: Any) -> None:
    device = under_test("sim-int64")
    with device.host(SIZE, 1) as host:
        tensor = device.tensor(SIZE, 2)
        base = device.address(tensor)
        swapped = (host.alias, base, SIZE) if direction == "d2h" else (base, host.alias, SIZE)
        with pytest.raises(SwapFailed):
            device.swap(direction, [swapped])
        assert (host.array == 1).all()
        assert (device.read(tensor) == 2).all()


def test_b12_a_pair_of_host_addresses_is_no_swap() -> None:
    device = under_test("sim-int64")
    with device.host(SIZE, 1) as one, device.host(SIZE, 2) as two, pytest.raises(SwapFailed):
        device.swap("d2h", [(one.alias, two.alias, SIZE)])
