"""The simulated devices: memory where it is said to lie, stricter than a driver, late, and failing when asked to."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecoffload import ConfigError, DeviceLost, EncoderCache, RegistrationRefused, SwapFailed, get_backend
from ecoffload.testing.devices import sim_of, simulated
from ecoffload.testing.harness import PAGE, DeviceUnderTest, HostBuffer, random_bytes
from ecoffload.testing.strategies import addresses, batches, offsets, sizes

NAMES = ("sim-int64", "sim-uint64", "sim-top")


@pytest.fixture(params=NAMES)
def device(request: pytest.FixtureRequest) -> DeviceUnderTest:
    return DeviceUnderTest(simulated(request.param))


def wait_for(condition: Callable[[], bool], device: DeviceUnderTest) -> None:
    device.ops.synchronize()
    gc.collect()
    device.tensor(1)  # space returns when the next tensor is made
    device.ops.synchronize()
    device.tensor(1)
    assert condition()


def test_memory_lies_where_the_name_says() -> None:
    first = {name: simulated(name).ops for name in NAMES}
    tensors = {name: ops.empty(1 << 20) for name, ops in first.items()}
    at = {name: ops.address_of(tensors[name]) for name, ops in first.items()}
    assert at["sim-int64"] == 0xFFFF_D556_B640_0000
    assert at["sim-uint64"] < 2**63 < at["sim-uint64"] + (1 << 20)
    assert at["sim-top"] + (1 << 20) == 2**64


def test_memory_returns_when_the_last_view_is_gone_and_not_before(device: DeviceUnderTest) -> None:
    memory = sim_of(device.backend).device.memory
    tensor = device.tensor(1 << 20, 7)
    view = tensor[6:16].view(torch.int16)
    del tensor
    wait_for(lambda: memory.allocated >= 1 << 20, device)
    assert (view == 0x0707).all()
    del view
    wait_for(lambda: memory.allocated < 1 << 20, device)


def test_memory_that_is_full_says_so_and_serves_again_after_a_free(device: DeviceUnderTest) -> None:
    whole = sim_of(device.backend).memory
    with pytest.raises(torch.OutOfMemoryError, match="simulated device out of memory"):
        device.ops.empty(whole + 1)
    half = device.ops.empty(whole // 2 + 1)
    with pytest.raises(torch.OutOfMemoryError):
        device.ops.empty(whole // 2 + 1)
    del half
    assert device.ops.empty(whole // 2 + 1).numel() == whole // 2 + 1


@given(steps=st.lists(st.one_of(st.integers(1, 5000), st.integers(-20, -1)), max_size=60))
@settings(max_examples=15, deadline=None)
def test_allocations_never_overlap_and_all_of_them_come_back(steps: list[int]) -> None:
    backend = simulated("sim-int64")
    memory = sim_of(backend).device.memory
    held: list[Any] = []
    for step in steps:
        if step > 0:
            held.append(backend.ops.empty(step))
        elif held:
            held.pop(step % len(held))
        ranges = sorted((backend.ops.address_of(t), t.numel()) for t in held)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(ranges))
    held.clear()
    wait_for(lambda: memory.allocated <= 512, DeviceUnderTest(backend))


@pytest.mark.parametrize(
    "where",
    ["freed", "past its allocation", "swapped", "across registrations", "not its alias"],
)
def test_a_copy_that_a_driver_may_let_pass_is_refused(where: str) -> None:
    device = DeviceUnderTest(simulated("sim-uint64"))
    tensor = device.tensor(PAGE, 1)
    base = device.address(tensor)
    host = HostBuffer(device.backend, 2 * PAGE, register=False)
    host.array[:] = 0  # buffers are lent again as they are
    one, two = (device.backend.register(host.address + i * PAGE, PAGE) for i in range(2))
    bad = {
        "freed": (base, one.alias, PAGE),
        "past its allocation": (base + 1, one.alias, PAGE),
        "swapped": (one.alias, base, PAGE),
        "across registrations": (base, two.alias - 8, 16),
        "not its alias": (base, host.address, PAGE),
    }[where]
    if where == "freed":
        del tensor
        wait_for(lambda: True, device)
    with pytest.raises(SwapFailed):
        device.swap("d2h", [bad])
    assert not host.array.any()


@pytest.mark.parametrize("name", ["sim-int64", "sim-uint64"])
def test_registrations_are_kept_in_a_list_of_the_devices_own(name: str) -> None:
    backend = simulated(name)
    host = HostBuffer(backend, 2 * PAGE, register=False)
    made = backend.register(host.address, 2 * PAGE)
    assert (made.alias == made.address) is (name == "sim-int64")
    with pytest.raises(RegistrationRefused) as caught:
        backend.register(host.address + PAGE, PAGE)
    assert caught.value.code == 712
    backend.unregister(made)
    with pytest.raises(RegistrationRefused):
        backend.unregister(made)


def test_a_fault_strikes_once_and_the_descriptor_that_it_was_meant_for() -> None:
    device = DeviceUnderTest(simulated("sim-int64"))
    with device.host(4096, 0) as host:
        tensor = device.tensor(4096, 1)
        device.inject("submit", 3)
        device.finish(device.save(tensor, host))
        pairs = [(device.address(tensor) + i, host.alias + i, 1) for i in range(4)]
        with pytest.raises(SwapFailed) as caught:
            device.submit("d2h", pairs)
        assert caught.value.index == 3
        device.swap("d2h", pairs)


def test_a_lost_device_says_so_everywhere_until_it_is_reset(device: DeviceUnderTest) -> None:
    sim = sim_of(device.backend).device
    with device.host(4096, 0) as host:
        tensor = device.tensor(4096, 1)
        device.inject("lost")
        for _ in range(2):
            with pytest.raises(DeviceLost):
                device.finish(device.save(tensor, host))
            with pytest.raises(DeviceLost):
                device.ops.query(device.ops.event())
        sim.reset()
        device.finish(device.save(tensor, host))
        assert (host.array == 1).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_simulated_device_is_reached_by_name_only(name: str) -> None:
    assert get_backend(name) is get_backend(name)
    assert get_backend(device=name) is get_backend(name)
    assert simulated(name) is not get_backend(name)
    assert get_backend(name).spec.test_only


def test_a_backend_that_is_not_simulated_has_no_handles() -> None:
    with pytest.raises(ConfigError, match="'cpu'"):
        sim_of(get_backend("cpu"))
    with pytest.raises(ConfigError):
        simulated("sim-int64").ops.address_of(torch.zeros(3))


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_runs_on_addresses_at_and_above_two_to_the_63(name: str) -> None:
    backend = get_backend(name)
    data = torch.from_numpy(random_bytes(40_001, 1))
    with EncoderCache("1MiB", device=name, backend=name) as cache:
        tensor = backend.ops.empty(40_001).copy_(data)
        assert cache.put("picture", tensor)
        assert cache.flush()
        loaded = cache.get("picture")
        backend.ops.synchronize()
        assert loaded is not None
        assert backend.ops.address_of(loaded) + 40_001 > 2**63
        assert torch.equal(loaded, data)


# --- strategies


@given(address=addresses(64))
def test_addresses_leave_room_for_the_bytes_asked(address: int) -> None:
    assert 0 <= address <= 2**64 - 64


@given(offset=offsets(4096), size=sizes(1000))
def test_offsets_and_sizes_stay_within_their_limits(offset: int, size: int) -> None:
    assert 0 <= offset <= 4096
    assert 1 <= size <= 1000


@given(batch=batches(1 << 12, alignment=4))
def test_batches_stay_inside_their_areas_and_write_no_byte_twice(batch: list[Any]) -> None:
    written = np.zeros(1 << 12, np.uint8)
    for src, dst, size in batch:
        assert size > 0
        assert src % 4 == dst % 4 == size % 4 == 0
        assert src + size <= 1 << 12
        written[dst : dst + size] += 1
    assert written.max(initial=0) <= 1
