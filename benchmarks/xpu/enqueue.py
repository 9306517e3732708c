"""What it costs the host to enqueue one copy of 4 KiB, 1,000 to a batch, on the real SYCL runtime's CPU device.

All callers enqueue the same 1,000 copies (device to USM host memory, each block an allocation of its own) on one
in-order queue:

* `submit`: the backend, through its shim; Python and completion included
* `ctypes`: `libDPCTLSyclInterface`, a call a copy
* `dpctl api`: `SyclQueue.memcpy_async` from addresses, which is what a batch holds: a memory object for each is made
* `dpctl ready`: the same with all memory objects made beforehand
* `driver`: a loop in C over OpenCL's own `clEnqueueMemcpyINTEL`, below which no way through SYCL can go

A figure is CPU time of the calling thread, the median over turns in which the callers alternate, so that other work on
the machine disturbs little and all alike; the best turn's wall time is printed beside it. The queue runs meanwhile, as
it does in use, and is drained, untimed, after each. It is the host's cost: a CPU device's bytes a second say nothing
about a GPU.

Run in an environment of `tests/xpu.sh`:  .venv-xpu-9/bin/python benchmarks/xpu/enqueue.py [TURNS]
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ecoffload_xpu.plugin import SPEC
from ecoffload_xpu.sycl_cpu import SyclCpuBackend, SyclCpuOps, SyclStream
from ecoffload_xpu.ways import DpctlWay, sycl_library
from figures import figure, finish

COPIES = 1000
NBYTES = 4096

LOOP = """
#include <cstddef>
#include <cstdint>
using Enqueue = int (*)(void *, unsigned, void *, const void *, size_t, unsigned, const void *, void *);
extern "C" int loop(Enqueue enqueue, void *queue, const uint64_t *dst, const uint64_t *src, size_t size, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (int code = enqueue(queue, 0, (void *)dst[i], (const void *)src[i], size, 0, nullptr, nullptr)) return code;
  return 0;
}
"""


class Batch:
    """`COPIES` descriptors as a backend sees them."""

    def __init__(self, sources: list[int], targets: list[int]) -> None:
        self.words = np.array([sources, targets, [NBYTES] * COPIES], dtype=np.uint64)
        self.src, self.dst, self.size = (row.ctypes.data for row in self.words)
        self.count, self.first = COPIES, 0


class Block:
    """USM memory at an address, in the protocol that dpctl makes its memory objects from."""

    def __init__(self, address: int, queue: Any) -> None:
        self.__sycl_usm_array_interface__ = {
            "data": (address, False),
            "shape": (NBYTES,),
            "strides": None,
            "typestr": "|u1",
            "version": 1,
            "syclobj": queue,
        }


def driver_loop(stream: SyclStream, batch: Batch) -> Callable[[], None]:
    """The batch as a loop in C over the driver's own call, on the OpenCL queue below the stream."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "loop.so"
        command = ["g++", "-O2", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
        subprocess.run(command, input=LOOP, text=True, check=True)
        loop = ctypes.CDLL(str(library)).loop
    loop.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_size_t] * 2
    opencl = ctypes.CDLL(str(Path(sys.prefix) / "lib" / "libOpenCL.so.1"))
    platform = ctypes.c_void_p()
    opencl.clGetPlatformIDs(1, ctypes.byref(platform), None)
    find = opencl.clGetExtensionFunctionAddressForPlatform
    find.argtypes, find.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_void_p
    enqueue = find(platform, b"clEnqueueMemcpyINTEL")
    queue_of = sycl_library()[0]["_ZNK4sycl3_V15queue9getNativeERi"]
    queue_of.argtypes, queue_of.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_void_p
    queue = queue_of(stream.sycl_queue, ctypes.addressof(ctypes.c_int()))
    opencl.clFinish.argtypes = [ctypes.c_void_p]

    def run() -> None:
        if loop(enqueue, queue, batch.dst, batch.src, NBYTES, COPIES) != 0:
            raise RuntimeError("the driver refused a copy")

    def drain() -> None:
        opencl.clFinish(queue)

    run.drain = drain  # type: ignore[attr-defined]
    return run


def measure(turns: int) -> dict[str, list[tuple[float, float]]]:
    """(CPU, wall) microseconds a copy of each caller, one pair a turn."""
    import dpctl.memory

    ops = SyclCpuOps()
    backend = SyclCpuBackend(SPEC, 0, ops)
    stream = ops.stream()
    queue = stream.queue
    device = [dpctl.memory.MemoryUSMDevice(NBYTES, queue=queue) for _ in range(COPIES)]
    host = [dpctl.memory.MemoryUSMHost(NBYTES, queue=queue) for _ in range(COPIES)]
    sources, targets = [m._pointer for m in device], [m._pointer for m in host]
    batch = Batch(sources, targets)
    for address in targets:  # as a region is: registered once, long before
        backend.register(address, NBYTES)
    one_by_one = DpctlWay(str(backend.stats()["libsycl"]))

    def api() -> None:
        make = dpctl.memory.as_usm_memory
        for to, at in zip(targets, sources, strict=True):
            queue.memcpy_async(make(Block(to, queue)), make(Block(at, queue)), NBYTES)

    def ready() -> None:
        for to, at in zip(host, device, strict=True):
            queue.memcpy_async(to, at, NBYTES)

    driver = driver_loop(stream, batch)
    callers: dict[str, Callable[[], Any]] = {
        "submit": lambda: backend.submit(batch, "d2h", stream),
        "ctypes": lambda: one_by_one.copy(stream.sycl_queue, batch.dst, batch.src, batch.size, COPIES, 0),
        "dpctl api": api,
        "dpctl ready": ready,
        "driver": driver,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in callers}
    for turn in range(turns + 1):  # the first one warms up
        for name, call in callers.items():
            wall, cpu = perf_counter(), thread_time()
            kept = call()
            cpu, wall = thread_time() - cpu, perf_counter() - wall
            queue.wait()
            driver.drain()  # type: ignore[attr-defined]
            del kept
            if turn:
                times[name].append((cpu * 1e6 / COPIES, wall * 1e6 / COPIES))
    backend.close()
    return times


def main(turns: int = 30) -> None:
    times = measure(turns)
    cpu = {name: statistics.median(c for c, _ in values) for name, values in times.items()}
    for name, values in times.items():
        wall = min(w for _, w in values)
        print(f"# {name:12} CPU {cpu[name]:5.1f} us a copy, wall {wall:5.1f} at best", file=sys.stderr)
    figure("xpu.times_cheaper_than_dpctl_api", cpu["dpctl api"] / cpu["submit"], 5, better="higher", aim=10)
    figure(
        "xpu.times_cheaper_than_dpctl_api_with_objects_ready", cpu["dpctl ready"] / cpu["submit"], 1, better="higher"
    )
    figure("xpu.times_cheaper_than_ctypes_one_by_one", cpu["ctypes"] / cpu["submit"], 1, better="higher")
    figure("xpu.times_the_driver_alone", cpu["submit"] / cpu["driver"], 1.5, aim=1.2)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
    sys.exit(finish())
