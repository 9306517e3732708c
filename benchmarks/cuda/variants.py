"""How the gather kernel's shape was chosen: every variant checked and timed at 1 to 4 SMs, alone and beside a GEMM.

Run on a machine with a GPU: ``python benchmarks/cuda/variants.py [--out FILE.json]``. It drives the kernel directly,
without the backend, so that a shape can be judged before the backend is told to use it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import time

import numpy as np
import torch
from ecoffload_cuda.driver import BATCH_VERSION, Cuda, Device
from ecoffload_cuda.kernel import Gather, Shape
from ecoffload_cuda.tables import Table

from ecoffload.drivers import BatchCall

TOTAL = 256 << 20
SHAPES = {
    "7x4x8K/1": Shape(7, 4, 1, 8192),
    "7x4x8K/2": Shape(7, 4, 2, 8192),
    "4x7x8K/2": Shape(4, 7, 2, 8192),
    "14x2x8K/1": Shape(14, 2, 1, 8192),
    "14x4x4K/1": Shape(14, 4, 1, 4096),
    "14x4x4K/2": Shape(14, 4, 2, 4096),
    "8x7x4K/2": Shape(8, 7, 2, 4096),
    "28x4x2K/1": Shape(28, 4, 1, 2048),
    "14x8x2K/2": Shape(14, 8, 2, 2048),
    "14x8x2K/4": Shape(14, 8, 4, 2048),
}
S, C, H = "SETTLE", "CLUSTER=2", "HINT"
BESIDE = [
    # (name, shape, multiprocessors, directions)
    ("14x4x4K/1", Shape(14, 4, 1, 4096), 2, "h2d"),
    ("14x4x4K/1 cluster", Shape(14, 4, 1, 4096, (C,)), 2, "h2d"),
    ("14x4x4K/1 hint", Shape(14, 4, 1, 4096, (H,)), 2, "h2d"),
    ("4x7x8K/1", Shape(4, 7, 1, 8192), 2, "h2d"),
    ("14x4x4K/1", Shape(14, 4, 1, 4096), 1, "h2d d2h"),
    ("4x4x4K/2 settle", Shape(4, 4, 2, 4096, (S,)), 2, "d2h"),
    ("4x4x4K/2 settle cluster", Shape(4, 4, 2, 4096, (S, C)), 2, "d2h"),
    ("4x4x4K/1 settle", Shape(4, 4, 1, 4096, (S,)), 2, "d2h"),
    ("4x4x4K/3 settle", Shape(4, 4, 3, 4096, (S,)), 2, "d2h"),
    ("4x4x4K/1", Shape(4, 4, 1, 4096), 2, "d2h"),
    ("4x3x4K/1 settle", Shape(4, 3, 1, 4096, (S,)), 2, "d2h"),
    ("3x4x4K/2 settle", Shape(3, 4, 2, 4096, (S,)), 2, "d2h"),
    ("3x4x4K/1", Shape(3, 4, 1, 4096), 2, "d2h"),
    ("6x4x2K/2 settle", Shape(6, 4, 2, 2048, (S,)), 2, "d2h"),
    ("2x4x8K/2 settle", Shape(2, 4, 2, 8192, (S,)), 2, "d2h"),
    ("3x4x4K/2 settle", Shape(3, 4, 2, 4096, (S,)), 3, "d2h"),
    ("2x4x4K/1 settle", Shape(2, 4, 1, 4096, (S,)), 4, "d2h"),
]

cuda = Cuda.open()
torch.cuda.init()
device = Device(cuda, 0)
torch.zeros(1, device="cuda")
path = "/dev/shm/ecoffload-variants"
fd = os.open(path, os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 2 * TOTAL)
mapping = mmap.mmap(fd, 2 * TOTAL)
os.unlink(path)
host = torch.frombuffer(memoryview(mapping), dtype=torch.uint8)
host.random_(0, 256)
assert cuda.MemHostRegister(host.data_ptr(), host.numel(), 3) == 0
dev = torch.empty(2 * TOTAL, dtype=torch.uint8, device="cuda").random_(0, 256)
low, high = torch.cuda.Stream.priority_range()
side = torch.cuda.Stream(priority=high)
side2 = torch.cuda.Stream(priority=high)
rng = np.random.default_rng(0)
batch = BatchCall(cuda.driver.resolve("cuMemcpyBatchAsync", BATCH_VERSION))
gathers: dict[Shape, Gather] = {}


def gather(shape: Shape) -> Gather:
    if shape not in gathers:
        gathers[shape] = Gather(device, shape)
    return gathers[shape]


class Work:
    """A table of descriptors in device memory, in pinned memory and as numpy arrays."""

    def __init__(self, sizes: np.ndarray, h2d: bool, slots: np.ndarray, stride: int) -> None:
        n = len(sizes)
        hp = np.uint64(host.data_ptr()) + slots.astype(np.uint64) * np.uint64(stride)
        offsets = np.arange(n, dtype=np.uint64) * np.uint64(stride)
        dp = np.uint64(dev.data_ptr()) + offsets
        self.set(*((hp, dp) if h2d else (dp, hp)), sizes.astype(np.uint64))

    def set(self, src: np.ndarray, dst: np.ndarray, size: np.ndarray) -> None:
        self.src, self.dst, self.size, self.n = src.copy(), dst.copy(), size.copy(), len(size)
        self.nbytes = int(size.sum())
        self.pinned = torch.from_numpy(np.stack([self.src, self.dst, self.size]).view(np.int64)).pin_memory()
        self.table = self.pinned.cuda()
        self.firsts: dict[int, tuple[int, int, int]] = {}
        self.keep: list[torch.Tensor] = []

    def pieces(self, chunk: int) -> tuple[int, int, int]:
        if chunk not in self.firsts:
            count = (self.size + np.uint64(chunk - 1)) // np.uint64(chunk)
            if (count == count[0]).all():
                self.firsts[chunk] = (0, int(count.sum()), int(count[0]))
            else:
                first = np.concatenate(([0], np.cumsum(count))).astype(np.uint32)
                tensor = torch.from_numpy(first.view(np.int32)).cuda()
                self.keep.append(tensor)
                self.firsts[chunk] = (tensor.data_ptr(), int(first[-1]), 0)
        return self.firsts[chunk]

    def kernel(self, shape: Shape, sms: int, stream: torch.cuda.Stream, table: torch.Tensor | None = None) -> None:
        at = (self.table if table is None else table).data_ptr()
        first, pieces, each = self.pieces(shape.chunk)
        filled = Table(at, at + 8 * self.n, at + 16 * self.n, first, self.n, pieces, each)
        code = gather(shape).launch(sms, stream.cuda_stream, filled)
        assert code == 0, cuda.driver.error_text(code)

    def engine(self, stream: torch.cuda.Stream, a: int = 0, b: int | None = None) -> None:
        b = self.n if b is None else b
        r = batch(
            self.dst[a:].ctypes.data, self.src[a:].ctypes.data, self.size[a:].ctypes.data, b - a, stream.cuda_stream
        )
        assert r.code == 0, r


def uniform(block: int, h2d: bool, limit: int = TOTAL) -> Work:
    n = min(TOTAL // block, limit // block)
    return Work(np.full(n, block), h2d, rng.permutation(2 * TOTAL // block)[:n], block)


def timed(call, *arguments, reps: int = 4) -> float:
    times = []
    for _ in range(reps):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        a.record(side)
        call(*arguments)
        b.record(side)
        side.synchronize()
        times.append(a.elapsed_time(b))
    return float(np.median(times[1:]))


def fuzz(shape: Shape, sms: int, seed: int) -> int:
    """Random sizes and alignments both ways; every byte of the target is compared, also those between the copies."""
    r = np.random.default_rng(seed)
    n, stride = 1500, 24576
    sizes = np.concatenate(
        [r.integers(1, 600, n // 3), r.integers(1, 20000, n // 3), r.integers(1, 70, n - 2 * (n // 3))]
    )
    r.shuffle(sizes)
    bad = 0
    for h2d in (True, False):
        hoff = r.integers(0, 48, n)
        doff = np.where(r.random(n) < 0.5, hoff % 16 + 16 * r.integers(0, 3, n), r.integers(0, 48, n))
        slots = r.permutation(n)
        hp = np.uint64(host.data_ptr()) + (slots * stride + hoff).astype(np.uint64)
        dp = np.uint64(dev.data_ptr()) + (np.arange(n) * stride + doff).astype(np.uint64)
        w = Work.__new__(Work)
        w.set(*((hp, dp) if h2d else (dp, hp)), sizes.astype(np.uint64))
        span = n * stride
        hv, dv = host[:span].numpy(), dev[:span]
        source = (host[:span] if h2d else dv.cpu()).numpy().copy()
        if h2d:
            dv.fill_(7)
        else:
            hv[:] = 7
        torch.cuda.synchronize()
        w.kernel(shape, sms, side)
        torch.cuda.synchronize()
        expected = np.full(span, 7, np.uint8)
        for i in range(n):
            h0, d0, z = int(slots[i] * stride + hoff[i]), int(i * stride + doff[i]), int(sizes[i])
            s0, t0 = (h0, d0) if h2d else (d0, h0)
            expected[t0 : t0 + z] = source[s0 : s0 + z]
        got = dv.cpu().numpy() if h2d else hv
        bad += int((got != expected).sum())
        host[:span].random_(0, 256)
        dev[:span].random_(0, 256)
    return bad


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", help="write every figure to this JSON file")
    parser.add_argument("--only", choices=["alone", "beside", "held"], help="leave the other parts out")
    args = parser.parse_args()
    print(torch.__version__, device.name, "driver", cuda.out("DriverGetVersion", ctype=ctypes.c_int), device.compute)
    results: dict[str, float] = {}
    if args.only in (None, "alone"):
        alone(results)
    if args.only in (None, "held"):
        occupancy()
    if args.only in (None, "beside"):
        beside_a_gemm(results)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as out:
            json.dump(results, out, indent=1)


def alone(results: dict[str, float]) -> None:
    t0 = time.perf_counter()
    for shape in SHAPES.values():
        gather(shape)
    print(f"compiled {len(SHAPES)} in {time.perf_counter() - t0:.2f} s; per thread block {device.shared_memory} bytes")
    plain = Shape(16, 0, 0, 16384)
    for name, shape in [*SHAPES.items(), ("plain", plain)]:
        print("fuzz", name, "wrong bytes:", fuzz(shape, 2, 1), flush=True)
    pin = torch.empty(TOTAL, dtype=torch.uint8, pin_memory=True)
    for h2d in (True, False):
        way = "h2d" if h2d else "d2h"

        def whole(h2d=h2d):
            with torch.cuda.stream(side):
                dev[:TOTAL].copy_(pin, non_blocking=True) if h2d else pin.copy_(dev[:TOTAL], non_blocking=True)

        results[f"{way} peak"] = TOTAL / timed(whole, reps=6) / 1e6
        print(way, "peak", round(results[f"{way} peak"], 2))
    for h2d in (True, False):
        way = "h2d" if h2d else "d2h"
        for block in (2048, 4096, 7168, 8192, 16384, 65536):
            w = uniform(block, h2d)
            print(way, block)
            for name, shape in SHAPES.items():
                row = []
                for sms in (1, 2, 3, 4):
                    rate = w.nbytes / timed(w.kernel, shape, sms, side, reps=3) / 1e6
                    results[f"{way} {block} {name} {sms}"] = rate
                    row.append(f"{rate:5.1f}")
                print(f"   {name:10s}", " ".join(row), flush=True)
            row = [f"{w.nbytes / timed(w.kernel, plain, s, side, reps=3) / 1e6:5.1f}" for s in (2, 4, 8, 16, 32)]
            print("   plain 2,4,8,16,32", " ".join(row))
            rate = w.nbytes / timed(w.kernel, SHAPES["14x4x4K/2"], 2, side, w.pinned, reps=3) / 1e6
            print(f"   14x4x4K/2 at 2, table in host memory {rate:5.1f}", flush=True)
    # copy engine on several streams, and beside the kernel
    done = [torch.cuda.Event() for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in range(3)]

    def spread(w: Work, k: int, share: float, shape: Shape) -> None:
        go = torch.cuda.Event()
        go.record(side)
        cut = int(w.n * share)
        edges = np.linspace(0, cut, k + 1).astype(int)
        if cut < w.n:
            rest = rests[id(w), cut]
            rest.kernel(shape, 2, side)
        for i in range(k):
            if edges[i] == edges[i + 1]:
                continue
            streams[i].wait_event(go)
            w.engine(streams[i], int(edges[i]), int(edges[i + 1]))
            done[i].record(streams[i])
            side.wait_event(done[i])

    rests: dict[tuple[int, int], Work] = {}
    for h2d in (True, False):
        way = "h2d" if h2d else "d2h"
        for block in (32768, 65536, 131072, 262144, 1 << 20, 0):
            if block:
                w = uniform(block, h2d)
            else:
                n = 1300
                w = Work(rng.integers(100, 300, n) * 1024, h2d, rng.permutation(n), 307200)
            row = []
            for k, share in ((1, 1.0), (2, 1.0), (3, 1.0), (1, 0.0), (1, 0.25), (1, 0.5), (1, 0.75), (1, 0.9)):
                cut = int(w.n * share)
                if cut < w.n:
                    rest = Work.__new__(Work)
                    rest.set(w.src[cut:], w.dst[cut:], w.size[cut:])
                    rests[id(w), cut] = rest
                rate = w.nbytes / timed(spread, w, k, share, SHAPES["7x4x8K/1"]) / 1e6
                results[f"{way} {block} engines {k} share {share}"] = rate
                row.append(f"{k}e{share:.2f} {rate:5.1f}")
            print(way, block or "100-300K", " | ".join(row), flush=True)
            rests.clear()
    # host costs
    ev = torch.cuda.Event()
    w = uniform(4096, True, 40 << 20)
    raw = side.cuda_stream
    ce = cuda.out("EventCreate", 2)
    pin3 = torch.empty(3 * w.n, dtype=torch.int64, pin_memory=True)
    table3 = torch.empty(3 * w.n, dtype=torch.int64, device="cuda")
    host3 = np.stack([w.src, w.dst, w.size]).view(np.int64)
    pn = pin3.numpy().reshape(3, -1)
    word = ctypes.c_int(2)
    at = ctypes.addressof(word)
    exchange = cuda.driver.library["cuThreadExchangeStreamCaptureMode"]
    exchange.argtypes = [ctypes.c_void_p]
    status = ctypes.c_int()
    calls = {
        "kernel launch": lambda: w.kernel(SHAPES["14x4x4K/2"], 2, side),
        "table copy_ 240 KB into pinned": lambda: np.copyto(pn, host3),
        "cuMemcpyAsync 240 KB": lambda: cuda.MemcpyAsync(table3.data_ptr(), pin3.data_ptr(), 24 * w.n, raw),
        "cuEventRecord": lambda: cuda.EventRecord(ce, raw),
        "torch event record": lambda: ev.record(side),
        "cuEventQuery": lambda: cuda.EventQuery(ce),
        "torch event query": ev.query,
        "exchange capture mode": lambda: exchange(at),
        "cuStreamIsCapturing": lambda: cuda.StreamIsCapturing(raw, ctypes.addressof(status)),
        "device.enter": device.enter,
        "cuStreamWaitEvent": lambda: cuda.StreamWaitEvent(raw, ce, 0),
        "torch wait_event": lambda: side.wait_event(ev),
        "torch.cuda.Event()+record": lambda: torch.cuda.Event().record(side),
    }
    for name, call in calls.items():
        best = []
        for _ in range(40):
            t = time.perf_counter()
            call()
            best.append(time.perf_counter() - t)
            torch.cuda.synchronize()
        print(f"host {name}: {np.median(best) * 1e6:.2f} us")
    for n in (1, 2, 4, 8, 16, 64):
        for h2d in (True, False):
            w = uniform(262144, h2d, n * 262144)
            best = []
            for _ in range(20):
                torch.cuda.synchronize()
                t = time.perf_counter()
                w.engine(side)
                best.append(time.perf_counter() - t)
            print(f"host batch call of {n} x 256 KiB {'h2d' if h2d else 'd2h'}: {np.median(best) * 1e6:.1f} us")


HOLD = """
extern "C" __global__ void CLUSTERED hold(unsigned long long ns, unsigned* where) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    if (threadIdx.x == 0) asm volatile("mov.u32 %0, %smid;" : "=r"(where[blockIdx.x]));
    do { __nanosleep(2000); asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
}
"""


def make_gemm():
    """A function: milliseconds of one of n GEMMs of 8192^3 in bf16, back to back."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def gemm(n: int) -> float:
        x, y = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        x.record()
        for _ in range(n):
            torch.mm(a, b)
        y.record()
        y.synchronize()
        return x.elapsed_time(y) / n

    for _ in range(5):
        gemm(40)
    return gemm


