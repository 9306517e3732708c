"""Asked: that a backend serves several threads, closes twice, and closes with work in flight."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch

from ecoffload.testing.harness import DeviceUnderTest, HostBuffer, asked, random_bytes
from ecoffload.testing.plugin import scaled


@asked("lifecycle.close-twice")
def test_closing_twice_is_closing_once(device: DeviceUnderTest) -> None:
    other = device.fresh()
    other.backend.close()
    other.backend.close()


@asked("lifecycle.close-after-use")
def test_closing_after_a_swap_leaves_other_objects_of_the_device_working(device: DeviceUnderTest) -> None:
    other = device.fresh()
    tensor = other.tensor(4096, 5)
    with other.host(4096, 0) as host:
        other.finish(other.save(tensor, host))
        assert (host.array == 5).all()
    other.backend.close()
    tensor = device.tensor(4096, 6)
    with device.host(4096, 0) as host:
        device.finish(device.save(tensor, host))
        assert (host.array == 6).all()


@asked("lifecycle.close-in-flight")
def test_closing_with_work_in_flight_waits_for_it(device: DeviceUnderTest) -> None:
    other = device.fresh()
    data = random_bytes(1 << 16, 1)
    buffer = HostBuffer(other.backend, 1 << 16, register=other.capabilities.host_memory == "register")
    tensor = other.tensor(1 << 16, data)
    other.hold(other.side)
    completion = other.save(tensor, buffer)
    other.backend.close()
    other.finish(completion)
    assert np.array_equal(buffer.array, data)


@asked("lifecycle.threads")
def test_several_threads_swap_at_the_same_time(device: DeviceUnderTest) -> None:
    threads, rounds, size, pieces = 4, scaled(6, 2), device.aligned(1000), 16
    nbytes = pieces * size

    def work(number: int) -> bool:
        ok = True
        stream = device.ops.stream()
        with device.host(nbytes, 0) as up, device.host(nbytes, 0) as down:
            tensor = device.tensor(nbytes, 0)
            base = device.address(tensor)
            for i in range(rounds):
                data = random_bytes(nbytes, 100 * number + i)
                up.array[:] = data
                order = [(k * 7) % pieces for k in range(pieces)]
                loaded = device.submit("h2d", [(up.alias + k * size, base + k * size, size) for k in order], stream)
                loaded.block(stream)
                saved = device.submit("d2h", [(base + k * size, down.alias + k * size, size) for k in order], stream)
                device.finish(saved)
                device.finish(loaded)
                ok = ok and bool(np.array_equal(down.array, data))
        return ok

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(work, range(threads)))
    assert device.pool.leased == 0


@asked("lifecycle.empty-tensors")
def test_tensors_made_for_loads_have_the_asked_shape_and_memory_of_their_own(device: DeviceUnderTest) -> None:
    specs = [((3, 5), torch.float32, 60), ((7,), torch.bfloat16, 14), ((2, 0), torch.uint8, 0), ((1,), torch.int64, 8)]
    tensors = device.ops.empty_tensors(specs, device.ops.stream())
    assert [tuple(t.shape) for t in tensors] == [shape for shape, _, _ in specs]
    assert [t.dtype for t in tensors] == [dtype for _, dtype, _ in specs]
    ranges = sorted((device.address(t), t.nbytes) for t in tensors if t.nbytes)
    assert all(a + n <= b for (a, n), (b, _) in pairwise(ranges))


@asked("lifecycle.owns")
def test_the_device_knows_its_own_tensors(device: DeviceUnderTest) -> None:
    assert device.ops.owns(device.tensor(16))
    assert device.ops.owns(device.tensor(16)[3:])
    if device.spec.device_type != "cpu":
        assert not device.ops.owns(torch.zeros(16))
