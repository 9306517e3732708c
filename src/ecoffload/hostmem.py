"""The Linux calls behind the host region: locks, mappings, population, memory limits.

The lowest file of the region: it knows descriptors, addresses and byte counts, no header, slot or entry. Only `region`,
its neighbours `slots`, `journal` and `regions`, and `doctor`-like tools call it. Calls that Python lacks go through
ctypes, which releases the GIL, so that many threads populate at once.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import count
from pathlib import Path
from threading import Event, Lock
from typing import NamedTuple, NoReturn, Protocol

from ecoffload.errors import RegionError

__all__ = [
    "UNLIMITED",
    "Gone",
    "Headroom",
    "Mount",
    "Words",
    "advise",
    "bind_to_node",
    "cgroup_headroom",
    "cpu_count",
    "lock_is_held",
    "map_shared",
    "memory_available",
    "mount_of",
    "populate",
    "reopen",
    "replace_by_nothing",
    "shmem_huge_pages",
    "try_lock",
    "unlock",
    "unmap",
    "zero",
]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
_libc.memset.restype = ctypes.c_void_p
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.syscall.restype = ctypes.c_long

_TMPFS, _HUGETLBFS = 0x01021994, 0x958458F6  # linux/magic.h
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 1, 2, 0x10, 0x20, 0x4000
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MADV_DONTDUMP, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 16, 14, 23  # asm-generic/mman-common.h
_MAP_FAILED = ctypes.c_void_p(-1).value
UNLIMITED = 1 << 62
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_MBIND = {"x86_64": 237, "aarch64": 235}  # system call numbers
_MPOL_BIND = 2
_SLICE = 32 << 20  # bytes that one thread populates at a time: enough to pay for the call, small enough to share evenly


class Words(Protocol):
    """The 64-bit words of a mapped header: a memoryview of format "Q", or what stands in for one that is gone."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


class Gone:
    """Stands where `Words` were, once a region is closed or a process forked: every access raises the same clear error.

    So the hot path pays nothing to check.
    """

    def __init__(self, kind: type[Exception], message: str) -> None:
        self._kind = kind
        self._message = message

    def __getitem__(self, index: object) -> NoReturn:
        raise self._kind(self._message)

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise self._kind(self._message)


# --- locks: of an open file description, so that they are the kernel's to drop when their holder dies -----------------


def try_lock(fd: int, start: int, length: int, *, shared: bool = False) -> bool:
    """Take a lock on a byte range of the file, or turn the one that `fd` has into this kind; atomic either way.

    False: somebody else holds a conflicting one, and nothing has changed.
    """
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno == errno.EINVAL:
            raise RegionError(
                "regions need locks of open file descriptions (Linux 3.15); this kernel has none"
            ) from error
        raise
    return True