def occupancy() -> None:
    """What a GEMM pays for multiprocessors that are merely held (asleep, moving nothing): the floor of any kernel."""
    from cuda.core import Program, ProgramOptions

    gemm = make_gemm()
    where = torch.zeros(16, dtype=torch.int32, device="cuda")
    kernels = {}
    for cluster in (1, 2):
        text = HOLD.replace("CLUSTERED", "" if cluster == 1 else f"__cluster_dims__({cluster}, 1, 1)")
        code = Program(text, "c++", ProgramOptions(arch="sm_90", std="c++17")).compile("cubin").code
        module = cuda.out("ModuleLoadData", bytes(code))
        kernels[cluster] = cuda.out("ModuleGetFunction", module, b"hold")
        assert cuda.FuncSetAttribute(kernels[cluster], 8, 229376) == 0
    ns, pointer = ctypes.c_uint64(80_000_000), ctypes.c_uint64(where.data_ptr())
    parameters = (ctypes.c_void_p * 2)(ctypes.addressof(ns), ctypes.addressof(pointer))
    for sms, cluster in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2)):
        args = (kernels[cluster], sms, 1, 1, 32, 1, 1, 229376, side.cuda_stream, ctypes.addressof(parameters), None)
        ratios = []
        for turn in range(8):  # in both orders, as below
            pair = {}
            for hold in ((False, True), (True, False))[turn % 2]:
                torch.cuda.synchronize()
                time.sleep(0.03)
                if hold:
                    assert cuda.LaunchKernel(*args) == 0
                    time.sleep(0.002)
                pair[hold] = gemm(30)
            torch.cuda.synchronize()
            ratios.append(pair[True] / pair[False])
        held = where[:sms].tolist()
        print(f"{sms} SMs held, clusters of {cluster} (on {held}): gemm x{np.median(ratios):.3f} of alone", flush=True)


