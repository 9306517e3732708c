"""A cluster on loopback: Mooncake's master and a storage node, and peers, each a process that a test can hurt."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# A suite of its own (make test-mooncake): elsewhere Mooncake is not installed, and there is nothing to ask.
collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("mooncake") is None else []

BIN = Path(sys.executable).parent
SHM = Path(os.environ.get("ECOFFLOAD_TEST_SHM", "/dev/shm"))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Peer:
    """One process with a cache on the store."""

    def __init__(self, url: str, capacity: str, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peer.py")), url, capacity, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.read() == "ready"

    def read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # Mooncake's library may print as well
            if line[:1] in '"{tfn[':
                return json.loads(line)
        raise EOFError("the peer is gone")

    def send(self, *words: Any) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def ask(self, *words: Any) -> Any:
        self.send(*words)
        return self.read()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Cluster:
    """``master`` and ``node`` by name; ``url`` for caches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shm = Path(tempfile.mkdtemp(prefix="ecoffload-test-", dir=SHM))
        self.ports = {name: free_port() for name in ("master", "metrics", "node")}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.peers: list[Peer] = []
        self.address = f"127.0.0.1:{self.ports['master']}"
        self.url = f"mooncake://{self.address}"
        self.start("master")
        self.start("node")

    def _command(self, name: str) -> list[str]:
        if name == "master":
            return [
                str(BIN / "mooncake_master"),
                f"--rpc_port={self.ports['master']}",
                "--rpc_address=127.0.0.1",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={self.ports['metrics']}",
                "--client_ttl=2",  # seconds after which a storage node that is gone is no longer written to
            ]
        return [
            str(BIN / "mooncake_client"),
            "--host=127.0.0.1",
            f"--port={self.ports['node']}",
            f"--master_server_address={self.address}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            "--global_segment_size=256MB",
        ]

    def start(self, name: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(self._command(name), stdout=log, stderr=log)
        end = time.monotonic() + 20
        while not listening(self.ports[name]):
            assert time.monotonic() < end, f"the {name} did not come up, see {self.folder}"
            time.sleep(0.02)

    def peer(self, query: str = "?wait=5&deadline=5&absent=0", capacity: str = "32MiB") -> Peer:
        self.peers.append(Peer(self.url + query, capacity, self.shm))
        return self.peers[-1]

    def hurt(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait()

    def heal(self, name: str) -> None:
        if self.processes[name].poll() is None:
            self.processes[name].send_signal(signal.SIGCONT)
        else:
            self.start(name)

    def end(self) -> None:
        for peer in self.peers:
            peer.end()
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        shutil.rmtree(self.shm)  # with the regions of peers that were killed


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.end()


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Print a line of figures whatever pytest captures."""

    def say(what: str, **figures: Any) -> None:
        with capsys.disabled():
            print(f"\n  {what}: " + ", ".join(f"{name} {value}" for name, value in figures.items()), end="")

    return say
