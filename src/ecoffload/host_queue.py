"""In-order queues of work on the host: what stands behind devices whose copies are made by threads of the core.

Used by the ``cpu`` backend, by the wrapper for backends whose ``submit`` blocks, and by simulated devices. A
:class:`HostQueue` behaves as a device's stream does: work runs in order on a thread of its own, events order queues
against each other, and a failure poisons nothing but the work that failed.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ecoffload.backend import D2H, H2D, Completion, Direction, SwapBackend
from ecoffload.descriptors import SubBatch
from ecoffload.errors import EcoffloadError, SwapFailed

__all__ = ["CALLER", "BlockingBackend", "Caller", "HostEvent", "HostQueue", "QueuedCompletion"]


class HostEvent:
    """Happens when the work enqueued before its record has run. An event never recorded has happened."""

    __slots__ = ("_flag",)

    def __init__(self) -> None:
        self._flag: threading.Event | None = None

    def _arm(self) -> threading.Event:
        # A new flag a record: who waited on an earlier record of this event keeps waiting for that one.
        self._flag = flag = threading.Event()
        return flag

    def _clear(self) -> None:
        self._flag = None

    def query(self) -> bool:
        flag = self._flag
        return flag is None or flag.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        flag = self._flag
        return True if flag is None else flag.wait(timeout)

    def waiter(self) -> Callable[[], Any]:
        """What a queue runs to wait for the record that the event holds now."""
        flag = self._flag
        return _nothing if flag is None else flag.wait


def _nothing() -> None:
    pass


class HostQueue:
    """Callables run in order on one daemon thread, which starts with the first of them."""

    __slots__ = ("__weakref__", "_lock", "_name", "_thread", "_work")

    def __init__(self, name: str = "ecoffload-queue") -> None:
        self._name = name
        self._start()
        _queues.add(self)

    def _start(self) -> None:
        self._work: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def put(self, job: Callable[[], Any]) -> None:
        """Enqueue ``job``; it must not raise (what it has to report goes through its own completion)."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    # The thread holds the queue of work, not this object, so that a dropped HostQueue ends it.
                    self._thread = threading.Thread(target=_run, args=(self._work,), name=self._name, daemon=True)
                    self._thread.start()
        self._work.put(job)

    def record(self, event: HostEvent) -> None:
        self.put(event._arm().set)

    def wait(self, event: HostEvent) -> None:
        if not event.query():
            self.put(event.waiter())

    def synchronize(self) -> None:
        if self._thread is not None:
            done = threading.Event()
            self.put(done.set)
            done.wait()

    def delay(self, ms: float) -> None:
        self.put(lambda: time.sleep(ms / 1000))

    def close(self) -> None:
        """Let the thread end after what is enqueued. Idempotent."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            if thread is not threading.current_thread():
                thread.join()

    def __del__(self) -> None:
        if self._thread is not None:
            self._work.put(None)


_queues: weakref.WeakSet[HostQueue] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child: the threads stayed with the parent, and so did the work that was enqueued."""
    for queue in list(_queues):
        queue._start()
    for backend in list(_blocking):
        backend._forget()


_blocking: weakref.WeakSet[BlockingBackend] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)


def _run(work: SimpleQueue[Callable[[], Any] | None]) -> None:
    while (job := work.get()) is not None:
        job()
        del job  # an idle queue must not keep the last job's memory alive


class Caller:
    """The stream of a caller whose work is ordered by the host alone: enqueued means done, waiting blocks."""

    __slots__ = ()

    def put(self, job: Callable[[], Any]) -> None:
        job()

    def record(self, event: HostEvent) -> None:
        event._clear()

    def wait(self, event: HostEvent) -> None:
        event.wait()

    def synchronize(self) -> None:
        pass

    def delay(self, ms: float) -> None:
        time.sleep(ms / 1000)


CALLER = Caller()


