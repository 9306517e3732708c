"""A corner of /dev/shm for each test, and processes that are killed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BASE = Path(os.environ.get("ECOFFLOAD_TEST_SHM", "/dev/shm"))


@pytest.fixture
def shm() -> Iterator[Path]:
    """An empty directory in shared memory."""
    path = Path(tempfile.mkdtemp(prefix="ecoffload-test-", dir=BASE))
    yield path
    shutil.rmtree(path)


class Forked:
    """A child and the socket to it; both ends carry bytes."""

    def __init__(self, pid: int, pipe: socket.socket) -> None:
        self.pid = pid
        self.pipe = pipe
        self.ended = False

    def hear(self) -> bytes:
        """The next message; empty if the child is gone."""
        return self.pipe.recv(1 << 16)

    def send(self, data: bytes) -> None:
        self.pipe.send(data)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if not self.ended:
            self.signal(signal.SIGKILL)
            self.wait()

    def wait(self) -> int:
        """Its exit status, negative for a signal."""
        self.ended = True
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def fork() -> Iterator[Callable[..., Forked]]:
    """`fork(main, *args)`: a child that runs `main(pipe, *args)` and ends. It says `up` by itself if it likes."""
    started: list[Forked] = []

    def start(main: Callable[..., None], *args: Any) -> Forked:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            status = 1
            try:
                ours.close()
                main(theirs, *args)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        theirs.close()
        ours.settimeout(60)
        started.append(Forked(pid, ours))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.pipe.close()
