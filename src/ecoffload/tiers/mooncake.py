"""The Mooncake Store as a tier: ``mooncake://MASTER_HOST:PORT?protocol=tcp&replicas=1&host=THIS_HOST``.

This process owns no memory of the store (storage nodes do); it reads and writes by addresses. Made of its batch calls
over scattered buffers. Facts on its answers are of 0.13 as tried on loopback: an accepted put is no proof of storage, a
call after its ``close`` is a segmentation fault, and its ports ask for no credentials: a trusted network is needed.

Mooncake comes as two wheels that both bring the package ``mooncake``; either will do, and neither is ever installed
from here, since one over the other breaks both.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
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
_TOO_SMALL = -600
_FULL = -200
_LOCAL_BUFFER = 16 << 20


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
        if not re.fullmatch(r"[^\s:]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}", address):
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
        if find_spec("mooncake") is None:
            raise BackendUnavailable(
                "mooncake:// needs Mooncake: pip install mooncake-transfer-engine (with CUDA's libraries) or "
                "pip install mooncake-transfer-engine-non-cuda; one of them, never both",
                name="mooncake",
                reason="not installed",
            )
        if "mooncake.store" in sys.modules:
            _log.info("mooncake was imported before; its limits are those of whoever did that")
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
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
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as exc:
            raise BackendUnavailable(
                f"mooncake is installed and does not load: {exc}. It needs libibverbs1, libcurl4 and libnuma1, and its "
                f"CUDA wheel libcuda.so.1",
                name="mooncake",
                reason=str(exc),
            ) from exc
        store = MooncakeDistributedStore()
        code = store.setup(self.host, self.metadata, 0, _LOCAL_BUFFER, self.protocol, self.device, self.address)
        if code:
            raise ConnectionError(f"Mooncake's master at {self.address} does not answer (code {code})")
        for address, nbytes in memory:
            code = store.register_buffer(address, nbytes)
            if code:
                store.close()
                raise ConnectionError(f"Mooncake does not register {nbytes} bytes for {self.protocol} (code {code})")
            self._registered.append(address)
        self._config = ReplicateConfig()
        self._config.replica_num = self.replicas
        self._store = store

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
        sizes: list[int | None] = []
        # One question for all that are missing, which most are; the size of the others is asked one by one.
        found = store.batch_is_exist(list(names)) if names else []
        for name, there in zip(names, found, strict=True):
            size = _ABSENT if there == 0 else store.get_size(name) if there == 1 else there
            if size == _ABSENT:
                sizes.append(None)
            elif size < 0:
                raise ConnectionError(f"Mooncake does not tell of {name} (code {size})")
            else:
                sizes.append(size)
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
            for address in self._registered:
                store.unregister_buffer(address)
            store.close()


def _columns(objects: Sequence[TierObject]) -> tuple[list[str], list[list[int]], list[list[int]]]:
    return (
        [each.name for each in objects],
        [[address for address, _ in each.parts] for each in objects],
        [[length for _, length in each.parts] for each in objects],
    )
