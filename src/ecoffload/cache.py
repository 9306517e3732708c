"""The cache of one process: put, get, get_or_encode. The facade over region, scheduler and worker.

One lock guards scheduler and worker. No lock is held while an encoder runs, nor while a device copies; what the host
does itself (copies on a CPU, checksums before a verified entry is given back) it does under the lock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

import torch

from ecoffload import options
from ecoffload.checksums import checksum_of
from ecoffload.dtypes import dtype_name
from ecoffload.errors import CacheClosed, ConfigError, DeviceLost
from ecoffload.region import HostRegion
from ecoffload.registry import find_backend
from ecoffload.scheduler import OffloadScheduler, SchedulerStats
from ecoffload.sizes import parse_size
from ecoffload.tiers.opening import open_tier
from ecoffload.worker import OffloadWorker, RegisterPolicy

if TYPE_CHECKING:
    from types import TracebackType

    from ecoffload.backend import SwapBackend
    from ecoffload.index import Entry
    from ecoffload.tiers.interface import RemoteTier

__all__ = ["CacheStats", "EncoderCache"]

_log = logging.getLogger("ecoffload.cache")

MAX_KEY = 256
DEFAULT_GRANULE = 4096
"""Bytes. Best fit needs no large blocks, so the unit is what registration and paging need: a page."""


@dataclass(frozen=True, slots=True)
class CacheStats(SchedulerStats):
    """Counts since the cache was opened, and what is held now. Bytes are entries' own bytes.

    ``worker`` and ``start`` say, as plain data, which backend and paths are used, whether the host memory is
    registered, and whether the region started new or warm (and why not); ``tier`` what came from a store behind it.
    """

    encodes: int
    recovered: int
    worker: dict[str, Any] = field(default_factory=dict)
    start: dict[str, str] = field(default_factory=dict)
    tier: dict[str, Any] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Hits over lookups; 0.0 before the first."""
        total = self.hits + self.misses
        return self.hits / total if total else 0.0

    def asdict(self) -> dict[str, Any]:
        """As plain data, for JSON and logs."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"hit_rate": self.hit_rate}


class _Encoding:
    """An encoder at work for one key, and whoever waits for it."""

    __slots__ = ("done", "event", "owner", "tensor")

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.done = threading.Event()
        self.tensor: torch.Tensor | None = None
        self.event: Any = None


class EncoderCache:
    """Keeps tensors in host memory under keys, and gives them back on the device, bit for bit.

    * ``capacity``: host memory in bytes, or a size such as "2GiB"; reserved now, so that no later write can fail.
    * ``device``: "cpu", "cuda", "cuda:1", ...; default "cpu", or the device of ``backend`` where one is named.
    * ``backend``: a backend's name; default: the one that serves ``device``.
    * ``policy``: "auto" (segmented LRU that a scan cannot flush), "lru", "fifo", "s3-fifo" or "gdsf".
    * ``register``: "require", "prefer" or "off": DMA-able host memory.
    * ``checksum``: verify each entry's bytes before it is given back.
    * ``directory``, ``id``, ``namespace``, ``warm``, ``reclaim_after``, ``scrub_on_close``: the host region's, see
      :meth:`HostRegion.open`. ``warm`` keeps entries over a restart, and implies checksums.
    * ``trust_uuids``: entries put with ``client_key=True`` may outlive the process as well.
    * ``granule``: allocation unit in bytes, a multiple of 256.
    * ``tier``: a store that other machines share, such as "mooncake://host:port" (:class:`TierOptions` says what may
      follow), or a :class:`RemoteTier`; needs ``namespace``, and a network on which everybody is trusted.
    * ``ghost_stats``: watch reuse (under a microsecond a lookup), for ``ecoffload size --live``.

    Thread-safe. Not usable in a forked child (open one there). Raises :class:`ConfigError` for bad options,
    :class:`NoSpace` where host memory is too small, and what :func:`get_backend` raises.
    """

    def __init__(
        self,
        capacity: int | str,
        *,
        device: str | torch.device | None = None,
        backend: str | SwapBackend | None = None,
        policy: str = "auto",
        namespace: str = "",
        register: RegisterPolicy = "prefer",
        checksum: bool = False,
        directory: str | os.PathLike[str] = "/dev/shm",
        id: str | None = None,
        warm: bool = False,
        trust_uuids: bool = False,
        reclaim_after: float = 3600.0,
        scrub_on_close: bool = False,
        granule: int = DEFAULT_GRANULE,
        ghost_stats: bool = False,
        tier: str | RemoteTier | None = None,
    ) -> None:
        nbytes = parse_size(capacity, option="capacity")
        if isinstance(granule, bool) or not isinstance(granule, int) or granule < 256 or granule % 256:
            raise ConfigError(
                f"granule {granule!r} must be a multiple of 256 bytes (device kernels need the alignment)",
                option="granule",
                value=granule,
            )
        for option, value in (("namespace", namespace), ("policy", policy)):
            options.text(option, value)
        for option, on in (("checksum", checksum), ("trust_uuids", trust_uuids), ("ghost_stats", ghost_stats)):
            options.flag(option, on)
        if backend is None and device is None:
            device = "cpu"
        self._backend = backend = find_backend(backend, device=device)
        self._pid = os.getpid()
        self._fresh_locks()
        _caches.add(self)
        self._closed = False
        self._last_stats: CacheStats | None = None
        self._checksum = checksum or warm
        self._trust_uuids = trust_uuids
        self._encoding: dict[bytes, _Encoding] = {}
        self._encodes = 0
        link = None if tier is None else open_tier(tier, namespace=namespace)
        self._tier_wait = 0.0 if link is None else link.options.wait
        self.region = HostRegion.open(
            id,
            capacity=nbytes,
            granule=granule,
            namespace=namespace,
            directory=directory,
            warm=warm,
            reclaim_after=reclaim_after,
            scrub_on_close=scrub_on_close,
        )
        try:
            self._scheduler = OffloadScheduler(
                self.region, policy=policy, checksum=self._checksum, ghost_stats=ghost_stats, tier=link
            )
            try:
                self._worker = OffloadWorker(self.region, backend, register=register)
            except BaseException:
                self._scheduler.close()
                raise
        except BaseException:
            self.region.close()
            raise

    # -- the calls users make ----------------------------------------------------------------------------------------

    def put(self, key: str | bytes, tensor: torch.Tensor, *, copy: bool = False, client_key: bool = False) -> bool:
        """Keep ``tensor`` (any dtype, any shape, on this cache's device) under ``key`` (1 to 256 bytes).

        True: it is there or on its way. A known key keeps what it has, and nothing is copied: :meth:`invalidate` first
        what another tensor is to replace. False: too large, no room that may be
        evicted, its copy failed, or the current stream is being captured into a graph. The tensor may be dropped at
        once; it may be written again only after its save (``flush``), or at once with ``copy=True``, which stages it on
        the device first. On a CPU it returns once the bytes are read. ``client_key``: the key was chosen by a client,
        not computed from the content.
        """
        name = _key(key)
        tensor = self._tensor(tensor)
        with self._lock:
            self._check()
            self._poll()
            scheduler, worker = self._scheduler, self._worker
            if scheduler.known(name):
                return True
            ops = self._backend.ops
            # Staged before anything is planned: the device may have no room for it.
            if copy and not ops.host_ordered and not ops.is_capturing(ops.current_stream()):
                try:
                    tensor = ops.clone(tensor)
                except DeviceLost:
                    raise
                except Exception as exc:
                    _log.warning("key %r is not kept: staging it on the device failed: %s", name, exc)
                    return False
            op = scheduler.plan_save(
                name,
                tensor.numel() * tensor.element_size(),
                dtype_name(tensor.dtype),
                tuple(tensor.shape),
                durable=self._trust_uuids or not client_key,
            )
            if op is None:
                return False
            try:
                worker.save(name, tensor, scheduler.take_plan())
                worker.flush()
            except BaseException:
                self._give_up()
                raise
            finally:
                scheduler.poll()
            return scheduler.known(name)

    def get(self, key: str | bytes) -> torch.Tensor | None:
        """A tensor of its own with the bytes of ``key``, or None.

        Returns at once, with the copy ordered on the caller's current stream; an entry still being saved is waited for
        there too, not on the host. Raises :class:`SwapFailed` (``keys`` names them) if tensors handed out earlier turn
        out to have failed, or if the key is there and the current stream is being captured into a graph.
        """
        name = _key(key)
        return self._load([name]).get(name)

    def get_many(self, keys: Iterable[str | bytes]) -> dict[str | bytes, torch.Tensor]:
        """The entries that are there, under the keys as given, in one transfer; misses are left out."""
        if isinstance(keys, str | bytes):
            raise ConfigError(f"get_many takes several keys, got one: [{keys!r}]", option="keys", value=keys)
        names: dict[bytes, str | bytes] = {}
        for key in keys:
            names.setdefault(_key(key), key)
        return {names[name]: tensor for name, tensor in self._load(list(names)).items()}

    def _load(self, names: list[bytes]) -> dict[bytes, torch.Tensor]:
        if self._scheduler.tier is not None:
            self._await_tier(names)
        with self._lock:
            self._check()
            self._poll()
            scheduler = self._scheduler
            planned = [op for name in names if (op := scheduler.plan_load(name, in_flight=True))]
            if not planned:
                return {}
            if self._checksum:
                for op in planned:
                    entry = scheduler.index.lookup(op.key)
                    if entry is None or entry.write != "ended":
                        continue  # saved a moment ago by this process: there is no checksum to compare with yet
                    if checksum_of(self.region, op.extents, op.nbytes) != entry.checksum:
                        scheduler.distrust(op)
            try:
                return self._worker.load(scheduler.take_plan())
            except BaseException:
                self._give_up()
                raise
            finally:
                scheduler.poll()

    def get_or_encode(self, key: str | bytes, encode: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The entry of ``key``, or what ``encode()`` returns (kept for the next time).

        One encode a key at a time: whoever asks meanwhile waits for its result. If ``encode`` raises, the caller gets
        that exception and another waiter encodes. If the cache is closed meanwhile, the caller gets the result, which
        is not kept, and who waits for it gets :class:`CacheClosed`.
        """
        name = _key(key)
        if not callable(encode):
            raise ConfigError(
                f"get_or_encode takes a function that gives the tensor, got a {type(encode).__name__}; "
                "pass lambda: tensor, or put() what is there already",
                option="encode",
                value=type(encode).__name__,
            )
        while True:
            found = self._load([name]).get(name)
            if found is not None:
                return found
            with self._encoding_lock:
                work = self._encoding.get(name)
                if work is None:
                    mine = self._encoding[name] = _Encoding()
                    break
            if work.owner == threading.get_ident():
                raise ConfigError(
                    f"encode for key {name!r} asked for the same key again; it would wait for itself",
                    option="key",
                    value=name,
                )
            while not work.done.wait(1.0):
                self._check()  # a closed cache keeps nobody waiting, whatever that encoder waits for
            if work.tensor is not None:
                found = self._load([name]).get(name)
                if found is not None:
                    return found
                # Too large, no room, or not verified yet: everybody who waited shares what was encoded.
                ops = self._backend.ops
                current = ops.current_stream()
                ops.wait(current, work.event)
                if self._backend.spec.capabilities.needs_record_stream:
                    ops.record_stream(work.tensor, current)
                return work.tensor
        try:
            with self._lock:
                self._check()
                known = self._scheduler.lookup(name)
            found = self._load([name]).get(name) if known else None
            if found is not None:
                return found
            tensor = encode()
            self._tensor(tensor, what="encode() returned")
            with self._lock:
                self._encodes += 1
                # Not if it was invalidated, or the cache closed, meanwhile: what was encoded is still the caller's.
                if not self._closed and self._encoding.get(name) is mine:
                    self.put(name, tensor)
            ops = self._backend.ops
            current = ops.current_stream()
            if not ops.is_capturing(current):  # what a graph will compute cannot be shared with who waits now
                mine.event = ops.event()
                ops.record(mine.event, current)
                mine.tensor = tensor
            return tensor
        finally:
            with self._encoding_lock:
                if self._encoding.get(name) is mine:
                    del self._encoding[name]
            mine.done.set()

    def contains(self, key: str | bytes) -> bool:
        """Whether ``key`` is saved: no until its save has landed. Does not count as a use."""
        name = _key(key)
        with self._lock:
            self._check()
            self._poll()
            return self._scheduler.lookup(name)

    def invalidate(self, key: str | bytes | None = None) -> int:
        """Forget one key, or everything; returns how many entries that were. What is being encoded now is given to
        those who wait for it, and not kept."""
        name = None if key is None else _key(key)
        with self._lock:
            self._check()
            self._poll()
            with self._encoding_lock:
                for each in [name] if name is not None else list(self._encoding):
                    self._encoding.pop(each, None)
            return self._scheduler.invalidate(name)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every save so far has landed (or failed), at most ``timeout`` seconds; False if time ran out."""
        end = None
        if timeout is not None:
            if isinstance(timeout, int | float) and timeout < 0:
                timeout = 0.0  # what is left of a caller's own limit
            end = time.monotonic() + min(options.seconds("timeout", timeout), threading.TIMEOUT_MAX / 2)
        so_far: set[Entry] | None = None  # others go on putting, and would keep this from ever returning
        while True:
            with self._lock:
                self._check()
                self._poll()
                now = self._scheduler.being_saved()
                so_far = now if so_far is None else so_far & now
                if not so_far:
                    return True
                save = self._worker.oldest_save()
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            if save is None:  # another of this cache's threads is at it
                time.sleep(50e-6)
                continue
            try:
                save.wait(left)  # without the lock: others go on putting and getting
            except Exception:  # the next poll tells what became of it
                continue

    def stats(self) -> CacheStats:
        """Counts and state, see :class:`CacheStats`; after ``close`` as they were when it had waited."""
        with self._lock:
            if self._last_stats is not None:
                return self._last_stats
            self._check()
            self._poll()
            return self._stats()

    def _stats(self) -> CacheStats:
        inner = self._scheduler.stats()
        counts = {f.name: getattr(inner, f.name) for f in fields(inner)}
        return CacheStats(
            **counts,
            encodes=self._encodes,
            recovered=self._scheduler.recovered,
            worker=self._worker.stats(),
            start={"how": self.region.start, "why": self.region.start_reason},
            tier={} if self._scheduler.tier is None else self._scheduler.tier.stats(),
        )

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """Wait for what is in flight, unregister and unmap. Idempotent; afterwards every call but ``stats`` raises
        CacheClosed.

        Raises :class:`SwapFailed`, with all that done, for tensors handed out whose copy turned out to have failed.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if os.getpid() != self._pid:
                return  # the child's copy: everything belongs to the parent
            try:
                try:
                    self._worker.synchronize()
                    self._scheduler.poll()  # while the worker's slot still says what has landed
                finally:
                    self._last_stats = self._stats()
                self._worker.close()
            finally:
                try:
                    self._scheduler.close()
                finally:
                    self.region.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, key: str | bytes) -> bool:
        return self.contains(key)

    def __len__(self) -> int:
        with self._lock:
            self._check()
            return len(self._scheduler.index)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._scheduler.index)} entries"
        return f"<EncoderCache {self.region.id} on {self._backend.spec.name}, {state}>"

    # -- inside ------------------------------------------------------------------------------------------------------

    def _fresh_locks(self) -> None:
        self._lock = threading.RLock()
        self._encoding_lock = threading.Lock()

    def _check(self) -> None:
        if self._closed:
            raise CacheClosed("this EncoderCache is closed; open another one")
        if os.getpid() != self._pid:
            raise CacheClosed("this EncoderCache was opened before the process was forked; open one in the child")

    def _poll(self) -> None:
        worker, scheduler = self._worker, self._scheduler
        try:
            worker.poll()
        finally:
            if scheduler.has_pending():
                scheduler.poll()

    def _await_tier(self, names: list[bytes]) -> None:
        """Have what is missing fetched, and wait until all of it is there, or known not to come, or it takes too long.
        The lock is free meanwhile."""
        with self._lock:
            self._check()
            tier = self._scheduler.tier
            seen = 0 if tier is None else tier.news  # before what it stands for is taken
            self._poll()
            coming = [name for name in names if self._scheduler.fetch(name)]
        end = time.monotonic() + self._tier_wait
        while coming and tier is not None and (left := end - time.monotonic()) > 0:
            tier.await_news(seen, left)
            with self._lock:
                self._check()
                seen = tier.news
                self._poll()
                coming = [name for name in coming if tier.coming(name)]

    def _give_up(self) -> None:
        """What was planned and has not reached the worker has failed: an empty plan behind it makes the worker say so,
        and does nothing else."""
        self._worker.load(self._scheduler.take_plan())

    def _tensor(self, tensor: torch.Tensor, what: str = "put takes") -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{what} a {type(tensor).__name__}; a torch.Tensor is needed", option="tensor")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            kind = " and quantized" if tensor.is_quantized else " and nested" if tensor.is_nested else ""
            raise ConfigError(
                f"{what} a tensor of layout {tensor.layout}{kind}; only dense tensors can be kept: pass to_dense(), "
                f"int_repr() and the scales, or the tensors of unbind() one by one",
                option="tensor",
                value=str(tensor.layout),
            )
        if not self._backend.ops.owns(tensor):
            raise ConfigError(
                f"{what} a tensor on {tensor.device}, this cache serves {self._backend.ops.device}; "
                f"move it there, or open a cache for its device",
                option="tensor",
                value=str(tensor.device),
            )
        return tensor


_caches: weakref.WeakSet[EncoderCache] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child: a lock that another thread of the parent held would never be let go."""
    for cache in list(_caches):
        cache._fresh_locks()


os.register_at_fork(after_in_child=_after_fork)


def _key(key: str | bytes) -> bytes:
    if isinstance(key, str):
        try:
            name = key.encode()
        except UnicodeEncodeError as exc:
            raise ConfigError(
                f"key {key!r} has no UTF-8 form ({exc.reason}); pass bytes, or os.fsencode() of a file's name",
                option="key",
                value=key,
            ) from exc
    elif isinstance(key, bytes):
        name = key
    else:
        raise ConfigError(f"a key is str or bytes, got {type(key).__name__}", option="key", value=key)
    if not 0 < len(name) <= MAX_KEY:
        raise ConfigError(
            f"a key has 1 to {MAX_KEY} bytes, this one {len(name)}; hash longer ones", option="key", value=key
        )
    return name
