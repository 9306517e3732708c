"""The cpu backend as a device in miniature: streams in order, events, completions that are never early."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ecoffload.backend import Completion
from ecoffload.cpu.backend import CpuBackend
from ecoffload.cpu.plugin import ecoffload_register_backend
from ecoffload.descriptors import DescriptorPool
from ecoffload.errors import SwapFailed
from ecoffload.host_queue import CALLER, HostEvent, HostQueue, QueuedCompletion
from ecoffload.registry import get_backend
from ecoffload.submission import submit_batch

SIZE = 1 << 12


@pytest.fixture
def backend() -> Iterator[CpuBackend]:
    backend = CpuBackend(ecoffload_register_backend())
    yield backend
    backend.close()


def copy(backend: CpuBackend, src: torch.Tensor, dst: torch.Tensor, stream: object, pieces: int = 1) -> Completion:
    batch, each = DescriptorPool().lease(), src.numel() // pieces
    for i in range(pieces):
        batch.append(src.data_ptr() + i * each, dst.data_ptr() + i * each, each)
    return submit_batch(backend, batch, "h2d", stream, keep=(src, dst))


def filled(value: int, nbytes: int = SIZE) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_it_is_found_like_any_other_backend() -> None:
    backend = get_backend("cpu")
    assert isinstance(backend, CpuBackend)
    assert backend.spec.encoding.dtype == "int64"


def test_on_the_callers_own_stream_a_copy_has_ended_when_submit_returns(backend: CpuBackend) -> None:
    src, dst = filled(3), filled(0)
    completion = copy(backend, src, dst, CALLER)
    assert torch.equal(src, dst)
    assert completion.done()


def test_a_completion_is_not_early_on_a_delayed_stream(backend: CpuBackend) -> None:
    stream = backend.ops.stream()
    backend.ops.delay(stream, 50)
    src, dst = filled(3), filled(0)
    completion = copy(backend, src, dst, stream)
    assert not completion.done()
    assert completion.wait(0.001) is False
    assert (dst == 0).all()
    while not completion.done():
        time.sleep(0.001)
    assert torch.equal(src, dst)


def test_copies_of_one_stream_run_in_order(backend: CpuBackend) -> None:
    stream = backend.ops.stream()
    backend.ops.delay(stream, 20)
    dst, seen = filled(0), []
    sources = [filled(value) for value in range(20)]
    for value in range(1, 20):
        copy(backend, sources[value], dst, stream)  # nobody keeps the completion, nor the pool
        stream.put(lambda: seen.append(int(dst[0])))
    backend.ops.synchronize(stream)
    assert seen == list(range(1, 20))


def test_an_event_orders_one_stream_behind_another(backend: CpuBackend) -> None:
    ops = backend.ops
    first, second = ops.stream(), ops.stream()
    ops.delay(first, 40)
    src, middle, dst = filled(7), filled(0), filled(0)
    copy(backend, src, middle, first)
    event = ops.event()
    ops.record(event, first)
    assert not ops.query(event)
    ops.wait(second, event)
    copy(backend, middle, dst, second).wait()
    assert (dst == 7).all()
    assert ops.query(event)


def test_without_the_event_the_order_is_not_given(backend: CpuBackend) -> None:
    ops = backend.ops
    first, second = ops.stream(), ops.stream()
    ops.delay(first, 40)
    middle, dst = filled(0), filled(0)
    late = copy(backend, filled(7), middle, first)
    copy(backend, middle, dst, second).wait()
    assert (dst == 0).all(), "the control: what the event is there to prevent"
    late.wait()


def test_a_stream_blocked_on_a_completion_waits_for_it_and_the_host_does_not(backend: CpuBackend) -> None:
    first, second = backend.ops.stream(), backend.ops.stream()
    backend.ops.delay(first, 40)
    middle, dst = filled(0), filled(0)
    completion = copy(backend, filled(7), middle, first)
    completion.block(second)
    assert not completion.done()
    copy(backend, middle, dst, second).wait()
    assert (dst == 7).all()


def test_the_caller_blocked_on_a_completion_waits_for_it(backend: CpuBackend) -> None:
    stream = backend.ops.stream()
    backend.ops.delay(stream, 30)
    src, dst = filled(7), filled(0)
    copy(backend, src, dst, stream).block(CALLER)
    assert (dst == 7).all()


def test_an_event_that_was_never_recorded_has_happened(backend: CpuBackend) -> None:
    event = backend.ops.event()
    assert backend.ops.query(event)
    backend.ops.synchronize(event)
    backend.ops.record(event, CALLER)
    assert backend.ops.query(event)


def test_who_waited_for_a_record_waits_for_that_one_though_the_event_is_recorded_again() -> None:
    event, first, second, third = HostEvent(), HostQueue(), HostQueue(), HostQueue()
    order: list[str] = []
    first.delay(30)
    first.put(lambda: order.append("first"))
    first.record(event)
    second.wait(event)
    second.put(lambda: order.append("second"))
    third.delay(90)
    third.record(event)
    second.synchronize()
    assert order == ["first", "second"]
    assert not event.query()
    for queue in (first, second, third):
        queue.close()


@pytest.mark.parametrize("pieces", [1, 4, 512])
def test_large_batches_are_shared_out_and_byte_exact(backend: CpuBackend, pieces: int) -> None:
    backend._helpers = 3
    nbytes = 512 * 7168
    src = torch.from_numpy(np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8))
    for stream in (CALLER, backend.ops.stream()):
        dst = filled(0, nbytes)
        copy(backend, src, dst, stream, pieces).wait()
        assert torch.equal(src, dst)
    assert backend._pool is not None, "helpers took part"


def test_many_threads_may_submit_at_once(backend: CpuBackend) -> None:
    backend._helpers = 1
    wrong: list[int] = []

    def work(value: int) -> None:
        for _ in range(20):
            src, dst = filled(value, 600 << 10), filled(0, 600 << 10)
            copy(backend, src, dst, CALLER)
            if not torch.equal(src, dst):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_a_copy_raises_on_its_thread_reaches_whoever_waits_and_poisons_nothing_else() -> None:
    queue = HostQueue()
    bad = QueuedCompletion(queue, lambda: 1 // 0)
    good = QueuedCompletion(queue, lambda: None)
    for _ in range(2):
        with pytest.raises(SwapFailed, match="ZeroDivisionError") as caught:
            bad.wait(30)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert good.wait(30)
    queue.close()


def test_a_closed_queue_has_run_what_it_was_given() -> None:
    queue, ran = HostQueue(), []
    queue.delay(20)
    queue.put(lambda: ran.append(1))
    queue.close()
    queue.close()
    assert ran == [1]


def test_a_dropped_stream_ends_its_thread(backend: CpuBackend) -> None:
    stream = backend.ops.stream()
    stream.synchronize()
    stream.put(lambda: None)
    thread = stream._thread
    assert thread is not None
    del stream
    thread.join(30)
    assert not thread.is_alive()


def test_one_descriptor_a_submit_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOFFLOAD_PER_COPY", "1")
    backend = CpuBackend(ecoffload_register_backend())
    counts: list[int] = []
    plain = backend._copy
    backend._copy = lambda *args: (counts.append(args[3]), plain(*args))[1]  # type: ignore[method-assign]
    src, dst = filled(5), filled(0)
    copy(backend, src, dst, CALLER, 8)
    assert counts == [1] * 8
    assert torch.equal(src, dst)
    assert backend.stats()["per_copy"] is True
