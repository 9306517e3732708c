"""Asked: that exactly the bytes of each descriptor move, in both directions, and no others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from ecoffload.backend import Direction
from ecoffload.testing.conformance.conditions import any_alignment, registers
from ecoffload.testing.harness import PAGE, DeviceUnderTest, HostBuffer, asked, random_bytes
from ecoffload.testing.plugin import scaled
from ecoffload.testing.strategies import Descriptor, batches, examples

DIRECTIONS: tuple[Direction, ...] = ("d2h", "h2d")
GUARD = 64
UNTOUCHED = 0xAB


def run(device: DeviceUnderTest, direction: Direction, descriptors: list[Descriptor], seed: int = 1) -> None:
    """Copy between the two scratch areas and compare every byte of the destination, also those not named."""
    scratch = device.scratch
    data = random_bytes(scratch.nbytes, seed)
    host, tensor = scratch.host, scratch.tensor
    base = device.address(tensor)
    expected = np.full(scratch.nbytes, UNTOUCHED, np.uint8)
    for src, dst, size in descriptors:
        expected[dst : dst + size] = data[src : src + size]
    if direction == "d2h":
        device.write(tensor, data)
        host.array[:] = UNTOUCHED
        device.swap("d2h", [(base + src, host.alias + dst, size) for src, dst, size in descriptors])
        found: NDArray[np.uint8] = host.array
    else:
        host.array[:] = data
        device.write(tensor, np.full(scratch.nbytes, UNTOUCHED, np.uint8))
        device.swap("h2d", [(host.alias + src, base + dst, size) for src, dst, size in descriptors])
        found = device.read(tensor)
    wrong = np.flatnonzero(found != expected)
    assert not len(wrong), f"{len(wrong)} bytes differ, the first at {wrong[0]} of the destination"


@asked("copies.sizes")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_descriptor_moves_its_bytes_and_no_others(device: DeviceUnderTest, direction: Direction) -> None:
    for size in (1, 2, 4, 8, 64, 512, 4096, 65536):
        size = device.aligned(size)
        run(device, direction, [Descriptor(device.aligned(GUARD), device.aligned(2 * GUARD), size)], seed=size)


@asked("copies.odd-sizes", when=any_alignment)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_odd_sizes_at_odd_offsets_move_their_bytes_and_no_others(device: DeviceUnderTest, direction: Direction) -> None:
    for size in (1, 3, 7, 63, 65, 511, 4095, 4097, 65537, 100_003):
        run(device, direction, [Descriptor(4097, 1025, size)], seed=size)


@asked("copies.batches", when=any_alignment)
@pytest.mark.parametrize("direction", DIRECTIONS)
@given(descriptors=batches())
@examples(25)
def test_any_batch_moves_its_bytes_and_no_others(
    device: DeviceUnderTest, direction: Direction, descriptors: list[Descriptor]
) -> None:
    run(device, direction, descriptors)


@asked("copies.many-mib")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_many_mib_arrive_whole(device: DeviceUnderTest, direction: Direction) -> None:
    nbytes = device.aligned(scaled(16 << 20, 1 << 20) + 24)
    data = random_bytes(nbytes, 3)
    with device.host(nbytes, data if direction == "h2d" else UNTOUCHED) as host:
        tensor = device.tensor(nbytes, UNTOUCHED if direction == "h2d" else data)
        if direction == "h2d":
            device.finish(device.load(host, tensor))
            assert np.array_equal(device.read(tensor), data)
        else:
            device.finish(device.save(tensor, host))
            assert np.array_equal(host.array, data)


def _counts(device: DeviceUnderTest, direction: Direction) -> list[int]:
    limit = device.backend.limits(direction).max_descriptors
    if limit is None:
        return [1, 2, 3, 31, 32, 33, scaled(1000, 50)]
    return sorted({1, 2, max(1, limit - 1), limit, limit + 1, 2 * limit + 1})


@asked("copies.counts")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_batches_of_one_to_above_the_limit_arrive_whole(device: DeviceUnderTest, direction: Direction) -> None:
    size = device.aligned(3)
    stride = size + device.alignment
    for count in _counts(device, direction):
        if count * stride > device.scratch.nbytes:
            size, stride = device.alignment, device.alignment
            count = min(count, device.scratch.nbytes // stride)
        # Destinations run against the sources, so that the last descriptor matters as much as the first.
        descriptors = [Descriptor(i * stride, (count - 1 - i) * stride, size) for i in range(count)]
        run(device, direction, descriptors, seed=count)


@asked("copies.mixed-sizes")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_small_and_large_descriptors_mix(device: DeviceUnderTest, direction: Direction) -> None:
    a = device.alignment
    sizes = [a, 1024 * a, 2 * a, a, 8192 * a, 3 * a, 512 * a, a]
    sizes = [s for s in sizes if s <= device.scratch.nbytes // 16]
    at, descriptors = 0, []
    for size in sizes:
        descriptors.append(Descriptor(at, at + a, size))
        at += size + 2 * a
    run(device, direction, descriptors)


@asked("copies.one-source-many-destinations")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_source_may_go_to_many_destinations(device: DeviceUnderTest, direction: Direction) -> None:
    size = device.aligned(100)
    run(device, direction, [Descriptor(device.alignment, i * 2 * size, size) for i in range(7)])


@asked("copies.last-byte")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_last_bytes_of_an_allocation_can_be_copied(device: DeviceUnderTest, direction: Direction) -> None:
    size, end = device.alignment, device.scratch.nbytes
    run(device, direction, [Descriptor(end - size, 0, size), Descriptor(0, end - size, size)])


@asked("copies.per-copy")
def test_the_batch_path_and_the_single_copy_path_give_the_same_bytes(device: DeviceUnderTest) -> None:
    backend, size = device.backend, device.aligned(48)
    descriptors = [Descriptor(i * 2 * size, (31 - i) * size, size) for i in range(32)]
    before = backend.per_copy
    for per_copy in (False, True):
        backend.per_copy = device.inner.per_copy = per_copy
        try:
            for direction in DIRECTIONS:
                run(device, direction, descriptors)
        finally:
            backend.per_copy = device.inner.per_copy = before


@asked("copies.empty-batch")
def test_an_empty_batch_is_complete_at_once(device: DeviceUnderTest) -> None:
    for direction in DIRECTIONS:
        completion = device.submit(direction, [])
        assert completion.done()
        assert completion.wait(0)
        completion.block(device.side)
    assert device.pool.leased == 0


@asked("copies.zero-sizes")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_descriptors_of_size_zero_are_left_out(device: DeviceUnderTest, direction: Direction) -> None:
    size = device.aligned(40)
    run(device, direction, [Descriptor(0, 0, 0), Descriptor(0, size, size), Descriptor(8, 8, 0)])
    run(device, direction, [Descriptor(0, 0, 0)])


@asked("copies.order-on-a-stream")
def test_of_two_swaps_on_one_stream_the_later_one_stays(device: DeviceUnderTest) -> None:
    nbytes = device.aligned(70_000)
    with device.host(nbytes, 1) as first, device.host(nbytes, 2) as second:
        tensor = device.tensor(nbytes, 0)
        device.hold(device.side)
        one = device.load(first, tensor)
        two = device.load(second, tensor)
        device.finish(two)
        device.finish(one)
        assert (device.read(tensor) == 2).all()


@asked("copies.current-stream")
def test_swaps_run_on_the_callers_own_stream_too(device: DeviceUnderTest) -> None:
    nbytes = device.aligned(8 * 8)
    data = random_bytes(nbytes, 5)
    with device.host(nbytes, data) as source, device.host(nbytes, 0) as back:
        tensor = device.tensor(nbytes, 0)
        stream = device.ops.current_stream()
        device.finish(device.load(source, tensor, stream=stream))
        device.finish(device.save(tensor, back, stream=stream))
        assert np.array_equal(back.array, data)


@asked("copies.both-directions")
def test_saves_and_loads_run_at_the_same_time(device: DeviceUnderTest) -> None:
    nbytes = device.aligned(300_000)
    up, down = random_bytes(nbytes, 6), random_bytes(nbytes, 7)
    with device.host(nbytes, up) as source, device.host(nbytes, 0) as target:
        saved, loaded = device.tensor(nbytes, down), device.tensor(nbytes, 0)
        completions = [
            device.save(saved, target, stream=device.ops.stream()),
            device.load(source, loaded, stream=device.ops.stream()),
        ]
        for completion in completions:
            device.finish(completion)
        assert np.array_equal(target.array, down)
        assert np.array_equal(device.read(loaded), up)


@asked("copies.registration-edge", when=registers)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_neighbours_on_both_sides_of_a_registration_edge_arrive(device: DeviceUnderTest, direction: Direction) -> None:
    backend, half = device.backend, PAGE
    host = HostBuffer(backend, 2 * half, register=False)
    data = random_bytes(2 * half, 8)
    registrations = [backend.register(host.address, half), backend.register(host.address + half, half)]
    try:
        host.array[:] = data if direction == "h2d" else UNTOUCHED
        tensor = device.tensor(2 * half, data if direction == "d2h" else UNTOUCHED)
        base = device.address(tensor)
        pairs = [(registrations[0].alias, base), (registrations[1].alias, base + half)]
        device.swap(direction, [(a, b, half) if direction == "h2d" else (b, a, half) for a, b in pairs])
        found = device.read(tensor) if direction == "h2d" else host.array
        assert np.array_equal(found, data)
    finally:
        for registration in reversed(registrations):
            backend.unregister(registration)