def unlock(fd: int, start: int, length: int) -> None:
    """Drop what `fd` holds of a byte range."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, length, 0))


def lock_is_held(fd: int, start: int, length: int) -> bool:
    """Whether any other open file description holds a lock, shared or not, in a byte range. Changes nothing."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def reopen(fd: int) -> int:
    """A second open file description of the same file, which holds locks of its own. Works for an unlinked file."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


# --- mappings -------------------------------------------------------------------------------------------------------


class Mount(NamedTuple):
    """The file system of a descriptor: its kind ("tmpfs", "hugetlbfs", a number), page size, bytes in all, free."""

    kind: str
    page: int
    size: int
    free: int

    @property
    def in_memory(self) -> bool:
        return self.kind in ("tmpfs", "hugetlbfs")


def mount_of(fd: int) -> Mount:
    """The file system on which an open file or directory lies."""
    buffer = ctypes.create_string_buffer(256)  # struct statfs; f_type is its first word
    if _libc.fstatfs(fd, buffer):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    magic = struct.unpack_from("q", buffer)[0] & 0xFFFFFFFF
    kind = {_TMPFS: "tmpfs", _HUGETLBFS: "hugetlbfs"}.get(magic, hex(magic))
    stat = os.fstatvfs(fd)
    # Mounted without a limit, both report no blocks at all.
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    if not stat.f_blocks:
        size = free = UNLIMITED
    if kind != "hugetlbfs":
        return Mount(kind, mmap.PAGESIZE, size, free)
    pool = _number(Path(f"/sys/kernel/mm/hugepages/hugepages-{stat.f_bsize >> 10}kB/free_hugepages"))
    return Mount(kind, stat.f_bsize, size, free if pool is None else min(free, pool * stat.f_bsize))


def map_shared(fd: int, nbytes: int) -> int:
    """Map the file's first `nbytes` bytes, shared and writable. Returns the address. Raises OSError."""
    address = _libc.mmap(None, nbytes, _PROT_READ_WRITE, _MAP_SHARED, fd, 0)
    if address in (None, _MAP_FAILED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(address)


def unmap(address: int, nbytes: int) -> None:
    """Undo `map_shared`."""
    _libc.munmap(address, nbytes)


def replace_by_nothing(address: int, nbytes: int) -> None:
    """Put inaccessible memory where a mapping was, so that the file is let go but its addresses go to nobody else."""
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    _libc.mmap(address, nbytes, _PROT_NONE, flags, -1, 0)


def advise(address: int, nbytes: int, *, huge: bool) -> None:
    """Keep a mapping out of core dumps (secrets, and size), and ask for huge pages if wanted. Best effort by nature."""
    _libc.madvise(address, nbytes, _MADV_DONTDUMP)
    if huge:
        _libc.madvise(address, nbytes, _MADV_HUGEPAGE)


def shmem_huge_pages(path: str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled") -> str:
    """The kernel's setting for huge pages in a tmpfs ("never", "advise", "always", ...); "never" if it has none."""
    try:
        setting = Path(path).read_text()
    except OSError:
        return "never"
    return setting[setting.find("[") + 1 : setting.find("]")] if "[" in setting else "never"


def zero(address: int, nbytes: int) -> None:
    """Overwrite memory with zeros, the GIL released."""
    _libc.memset(address, 0, nbytes)


def bind_to_node(address: int, nbytes: int, node: int) -> None:
    """Have the pages of a mapping allocated on one NUMA node; call it before they are. Raises RegionError."""
    if not Path(f"/sys/devices/system/node/node{node}").is_dir():
        raise RegionError(f"numa_node is {node}, and this machine has no such node", actual=node)
    number = _MBIND.get(platform.machine())
    if number is None:
        raise RegionError(f"numa_node: no mbind system call is known for {platform.machine()}; leave it unset")
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    result = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_MPOL_BIND),
        mask,
        ctypes.c_ulong(64 * len(mask) + 1),  # the kernel reads one bit less than it is told
        ctypes.c_ulong(0),
    )
    if result:
        reason = os.strerror(ctypes.get_errno())
        raise RegionError(f"numa_node {node}: the kernel refused to bind the region to it: {reason}", actual=node)


# --- population -----------------------------------------------------------------------------------------------------


def cpu_count() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0))


def _madvise_populate(address: int, nbytes: int) -> int:
    """Allocate and map the pages of a range without changing a byte. Returns 0 or an errno."""
    while _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE):
        error = ctypes.get_errno()
        if error not in (errno.EINTR, errno.EAGAIN):
            return error
    return 0


def _fallocate(fd: int, offset: int, nbytes: int) -> int:
    """Allocate a range of the file; existing bytes stay. Returns 0 or an errno."""
    while True:
        try:
            os.posix_fallocate(fd, offset, nbytes)
        except InterruptedError:
            continue
        except OSError as error:
            return error.errno or errno.EIO
        return 0


