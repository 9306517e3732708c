"""Asked: that a completion says "done" when the bytes are there, not before, and that descriptors live long enough."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np

from ecoffload.testing.conformance.conditions import asynchronous, snapshots, streams_and_asynchronous
from ecoffload.testing.harness import DeviceUnderTest, asked, random_bytes


@asked("completion.never-early")
def test_a_completion_is_not_done_before_the_bytes_are_there(device: DeviceUnderTest) -> None:
    nbytes = device.aligned(1 << 20)
    data = random_bytes(nbytes, 1)
    tensor = device.tensor(nbytes, data)
    for held in (True, False, False, False):
        with device.host(nbytes, 0) as host:
            if held:
                device.hold(device.side)
            completion = device.save(tensor, host)
            end = time.monotonic() + device.limit_s
            while not completion.done():
                assert time.monotonic() < end, "the swap did not end"
            at_done = host.array.copy()
            assert np.array_equal(at_done, data)


@asked("completion.load-never-early")
def test_a_load_is_not_done_before_the_bytes_are_there(device: DeviceUnderTest) -> None:
    nbytes = device.aligned(1 << 20)
    data = random_bytes(nbytes, 2)
    tensor = device.tensor(nbytes, 0)
    with device.host(nbytes, data) as host, device.host(nbytes, 0) as back:
        device.hold(device.side)
        device.finish(device.load(host, tensor))
        # The source may change from here on: whoever was told "done" reuses it.
        host.array[:] = 0xEE
        device.finish(device.save(tensor, back))
        assert np.array_equal(back.array, data)


@asked("completion.pending", when=streams_and_asynchronous)
def test_a_submit_returns_before_a_held_back_stream_has_run(device: DeviceUnderTest) -> None:
    def returned_early() -> bool:
        device.hold(device.side)
        completion = device.save(tensor, host)
        early = not completion.done() and not completion.wait(0) and not completion.wait(0.001)
        device.finish(completion)
        return early

    tensor = device.tensor(4096, 1)
    with device.host(4096, 0) as host:
        assert any(returned_early() for _ in device.attempts())


@asked("completion.stays-done")
def test_a_completion_stays_done(device: DeviceUnderTest) -> None:
    tensor = device.tensor(4096, 1)
    with device.host(4096, 0) as host:
        completion = device.save(tensor, host)
        device.finish(completion)
        for _ in range(3):
            assert completion.done()
            assert completion.wait(0)
            assert completion.wait()


@asked("completion.in-order")
def test_a_later_swap_of_a_stream_is_not_done_before_an_earlier_one(device: DeviceUnderTest) -> None:
    with device.host(4096, 0) as host:
        tensor = device.tensor(4096, 1)
        device.hold(device.side)
        completions = [device.save(tensor, host) for _ in range(4)]
        device.finish(completions[-1])
        assert all(completion.done() for completion in completions)


@asked("completion.block-after-done")
def test_blocking_a_stream_on_a_finished_swap_costs_it_nothing(device: DeviceUnderTest) -> None:
    with device.host(4096, 0) as host:
        tensor = device.tensor(4096, 3)
        first = device.save(tensor, host)
        device.finish(first)
        stream = device.ops.stream()
        first.block(stream)
        device.finish(device.save(tensor, host, stream=stream))
        assert (host.array == 3).all()


@asked("completion.lease-held", when=asynchronous)
def test_the_descriptors_are_kept_until_the_swap_has_ended(device: DeviceUnderTest) -> None:
    tensor = device.tensor(4096, 1)
    with device.host(4096, 0) as host:
        device.hold(device.side)
        completion = device.save(tensor, host)
        kept = device.pool.leased  # the same whether it has ended or not: nobody has asked it
        device.finish(completion)
        assert kept == (0 if device.capabilities.snapshots_descriptors else 1)
        assert device.pool.leased == 0


@asked("completion.pool-reuse")
def test_batches_that_follow_each_other_at_once_do_not_mix(device: DeviceUnderTest) -> None:
    rounds, size = 24, device.aligned(512)
    data = random_bytes(rounds * size, 4)
    tensor = device.tensor(rounds * size, data)
    base = device.address(tensor)
    with device.host(rounds * size, 0) as host:
        device.hold(device.side)
        completions = [device.submit("d2h", [(base + i * size, host.alias + i * size, size)]) for i in range(rounds)]
        for completion in completions:
            device.finish(completion)
        assert np.array_equal(host.array, data)


@asked("completion.snapshot", when=snapshots)
def test_descriptors_may_be_overwritten_right_after_the_submit(device: DeviceUnderTest) -> None:
    count, size = 8, device.aligned(256)
    data = random_bytes(count * size, 5)
    tensor = device.tensor(2 * count * size, np.concatenate([data, np.zeros_like(data)]))
    base = device.address(tensor)
    with device.host(2 * count * size, 0) as host:
        words = np.empty((3, count), np.uint64)
        at = words.ctypes.data
        view = SimpleNamespace(count=count, src=at, dst=at + 8 * count, size=at + 16 * count, first=0)
        stream = device.ops.stream()
        for _ in device.attempts():
            host.array[:] = 0
            for i in range(count):
                words[:, i] = (base + i * size, host.alias + i * size, size)
            device.hold(stream)
            completion = device.backend.submit(view, "d2h", stream)
            # Valid descriptors of another copy, so that a late reader moves wrong bytes and does not crash the process.
            for i in range(count):
                words[:, i] = (base + (count + i) * size, host.alias + (count + i) * size, size)
            in_time = completion is not None and not completion.done()
            if completion is not None:
                device.finish(completion)
            assert np.array_equal(host.array[: count * size], data)
            assert not host.array[count * size :].any()
            if in_time:
                break