def beside_a_gemm(results: dict[str, float]) -> None:
    """Each variant next to a plain DMA copy measured in the same breath: clocks drift with power and heat."""
    pin = torch.empty(TOTAL, dtype=torch.uint8, pin_memory=True)
    for name, shape, _, _ in BESIDE:
        print("fuzz", name, "wrong bytes:", fuzz(shape, 2, 2), flush=True)

    def beside(call) -> tuple[float, float]:
        torch.cuda.synchronize()
        x, y = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        x.record(side)
        for _ in range(14):
            call()
        y.record(side)
        ms = gemm(30)
        torch.cuda.synchronize()
        return ms, 14 * TOTAL / x.elapsed_time(y) / 1e6

    gemm = make_gemm()
    for h2d in (True, False):
        way = "h2d" if h2d else "d2h"
        w, w2 = uniform(7168, h2d), uniform(2048, h2d)

        def dma(h2d=h2d):
            with torch.cuda.stream(side):
                dev[:TOTAL].copy_(pin, non_blocking=True) if h2d else pin.copy_(dev[:TOTAL], non_blocking=True)

        beside(dma)
        for name, shape, sms, ways in BESIDE:
            if way not in ways:
                continue

            def call(shape=shape, sms=sms, w=w):
                w.kernel(shape, sms, side)

            solo = w.nbytes / timed(call, reps=3) / 1e6
            ratios, rates = [], []
            for turn in range(6):  # in both orders: whoever comes second finds a warmer device
                pair = {}
                for which in ((dma, call), (call, dma))[turn % 2]:
                    pair[which] = beside(which)
                ratios.append(pair[call][0] / pair[dma][0])
                rates.append(pair[call][1])
            results[f"gemm {way} {name} {sms}"] = float(np.median(ratios))
            print(
                f"{way} {name} on {sms}: gemm x{np.median(ratios):.3f} of beside dma "
                f"({min(ratios):.3f}..{max(ratios):.3f}); copy alone {solo:.1f}, beside {np.median(rates):.1f} GB/s",
                flush=True,
            )
            if way == "d2h" and not shape.extra[1:]:
                row = [w2.nbytes / timed(w2.kernel, shape, n, side, reps=3) / 1e6 for n in (2, 3, 4)]
                print("      2 KiB blocks on 2, 3, 4:", " ".join(f"{r:.1f}" for r in row), flush=True)
        alone = gemm(30)
        print(way, f"gemm alone {alone:.3f} ms, dma {beside(dma)[0]:.3f} ms")


if __name__ == "__main__":
    main()
