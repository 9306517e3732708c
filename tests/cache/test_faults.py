"""What goes wrong under a cache: what was promised is there, what failed is a miss, and the next call works.

On simulated devices, one of its own for each test; a region of a few pages.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ecoffload import CacheClosed, EncoderCache, get_backend, slots, swap_blocks, swaps
from ecoffload.backend import KernelSpec, SwapBackend
from ecoffload.errors import SwapFailed
from ecoffload.host_queue import BlockingBackend, HostQueue
from ecoffload.testing.declarations import DECLARED
from ecoffload.testing.devices import SimBackend, SimOps, SimTop, SimUint64, sim_of, simulated

SIZE = 4096
SHM = Path(os.environ.get("ECOFFLOAD_TEST_SHM", "/dev/shm"))


class Rig:
    """A cache on a device of its own."""

    def __init__(self, device: str | SwapBackend = "sim-int64", capacity: str = "256KiB", **options: Any) -> None:
        self.backend = simulated(device) if isinstance(device, str) else device
        self.sim: SimBackend = sim_of(self.backend)
        self.ops = self.backend.ops
        self.cache = EncoderCache(capacity, backend=self.backend, directory=SHM, **options)

    def tensor(self, value: int, nbytes: int = SIZE) -> torch.Tensor:
        return self.ops.empty(nbytes).fill_(value)

    def saved(self, key: str, value: int) -> None:
        assert self.cache.put(key, self.tensor(value))
        assert self.cache.flush(10)
        assert self.cache.contains(key)

    def read(self, tensor: torch.Tensor | None) -> int | None:
        """The one value that all of its bytes have, once everything has landed; None for no tensor."""
        if tensor is None:
            return None
        self.ops.synchronize()
        values = set(tensor.tolist())
        assert len(values) == 1
        return int(values.pop())


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*args: Any, **options: Any) -> Rig:
        made.append(Rig(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.cache.close()
        each.backend.close()


def out_of_memory(tensor: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("the device is full")


# --- a save that was planned and never came


def test_a_put_that_finds_no_memory_for_its_copy_keeps_nothing_and_may_be_repeated(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    r = rig()
    with monkeypatch.context() as patch:
        patch.setattr(r.ops, "clone", out_of_memory)
        assert not r.cache.put("k", r.tensor(7), copy=True)
    assert r.cache.get("k") is None
    assert r.cache.put("k", r.tensor(7))
    assert r.cache.flush(10)
    assert r.read(r.cache.get("k")) == 7


def test_a_plan_that_never_reached_the_worker_is_a_miss_and_its_key_may_be_put_again(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    r = rig()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(r.cache._worker, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            r.cache.put("k", r.tensor(7))
    assert len(r.cache) == 0
    assert r.cache.get("k") is None
    assert r.cache.flush(10)
    r.saved("k", 7)
    assert r.read(r.cache.get("k")) == 7


def test_a_failure_that_is_told_late_does_not_take_the_put_that_tells_it_along(rig: Callable[..., Rig]) -> None:
    r = rig("sim-int64")
    r.saved("a", 3)
    r.backend.inject_fault("late")  # type: ignore[attr-defined]
    broken = r.cache.get("a")
    assert broken is not None
    r.ops.synchronize()
    r.cache._worker.synchronize()  # noticed, not yet told
    r.cache._scheduler.poll()
    with pytest.raises(Exception, match="1 loads failed"):
        r.cache.put("k", r.tensor(7))
    assert not r.cache.contains("k")
    r.saved("k", 7)


def test_flush_waits_for_what_was_put_before_it_not_for_what_others_go_on_putting(rig: Callable[..., Rig]) -> None:
    r = rig()
    r.sim.device.latency = 0.002
    worker, others = r.cache._worker, iter(range(1000))
    oldest = worker.oldest_save

    def another_comes() -> Any:
        assert r.cache.put(f"other {next(others)}", r.tensor(1))
        return oldest()

    worker.oldest_save = another_comes  # type: ignore[method-assign]
    assert r.cache.put("mine", r.tensor(2))
    assert r.cache.flush(3)
    assert r.cache.contains("mine")


# --- a device whose copies block and whose streams are its own


class Stream:
    """A stream that the core does not know: it can only be waited for on the host."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue, name)


