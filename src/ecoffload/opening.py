"""How a process gets at a region: create it, take it over from the dead, or join the living.

`region.HostRegion.open` is its only caller. Every step is safe to be killed at: a file is either unfinished (no READY
word; the next one to come makes it anew), or whole. Memory is asked for only here.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from ecoffload import hostmem, layout, options
from ecoffload.errors import ConfigError, NoSpace, RegionError
from ecoffload.journal import RECORD_BYTES, Journal
from ecoffload.layout import Header
from ecoffload.regions import PREFIX, check_id, is_at, list_regions, reclaim
from ecoffload.slots import SLOT_BYTES

__all__ = ["Opened", "Opener", "Start"]

_log = logging.getLogger(__name__)
Start = Literal["created", "joined", "warm", "cold"]
_SHORTFALL = (errno.EFAULT, errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # NONBLOCK: a planted FIFO must not hang us


@dataclass(frozen=True, slots=True)
class Opened:
    """A mapped region: its descriptor holds the LIFE byte shared; `address` is that of the file's first byte."""

    id: str
    path: Path
    fd: int
    address: int
    header: Header
    start: Start
    reason: str


@dataclass(slots=True)
class Opener:
    """What was asked for; see `HostRegion.open`."""

    id: str | None
    capacity: int
    granule: int
    namespace: str
    directory: Path
    create: bool
    warm: bool
    timeout: float
    slots: int
    chunk_bytes: int
    numa_node: int | None
    progress: Callable[[int, int], None] | None
    scrub: bool
    reclaim_after: float
    takeover_limit: tuple[int, float]
    path: Path = Path()
    page: int = 0
    header: Header = None  # type: ignore[assignment]  # set by open(), before anything reads it
    end: float = 0.0
    waiting_for: str = ""
    blocks: int = -1  # of the file that another process is creating, when last seen

    def open(self) -> Opened:
        """Create, take over or join, within the time limit."""
        self._check_options()
        if self.scrub and self.warm:
            raise ConfigError("scrub_on_close and warm contradict each other", option="scrub_on_close", value=True)
        self.page = self._check_directory()
        self.header = layout.plan(
            capacity=self.capacity,
            granule=self.granule,
            page=self.page,
            chunk_bytes=self.chunk_bytes,
            slots=self.slots,
            warm=self.warm,
            scrub=self.scrub,
            namespace=self.namespace,
            incarnation=secrets.randbits(61) + 1,
        )
        if self.id is None:
            self.id = f"ns-{self.header.digest.hex()[:24]}" if self.warm else f"anon-{secrets.token_hex(8)}"
        self.path = self.directory / (PREFIX + check_id(self.id))
        self._extend()
        pause = 0.001
        while True:
            opened = self._attempt()
            if opened is not None:
                return opened
            if time.monotonic() > self.end:
                raise RegionError(
                    f"region {self.path}: {self.waiting_for or 'other processes kept changing it'}; "
                    f"gave up after {self.timeout:g} s",
                    path=str(self.path),
                    expected="a region ready to be joined",
                    actual=self.waiting_for,
                )
            time.sleep(pause)
            pause = min(0.05, 1.5 * pause)

    def _check_options(self) -> None:
        """Whatever callers may have given; the numbers that make the layout are checked by it."""
        options.text("namespace", self.namespace)
        for name, value in (("create", self.create), ("warm", self.warm), ("scrub_on_close", self.scrub)):
            options.flag(name, value)
        self.timeout = options.seconds("timeout", self.timeout)
        self.reclaim_after = options.seconds("reclaim_after", self.reclaim_after)
        match self.takeover_limit:
            case (int(), int() | float()):
                options.seconds("takeover_limit's window", self.takeover_limit[1])
            case _:
                raise ConfigError(
                    f"takeover_limit is {self.takeover_limit!r}; write (takeovers, seconds), for example (3, 600)",
                    option="takeover_limit",
                    value=self.takeover_limit,
                )

    def _extend(self) -> None:
        self.end = time.monotonic() + self.timeout

    # --- getting the file -------------------------------------------------------------------------------------------

    def _check_directory(self) -> int:
        """The page size of the file system. Refuses what is not memory: bytes of a region must never reach a disk."""
        try:
            fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise RegionError(
                f"region directory {self.directory}: {error.strerror}; name a tmpfs or hugetlbfs that is there, "
                "such as /dev/shm",
                path=str(self.directory),
            ) from error
        try:
            mount = hostmem.mount_of(fd)
        finally:
            os.close(fd)
        if not mount.in_memory:
            raise RegionError(
                f"region directory {self.directory} lies on a file system of type {mount.kind}; "
                "a region needs a tmpfs or hugetlbfs, such as /dev/shm",
                path=str(self.directory),
                expected="tmpfs or hugetlbfs",
                actual=mount.kind,
            )
        return mount.page

    def _attempt(self) -> Opened | None:
        """One try; None means that another process is in the middle of something, or has just been."""
        fd = self._open_file()
        if fd is None:
            return None
        address = None
        try:
            if not self._is_ours(fd):
                return None
            if self.create and hostmem.try_lock(fd, layout.LIFE, 1):
                if not is_at(fd, self.path):
                    return None
                address, header, start, reason = self._take(fd)
                hostmem.try_lock(fd, layout.LIFE, 1, shared=True)  # from exclusive it always succeeds, at once
            else:
                joined = self._join(fd)
                if joined is None:
                    return None
                address, header = joined
                start, reason = "joined", "other processes map it"
            opened = Opened(self.id or "", self.path, fd, address, header, start, reason)
            fd = -1
            return opened
        finally:
            if fd >= 0:
                os.close(fd)

    def _open_file(self) -> int | None:
        try:
            return os.open(self.path, _OPEN)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._refuse(error)
        if not self.create:
            self.waiting_for = "nobody has created it"
            return None
        try:
            fd = os.open(self.path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return None
        except OSError as error:
            self._refuse(error)
        os.fchmod(fd, 0o600)  # whatever the umask was
        return fd

    def _refuse(self, error: OSError) -> NoReturn:
        """The path or its directory cannot be used."""
        uid = os.geteuid()
        if error.errno == errno.ELOOP:
            reason = "it is a symbolic link, which is never followed; remove it"
        elif error.errno in (errno.EACCES, errno.EPERM):
            try:
                reason = (
                    f"it belongs to uid {self.path.lstat().st_uid}, and this process runs as uid {uid}; use another id"
                )
            except OSError:
                owner = self.directory.stat()
                reason = (
                    f"uid {uid} may not create files in {self.directory} "
                    f"(uid {owner.st_uid}, mode {stat.S_IMODE(owner.st_mode):04o})"
                )
        elif error.errno == errno.EROFS:
            reason = f"{self.directory} is mounted read-only; remount it read-write, or name another directory"
        else:
            reason = error.strerror or str(error)
        raise RegionError(f"region {self.path}: {reason}", path=str(self.path), actual=error.errno) from error

    def _is_ours(self, fd: int) -> bool:
        """Whether the file is still linked. Raises RegionError for one that no region of this user can be."""
        status = os.fstat(fd)
        problem = None
        if not stat.S_ISREG(status.st_mode):
            problem = "it is no regular file"
        elif status.st_uid != os.geteuid():
            problem = f"it belongs to uid {status.st_uid}, and this process runs as uid {os.geteuid()}; use another id"
        elif status.st_mode & 0o077:
            # A creator sets 0600 right after creating; 0600 & ~umask has no such bits at any time.
            problem = f"its mode is {stat.S_IMODE(status.st_mode):04o}, which lets others in; remove it"
        elif status.st_nlink > 1:
            problem = "it has a second name (hard link); remove it"
        if problem:
            raise RegionError(f"region {self.path}: {problem}", path=str(self.path))
        return status.st_nlink == 1

    # --- joining ----------------------------------------------------------------------------------------------------

    def _join(self, fd: int) -> tuple[int, Header] | None:
        if not hostmem.lock_is_held(fd, layout.LIFE, 1):
            self.waiting_for = "nobody maps it: who made it has ended, and nobody has taken it over"
            return None
        if not hostmem.try_lock(fd, layout.LIFE, 1, shared=True):
            self.waiting_for = "another process is still creating it"
            blocks = os.fstat(fd).st_blocks
            if blocks > self.blocks >= 0:
                self._extend()  # it makes progress: a large region takes its time
            self.blocks = blocks
            return None
        if not is_at(fd, self.path):
            return None
        page = os.pread(fd, layout.HEADER_BYTES, 0)
        if not layout.is_ready(page):
            version = layout.version_of(page)
            if version not in (None, layout.VERSION):
                self._mismatch([("version of its layout", layout.VERSION, version)])
            self.waiting_for = f"it has no valid header (size {os.fstat(fd).st_size}, {self.header.total} expected)"
            return None
        header = layout.parse(page)
        if header is None:
            return None
        self._mismatch(self.header.differences(header))
        status = os.fstat(fd)
        self._mismatch([("size of its file", header.total, status.st_size)] if status.st_size != header.total else [])
        if status.st_blocks * 512 < header.total:
            self._mismatch([("memory behind its file", header.total, status.st_blocks * 512)])
        begun = layout.word_of(page, layout.W_BEGUN)
        if begun and not header.warm and not hostmem.lock_is_held(fd, layout.SCHEDULER, 1):
            # Their devices may still write, and without a journal nobody knows where.
            self.waiting_for = "processes of an engine whose scheduler died still map it"
            return None
        address = hostmem.map_shared(fd, header.total)
        hostmem.advise(address, header.total, huge=self._huge())
        return address, header

    def _mismatch(self, differences: list[tuple[str, object, object]]) -> None:
        if differences:
            text = ", ".join(f"{name}: expected {ours!r}, found {theirs!r}" for name, ours, theirs in differences)
            raise RegionError(
                f"region {self.path}: other processes use it with another {text}; give all the same, or another id",
                path=str(self.path),
                expected={name: ours for name, ours, _ in differences},
                actual={name: theirs for name, _, theirs in differences},
            )

    # --- creating and taking over: the LIFE byte is held exclusively ------------------------------------------------

    def _take(self, fd: int) -> tuple[int, Header, Start, str]:
        status = os.fstat(fd)
        page = os.pread(fd, layout.HEADER_BYTES, 0)
        found = layout.parse(page) if layout.is_ready(page) else None
        wanted = self.header
        whole = status.st_size == wanted.total and status.st_blocks * 512 >= wanted.total
        if found is None or not found.same_layout(wanted) or not whole:
            reason = ""
            if found is not None and found.same_layout(wanted):
                reason = (
                    f"the file found was not whole: size {status.st_size}, {status.st_blocks * 512} of it in memory; "
                    f"{wanted.total} expected"
                )
            elif found is not None:
                different = [each for each in wanted.differences(found) if each[0] != "namespace"]
                reason = "the region found had another geometry: " + ", ".join(
                    f"{name} {theirs!r}, not {ours!r}" for name, ours, theirs in different
                )
            elif status.st_size:
                reason = "the file found had no valid header: its creator died, or another version made it"
            if status.st_size:
                os.ftruncate(fd, 0)
            address = self._make(fd)
            self._say_cold(reason)
            return address, wanted, "cold" if reason else "created", reason or "nothing was there"
        address = hostmem.map_shared(fd, wanted.total)
        try:
            hostmem.advise(address, wanted.total, huge=self._huge())
            words = _words(address)
            recent = self._takeovers(words)
            reason = self._why_cold(found, len(recent) + 1)
            if reason:
                self._format(address)
                self._say_cold(reason)
                return address, wanted, "cold", reason
            self._revive(address, found, recent)
        except BaseException:
            hostmem.unmap(address, wanted.total)
            raise
        return address, found, "warm", "taken over with its entries"

    def _why_cold(self, found: Header, takeovers: int) -> str:
        limit, window = self.takeover_limit
        if not self.warm:
            return "a region of the same id was left over, and this one is not warm"
        if not found.warm:
            return "the region found kept nothing for a restart"
        if found.digest != self.header.digest:
            return f"the region found belongs to the namespace {found.namespace!r}, not {self.namespace!r}"
        if takeovers >= limit:
            return f"{takeovers} takeovers within {window:g} s: what it holds may be what ends its engines"
        return ""

    def _say_cold(self, reason: str) -> None:
        if reason and self.warm:
            _log.warning("region %s: starting cold: %s", self.path, reason)

    def _takeovers(self, words: hostmem.Words) -> list[int]:
        """Times of the last takeovers within the window, newest first. A time from the future is none."""
        now, window = time.time(), self.takeover_limit[1]
        times = [words[layout.W_TAKEOVERS + at] for at in range(layout.TAKEOVERS)]
        return [each for each in times if now - window <= each <= now + 1]

    def _make(self, fd: int) -> int:
        """Give an empty file its memory and header, or leave nothing behind."""
        total = self.header.total
        address = None
        try:
            reclaim(self.directory, after=self.reclaim_after, digest=self.header.digest, keep=self.path)
            self._check_room(fd)
            try:
                os.ftruncate(fd, total)
                address = hostmem.map_shared(fd, total)
                hostmem.advise(address, total, huge=self._huge())
                if self.numa_node is not None:
                    hostmem.bind_to_node(address, total, self.numa_node)
                hostmem.populate(fd, address, total, page=self.page, progress=self.progress)
            except OSError as error:
                if error.errno in _SHORTFALL:
                    raise self._no_space(fd, error.strerror or "") from error
                raise RegionError(
                    f"region {self.path}: its {total} bytes could not be reserved: {error.strerror}",
                    path=str(self.path),
                    actual=error.errno,
                ) from error
            self._format(address)
        except BaseException:
            if address is not None:
                hostmem.unmap(address, total)
            if is_at(fd, self.path):
                self.path.unlink()
            raise
        return address

    def _huge(self) -> bool:
        return hostmem.shmem_huge_pages() == "advise"

    def _check_room(self, fd: int) -> None:
        """Refuse before a page is taken what the file system or a memory limit cannot hold."""
        free = hostmem.mount_of(fd).free
        if self.header.total > min([free, *(each.nbytes for each in self._limits(fd))]):
            raise self._no_space(fd, "")

    @staticmethod
    def _limits(fd: int) -> list[hostmem.Headroom]:
        """What else must hold the region's pages. Huge pages were set aside before and count for nothing more."""
        if hostmem.mount_of(fd).kind == "hugetlbfs":
            return []
        return [each for each in (hostmem.cgroup_headroom(), hostmem.memory_available()) if each is not None]

    def _no_space(self, fd: int, reason: str) -> NoSpace:
        held = os.fstat(fd).st_blocks * 512  # what a failed population has taken goes back with the file
        mount = hostmem.mount_of(fd)
        free = mount.free + held
        asked = self.header.total
        limits = self._limits(fd)
        least = min(limits, default=None, key=lambda each: each.nbytes)
        text = [f"region {self.path}: no room: capacity {self.capacity} needs {asked} bytes"]
        if free < hostmem.UNLIMITED:
            text.append(f"{free} are free in {self.directory}")
        text += [f"{each.nbytes} are left by {each.source}" for each in limits]
        mib = -(-(mount.size - free + asked) // (1 << 20))  # what lies there now stays
        remedies = ["ask for a smaller capacity"]
        if mount.kind == "hugetlbfs":
            remedies.append("set more huge pages aside (sysctl vm.nr_hugepages), or enlarge the mount")
        elif asked > free:
            remedies.append(
                f"enlarge {self.directory}: in a container `--shm-size={mib}m`, in Kubernetes a volume "
                f"`emptyDir: {{medium: Memory, sizeLimit: {mib}Mi}}` mounted there"
            )
        if least and asked > least.nbytes:
            remedies.append("raise the memory limit: shared memory counts towards it")
        idle = [each for each in list_regions(self.directory) if each.state in ("ownerless", "unfinished")]
        idle = [each for each in idle if each.path != str(self.path)]
        if idle:
            size = sum(each.nbytes for each in idle)
            remedies.append(f"free {size} bytes of {len(idle)} ownerless regions with `ecoffload regions --reclaim`")
        return NoSpace(
            f"{', '.join(text)}{f' ({reason})' if reason else ''}. Remedy: {'; or '.join(remedies)}",
            asked=asked,
            free=free,
            headroom=least.nbytes if least else None,
            path=str(self.path),
        )

    def _format(self, address: int) -> None:
        """Write everything but the data. READY comes last."""
        header, words = self.header, _words(address)
        words[layout.W_READY] = 0
        hostmem.zero(address, header.journal_offset + header.journal_records * RECORD_BYTES)
        ctypes.memmove(address, header.pack(), layout.HEADER_BYTES // 2)
        words[layout.W_OPENED] = int(time.time())
        words[layout.W_INSTANCE] = secrets.randbits(61) + 1
        words[layout.W_READY] = header.incarnation

    def _revive(self, address: int, found: Header, recent: list[int]) -> None:
        """Keep the entries; forget the dead engine's slots, scheduler and unfinished saves."""
        words = _words(address)
        now = int(time.time())
        for at, each in enumerate([now, *recent][: layout.TAKEOVERS]):
            words[layout.W_TAKEOVERS + at] = each
        hostmem.zero(address + layout.HEADER_BYTES, found.slots * SLOT_BYTES)
        buffer = _memory(address + found.journal_offset, found.journal_records * RECORD_BYTES)
        Journal(buffer, capacity=found.capacity, granule=found.granule, edges=found.edges).end_intents()
        words[layout.W_OWNERLESS_SINCE] = words[layout.W_BEGUN] = 0
        words[layout.W_OPENED] = now
        words[layout.W_INSTANCE] = secrets.randbits(61) + 1


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _words(address: int) -> memoryview:
    return _memory(address, layout.HEADER_BYTES).cast("Q")
