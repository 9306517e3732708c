"""What a machine gives: the link's peak, our ways and the naive ones by block size, latencies, and start-up.

``ecoffload bench`` shows what :func:`bench` returns and compares two such documents. Rates are wall time, from the
first Python call until the bytes are there, best of a few rounds, bytes verified once for each way.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ecoffload import __version__
from ecoffload.backend import D2H, H2D, Direction, SwapBackend
from ecoffload.cache import EncoderCache
from ecoffload.descriptors import DescriptorPool
from ecoffload.errors import ConfigError, RegistrationRefused, SwapFailed
from ecoffload.region import HostRegion
from ecoffload.submission import submit_batch

if TYPE_CHECKING:
    import torch

__all__ = ["SIZES", "bench", "compare"]

SIZES = (2 << 10, 7 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
_LOOP_AT_MOST = 2048  # blocks that a loop of copies is timed on: it is that slow
_PATIENCE = 0.3  # seconds for the rounds of one way
_ENTRY = 256 * 7168  # bytes of the entry whose latency is measured: an image of 256 tokens

Progress = Callable[[int, str], None]  # steps done since the last call, and what comes next


def bench(
    backend: SwapBackend,
    *,
    sizes: tuple[int, ...] = SIZES,
    total: int = 32 << 20,
    rounds: int = 5,
    entries: int = 100,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure ``backend`` with ``total`` bytes a batch, in blocks of each of ``sizes`` bytes; plain data.

    ``ours``: one batch of scattered blocks of the region to or from one tensor. ``loop``: a torch copy for each block.
    ``pack``: blocks gathered on the host by indexing, then one copy (and the reverse). Raises :class:`ConfigError` for
    sizes or a total that leave nothing to measure, :class:`NoSpace` where the region does not fit, and
    :class:`SwapFailed` if bytes arrive changed.
    """
    if not sizes or min(sizes) < 1 or max(sizes) > total or rounds < 1 or entries < 1:
        raise ConfigError(
            f"sizes {', '.join(map(str, sizes))} with a total of {total} bytes, {rounds} rounds and {entries} entries "
            "leave nothing to measure; a block is at least one byte and no larger than the total",
            option="sizes",
            value=sizes,
        )
    note = progress or (lambda _, __: None)
    start = time.perf_counter()
    region = HostRegion.open(None, capacity=total, granule=4096)
    opened = time.perf_counter() - start
    try:
        with _Bench(backend, region, total, rounds) as bench:
            peak: dict[str, float] = {}
            for direction in (H2D, D2H):
                note(0, f"{direction}: one contiguous copy")
                peak[direction] = bench.peak(direction)
                note(1, "")
            rates = []
            for direction in (H2D, D2H):
                for size in sizes:
                    note(0, f"{direction}: blocks of {size}")
                    rates.append(
                        {"direction": direction, "block_bytes": size, "gb_per_s": bench.rates(direction, size)}
                    )
                    note(1, "")
            registration = bench.registration
    finally:
        region.close()
    note(0, "latency of single entries")
    latency = _latency(backend, entries)
    note(1, "")
    return {
        "ecoffload": __version__,
        "backend": backend.spec.name,
        "device": str(backend.ops.device),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "total_bytes": total,
        "peak": peak,
        "rates": rates,
        "latency": latency,
        "start_up": {"region_bytes": total, "region_s": opened, **registration},
    }


def steps(sizes: tuple[int, ...]) -> int:
    """How many steps :func:`bench` will report."""
    return 2 + 2 * len(sizes) + 1


@dataclass(slots=True)
class _Blocks:
    """Scattered blocks of one size: their places in the region and their rows in the tensor."""

    count: int
    size: int
    places: Any  # int64 array: number of the region's block for each row