class StreamOps(SimOps):
    def stream(self) -> Any:
        return Stream(super().stream())

    def current_stream(self) -> Any:
        return Stream(super().current_stream())

    def empty(self, nbytes: int, stream: Any = None) -> torch.Tensor:
        return super().empty(nbytes)


def foreign_streams() -> SwapBackend:
    inner = SimTop(DECLARED["sim-top"])
    inner._ops = StreamOps(inner.device)
    return BlockingBackend(inner)


def test_a_get_behind_a_save_that_fails_gives_all_but_its_entry(rig: Callable[..., Rig]) -> None:
    r = rig(foreign_streams())
    r.saved("good", 3)
    r.sim.device.latency = 0.05
    r.sim.inject_fault("late")
    assert r.cache.put("bad", r.tensor(4))
    found = r.cache.get_many(["good", "bad"])
    assert set(found) == {"good"}
    assert r.read(found["good"]) == 3
    assert r.cache.contains("good")
    assert not r.cache.contains("bad")
    assert r.cache.flush(10)
    r.cache._worker._pool.lease().release()  # looks after what was given up
    assert r.cache._worker._pool.leased == 0


# --- the caller is capturing a graph


def test_in_a_capture_a_put_keeps_nothing_and_a_get_of_what_is_there_is_refused(rig: Callable[..., Rig]) -> None:
    r = rig("sim-uint64")
    r.saved("there", 3)
    r.sim.device.capturing = True
    assert not r.cache.put("k", r.tensor(7))
    assert not r.cache.put("k", r.tensor(7), copy=True)
    assert r.cache.get("k") is None
    with pytest.raises(SwapFailed, match="captured into a graph") as refused:
        r.cache.get("there")
    assert refused.value.details["keys"] == [b"there"]
    tensor = r.tensor(7)
    assert r.cache.get_or_encode("k", lambda: tensor) is tensor
    r.sim.device.capturing = False
    assert not r.cache.contains("k")
    assert r.read(r.cache.get("there")) == 3, "it was kept"
    assert r.cache.stats().pinned_entries == 0
    r.saved("k", 7)


def test_a_load_that_fails_behind_the_last_call_is_told_by_close(rig: Callable[..., Rig]) -> None:
    r = rig()
    r.saved("k", 7)
    r.sim.inject_fault("late")
    assert r.cache.get("k") is not None
    with pytest.raises(SwapFailed, match="hold no valid data") as told:
        r.cache.close()
    assert told.value.details["keys"] == (b"k",)
    r.cache.close()
    with pytest.raises(CacheClosed):
        r.cache.get("k")
    assert not r.cache.region.path.exists()


# --- a fork while another thread is at work


def exit_status(child: Callable[[], None]) -> int:
    """What a forked child ends with: 0 if ``child`` returned, 1 if it raised, -SIGALRM if it hung."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            child()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def held(*locks: Any) -> Iterator[None]:
    """Another thread holds these."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            taken.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_while_a_thread_holds_the_caches_locks_is_told_so_and_does_not_hang(
    rig: Callable[..., Rig],
) -> None:
    r = rig()
    r.saved("k", 7)

    def child() -> None:
        with pytest.raises(CacheClosed, match="forked"):
            r.cache.get("k")
        with pytest.raises(CacheClosed, match="forked"):
            r.cache.get_or_encode("k", lambda: r.tensor(7))
        r.cache.close()

    with held(r.cache._lock, r.cache._encoding_lock):
        assert exit_status(child) == 0
    assert r.read(r.cache.get("k")) == 7


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_open_its_own_cache_and_swap_whatever_its_parent_was_doing() -> None:
    backend = get_backend("cpu")
    queue = HostQueue()
    queue.synchronize()
    fence = slots._order.__defaults__
    assert fence is not None
    # Made here: torch's own threads do not survive a fork, so the child must not fill or add up anything large.
    src, dst = torch.ones(2, 1 << 20, dtype=torch.uint8), torch.zeros(2, 1 << 20, dtype=torch.uint8)

    def child() -> None:
        queue.put(ran.set)
        queue.synchronize()
        assert ran.is_set()
        with EncoderCache("4MiB", directory=SHM) as cache:
            assert cache.put("k", src)
            assert cache.get("k") is not None
        swap_blocks(src, dst, [(0, 1)]).wait()
        assert dst[1, -3:].tolist() == [1, 1, 1]

    ran = threading.Event()
    with held(queue._lock, backend._lock, swaps._pool._lock, *fence):  # type: ignore[attr-defined]
        assert exit_status(child) == 0
    queue.close()


