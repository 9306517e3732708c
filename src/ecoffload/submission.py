"""From a filled batch to one completion: check, split by the device's limits, submit, hold the lease until the end.

The one way in to a backend's ``submit``, used by the worker and by the plain swap functions. Below it nothing checks
again; above it nobody calls a backend directly.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from ecoffload.backend import Completed, Completion, Direction, SwapBackend
from ecoffload.descriptors import AddressRanges, Batch
from ecoffload.errors import EcoffloadError, SwapFailed

__all__ = ["submit_batch"]


def submit_batch(
    backend: SwapBackend,
    batch: Batch,
    direction: Direction,
    stream: Any,
    *,
    sources: AddressRanges | None = None,
    destinations: AddressRanges | None = None,
    keep: Any = None,
    checked: bool = False,
) -> Completion:
    """Submit ``batch`` on ``stream`` and own its lease from here on: it returns to the pool when the swap has ended.

    Every range is checked first; None says that nothing is known of that side, and ``checked`` that the caller computed
    each descriptor inside ranges that it knows, so that a second look would only cost time. An empty batch completes at
    once. ``keep`` is held until the swap has ended, also if its completion is dropped. Raises :class:`DescriptorError`
    before anything is enqueued, or :class:`SwapFailed` with the global index; after the latter, what was enqueued
    before is unknown, so the call has waited for it before it gave the descriptors back.
    """
    if not checked:
        try:
            batch.check(sources, destinations)
        except BaseException:
            batch.release()
            raise
    if batch.count == 0:
        batch.release()
        return Completed()
    parts: list[Completion] = []
    try:
        limits = backend.limits(direction)
        if limits.alignment > 1 or limits.min_bytes > 1:
            batch.check_shape(limits.alignment, limits.min_bytes)
        most = 1 if backend.per_copy else limits.max_descriptors
        if limits.max_bytes is None and (most is None or batch.count <= most):
            views: Any = (batch,)
        else:
            views = batch.split(most, limits.max_bytes, limits.alignment)
        for view in views:
            completion = backend.submit(view, direction, stream)
            if completion is not None:
                parts.append(completion)
    except BaseException as exc:  # an interrupt as well: what was enqueued goes on, whoever looks
        count = batch.count
        _settle(backend, parts, stream, exc)
        batch.release()
        if isinstance(exc, EcoffloadError) or not isinstance(exc, Exception):
            raise
        raise SwapFailed(
            f"backend {backend.spec.name!r} failed to submit a {direction} batch of {count} descriptors: {exc!r}",
            index=None,
        ) from exc
    capabilities = backend.spec.capabilities
    if capabilities.snapshots_descriptors and capabilities.submission == "async" and keep is None:
        # A blocking backend consumes them in its submit as well, but that runs later, on a thread of the core.
        batch.release()
        return parts[0] if len(parts) == 1 else _All(parts, None, None)
    return _All(parts, batch, keep)


def _settle(backend: SwapBackend, parts: list[Completion], stream: Any, failure: BaseException) -> None:
    """After a failed submit: earlier parts may still be copying from arrays that are about to be lent again.

    A backend that refused before it enqueued anything says so (detail ``enqueued=False``): a stream that it refused
    because it is being captured into a graph must not be synchronised, or the capture is lost.
    """
    for part in parts:
        try:
            part.wait()
        except Exception:  # it has ended, which is all that is asked here
            continue
    interrupted = not isinstance(failure, Exception)  # then the backend has not cleaned up after itself
    if interrupted or (not backend.spec.capabilities.snapshots_descriptors and getattr(failure, "enqueued", True)):
        try:
            backend.ops.synchronize(stream)
        except Exception:  # the device's own report comes with the error that is being raised
            return


class _All(Completion):
    """The end of every part of a split batch; gives the lease back exactly once, when all have ended."""

    __slots__ = ("_batch", "_keep", "_parts")

    def __init__(self, parts: list[Completion], batch: Batch | None, keep: Any) -> None:
        self._parts = parts
        self._batch = batch
        self._keep = keep

    def _ended(self) -> None:
        batch, self._batch, self._keep = self._batch, None, None
        if batch is not None:
            batch.release()

    def done(self) -> bool:
        failure: SwapFailed | None = None
        for part in self._parts:
            try:
                if not part.done():
                    return False
            except SwapFailed as exc:
                failure = failure or exc
        return self._report(failure)

    def wait(self, timeout: float | None = None) -> bool:
        failure: SwapFailed | None = None
        end = None if timeout is None else time.monotonic() + timeout
        for part in self._parts:
            try:
                if not part.wait(None if end is None else max(0.0, end - time.monotonic())):
                    return False
            except SwapFailed as exc:
                failure = failure or exc
        return self._report(failure)

    def _report(self, failure: SwapFailed | None) -> bool:
        # Only now have all parts ended: a part that failed early says nothing of those behind it.
        self._ended()
        if failure is not None:
            raise failure
        return True

    def block(self, stream: Any) -> None:
        for part in self._parts:
            part.block(stream)

    def __del__(self) -> None:
        # Dropped without a look: the copies may still read the arrays, and what they copy, so the pool keeps both until
        # they have ended.
        batch = getattr(self, "_batch", None)
        if batch is not None:
            batch.abandon(partial(_ended, self._parts, self._keep))


def _ended(parts: list[Completion], keep: Any) -> bool:
    """Whether all of ``parts`` have ended, well or badly; ``keep`` lives as long as the question."""
    for part in parts:
        try:
            if not part.done():
                return False
        except SwapFailed:
            continue
        except Exception:  # it cannot be asked, so it may still be reading
            return False
    return True
