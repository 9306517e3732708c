"""Directories, child processes and small file systems for the region's tests.

Everything lies below one directory of the test's own, so that no test sees, and none reclaims, anybody else's region.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

BASE = Path(os.environ.get("ECOFFLOAD_TEST_SHM", "/dev/shm"))


@pytest.fixture
def shm() -> Iterator[Path]:
    """An empty directory in shared memory; ECOFFLOAD_TEST_SHM says in which one."""
    path = Path(tempfile.mkdtemp(prefix="ecoffload-test-", dir=BASE))
    yield path
    shutil.rmtree(path)


class Child:
    """A Python process that runs a piece of code and talks in lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """The next line it prints; empty at its end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self, timeout: float = 30) -> tuple[int, str, str]:
        """Exit status, the rest of what it printed, and its errors."""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Start `child(code, *args)`: the code finds its arguments in `args`, and `HostRegion`, `os`, `sys`, `time`."""
    started: list[Child] = []

    def start(code: str, *args: object, prefix: tuple[str, ...] = ()) -> Child:
        head = "import os, sys, time\nfrom ecoffload.region import HostRegion\nargs = sys.argv[1:]\n"
        head += "def say(*what): print(*what, flush=True)\n"
        process = subprocess.Popen(
            [*prefix, sys.executable, "-W", "error", "-c", head + textwrap.dedent(code), *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Child(process))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.process.wait()
        for stream in (each.process.stdin, each.process.stdout, each.process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def in_tmpfs(child: Callable[..., Child], tmp_path: Path) -> Callable[..., Child]:
    """`in_tmpfs("8m", code)`: run code whose args[0] is a tmpfs of that size, seen by that process alone."""
    unshare = ("unshare", "-m") if os.geteuid() == 0 else ("unshare", "-r", "-m")
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip(f"a small tmpfs of its own needs what this system refuses: {' '.join(unshare)}")
    mount = tmp_path / "shm"
    mount.mkdir()

    def start(size: str, code: str, *args: object) -> Child:
        script = f'mount -t tmpfs -o size={size} none "{mount}" && exec "$@"'
        return child(code, mount, *args, prefix=(*unshare, "sh", "-c", script, "sh"))

    return start