class QueuedCompletion(Completion):
    """One job on a host queue: runs ``work``, keeps what it raised, tells waiters."""

    __slots__ = ("_done", "_error", "_work")

    def __init__(self, queue: HostQueue | Caller, work: Callable[[], Any]) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._work: Callable[[], Any] | None = work
        queue.put(self._run)

    def _run(self) -> None:
        work, self._work = self._work, None
        try:
            if work is not None:
                work()
        except BaseException as exc:  # anything at all must reach whoever waits, or they wait for ever
            self._error = exc
        finally:
            self._done.set()

    def _raise(self) -> None:
        error = self._error
        if error is None:
            return
        if isinstance(error, EcoffloadError):
            raise error
        raise SwapFailed(f"a copy failed on its thread: {error!r}") from error

    def done(self) -> bool:
        if not self._done.is_set():
            return False
        self._raise()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        if not self._done.wait(timeout):
            return False
        self._raise()
        return True

    def ended(self, timeout: float | None = None) -> bool:
        """As :meth:`wait`, but says nothing of how it ended."""
        return self._done.wait(timeout)

    def block(self, stream: Any) -> None:
        if isinstance(stream, HostQueue):
            if not self._done.is_set():
                stream.put(self._done.wait)
        else:
            self.wait()


class BlockingBackend(SwapBackend):
    """Runs another backend's blocking ``submit`` on threads of the core, so that every backend is asynchronous.

    One thread for each direction, since a load must not wait behind a save that waits for compute; one for both where
    the device is a "single-queue". The order of the caller's stream is kept: an event recorded there at submit is
    awaited (on the thread) before the copy, and so are copies that the other thread has for that stream. The wrapped
    backend must not need its descriptors after it returned.
    """

    def __init__(self, inner: SwapBackend) -> None:
        super().__init__(inner.spec, inner.device_index)
        self.inner = inner
        name = f"ecoffload-{inner.spec.name}-{inner.device_index}"
        one = HostQueue(name)
        single = inner.spec.capabilities.ordering == "single-queue"
        self._queues: dict[Direction, HostQueue] = {D2H: one, H2D: one if single else HostQueue(name)}
        self._forget()
        _blocking.add(self)
        self.per_copy = inner.per_copy
        self.has_pointer_query = inner.has_pointer_query  # type: ignore[misc]
        for name in ("limits", "register", "unregister", "check_table", "kernel", "pointer_range"):
            setattr(self, name, getattr(inner, name))

    @property
    def ops(self) -> Any:
        return self.inner.ops

    def submit(self, batch: Any, direction: Direction, stream: Any) -> Completion:
        ops = self.inner.ops
        with self._lock:
            earlier = [each for on, each in self._in_flight(H2D if direction == D2H else D2H) if on == stream]
        before = ops.event()
        ops.record(before, stream)
        # Addresses and a count: the batch itself is of no use once whoever submitted it has dropped the completion.
        view = SubBatch(batch.count, batch.src, batch.dst, batch.size, batch.first)

        def copy() -> None:
            ops.synchronize(before)
            for each in earlier:
                each.ended()
            inner = self.inner.submit(view, direction, stream)
            if inner is not None:
                inner.wait()

        completion = QueuedCompletion(self._queues[direction], copy)
        with self._lock:
            self._in_flight(direction).append((stream, completion))
        return completion

    def _in_flight(self, direction: Direction) -> deque[tuple[Any, QueuedCompletion]]:
        """Less what has ended. For whoever holds the lock: two that look at once would each forget the first."""
        flying = self._flying[direction]
        while flying and flying[0][1].ended(0):
            flying.popleft()
        return flying

    def _forget(self) -> None:
        """Nothing is in flight: at the beginning, and in a forked child, where the parent's copies never end."""
        self._lock = threading.Lock()
        self._flying: dict[Direction, deque[tuple[Any, QueuedCompletion]]] = {D2H: deque(), H2D: deque()}

    def stats(self) -> dict[str, Any]:
        return {**self.inner.stats(), "submission": "blocking, on threads of the core"}

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()
        self.inner.close()
