"""Asked: that swaps keep their place among work on other streams, where a device has streams.

Producers and consumers are swaps themselves, since every backend can make those. Each test of an order has a negative
control on devices whose submit does not block: without the wait, the wrong bytes must show, or the test proves nothing.
"""

from __future__ import annotations

import time

import numpy as np

from ecoffload.testing.conformance.conditions import (
    asynchronous,
    single_queue,
    streams,
    streams_and_asynchronous,
    wants_record_stream,
)
from ecoffload.testing.harness import DeviceUnderTest, asked

OLD, NEW, NEWER = 1, 2, 3
NBYTES = 16 << 10


def _save_after_producer(device: DeviceUnderTest, *, wait: bool) -> int:
    """A producer writes NEW to a tensor late on one stream; a save on another. The byte that was saved."""
    with device.host(NBYTES, NEW) as source, device.host(NBYTES, 0) as saved:
        tensor = device.tensor(NBYTES, OLD)
        compute, side = device.ops.stream(), device.ops.stream()
        device.hold(compute)
        produced = device.load(source, tensor, stream=compute)
        if wait:
            produced.block(compute)  # where the copy runs beside its stream, this puts its end on it
            device.after(side, compute)
        completion = device.save(tensor, saved, stream=side)
        device.finish(completion)
        found = np.unique(saved.array)
        device.finish(produced)
    return int(found[0]) if len(found) == 1 else -1


@asked("ordering.save-after-producer", when=streams)
def test_a_save_waits_for_the_stream_that_produces_its_source(device: DeviceUnderTest) -> None:
    assert _save_after_producer(device, wait=True) == NEW


@asked("ordering.save-after-producer-control", when=streams_and_asynchronous)
def test_without_the_wait_a_save_overtakes_the_producer(device: DeviceUnderTest) -> None:
    assert any(_save_after_producer(device, wait=False) == OLD for _ in device.attempts())


def _consumer_after_load(device: DeviceUnderTest, *, wait: bool) -> int:
    """A load lands late on one stream; a consumer on another reads its tensor. The byte that it read."""
    with device.host(NBYTES, NEW) as source, device.host(NBYTES, 0) as seen:
        tensor = device.tensor(NBYTES, OLD)
        side, compute = device.ops.stream(), device.ops.stream()
        device.hold(side)
        loaded = device.load(source, tensor, stream=side)
        if wait:
            loaded.block(compute)
        consumed = device.save(tensor, seen, stream=compute)
        device.finish(consumed)
        found = np.unique(seen.array)
        device.finish(loaded)
    return int(found[0]) if len(found) == 1 else -1


@asked("ordering.consumer-after-load", when=streams)
def test_a_consumer_blocked_on_a_load_sees_its_bytes(device: DeviceUnderTest) -> None:
    assert _consumer_after_load(device, wait=True) == NEW


@asked("ordering.consumer-after-load-control", when=streams_and_asynchronous)
def test_without_the_block_a_consumer_overtakes_the_load(device: DeviceUnderTest) -> None:
    assert any(_consumer_after_load(device, wait=False) == OLD for _ in device.attempts())


def _load_over_reader(device: DeviceUnderTest, *, wait: bool) -> int:
    """A reader of a tensor runs late on one stream; a load into the tensor on another. The byte that was read."""
    with device.host(NBYTES, NEW) as source, device.host(NBYTES, 0) as seen:
        tensor = device.tensor(NBYTES, OLD)
        compute, side = device.ops.stream(), device.ops.stream()
        device.hold(compute)
        read = device.save(tensor, seen, stream=compute)
        if wait:
            read.block(compute)
            device.after(side, compute)
        loaded = device.load(source, tensor, stream=side)
        device.finish(loaded)
        device.finish(read)
        found = np.unique(seen.array)
    return int(found[0]) if len(found) == 1 else -1


@asked("ordering.load-after-reader", when=streams)
def test_a_load_waits_for_the_stream_that_still_reads_its_destination(device: DeviceUnderTest) -> None:
    assert _load_over_reader(device, wait=True) == OLD