# --- an encode that is shared


class Awaited(threading.Event):
    """Says how many wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.waiting.release()
        return super().wait(timeout)


def shared_by_three(r: Rig, during: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """What one who encodes ``k`` and two who wait for it get. ``during``: runs once both wait, and is the encoder."""
    with ThreadPoolExecutor(2) as pool:
        others: list[Future[torch.Tensor]] = []

        def never() -> torch.Tensor:
            raise AssertionError("encoded twice")

        def encode() -> torch.Tensor:
            done = r.cache._encoding[b"k"].done = Awaited()
            others.extend(pool.submit(r.cache.get_or_encode, "k", never) for _ in range(2))
            for _ in range(2):
                assert done.waiting.acquire(timeout=10)
            return during()

        first = r.cache.get_or_encode("k", encode)
        return [first, *(each.result(10) for each in others)]


def test_a_tensor_that_several_waited_for_is_recorded_on_the_stream_of_each(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    r = rig("sim-int64", capacity="4KiB")
    assert r.backend.spec.capabilities.needs_record_stream
    large = r.tensor(7, 2 * SIZE)
    recorded = []
    monkeypatch.setattr(r.ops, "record_stream", lambda tensor, stream: recorded.append(tensor))
    assert all(each is large for each in shared_by_three(r, lambda: large))
    assert [each is large for each in recorded] == [True, True]


@pytest.mark.parametrize("key", ["k", None])
def test_what_was_being_encoded_at_an_invalidation_is_shared_and_not_kept(
    rig: Callable[..., Rig], key: str | None
) -> None:
    r = rig()
    old = r.tensor(1)

    def encode() -> torch.Tensor:
        r.cache.invalidate(key)
        return old

    assert all(each is old for each in shared_by_three(r, encode))
    assert not r.cache.contains("k")
    new = r.tensor(2)
    assert r.cache.get_or_encode("k", lambda: new) is new
    assert r.cache.flush(10)
    assert r.read(r.cache.get("k")) == 2


def test_an_invalidation_of_another_key_leaves_an_encode_alone(rig: Callable[..., Rig]) -> None:
    r = rig()

    def encode() -> torch.Tensor:
        r.cache.invalidate("other")
        return r.tensor(1)

    r.cache.get_or_encode("k", encode)
    assert r.cache.flush(10)
    assert r.cache.contains("k")


def test_an_entry_that_no_kernel_can_copy_is_refused_alone(rig: Callable[..., Rig]) -> None:
    spec = DECLARED["sim-uint64"]
    kernel = KernelSpec(name="copy", address_dtype="uint64", alignment=16, min_bytes=32)
    r = rig(SimUint64(spec.model_copy(update={"kernels": (kernel,)})))
    assert not r.cache.put("odd", r.tensor(1, 40))
    assert not r.cache.put("small", r.tensor(1, 16))
    assert r.cache.put("k", r.tensor(1, 48))
    assert r.cache.flush(10)
    assert r.read(r.cache.get("k")) == 1
