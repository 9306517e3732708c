"""Every figure of the cuda backend in one call: checks, times, prints a table against bar and aim, writes JSON.

    python benchmarks/cuda/run.py --out results.json [--peer DIR] [--only NAME...] [--no-region]

Needs an NVIDIA GPU, ecoffload and ecoffload-cuda. "peak" is one large pinned copy, measured in the same run; today's
other ways (the batch call, a loop of copies, a load/store kernel) are measured beside ours. Stream times: the stream is
held back until the host has submitted, for every way alike. ``--peer``: a folder with vLLM's own worker and the script
``peer_vllm_worker.py`` that drives it, run as a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import mmap
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ecoffload_cuda.kernel import PLAIN, Gather

from ecoffload import get_backend
from ecoffload.backend import D2H, H2D, Direction
from ecoffload.cache import DEFAULT_GRANULE
from ecoffload.descriptors import AddressRanges, Batch, DescriptorPool
from ecoffload.region import HostRegion
from ecoffload.scheduler import OffloadScheduler
from ecoffload.submission import submit_batch
from ecoffload.worker import OffloadWorker

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from figures import figure, finish

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
TOTAL = 256 * MIB
HIDDEN = 3584
WAYS: tuple[Direction, ...] = (H2D, D2H)

rows: list[dict[str, Any]] = []
ways: list[dict[str, Any]] = []
notes: dict[str, Any] = {}


def row(name: str, value: float, bar: float, aim: float, better: Any = "lower") -> None:
    ok = figure(name, value, bar, better=better, aim=aim)
    met = value <= aim if better == "lower" else value >= aim
    rows.append({"name": name, "value": value, "bar": bar, "aim": aim, "better": better, "ok": ok, "aim_met": met})


class Bench:
    """The backend, a registered host buffer, device memory and streams."""

    def __init__(self) -> None:
        self.backend: Any = get_backend("cuda")
        self.ops = self.backend.ops
        self.live = self.backend.live()
        self.memory = mmap.mmap(-1, 2 * TOTAL)
        self.host = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.registration = self.backend.register(self.host.data_ptr(), 2 * TOTAL)
        self.device = torch.empty(2 * TOTAL, dtype=torch.uint8, device="cuda").random_(0, 256)
        self.host.copy_(self.device)
        self.pinned = torch.empty(TOTAL, dtype=torch.uint8, pin_memory=True)
        self.stream = self.ops.stream()
        self.pool = DescriptorPool()
        self.random = np.random.default_rng(0)
        with self.live.device.current():
            self.plain = Gather(self.live.device, PLAIN)
        self.peak = {way: TOTAL / self.stream_ms(self.contiguous, way, TOTAL, rounds=9) / 1e6 for way in WAYS}
        for way in WAYS:
            ways.append({"way": "peak", "direction": way, "block": TOTAL, "gbps": self.peak[way]})
            print(f"peak {way}: {self.peak[way]:.2f} GB/s")

    def contiguous(self, way: Direction, nbytes: int) -> None:
        with torch.cuda.stream(self.stream):
            if way == H2D:
                self.device[:nbytes].copy_(self.pinned[:nbytes], non_blocking=True)
            else:
                self.pinned[:nbytes].copy_(self.device[:nbytes], non_blocking=True)

    def stream_ms(self, call: Callable[..., Any], *arguments: Any, rounds: int = 5) -> float:
        """Median stream time of ``call(*arguments)``; a first round warms up."""
        times = []
        for _ in range(rounds):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(12_000_000)  # about 7 ms: what the host does meanwhile costs no stream time
            a.record(self.stream)
            call(*arguments)
            b.record(self.stream)
            self.stream.synchronize()
            times.append(a.elapsed_time(b))
        return float(np.median(times[1:]))

    def table(self, way: Direction, sizes: np.ndarray, stride: int, places: np.ndarray) -> tuple[np.ndarray, ...]:
        host = np.uint64(self.registration.alias) + places.astype(np.uint64) * np.uint64(stride)
        device = np.uint64(self.device.data_ptr()) + np.arange(len(sizes), dtype=np.uint64) * np.uint64(stride)
        src, dst = (host, device) if way == H2D else (device, host)
        return src, dst, sizes.astype(np.uint64)

    def lease(self, table: tuple[np.ndarray, ...]) -> Batch:
        batch = self.pool.lease(len(table[0]))
        batch.extend(*table)
        return batch

    def ours(self, way: Direction, table: tuple[np.ndarray, ...]) -> None:
        submit_batch(self.backend, self.lease(table), way, self.stream)

    def batch_call(self, table: tuple[np.ndarray, ...]) -> None:
        src, dst, size = (column.ctypes.data for column in table)
        result = self.live.batch(dst, src, size, len(table[0]), self.stream.cuda_stream)
        assert result.code == 0, result

    def loop(self, table: tuple[np.ndarray, ...]) -> None:
        copy, raw = self.live.cuda.MemcpyAsync, self.stream.cuda_stream
        for s, d, n in zip(*(column.tolist() for column in table), strict=True):
            copy(d, s, n, raw)

    def wall_s(self, call: Callable[..., Any], *arguments: Any) -> float:
        """Median seconds from the call until the bytes are there."""
        walls = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call(*arguments)
            self.stream.synchronize()
            walls.append(time.perf_counter() - start)
        return float(np.median(walls[1:]))

    def load_store(self, table: tuple[np.ndarray, ...], blocks: int) -> None:
        tables = self.live.tables
        slot = tables.lend(len(table[0]))
        size = table[2]
        shift = self.plain.shift
        filled = tables.fill(slot, *table, int(size.min()), int(size.max()), shift, self.stream.cuda_stream)
        assert self.plain.launch(blocks, self.stream.cuda_stream, filled) == 0
        tables.used(slot, self.stream.cuda_stream)

    def verify(self, way: Direction, table: tuple[np.ndarray, ...]) -> None:
        """Every byte of every descriptor, after a swap into poisoned memory."""
        to, source = (self.device, self.host) if way == H2D else (self.host, self.device)
        self.device.random_(0, 256)
        source.copy_(self.device)
        to.fill_(0xA5)
        torch.cuda.synchronize()
        self.ours(way, table)
        torch.cuda.synchronize()
        host, device = self.host.numpy(), self.device.cpu().numpy()
        h, d = (table[0], table[1]) if way == H2D else (table[1], table[0])
        h0, d0 = self.registration.alias, self.device.data_ptr()
        for a, b, n in zip((h - np.uint64(h0)).tolist(), (d - np.uint64(d0)).tolist(), table[2].tolist(), strict=True):
            assert np.array_equal(host[a : a + n], device[b : b + n]), f"wrong bytes at {a}"


class Quiet:
    """Moves this thread to a core that nobody disturbs, and tells whether it stayed so.

    A core of a virtual machine seems to share a physical one with strangers: a loop of pure Python takes its best time
    or 1.6 to 2 times as long, changing within seconds (measured on each core of a lent machine), and so does all that a
    host does for a swap. Figures of the host are therefore medians of undisturbed rounds; those of all are noted too.
    """

    def __init__(self) -> None:
        self.cores = sorted(os.sched_getaffinity(0))
        self.best = float("inf")
        self.slow: list[float] = []
        for core in self.cores * 2:
            os.sched_setaffinity(0, {core})
            self.best = min(self.best, self.loop())

    def loop(self) -> float:
        """Seconds of a fixed loop of Python, the lesser of two."""
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            total = 0
            for i in range(2000):
                total += i * i
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    def settle(self) -> None:
        """Stay where all is quiet, or go to the first core where it is; the last one tried, if it is so nowhere."""
        for core in (None, *self.cores):
            if core is not None:
                os.sched_setaffinity(0, {core})
            took = self.loop()
            self.slow.append(took / self.best)
            if took < 1.15 * self.best:
                return

    def undisturbed(self) -> bool:
        return self.loop() < 1.15 * self.best

    def release(self) -> None:
        """Any core again."""
        os.sched_setaffinity(0, self.cores)


def scattered(bench: Bench) -> None:
    """GB/s by block size, ours beside today's ways, and the shares of peak that have a bar."""
    heads = ("ours", "batch", "loop", "ld/st 12", "ld/st 32", "ours*", "batch*", "peak")
    print(f"{'':18s}" + "".join(f"{head:>9s}" for head in heads) + "   GB/s (*: host's submit included)")
    bars = {2: (0.88, 0.92), 4: (0.90, 0.93), 7: (0.90, 0.93), 8: (0.90, 0.93), 16: (0.90, 0.93), 64: (0.90, 0.93)}
    later = []
    for way in WAYS:
        for kib in (2, 4, 7, 8, 16, 32, 64, 128, 256, 1024, 0):
            if kib:
                block = kib * KIB
                count = TOTAL // block
                table = bench.table(
                    way, np.full(count, block), block, bench.random.permutation(2 * TOTAL // block)[:count]
                )
            else:
                count = 1200
                sizes = bench.random.integers(100 * KIB // 256, 300 * KIB // 256, count) * 256
                table = bench.table(way, sizes, 300 * KIB, bench.random.permutation(count))
            nbytes = int(table[2].sum())
            if kib in (2, 7, 64, 0):
                bench.verify(way, table)
            few = tuple(column[:2048] for column in table)
            measured = {
                "ours": nbytes / bench.stream_ms(bench.ours, way, table) / 1e6,
                "batch call": nbytes / bench.stream_ms(bench.batch_call, table, rounds=3) / 1e6,
                "loop of copies": int(few[2].sum()) / bench.stream_ms(bench.loop, few, rounds=3) / 1e6,
                "load/store kernel, 12 SMs": nbytes / bench.stream_ms(bench.load_store, table, 12, rounds=3) / 1e6,
                "load/store kernel, 32 SMs": nbytes / bench.stream_ms(bench.load_store, table, 32, rounds=3) / 1e6,
            }
            for name, rate in measured.items():
                ways.append({"way": name, "direction": way, "block": kib * KIB or "100-300 KiB", "gbps": rate})
            label = f"{kib} KiB" if kib else "100-300 KiB"
            few_bytes = int(few[2].sum())
            for name, moved, call, arguments in (
                ("ours", nbytes, bench.ours, (way, table)),
                ("batch call", nbytes, bench.batch_call, (table,)),
                ("loop of copies", few_bytes, bench.loop, (few,)),
                ("load/store kernel, 12 SMs", nbytes, bench.load_store, (table, 12)),
            ):
                rate = moved / bench.wall_s(call, *arguments) / 1e9
                ways.append(
                    {"way": f"{name}, submit included", "direction": way, "block": kib * KIB or label, "gbps": rate}
                )
                if name in ("ours", "batch call"):
                    measured[f"{name}, submit included"] = rate
            rates = list(measured.values())
            line = "".join(f"{rate:9.1f}" for rate in (*rates, bench.peak[way]))
            print(f"{way} {label:14s}{line}", flush=True)
            if kib in bars or not kib:
                bar, aim = bars.get(kib, (0.92, 0.96))
                later.append(
                    (f"scattered {label} {way}, share of peak", rates[0] / bench.peak[way], bar, aim, "higher")
                )
    for each in later:
        row(*each)
    notes["multiprocessors"] = {way: bench.live.tuning.way(way).sms for way in WAYS}


def churned_extents(bench: Bench, region: HostRegion, scheduler: OffloadScheduler) -> None:
    """Entries of a churned region as they lie there, moved as one batch."""
    backend = bench.backend
    entries = [e for e in scheduler.index if e.write == "ended"]
    buffer = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    for take in (16, 64):
        for way in WAYS:
            shares, pieces = [], []
            for _ in range(5):
                picked = [entries[int(i)] for i in bench.random.choice(len(entries), take, replace=False)]
                host, sizes = [], []
                for entry in picked:
                    left = entry.nbytes
                    for offset, length in entry.extents:
                        host.append(region.address + offset)
                        sizes.append(min(length, left))
                        left -= sizes[-1]
                size = np.array(sizes, np.uint64)
                h = np.array(host, np.uint64)
                d = np.uint64(buffer.data_ptr()) + np.concatenate(([0], np.cumsum(size)[:-1])).astype(np.uint64)
                table = (h, d, size) if way == H2D else (d, h, size)
                ms = bench.stream_ms(bench.ours, way, table, rounds=4)
                shares.append(int(size.sum()) / ms / 1e6 / bench.peak[way])
                pieces.append(len(sizes))
            row(f"churned region, {take} entries {way}, share of peak", float(np.median(shares)), 0.96, 0.98, "higher")
            notes[f"descriptors of {take} entries {way}"] = float(np.median(pieces))
    del buffer
    notes["stats"] = {k: str(v) for k, v in backend.stats().items()}


def submit_time(bench: Bench) -> None:
    """Host time of a batch of 10,000: lease, fill, check of every range, submit."""
    count, block = 10_000, 4 * KIB
    for way in WAYS:
        table = bench.table(way, np.full(count, block), block, bench.random.permutation(2 * TOTAL // block)[:count])
        host = AddressRanges([(bench.registration.alias, 2 * TOTAL)])
        device = AddressRanges([(bench.device.data_ptr(), 2 * TOTAL)])
        ranges = {"sources": host, "destinations": device} if way == H2D else {"sources": device, "destinations": host}
        whole, submit = [], []
        for _ in range(40):
            torch.cuda.synchronize()
            t0 = time.perf_counter()
            batch = bench.lease(table)
            t1 = time.perf_counter()
            submit_batch(bench.backend, batch, way, bench.stream, **ranges)
            t2 = time.perf_counter()
            whole.append(t2 - t0)
            submit.append(t2 - t1)
        row(f"host time of 10,000 scattered descriptors {way}, ms", float(np.median(whole)) * 1e3, 0.5, 0.25)
        notes[f"submit alone of 10,000 {way}, ms"] = float(np.median(submit)) * 1e3


class Gemm:
    def __init__(self) -> None:
        self.a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(5):
            self.ms(40)

    def enqueue(self, n: int) -> None:
        for _ in range(n):
            torch.mm(self.a, self.b)

    def ms(self, n: int) -> float:
        x, y = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        x.record()
        self.enqueue(n)
        y.record()
        y.synchronize()
        return x.elapsed_time(y) / n


def beside(bench: Bench, gemm: Gemm, call: Callable[..., None], *arguments: Any) -> tuple[float, float]:
    """Milliseconds of a GEMM while copies run next to it, and GB/s of these."""
    torch.cuda.synchronize()
    x, y = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    x.record(bench.stream)
    for _ in range(14):
        call(*arguments)
    y.record(bench.stream)
    ms = gemm.ms(30)
    torch.cuda.synchronize()
    return ms, 14 * TOTAL / x.elapsed_time(y) / 1e6


def beside_gemm(bench: Bench, gemm: Gemm) -> None:
    """What a GEMM pays for a copy beside it: ours against one plain DMA copy, in turns, since clocks drift."""
    block = 7 * KIB
    for way in WAYS:
        count = TOTAL // block
        table = bench.table(way, np.full(count, block), block, bench.random.permutation(2 * TOTAL // block)[:count])

        ratios, rates = [], []
        for turn in range(12):  # in both orders: whoever comes second finds a warmer device
            pair: dict[str, tuple[float, float]] = {}
            for name in (("dma", "ours"), ("ours", "dma"))[turn % 2]:
                if name == "dma":
                    pair[name] = beside(bench, gemm, bench.contiguous, way, TOTAL)
                else:
                    pair[name] = beside(bench, gemm, bench.ours, way, table)
            ratios.append(pair["ours"][0] / pair["dma"][0])
            rates.append(pair["ours"][1])
        row(f"GEMM beside scattered 7 KiB {way}, against beside a DMA copy", float(np.median(ratios)), 1.07, 1.03)
        notes[f"beside gemm {way}"] = {"ratios": ratios, "GB/s": float(np.median(rates))}
        print(f"   {min(ratios):.3f}..{max(ratios):.3f}; ours beside it {np.median(rates):.1f} GB/s", flush=True)


def tokens(random: np.random.Generator, n: int) -> list[int]:
    return [int(t) for t in np.clip(np.exp(random.normal(6.9, 0.9, n)), 64, 16384)]


class Engine:
    """A scheduler and a worker on one churned region."""

    def __init__(self, bench: Bench, capacity: int = 4 * GIB) -> None:
        self.bench = bench
        self.region = HostRegion.open(None, capacity=capacity, granule=DEFAULT_GRANULE)
        self.scheduler = OffloadScheduler(self.region)
        self.worker = OffloadWorker(self.region, bench.backend, register="require")
        self.random = np.random.default_rng(1)
        self.number = 0
        pool = torch.randn(16384, HIDDEN, device="cuda", dtype=torch.bfloat16)
        for _ in range(250):  # nine times over: 4000 entries of 9.7 MB on average
            self.save([pool[:t] for t in tokens(self.random, 16)])
            for _ in range(4):
                entries = list(self.scheduler.index)
                self.scheduler.index.touch(entries[int(self.random.integers(len(entries)))])

    def save(self, tensors: list[torch.Tensor]) -> tuple[list[bytes], float, float]:
        """Keys, seconds until flush returned, seconds until the bytes were there."""
        keys = []
        for tensor in tensors:
            self.number += 1
            key = b"%d" % self.number
            if self.scheduler.plan_save(key, tensor.nbytes, "bfloat16", tuple(tensor.shape)) is not None:
                keys.append(key)
        plan = self.scheduler.take_plan()
        torch.cuda.synchronize()
        worker = self.worker
        t0 = time.perf_counter()
        for key, tensor in zip(keys, tensors, strict=True):
            worker.save(key, tensor, plan)
        worker.flush()
        t1 = time.perf_counter()
        torch.cuda.synchronize()
        t2 = time.perf_counter()
        self.settle()
        return keys, t1 - t0, t2 - t0

    def load(self, keys: list[bytes]) -> tuple[dict[bytes, torch.Tensor], float, float]:
        for key in keys:
            assert self.scheduler.plan_load(key) is not None
        plan = self.scheduler.take_plan()
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        out = self.worker.load(plan)
        t1 = time.perf_counter()
        torch.cuda.synchronize()
        t2 = time.perf_counter()
        self.settle()
        return out, t1 - t0, t2 - t0

    def settle(self) -> None:
        while self.scheduler.has_pending():
            self.worker.poll()
            self.scheduler.poll()

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()
        self.region.close()


class Timed:
    """The batch call with a clock: what it takes is the driver's, not ours."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.seconds = 0.0

    def __call__(self, *arguments: int) -> Any:
        start = time.perf_counter()
        result = self.call(*arguments)
        self.seconds += time.perf_counter() - start
        return result


@contextmanager
def clocked(live: Any) -> Any:
    timed = Timed(live.batch)
    live.batch = timed
    try:
        yield timed
    finally:
        live.batch = timed.call


def contiguous(address: int, nbytes: int) -> dict[str, float]:
    """Seconds of a torch copy of the region's first bytes, from the call until they are there; the bytes stay."""
    region = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
    flat = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    seconds = {}
    for name, to, source in (("load", flat, region), ("save", region, flat)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - start
    return seconds


def end_to_end(bench: Bench, engine: Engine) -> None:
    """From the first Python call until the bytes are there; medians of rounds that nobody disturbed (see `Quiet`)."""
    quiet = Quiet()
    print("entries   MB      save GB/s  us/entry  of it ours     load GB/s  us/entry  of it ours   rounds")
    for k in (1, 4, 16, 64):
        good: list[dict[str, float]] = []
        every: list[dict[str, float]] = []
        for turn in range(60):
            if turn > 13 and len(good) >= 12:
                break
            quiet.settle()
            counts = [910] if k == 1 else tokens(engine.random, k)
            tensors = [torch.randn(t, HIDDEN, device="cuda", dtype=torch.bfloat16) for t in counts]
            total = sum(t.nbytes for t in tensors)
            seen = {"MB": total / MIB}
            with clocked(bench.live) as driver:
                keys, python, wall = engine.save(tensors)
                seen |= {"save GB/s": total / wall / 1e9, "save us": python / k * 1e6}
                seen["save us, ours"] = (python - driver.seconds) / k * 1e6
            undisturbed = quiet.undisturbed()
            if k == 1:  # against one contiguous copy of as many bytes, out of the region and into it
                seen["save over"] = wall * 1e6
            with clocked(bench.live) as driver:
                out, python, wall = engine.load(keys)
                seen |= {"load GB/s": total / wall / 1e9, "load us": python / k * 1e6}
                seen["load us, ours"] = (python - driver.seconds) / k * 1e6
            assert all(torch.equal(out[key], tensor) for key, tensor in zip(keys, tensors, strict=True))
            if k == 1:
                copied = contiguous(engine.region.address, total)
                seen["save over"] -= copied["save"] * 1e6
                seen["load over"] = (wall - copied["load"]) * 1e6
            if turn > 1:
                every.append(seen)
                if undisturbed and quiet.undisturbed():
                    good.append(seen)
            del out, tensors
        if not good:
            raise RuntimeError(f"no round of {k} entries was undisturbed: this host is too busy to measure")
        us, of_all = ({n: float(np.median([r[n] for r in rounds])) for n in rounds[0]} for rounds in (good, every))
        print(
            f"{k:7d} {us['MB']:6.1f}   {us['save GB/s']:9.1f} {us['save us']:9.1f} {us['save us, ours']:11.1f}     "
            f"{us['load GB/s']:9.1f} {us['load us']:9.1f} {us['load us, ours']:11.1f}   {len(good)} of {len(every)}",
            flush=True,
        )
        notes[f"end to end, {k} entries"] = {
            "undisturbed": {"rounds": len(good), **us},
            "all": {"rounds": len(every), **of_all},
        }
        if k == 1:
            row("one entry of 6.5 MB, save over a contiguous copy, us", us["save over"], 50, 20)
            row("one entry of 6.5 MB, load over a contiguous copy, us", us["load over"], 70, 40)
        if k in (16, 64):
            bars = {16: ((0.88, 0.95), (0.85, 0.92)), 64: ((0.92, 0.97), (0.88, 0.93))}[k]
            row(f"{k} entries, save, share of peak", us["save GB/s"] / bench.peak[D2H], *bars[0], "higher")
            row(f"{k} entries, load, share of peak", us["load GB/s"] / bench.peak[H2D], *bars[1], "higher")
        if k == 16:
            row("our Python an entry at 16 entries, save, us", us["save us, ours"], 15, 8)
            row("our Python an entry at 16 entries, load, us", us["load us, ours"], 20, 13)
    quiet.release()
    notes["a fixed loop of Python, against its best"] = {
        "median": float(np.median(quiet.slow)),
        "longest": max(quiet.slow),
    }


def step(bench: Bench, engine: Engine, gemm: Gemm) -> None:
    """A step of GEMMs of 20 ms in which 16 entries are saved and 16 others are reloaded for its end."""
    n = max(1, round(20 / gemm.ms(40)))
    aside = torch.cuda.Stream()
    ratios = []
    pool = torch.randn(16384, HIDDEN, device="cuda", dtype=torch.bfloat16)
    for _ in range(9):
        tensors = [pool[:t] for t in tokens(engine.random, 16)]
        old, _, _ = engine.save([pool[:t] for t in tokens(engine.random, 16)])

        def run(move: bool, tensors: list[torch.Tensor] = tensors, old: list[bytes] = old) -> float:
            keys = []
            scheduler, worker = engine.scheduler, engine.worker
            if move:
                for key in old:
                    assert scheduler.plan_load(key) is not None
                for tensor in tensors:
                    engine.number += 1
                    keys.append(b"%d" % engine.number)
                    scheduler.plan_save(keys[-1], tensor.nbytes, "bfloat16", tuple(tensor.shape))
                plan = scheduler.take_plan()
            torch.cuda.synchronize()
            x, y = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            x.record()
            gemm.enqueue(2)
            if move:
                with torch.cuda.stream(aside):  # the step's own stream waits only where it needs what was loaded
                    out = worker.load(plan)
                for key, tensor in zip(keys, tensors, strict=True):
                    worker.save(key, tensor, plan)
                worker.flush()
            gemm.enqueue(n - 2)
            if move:
                torch.cuda.current_stream().wait_stream(aside)
            y.record()
            torch.cuda.synchronize()
            if move:
                assert len(out) == len(old)
                engine.settle()
            return x.elapsed_time(y)

        run(False)
        ratios.append(run(True) / run(False))
    row("a 20 ms step with 16 saves and 16 loads, against without", float(np.median(ratios)), 1.03, 1.01)
    notes["step"] = {"gemms": n, "ratios": ratios}


def region_start(bench: Bench) -> None:
    """24 GiB reserved, populated and registered."""
    free = os.statvfs("/dev/shm")
    if free.f_bavail * free.f_frsize < 26 * GIB:
        print("24 GiB region: /dev/shm is too small here, not measured")
        return
    t0 = time.perf_counter()
    region = HostRegion.open(None, capacity=24 * GIB, granule=DEFAULT_GRANULE)
    t1 = time.perf_counter()
    worker = OffloadWorker(region, bench.backend, register="require")
    t2 = time.perf_counter()
    row(f"24 GiB region reserved, populated and registered on {os.cpu_count()} cores, s", t2 - t0, 8, 6)
    notes["region"] = {"populate s": t1 - t0, "register s": t2 - t1}
    worker.close()
    region.close()


def peer(folder: str) -> None:
    """vLLM's own worker in a process of its own, on this machine."""
    done = subprocess.run(
        [sys.executable, str(Path(folder) / "peer_vllm_worker.py")],
        env={**os.environ, "PEER": folder},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    print("vLLM 0.33's worker:\n" + done.stdout + done.stderr[-500:], flush=True)
    found = re.findall(
        r"entries\s+(\d+) ([\d.]+) MB: save ([\d.]+) GB/s \(([\d.]+) us.*?load ([\d.]+) GB/s \(([\d.]+) us", done.stdout
    )
    names = ("entries", "MB", "save GB/s", "save us an entry", "load GB/s", "load us an entry")
    notes["vLLM 0.33's worker"] = [dict(zip(names, map(float, each), strict=True)) for each in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write everything to this JSON file")
    parser.add_argument("--peer", metavar="DIR", help="measure vLLM's own worker, found in DIR, too")
    parser.add_argument("--no-region", action="store_true", help="leave out the 24 GiB region")
    parser.add_argument("--only", nargs="*", help="scattered, submit, churned, end-to-end, gemm, step, region")
    args = parser.parse_args()
    wanted = set(args.only or ("scattered", "submit", "churned", "end-to-end", "gemm", "step", "region"))
    bench = Bench()
    live = bench.live
    about = {
        "device": live.device.name,
        "driver API": live.version,
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "peak GB/s": bench.peak,
    }
    try:
        version = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        found = re.search(r"\d+\.\d+\.\d+", version)
        about["driver"] = found[0] if found else ""
    except OSError:
        about["driver"] = "unknown"
    print(about, flush=True)

    def guarded(name: str, *call: Any) -> None:
        if name not in wanted:
            return
        try:
            call[0](*call[1:])
        except Exception as exc:
            print(f"{name} failed: {exc!r}", flush=True)
            figure(f"{name} ran", 0, 1, better="higher")
            notes[f"{name} failed"] = repr(exc)

    guarded("scattered", scattered, bench)
    guarded("submit", submit_time, bench)
    if wanted & {"churned", "end-to-end", "step"}:
        engine = Engine(bench)
        guarded("churned", churned_extents, bench, engine.region, engine.scheduler)
        guarded("end-to-end", end_to_end, bench, engine)
    if wanted & {"gemm", "step"}:
        gemm = Gemm()
        if "step" in wanted:
            guarded("step", step, bench, engine, gemm)
        guarded("gemm", beside_gemm, bench, gemm)
    if wanted & {"churned", "end-to-end", "step"}:
        engine.close()
    if not args.no_region:
        guarded("region", region_start, bench)
    if args.peer:
        peer(args.peer)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as out:
            json.dump({"about": about, "rows": rows, "ways": ways, "notes": notes}, out, indent=1)
    print(f"\n{'figure':72s} {'value':>8s} {'bar':>6s} {'aim':>6s}")
    for each in rows:
        verdict = "aim met" if each["aim_met"] else "ok" if each["ok"] else "BELOW"
        print(f"{each['name']:72s} {each['value']:8.3f} {each['bar']:6g} {each['aim']:6g}  {verdict}")
    return finish()


if __name__ == "__main__":
    sys.exit(main())