def populate(
    fd: int,
    address: int,
    nbytes: int,
    *,
    page: int,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Allocate every page of a mapping of `fd` from its first byte, from every CPU, and change no byte of it.

    Returns the way that was taken: "populate", or "fallocate" on kernels before 5.14, which know no
    MADV_POPULATE_WRITE (EINVAL). Raises OSError with the kernel's errno: EFAULT, ENOSPC, ENOMEM where memory ran out.
    `progress(done, total)` is called on the caller's thread; what it raises ends the work and comes through.
    """
    way = "populate"
    probe = _madvise_populate(address, min(page, nbytes))
    if probe == errno.EINVAL:
        way = "fallocate"
    elif probe:
        raise OSError(probe, os.strerror(probe))
    slices = range(0, nbytes, -(-_SLICE // page) * page)
    stop = Event()
    turn, lock = count(), Lock()
    done = 0

    def one(at: int) -> int:
        length = min(slices.step, nbytes - at)
        return _madvise_populate(address + at, length) if way == "populate" else _fallocate(fd, at, length)

    def work() -> int:
        nonlocal done
        while not stop.is_set():
            index = next(turn)
            if index >= len(slices):
                break
            error = one(slices[index])
            if error:
                stop.set()
                return error
            with lock:
                done += min(slices.step, nbytes - slices[index])
        return 0

    workers = min(threads or cpu_count(), len(slices))
    with ThreadPoolExecutor(workers, thread_name_prefix="ecoffload-populate") as pool:
        running = {pool.submit(work) for _ in range(workers)}
        errors: list[int] = []
        try:
            while running:
                ended, running = wait(running, timeout=0.1 if progress else None, return_when=FIRST_COMPLETED)
                errors += [each.result() for each in ended]
                if progress:
                    progress(done, nbytes)
        finally:
            stop.set()
    for error in errors:
        if error:
            raise OSError(error, os.strerror(error))
    return way


# --- how much memory there is ---------------------------------------------------------------------------------------


class Headroom(NamedTuple):
    """Bytes that a limit still leaves, and the file that says so."""

    nbytes: int
    source: str


def _number(path: Path) -> int | None:
    """The number in a control file; None if it is missing, unreadable, or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(group: Path) -> int:
    """Bytes of page cache that the kernel gives up before it kills: they count as used, and are not in the way."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(maxsplit=1) for line in lines if " " in line)
    for name in ("total_inactive_file", "inactive_file"):
        if values.get(name, "").isdigit():
            return int(values[name])
    return 0


def cgroup_headroom(proc: str = "/proc/self") -> Headroom | None:
    """What this process's memory cgroup and those above it still leave, the least of them; None without a limit.

    Reads version 2 (memory.max, memory.current) and version 1 (memory.limit_in_bytes, memory.usage_in_bytes). Shared
    memory counts for the group whose process touches it first.
    """
    try:
        groups = [line.split(":", 2) for line in Path(proc, "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in Path(proc, "mountinfo").read_text().splitlines()]
    except OSError:
        return None
    least: Headroom | None = None
    for mount in mounts:
        kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
        for _, controllers, path in (each for each in groups if len(each) == 3):
            if kind == "cgroup2" and not controllers:
                limit, usage = "memory.max", "memory.current"
            elif kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options:
                limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            top = Path(mount[4])
            # Inside a container the mount shows a subtree: the part of the path that it hides is not there to read.
            below = os.path.relpath(path, mount[3]) if mount[3] != "/" else path.lstrip("/")
            group = top if below.startswith("..") else Path(os.path.normpath(top / below))
            for each in (group, *group.parents):
                most, used = _number(each / limit), _number(each / usage)
                if most is not None and used is not None and most < 1 << 62:
                    left = max(0, most - used + _reclaimable(each))
                    if least is None or left < least.nbytes:
                        least = Headroom(left, str(each / limit))
                if each == top:
                    break
    return least


def memory_available(path: str = "/proc/meminfo") -> Headroom | None:
    """Memory and swap that the whole machine could still give."""
    try:
        fields = dict(line.split(":", 1) for line in Path(path).read_text().splitlines() if ":" in line)
        nbytes = sum(int(fields[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        return None
    return Headroom(nbytes, path)