@asked("ordering.load-after-reader-control", when=streams_and_asynchronous)
def test_without_the_wait_a_load_overwrites_what_is_being_read(device: DeviceUnderTest) -> None:
    assert any(_load_over_reader(device, wait=False) == NEW for _ in device.attempts())


@asked("ordering.block-leaves-the-host-free", when=streams_and_asynchronous)
def test_blocking_a_stream_does_not_block_the_host(device: DeviceUnderTest) -> None:
    def still_running() -> bool:
        device.hold(side)
        loaded = device.load(source, tensor, stream=side)
        loaded.block(compute)
        running = not loaded.done()
        device.finish(loaded)
        return running

    tensor = device.tensor(NBYTES, OLD)
    side, compute = device.ops.stream(), device.ops.stream()
    with device.host(NBYTES, NEW) as source:
        assert any(still_running() for _ in device.attempts())


@asked("ordering.streams-are-apart", when=streams_and_asynchronous)
def test_a_held_back_stream_does_not_hold_back_another(device: DeviceUnderTest) -> None:
    def overtaken() -> bool:
        device.hold(slow)
        waiting = device.load(source, one, stream=slow)
        device.finish(device.save(two, target, stream=quick))
        overtook = not waiting.done()
        device.finish(waiting)
        return overtook

    one, two = device.tensor(NBYTES, OLD), device.tensor(NBYTES, NEWER)
    slow, quick = device.ops.stream(), device.ops.stream()
    with device.host(NBYTES, NEW) as source, device.host(NBYTES, 0) as target:
        assert any(overtaken() for _ in device.attempts())


@asked("ordering.single-queue", when=single_queue)
def test_a_single_queue_keeps_the_order_of_submits(device: DeviceUnderTest) -> None:
    with device.host(NBYTES, NEW) as source, device.host(NBYTES, 0) as target:
        tensor = device.tensor(NBYTES, OLD)
        device.hold(device.ops.stream())
        loaded = device.load(source, tensor, stream=device.ops.stream())
        loaded.block(device.ops.stream())
        saved = device.save(tensor, target, stream=device.ops.stream())
        device.finish(saved)
        device.finish(loaded)
        assert (target.array == NEW).all()


@asked("ordering.events")
def test_an_event_happens_after_what_was_enqueued_before_it(device: DeviceUnderTest) -> None:
    ops = device.ops
    with device.host(NBYTES, 0) as target:
        tensor = device.tensor(NBYTES, NEW)
        stream = ops.stream()
        device.hold(stream)
        saved = device.save(tensor, target, stream=stream)
        saved.block(stream)
        event = ops.event()
        ops.record(event, stream)
        end = time.monotonic() + device.limit_s
        while not ops.query(event):
            assert time.monotonic() < end, "the event did not happen"
        assert (target.array == NEW).all()
        assert saved.done()


@asked("ordering.delay", when=asynchronous)
def test_the_delay_that_these_tests_lean_on_holds_a_stream_back(device: DeviceUnderTest) -> None:
    ops, stream = device.ops, device.ops.stream()

    def held() -> bool:
        device.hold(stream)
        event = ops.event()
        ops.record(event, stream)
        waits = not ops.query(event)
        ops.synchronize(event)
        assert ops.query(event)
        return waits

    assert any(held() for _ in device.attempts())


@asked("ordering.record-stream", when=wants_record_stream)
def test_a_tensor_recorded_on_a_stream_outlives_its_last_name(device: DeviceUnderTest) -> None:
    ops = device.ops
    stream = ops.stream()
    with device.host(NBYTES, 0) as target:
        for _ in device.attempts():
            tensor = device.tensor(NBYTES, NEW)
            device.hold(stream)
            saved = device.save(tensor, target, stream=stream)
            ops.record_stream(tensor, stream)
            del tensor
            others = [device.tensor(NBYTES, OLD) for _ in range(8)]  # would get its memory, were it not recorded
            in_time = not saved.done()
            device.finish(saved)
            del others
            assert (target.array == NEW).all()
            if in_time:
                break
