"""The Mooncake Store as a tier: ``mooncake://MASTER_HOST:PORT?protocol=tcp&replicas=1&host=THIS_HOST``.

This process owns no memory of the store (storage nodes do); it reads and writes by addresses. Made of its batch calls
over scattered buffers. Facts on its answers are of 0.13 as tried on loopback: an accepted put is no proof of storage, a
call after its ``close`` is a segmentation fault, and its ports ask for no credentials: a trusted network is needed.

Mooncake comes as two wheels that both bring the package ``mooncake``; either will do, and neither is ever installed
from here, since one over the other breaks both.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from typing import Any, ClassVar

from ecoffload.errors import BackendUnavailable, CacheClosed, ConfigError
from ecoffload.tiers.interface import Answer, RemoteTier, TierObject

__all__ = ["MooncakeTier"]

_log = logging.getLogger("ecoffload.tiers")

_SETTINGS = {
    # Its own limits are 30 s and more. They are read when its library is loaded; what a user has set stays.
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
}
_ABSENT = -704
_IN_FLIGHT = -703
_TOO_SMALL = -600
_FULL = -200
_LOCAL_BUFFER = 16 << 20
_WHEELS = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
_TRIAL = """
import json, os, sys
path, arguments = json.loads(sys.argv[1])
sys.path[:] = path
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup(*arguments)
print(code, flush=True)
os._exit(code != 0)  # without its destructor, which takes a second
"""
_TRIAL_LIMIT = 10.0


class MooncakeTier(RemoteTier):
    """A client of a Mooncake Store. Options: ``protocol`` ("tcp", "rdma"), ``device`` (an RDMA device's name),
    ``replicas`` (copies of each object, 1), ``host`` (this host's address as storage nodes reach it; default
    127.0.0.1, right only where everything runs on one host), ``metadata`` (its metadata server)."""

    scheme: ClassVar[str] = "mooncake"

    def __init__(self, address: str, options: Mapping[str, str]) -> None:
        rest = dict(options)
        self.protocol = rest.pop("protocol", "tcp")
        self.device = rest.pop("device", "")
        self.host = rest.pop("host", "127.0.0.1")
        self.metadata = rest.pop("metadata", "P2PHANDSHAKE")
        replicas = rest.pop("replicas", "1")
        super().__init__(address, rest)
        master = re.fullmatch(r"(?:[^\s:]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", address)
        if master is None or not 0 < int(master[1]) < 1 << 16:
            raise ConfigError(
                f"mooncake://{address} names no master; write mooncake://host:port", option="tier", value=address
            )
        if self.protocol not in ("tcp", "rdma"):
            raise ConfigError(
                f"protocol {self.protocol!r} is neither 'tcp' nor 'rdma'", option="protocol", value=self.protocol
            )
        if not replicas.isdecimal() or not 1 <= int(replicas) <= 16:
            raise ConfigError(f"replicas {replicas!r} is not in 1..16", option="replicas", value=replicas)
        self.replicas = int(replicas)
        self._library = _load()
        timeout = _number("MC_RPC_TIMEOUT_MS") / 1e3
        self._patience = timeout / 2 if timeout > 0 else math.inf  # an empty answer that took longer is none
        self.grace = max(self.grace, 5 * _number("MC_TCP_PROGRESS_TIMEOUT_SEC"))
        self._store: Any = None
        self._config: Any = None
        self._registered: list[int] = []
        self._closed = False

    def _open(self) -> Any:
        if self._closed:
            raise CacheClosed("this tier is closed")
        if self._store is None:
            raise BackendUnavailable("this tier is not connected", name="mooncake", reason="not connected")
        return self._store

    def connect(self, memory: Sequence[tuple[int, int]]) -> None:
        if self._closed:
            raise CacheClosed("this tier is closed")
        arguments = (self.host, self.metadata, 0, _LOCAL_BUFFER, self.protocol, self.device, self.address)
        self._try(arguments)
        store = self._library.MooncakeDistributedStore()
        code = store.setup(*arguments)
        if code:
            raise ConnectionError(f"Mooncake's master at {self.address} does not answer (code {code})")
        for address, nbytes in memory:
            code = store.register_buffer(address, nbytes)
            if code:
                store.close()
                raise ConnectionError(f"Mooncake does not register {nbytes} bytes for {self.protocol} (code {code})")
        self._registered = [address for address, _ in memory]
        self._config = self._library.ReplicateConfig()
        self._config.replica_num = self.replicas
        self._store = store

    def _try(self, arguments: tuple[Any, ...]) -> None:
        """Raise :class:`ConnectionError` if the setup would fail, or last.

        It holds the interpreter's lock (all other calls release it): 4.5 s with a dead master, and no thread of the
        engine would run meanwhile. So a child does it first, unless it is plain that nobody listens.
        """
        host, _, port = self.address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        command = [sys.executable, "-S", "-P", "-c", _TRIAL, json.dumps([list(map(str, sys.path)), arguments])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_LIMIT, check=False)
        except subprocess.TimeoutExpired as exc:
            raise ConnectionError(f"Mooncake's master at {self.address} does not answer") from exc
        if done.returncode:
            told = ((done.stdout.strip() or done.stderr.strip()).splitlines() or ["it said nothing"])[-1]
            raise ConnectionError(f"Mooncake's client cannot be set up for {self.address}: {told}")

    def publish(self, objects: Sequence[TierObject]) -> list[Answer]:
        store = self._open()
        names, addresses, lengths = _columns(objects)
        codes = store.batch_put_from_multi_buffers(names, addresses, lengths, self._config)
        accepted = [i for i, code in enumerate(codes) if code == 0]
        answers = [Answer.REFUSED if code in (_FULL, _TOO_SMALL) else Answer.UNCONFIRMED for code in codes]
        # Zero is also the answer for a name that is taken or in flight, and for 30 s after a publisher died.
        there = store.batch_is_exist([names[i] for i in accepted]) if accepted else []
        for i, found in zip(accepted, there, strict=True):
            answers[i] = {1: Answer.DONE, 0: Answer.ABSENT}.get(found, Answer.UNCONFIRMED)
        return answers

    def exists(self, names: Sequence[str]) -> list[int | None]:
        store = self._open()
        if len(names) == 1:  # the only call that tells all of it at once: size, absence, silence
            return [_asked_alone(store, names[0])]
        begun = time.monotonic()
        replicas = store.batch_get_replica_desc(list(names)) if names else {}
        if not replicas and time.monotonic() - begun > self._patience:
            raise ConnectionError("Mooncake's master does not answer")  # asking again would take as long again
        sizes: list[int | None] = []
        for name in names:
            if name in replicas:
                size = _size_of(replicas[name])
                sizes.append(_asked_alone(store, name) if size is None else size)  # on disk, or gone since
            elif replicas or sizes:  # somebody has answered
                sizes.append(None)
            else:  # either none of them is there, or nobody answers: that call tells no difference
                sizes.append(_asked_alone(store, name))
        return sizes

    def fetch_many(self, objects: Sequence[TierObject]) -> list[Answer]:
        names, addresses, lengths = _columns(objects)
        codes = self._open().batch_get_into_multi_buffers(names, addresses, lengths)
        return [
            Answer.DONE
            if code == each.nbytes
            else Answer.ABSENT
            if code == _ABSENT
            else Answer.REFUSED
            if code == _TOO_SMALL
            else Answer.UNCONFIRMED
            for code, each in zip(codes, objects, strict=True)
        ]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True  # first: a call after the store's own close ends the process
        store, self._store = self._store, None
        if store is not None:
            try:
                for address in self._registered:
                    store.unregister_buffer(address)
            finally:
                store.close()


def _load() -> Any:
    """Mooncake's module, with limits of seconds. Raises :class:`BackendUnavailable` with what to do."""
    if find_spec("mooncake") is None:
        raise BackendUnavailable(
            f"mooncake:// needs Mooncake: pip install {_WHEELS[0]} (with CUDA's libraries) or "
            f"pip install {_WHEELS[1]}; one of them, never both",
            name="mooncake",
            reason="not installed",
        )
    if all(map(_installed, _WHEELS)):
        _log.warning("both %s are installed, over each other: uninstall both, then install one", " and ".join(_WHEELS))
    if "mooncake.store" in sys.modules:
        _log.info("mooncake was imported before; its limits are those of whoever did that")
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        return import_module("mooncake.store")
    except ImportError as exc:
        raise BackendUnavailable(
            f"mooncake is installed and does not load: {exc}. It needs libibverbs1, libcurl4 and libnuma1, and its "
            f"CUDA wheel libcuda.so.1",
            name="mooncake",
            reason=str(exc),
        ) from exc


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _number(variable: str) -> float:
    try:
        return float(os.environ[variable])
    except ValueError as exc:
        raise ConfigError(
            f"{variable}={os.environ[variable]!r} is no number", option=variable, value=os.environ[variable]
        ) from exc


def _size_of(replicas: Sequence[Any]) -> int | None:
    """Bytes of an object by its replicas in memory, if one of them is whole."""
    for each in replicas:
        if each.is_memory_replica() and each.status.name == "COMPLETE":
            return int(each.get_memory_descriptor().buffer_descriptor.size)
    return None


def _asked_alone(store: Any, name: str) -> int | None:
    """Bytes of the object, None where there is none (whole). Raises :class:`ConnectionError` if nobody answers."""
    size = int(store.get_size(name))
    if size in (_ABSENT, _IN_FLIGHT):
        return None
    if size < 0:
        raise ConnectionError(f"Mooncake does not tell of {name} (code {size})")
    return size


def _columns(objects: Sequence[TierObject]) -> tuple[list[str], list[list[int]], list[list[int]]]:
    return (
        [each.name for each in objects],
        [[address for address, _ in each.parts] for each in objects],
        [[length for _, length in each.parts] for each in objects],
    )