class _Bench:
    """One region, registered if the device wants it, and one tensor on the device."""

    def __init__(self, backend: SwapBackend, region: HostRegion, total: int, rounds: int) -> None:
        import torch

        self._backend = backend
        self._ops = ops = backend.ops
        self._region = region
        self._total = total
        self._rounds = rounds
        self._pool = DescriptorPool()
        self._stream = ops.current_stream() if ops.host_ordered else ops.stream()
        self._registered: Any = None
        self._base = region.address
        self.registration: dict[str, Any] = {"registered": False, "register_s": None, "reason": ""}
        start = time.perf_counter()
        try:
            self._registered = backend.register(region.address, region.nbytes)
        except RegistrationRefused as exc:
            self.registration["reason"] = str(exc)
        else:
            self._base = self._registered.alias
            if backend.spec.capabilities.host_memory == "register":
                self.registration |= {"registered": True, "register_s": time.perf_counter() - start}
            else:
                self.registration["reason"] = "not needed on this device"
        (view,) = region.view([(0, total)])
        self._host = torch.frombuffer(view, dtype=torch.uint8)
        self._device = ops.empty(total)
        self._sent = torch.randint(0, 256, (total,), dtype=torch.uint8)
        self._overwritten = self._sent ^ 0xFF  # differs in every byte, so that one which did not move is seen
        self._address = ops.address_of(self._device)

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        del self._host, self._device
        if self._registered is not None:
            self._backend.unregister(self._registered)

    def _best(self, job: Callable[[], None]) -> float:
        """Seconds of the best round; a slow way gets fewer rounds, but never less than two."""
        best, began = float("inf"), time.perf_counter()
        for done in range(self._rounds + 1):  # the first one warms up; it is never the best
            start = time.perf_counter()
            if done > 1 and start - began > _PATIENCE:
                break
            job()
            self._ops.synchronize()
            best = min(best, time.perf_counter() - start)
        return best

    def peak(self, direction: Direction) -> float:
        """GB/s of one contiguous copy of everything, by torch or as one descriptor: the better of the two."""
        self._fill(direction)
        host, device = self._host, self._device
        source, target = (host, device) if direction == H2D else (device, host)
        whole = _Blocks(1, self._total, np.zeros(1, np.int64))
        seconds = min(self._best(lambda: _copy(target, source)), self._best(lambda: self._ours(whole, direction)))
        return self._total / seconds / 1e9

    def rates(self, direction: Direction, size: int) -> dict[str, float]:
        """GB/s of each way, for blocks of ``size`` bytes at random places."""
        count = self._total // size
        blocks = _Blocks(count, size, np.random.default_rng(size).permutation(count))
        ways: dict[str, tuple[Callable[[_Blocks, Direction], None], _Blocks]] = {
            "ours": (self._ours, blocks),
            "loop": (self._loop, _Blocks(min(count, _LOOP_AT_MOST), size, blocks.places[:_LOOP_AT_MOST])),
            "pack": (self._pack, blocks),
        }
        found: dict[str, float] = {}
        for name, (way, of) in ways.items():
            self._fill(direction)
            seconds = self._best(partial(way, of, direction))
            self._verify(name, of)
            found[name] = of.count * of.size / seconds / 1e9
        return found

    def _fill(self, direction: Direction) -> None:
        """What is to be sent on one side, and other bytes on the other."""
        source, target = (self._host, self._device) if direction == H2D else (self._device, self._host)
        source.copy_(self._sent)
        target.copy_(self._overwritten)
        self._ops.synchronize()

    def _verify(self, name: str, blocks: _Blocks) -> None:
        import torch

        host, device = self._rows(self._host, blocks), self._rows(self._device.cpu(), blocks)
        if not torch.equal(host[torch.from_numpy(blocks.places)], device[: blocks.count]):
            raise SwapFailed(f"{name}: blocks of {blocks.size} bytes did not arrive as they were", index=None)

    @staticmethod
    def _rows(tensor: torch.Tensor, blocks: _Blocks) -> torch.Tensor:
        return tensor[: tensor.numel() // blocks.size * blocks.size].view(-1, blocks.size)

    def _ours(self, blocks: _Blocks, direction: Direction) -> None:
        size = np.uint64(blocks.size)
        host = np.uint64(self._base) + blocks.places.astype(np.uint64) * size
        device = np.uint64(self._address) + np.arange(blocks.count, dtype=np.uint64) * size
        source, target = (host, device) if direction == H2D else (device, host)
        batch = self._pool.lease(blocks.count)
        batch.extend(source, target, np.full(blocks.count, size))
        submit_batch(self._backend, batch, direction, self._stream).wait()

    def _loop(self, blocks: _Blocks, direction: Direction) -> None:
        host, device = self._rows(self._host, blocks), self._rows(self._device, blocks)
        for row, place in enumerate(blocks.places.tolist()):
            if direction == H2D:
                _copy(device[row], host[place])
            else:
                _copy(host[place], device[row])

    def _pack(self, blocks: _Blocks, direction: Direction) -> None:
        import torch

        host, device = self._rows(self._host, blocks), self._rows(self._device, blocks)
        places = torch.from_numpy(blocks.places)
        if direction == H2D:
            device.copy_(host[places])
        else:
            host[places] = device.cpu()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _latency(backend: SwapBackend, entries: int) -> dict[str, Any]:
    """Microseconds of one ``put`` until its bytes are in the region, one ``get`` until they are back, and its call."""
    ops = backend.ops
    held = 4
    times: dict[str, list[float]] = {"save": [], "load": [], "get_returns": []}
    start = time.perf_counter()
    with EncoderCache(held * _ENTRY, backend=backend) as cache:
        opened = time.perf_counter() - start
        tensor = ops.empty(_ENTRY)
        ops.synchronize()
        for number in range(entries + held):
            key = b"%d" % number
            start = time.perf_counter()
            cache.put(key, tensor)
            cache.flush()
            saved = time.perf_counter()
            back = cache.get(key)
            returned = time.perf_counter()
            ops.synchronize()
            loaded = time.perf_counter()
            if back is None:
                raise SwapFailed(f"the entry {key!r} of {_ENTRY} bytes was not kept", index=None)
            if number >= held:  # until the region was full once, pages and paths were new
                times["save"].append(saved - start)
                times["load"].append(loaded - saved)
                times["get_returns"].append(returned - saved)
            del back
    found: dict[str, Any] = {"entry_bytes": _ENTRY, "cache_opens_s": opened}
    for name, seconds in times.items():
        points = np.percentile(np.array(seconds) * 1e6, [50, 90, 99])
        found[name] = dict(zip(("p50_us", "p90_us", "p99_us"), points.tolist(), strict=True))
    return found


def compare(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    """Figures that both documents have, as rows of name, first, second and ``ratio`` (above 1: the second is better).

    Raises :class:`ConfigError` for a document that :func:`bench` did not make.
    """
    ours, theirs = _figures(first), _figures(second)
    return [
        {
            "figure": name,
            "first": value,
            "second": theirs[name][0],
            "ratio": _ratio(value, theirs[name][0], rising),
        }
        for name, (value, rising) in ours.items()
        if name in theirs
    ]


def _ratio(first: float, second: float, rising: bool) -> float | None:
    top, bottom = (second, first) if rising else (first, second)
    return top / bottom if bottom else None


def _figures(document: dict[str, Any]) -> dict[str, tuple[float, bool]]:
    """Every figure by name, and whether more of it is better."""
    try:
        found: dict[str, tuple[float, bool]] = {}
        for direction, rate in document["peak"].items():
            found[f"{direction} peak GB/s"] = (float(rate), True)
        for row in document["rates"]:
            for way, rate in row["gb_per_s"].items():
                found[f"{row['direction']} {row['block_bytes']} bytes, {way} GB/s"] = (float(rate), True)
        for name in ("save", "load", "get_returns"):
            for point, value in document["latency"][name].items():
                found[f"{name} {point}"] = (float(value), False)
        for name in ("region_s", "register_s"):
            if document["start_up"][name] is not None:
                found[f"start-up {name}"] = (float(document["start_up"][name]), False)
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ConfigError(
            f"that is no result of 'ecoffload bench --json': {exc!r}", option="compare", value=None
        ) from exc
    return found
