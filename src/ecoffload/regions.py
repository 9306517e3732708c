"""The regions in a directory: what lies there, whose it is, who maps it, and unlinking those that nobody does.

Reads files that it did not make, through the layout's checks, and unlinks a file only while it holds its LIFE byte
exclusively. The command line lists and reclaims with it; `opening` calls `reclaim` before it asks for memory.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ecoffload import hostmem, layout
from ecoffload.errors import ConfigError
from ecoffload.journal import count_commits

__all__ = ["PREFIX", "RegionInfo", "check_id", "is_at", "list_regions", "reclaim"]

_log = logging.getLogger(__name__)
PREFIX = "ecoffload."
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """One region's file.

    `age`: seconds since it was last created or taken over; `ownerless`: seconds since it was first known that nobody
    maps it, None while somebody does. `state`: "live", "ownerless", "unfinished" (its creator died), "foreign" (another
    user's, or no file of ours: never touched). `mappers`: those processes that this one may see.
    """

    path: str
    id: str
    state: str
    uid: int
    nbytes: int
    age: float
    ownerless: float | None
    namespace: str
    warm: bool
    entries: int
    mappers: tuple[int, ...]

    @property
    def live(self) -> bool:
        return self.state == "live"


def check_id(id: str) -> str:
    """The id, if it is one: it becomes part of a file name. Raises ConfigError."""
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise ConfigError(
            f"region id {id!r}: it has 1 to 64 letters, digits, '-' and '_', and begins with a letter or digit",
            option="id",
            value=id,
        )
    return id


def is_at(fd: int, path: Path) -> bool:
    """Whether the file at `path` is the one that is open."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _files(directory: str | os.PathLike[str]) -> list[Path]:
    """Those whose names a region may have. Others are nobody's of ours, and may hold what steers a terminal."""
    found = Path(directory).glob(PREFIX + "*")
    return sorted(path for path in found if _ID.fullmatch(path.name.removeprefix(PREFIX)))


def list_regions(directory: str | os.PathLike[str] = "/dev/shm") -> list[RegionInfo]:
    """Every region in `directory`, by path. Changes nothing. Raises OSError if the directory cannot be read."""
    found = []
    for path in _files(directory):
        with _opened(path) as fd:
            info = _inspect(path, fd, thorough=True)
        if info is not None:
            found.append(info)
    return found


def reclaim(
    directory: str | os.PathLike[str] = "/dev/shm",
    *,
    after: float = 0.0,
    digest: bytes | None = None,
    ids: tuple[str, ...] | None = None,
    keep: Path | None = None,
) -> list[RegionInfo]:
    """Unlink this user's regions that nobody maps and that have been ownerless for `after` seconds; return them.

    Unfinished ones go at once, and so do those of the namespace with this `digest` that keep nothing for a restart.
    How long a region whose processes were killed has been ownerless is counted from when somebody first looked: this
    call stamps it. `ids`: only these; `keep`: not this path.
    """
    gone = []
    for path in _files(directory):
        if path == keep or (ids is not None and path.name.removeprefix(PREFIX) not in ids):
            continue
        with _opened(path) as fd:
            info = _inspect(path, fd)
            if fd is None or info is None or info.state not in ("ownerless", "unfinished"):
                continue
            if not hostmem.try_lock(fd, layout.LIFE, 1) or not is_at(fd, path):
                continue
            page = os.pread(fd, layout.HEADER_BYTES, 0)
            header = layout.parse(page)
            useless = header is not None and header.digest == digest and not header.warm
            if info.state == "ownerless" and not useless and _stamped(fd, page) < after:
                continue
            path.unlink()
            _log.info("region %s: nobody maps it (%s); unlinked, %d bytes", path, info.state, info.nbytes)
            gone.append(info)
    return gone


def _stamped(fd: int, page: bytes) -> float:
    """Seconds since the region was first known to be ownerless; marks it now if it was not."""
    now = int(time.time())
    since = layout.word_of(page, layout.W_OWNERLESS_SINCE)
    if 0 < since <= now:
        return now - since
    size = hostmem.mount_of(fd).page
    address = hostmem.map_shared(fd, size)  # not pwrite: a hugetlbfs has no write
    try:
        ctypes.c_uint64.from_address(address + 8 * layout.W_OWNERLESS_SINCE).value = now
    finally:
        hostmem.unmap(address, size)
    return 0.0


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """The file, open for reading and writing, or None if it cannot be: gone, a symbolic link, another user's."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _inspect(path: Path, fd: int | None, *, thorough: bool = False) -> RegionInfo | None:
    """What one file is; None if it went away. Mappers and entries cost a walk and are counted only if `thorough`."""
    try:
        status = path.lstat() if fd is None else os.fstat(fd)
    except FileNotFoundError:
        return None
    foreign = fd is None or not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid()
    page = b"" if foreign or fd is None else os.pread(fd, layout.HEADER_BYTES, 0)
    header = layout.parse(page)
    known = layout.version_of(page) is not None and layout.word_of(page, layout.W_READY) != 0
    now = time.time()
    if fd is None or foreign:
        state = "foreign"
    elif hostmem.lock_is_held(fd, layout.LIFE, 1):
        state = "live"
    else:
        state = "ownerless" if known else "unfinished"
    opened = layout.word_of(page, layout.W_OPENED) if known else int(status.st_mtime)
    since = layout.word_of(page, layout.W_OWNERLESS_SINCE) if known else 0
    return RegionInfo(
        path=str(path),
        id=path.name.removeprefix(PREFIX),
        state=state,
        uid=status.st_uid,
        nbytes=status.st_size,
        age=max(0.0, now - opened),
        ownerless=None if state != "ownerless" else max(0.0, now - since) if since else 0.0,
        namespace=header.namespace if header else "",
        warm=bool(header and header.warm),
        entries=count_commits(fd, header.journal_offset, header.journal_records)
        if thorough and header and fd is not None
        else 0,
        mappers=_mappers(status) if thorough and state == "live" else (),
    )


def _mappers(status: os.stat_result) -> tuple[int, ...]:
    """Processes whose memory map names the file, as far as /proc shows them to this one."""
    found = []
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino} "
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                text = (process / "maps").read_text(errors="replace")
            except OSError:
                continue
            if wanted in text:
                found.append(int(process.name))
    return tuple(sorted(found))
