"""What a region costs: reserving it from every core beside one thread, telling completion, keeping the journal.

`make bench` runs it; ECOFFLOAD_BENCH_REGION_MIB sets how much shared memory it populates at a time (1024 by default,
never more than a quarter of what is free), ECOFFLOAD_BENCH_SHM where.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import timeit
from pathlib import Path

from figures import figure, finish

from ecoffload import hostmem
from ecoffload.region import HostRegion

DIRECTORY = os.environ.get("ECOFFLOAD_BENCH_SHM", "/dev/shm")


def populate(path: Path, nbytes: int, threads: int) -> float:
    """Seconds to reserve a new file of `nbytes` with so many threads."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(path)
        os.ftruncate(fd, nbytes)
        address = hostmem.map_shared(fd, nbytes)
        started = time.perf_counter()
        hostmem.populate(fd, address, nbytes, page=4096, threads=threads)
        seconds = time.perf_counter() - started
        hostmem.unmap(address, nbytes)
    finally:
        os.close(fd)
    return seconds


def microseconds(action: object, number: int) -> float:
    return min(timeit.repeat(action, number=number, repeat=9)) / number * 1e6  # type: ignore[arg-type]


def main() -> None:
    directory = Path(tempfile.mkdtemp(prefix="ecoffload-bench-", dir=DIRECTORY))
    try:
        free = os.statvfs(directory)
        nbytes = min(
            int(os.environ.get("ECOFFLOAD_BENCH_REGION_MIB", "1024")) << 20, free.f_bavail * free.f_frsize // 4
        )
        cores = hostmem.cpu_count()
        one, all_cores = [], []
        for turn in range(8):  # alternating, so that both see the same machine; the first turn warms it up
            seconds = populate(directory / "one", nbytes, 1), populate(directory / "all", nbytes, cores)
            if turn:
                one.append(seconds[0])
                all_cores.append(seconds[1])
        gib = nbytes / (1 << 30)
        print(f"# {gib:.2f} GiB: one thread {min(one):.3f} s, {cores} threads {min(all_cores):.3f} s", file=sys.stderr)
        if cores > 1:
            figure("region: populating by all cores, times faster than one thread", min(one) / min(all_cores), 1.6,
                   better="higher")  # fmt: skip
        with HostRegion.open(
            "b", capacity=16 << 20, granule=4096, directory=directory, warm=True, namespace="b"
        ) as region:
            region.begin_instance()
            slots = [region.claim_slot(rank) for rank in range(8)]
            figure("region: progress of 8 workers, us", microseconds(lambda: region.progress(8), 5000), 3)
            figure("region: finish_save, us", microseconds(lambda: slots[0].finish_save(1), 20000), 0.5)
            journal = region.journal
            if journal is not None:

                def entry() -> None:
                    handle = journal.intent(b"k" * 32, 1, ((0, 8192), (16384, 4096)), 12288, "bfloat16", (6, 1024))
                    if handle is not None:
                        journal.commit(handle, 1)
                        journal.drop(handle)

                figure("region: journal, intent and commit and drop of an entry, us", microseconds(entry, 2000), 20)
            journal = None
        HostRegion.open("b", capacity=16 << 20, granule=4096, directory=directory).close()  # cold: unlinked
    finally:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


if __name__ == "__main__":
    main()
    sys.exit(finish())
