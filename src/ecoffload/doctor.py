"""What an installation may suffer from, looked up one by one: ``ecoffload doctor``.

Each check is a function that returns one or more :class:`Check`; together they say whether something is wrong, whether
it matters here, and what to do. Initialises no device: only loaded libraries, files, limits and metadata are read.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ecoffload import __version__
from ecoffload.drivers import loaded_libraries
from ecoffload.errors import PluginError
from ecoffload.hostmem import UNLIMITED, cgroup_headroom, memory_available, mount_of
from ecoffload.registry import list_backends

__all__ = ["Check", "cache_directory", "run_checks"]

Status = Literal["ok", "warn", "fail"]

_DRIVERS = ("libcuda", "libamdhip64", "libsycl")
_MIB, _GIB = 1 << 20, 1 << 30
_MINIMA = {"torch": (2, 10), "numpy": (1, 26)}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: what was looked at, how bad it is, what was seen and why it matters, and what to do ("" if well)."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def run_checks() -> list[Check]:
    """Every check, in an order that a reader can follow; one that breaks is a finding of its own."""
    found: list[Check] = []
    for check in (_versions, _metadata, _backends, _drivers, _memlock, _shm, _cgroup, _cache):
        found += _guarded(check)
    return found


def _guarded(check: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    try:
        yield from check()
    except Exception as exc:
        name = check.__name__.strip("_")
        yield Check(name, "warn", f"could not be checked: {type(exc).__name__}: {exc}", "report this with the message")


# --- what is installed


def _versions() -> Iterator[Check]:
    for package, minimum in _MINIMA.items():
        wanted = ".".join(map(str, minimum))
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield Check(package, "fail", "is not installed, and nothing works without it", f"pip install {package}")
            continue
        numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
        if numbers < minimum:
            yield Check(package, "fail", f"{version} is older than {wanted}", f"pip install '{package}>={wanted}'")
        else:
            yield Check(package, "ok", version)


def _metadata() -> Iterator[Check]:
    """Distributions of ours and of backends: seen twice, or of another version than the code."""
    seen: dict[str, list[importlib.metadata.Distribution]] = defaultdict(list)
    for dist in importlib.metadata.distributions():
        name = dist.metadata["Name"]
        if name and re.sub(r"[-_.]+", "-", name).lower().startswith("ecoffload"):
            seen[re.sub(r"[-_.]+", "-", name).lower()].append(dist)
    if "ecoffload" not in seen:
        yield Check(
            "metadata",
            "fail",
            "ecoffload is imported from a folder that was never installed, so no backend is found, not even 'cpu'",
            "pip install ecoffload, or pip install -e . in its source tree",
        )
        return
    well = True
    for name, dists in sorted(seen.items()):
        places = sorted({str(dist.locate_file("")) for dist in dists})
        if len(places) > 1:
            well = False
            yield Check(
                "metadata",
                "warn",
                f"{name} is installed {len(places)} times ({', '.join(places)}); the first on sys.path counts, and "
                "entry points of the others may be stale",
                f"pip uninstall {name} until it is gone, then install it once",
            )
        elif name == "ecoffload" and dists[0].version != __version__:
            well = False
            yield Check(
                "metadata",
                "warn",
                f"the metadata say ecoffload {dists[0].version}, the code is {__version__}: entry points may be stale",
                "install it again: pip install --force-reinstall --no-deps ecoffload (or -e . in its source tree)",
            )
    if well:
        versions = ", ".join(f"{name} {dists[0].version}" for name, dists in sorted(seen.items()))
        yield Check("metadata", "ok", versions)


def _backends() -> Iterator[Check]:
    try:
        records = list_backends()
    except PluginError as exc:  # ECOFFLOAD_STRICT asks for that
        yield Check("backends", "fail", str(exc), "mend or uninstall the package that is named")
        return
    for record in records:
        name = f"backend {record.name}"
        if record.status == "ok":
            yield Check(name, "ok", record.reason)
        elif record.status in ("unavailable", "blocked"):  # well, as long as nobody means to use it
            yield Check(
                name, "ok", f"installed, not usable here, which matters only if you mean to use it: {record.reason}"
            )
        else:
            yield Check(
                name,
                "fail" if record.status == "failed" else "warn",
                f"{record.distribution} {record.version} is {record.status}: {record.reason}",
                f"mend or remove it: pip install --upgrade {record.distribution}, or pip uninstall it",
            )


def _drivers() -> Iterator[Check]:
    import torch  # noqa: F401 - loads the copies that count: those which this process would use

    for stem in _DRIVERS:
        copies = loaded_libraries(stem)
        if len(copies) > 1:
            yield Check(
                "driver libraries",
                "fail",
                f"this process holds {len(copies)} copies of {stem} ({', '.join(copies)}); streams and errors of one "
                "mean nothing to the other, and its backend refuses to start",
                "let only torch's copy load: look at LD_PRELOAD, LD_LIBRARY_PATH and for packages that bring one",
            )
        elif copies:
            yield Check("driver libraries", "ok", f"one {stem}: {copies[0]}")
    if not any(loaded_libraries(stem) for stem in _DRIVERS):
        yield Check("driver libraries", "ok", "none is loaded by torch in this process")


# --- what the machine grants


def _memlock() -> Iterator[Check]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Check("memlock", "ok", "unlimited")
        return
    registers = [
        r.name
        for r in list_backends()
        if r.status == "ok" and r.spec is not None and r.spec.capabilities.host_memory == "register"
    ]
    if not registers:
        yield Check("memlock", "ok", f"{_size(soft)}; does not matter: no backend that runs here registers host memory")
    else:
        yield Check(
            "memlock",
            "ok" if soft >= 64 * _GIB else "warn",
            f"{_size(soft)}; drivers that count registered memory against it refuse a larger region "
            f"(backends that register: {', '.join(registers)})",
            "" if soft >= 64 * _GIB else "ulimit -l unlimited; for a container: --ulimit memlock=-1",
        )


def _shm(path: str = "/dev/shm") -> Iterator[Check]:
    remedy = "for a container: --shm-size=16g, or mount a tmpfs and name it in `directory`"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as exc:
        yield Check("shm", "fail", f"{path} cannot be opened ({exc.strerror}); the host region lives there", remedy)
        return
    try:
        mount, mode = mount_of(fd), os.fstat(fd).st_mode
    finally:
        os.close(fd)
    limited = mount.size < UNLIMITED
    text = f"{path}: {_size(mount.free)} free of {_size(mount.size)}" if limited else f"{path}: no limit of its own"
    if not mount.in_memory:
        yield Check("shm", "fail", f"{path} is no tmpfs but {mount.kind}; a region there is refused", remedy)
    elif not os.access(path, os.W_OK | os.X_OK):
        yield Check("shm", "fail", f"{path} is not writable for uid {os.getuid()}", f"chmod 1777 {path}, or {remedy}")
    elif mount.free < 512 * _MIB:
        yield Check("shm", "warn", f"{text}; a region must fit there whole, and is refused otherwise", remedy)
    elif not mode & stat.S_ISVTX:
        yield Check("shm", "warn", f"{text}, but not sticky: other users may delete regions", f"chmod 1777 {path}")
    else:
        yield Check("shm", "ok", text)


def _cgroup() -> Iterator[Check]:
    headroom, machine = cgroup_headroom(), memory_available()
    if headroom is None:
        left = f"; the machine has {_size(machine.nbytes)} left" if machine else ""
        yield Check("memory limit", "ok", f"no memory cgroup limits this process{left}")
        return
    text = f"{headroom.source} leaves {_size(headroom.nbytes)}; shared memory counts against it"
    if headroom.nbytes < _GIB:
        yield Check(
            "memory limit", "warn", f"{text}, and a region beyond it is refused", "raise the container's memory"
        )
    else:
        yield Check("memory limit", "ok", text)


def cache_directory() -> Path:
    """Where compiled helpers and tuning results are kept: ECOFFLOAD_CACHE_DIR, or ecoffload in the user's cache."""
    named = os.environ.get("ECOFFLOAD_CACHE_DIR")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path(os.path.expanduser("~"), ".cache")) / "ecoffload"


def _cache() -> Iterator[Check]:
    path = cache_directory()
    nearest = next(p for p in (path, *path.parents) if p.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        yield Check("cache directory", "ok", str(path))
    else:
        yield Check(
            "cache directory",
            "warn",
            f"{path} cannot be written: {nearest} is {'not writable' if nearest.is_dir() else 'no directory'}; "
            "compiled helpers are built again in every process and tuning results are lost",
            "set ECOFFLOAD_CACHE_DIR to a directory that you may write",
        )


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", _GIB), ("MiB", _MIB), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} bytes"
