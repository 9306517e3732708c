"""What the Mooncake tier does around Mooncake's client, with a stand-in for its package: the store itself is not here
(tests/mooncake has it). The stand-in answers as facts from the real one have it."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ecoffload import BackendUnavailable, CacheClosed, ConfigError
from ecoffload.tiers import Answer, TierObject, mooncake, open_tier
from ecoffload.tiers.mooncake import MooncakeTier

STAND_IN = """
import os, time

class ReplicateConfig:
    replica_num = 1

class MooncakeDistributedStore:
    made = []
    def __init__(self):
        self.made.append(self)
        self.calls = []
        self.answers = {}
    def setup(self, *arguments):
        self.calls.append(("setup", arguments))
        print("a line of its log")
        if os.environ.get("STAND_IN") == "hangs":
            time.sleep(60)
        return -1 if os.environ.get("STAND_IN") == "refuses" else 0
    def register_buffer(self, address, nbytes):
        self.calls.append(("register_buffer", address))
        return self.answers.get("register_buffer", 0)
    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            return self.answers.get(name, 0)
        return call
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """`package(code)`: as if that were Mooncake."""

    def install(code: str) -> None:
        (tmp_path / "mooncake").mkdir()
        (tmp_path / "mooncake" / "__init__.py").write_text("")
        (tmp_path / "mooncake" / "store.py").write_text(code)

    for name in list(sys.modules):
        if name.split(".")[0] == "mooncake":
            monkeypatch.delitem(sys.modules, name)
    for name in mooncake._SETTINGS:
        monkeypatch.setenv(name, "x")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    for name in list(sys.modules):
        if name.split(".")[0] == "mooncake":
            del sys.modules[name]


@pytest.fixture
def listener() -> Iterator[str]:
    """An address where somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def opened(address: str) -> MooncakeTier:
    tier = open_tier(f"mooncake://{address}", namespace="model").tier
    assert isinstance(tier, MooncakeTier)
    return tier


@pytest.fixture
def tier(package: Callable[[str], None], listener: str) -> MooncakeTier:
    """Connected."""
    package(STAND_IN)
    made = opened(listener)
    made.connect([(4096, 100)])
    return made


def test_without_mooncake_the_error_names_both_wheels_and_says_never_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"mooncake-transfer-engine .*-non-cuda; one of them, never both"):
        opened("host:1")


def test_both_wheels_over_each_other_are_told(
    package: Callable[[str], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package(STAND_IN)
    for name in ("mooncake_transfer_engine", "mooncake_transfer_engine_non_cuda"):
        assert "uninstall both" not in caplog.text
        info = tmp_path / f"{name}-0.3.13.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.3.13\n")
        with caplog.at_level(logging.WARNING):
            opened("host:1")
    assert "uninstall both, then install one" in caplog.text


def test_a_mooncake_that_does_not_load_is_an_error_at_the_start_that_says_what_it_needs(
    package: Callable[[str], None],
) -> None:
    package("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    with pytest.raises(BackendUnavailable, match=r"libibverbs.so.1.* It needs libibverbs1, libcurl4 and libnuma1"):
        opened("host:1")


def test_its_limits_are_set_before_it_is_loaded_and_what_a_user_has_set_stays(
    package: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    package("import os\nSEEN = dict(os.environ)\n" + STAND_IN)
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "500")
    seen = opened("host:1")._library.SEEN
    assert seen["MC_RPC_TIMEOUT_MS"] == "500"
    assert seen["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "2"


@pytest.mark.parametrize(("seconds", "grace"), [("2", 10.0), ("30", 150.0)])
def test_extents_are_kept_aside_longer_where_its_connections_may_stall_longer(
    package: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, seconds: str, grace: float
) -> None:
    package(STAND_IN)
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", seconds)
    assert opened("host:1").grace == grace


def test_a_limit_that_is_no_number_is_refused(package: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    package(STAND_IN)
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "soon")
    with pytest.raises(ConfigError, match="MC_TCP_PROGRESS_TIMEOUT_SEC='soon'"):
        opened("host:1")


@pytest.mark.parametrize("address", ["host", "host:0", "host:65536", "host:port", ":1", "a:b:1"])
def test_what_names_no_master_is_refused(package: Callable[[str], None], address: str) -> None:
    package(STAND_IN)
    with pytest.raises(ConfigError, match="names no master"):
        opened(address)


def test_where_nobody_listens_no_client_is_made(package: Callable[[str], None], listener: str) -> None:
    package(STAND_IN)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    made = opened(address)
    with pytest.raises(ConnectionRefusedError):
        made.connect([])
    assert made._library.MooncakeDistributedStore.made == []


@pytest.mark.parametrize(("how", "reason"), [("refuses", r"cannot be set up for .*: -1"), ("hangs", "does not answer")])
def test_a_setup_that_fails_or_lasts_does_so_in_a_child_only(
    package: Callable[[str], None], listener: str, monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    package(STAND_IN)
    monkeypatch.setattr(mooncake, "_TRIAL_LIMIT", 0.5)
    monkeypatch.setenv("STAND_IN", how)
    made = opened(listener)
    begun = time.monotonic()
    with pytest.raises(ConnectionError, match=reason):
        made.connect([])
    assert time.monotonic() - begun < 30
    assert made._library.MooncakeDistributedStore.made == []


def test_a_failed_registration_leaves_nothing_behind_and_connecting_again_starts_anew(
    package: Callable[[str], None], listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(STAND_IN)
    made = opened(listener)
    stores = made._library.MooncakeDistributedStore.made
    with monkeypatch.context() as patched:
        patched.setattr(made._library.MooncakeDistributedStore, "register_buffer", lambda self, a, n: -1)
        with pytest.raises(ConnectionError, match="does not register 100 bytes"):
            made.connect([(4096, 100)])
    assert stores[0].calls[-1] == ("close",)
    made.connect([(4096, 100)])
    made.close()
    assert [call for call in stores[1].calls if call[0] == "unregister_buffer"] == [("unregister_buffer", 4096)]


def test_zero_from_a_put_is_no_proof_and_is_looked_after(tier: MooncakeTier) -> None:
    tier._store.answers = {"batch_put_from_multi_buffers": [0, 0, 0, -200, -800], "batch_is_exist": [1, 0, -900]}
    answers = tier.publish([TierObject(name, ((4096, 10),)) for name in "abcde"])
    assert answers == [Answer.DONE, Answer.ABSENT, Answer.UNCONFIRMED, Answer.REFUSED, Answer.UNCONFIRMED]
    assert tier._store.calls[-1] == ("batch_is_exist", ["a", "b", "c"])


def test_a_fetch_is_done_only_with_every_byte(tier: MooncakeTier) -> None:
    tier._store.answers = {"batch_get_into_multi_buffers": [10, 9, -704, -600, -800]}
    answers = tier.fetch_many([TierObject(name, ((4096, 10),)) for name in "abcde"])
    assert answers == [Answer.DONE, Answer.UNCONFIRMED, Answer.ABSENT, Answer.REFUSED, Answer.UNCONFIRMED]


class Replica:
    def __init__(self, size: int, status: str = "COMPLETE", memory: bool = True) -> None:
        self.status = type("Status", (), {"name": status})
        self.memory = memory
        self.buffer_descriptor = type("Buffer", (), {"size": size})

    def is_memory_replica(self) -> bool:
        return self.memory

    def get_memory_descriptor(self) -> Any:
        return self


def test_sizes_of_all_that_is_there_are_asked_for_in_one_call(tier: MooncakeTier) -> None:
    tier._store.answers = {
        "batch_get_replica_desc": {"b": [Replica(5, "PROCESSING"), Replica(7)], "c": [Replica(9)]},
    }
    tier._store.calls.clear()
    assert tier.exists(["a", "b", "c"]) == [None, 7, 9]
    assert [call[0] for call in tier._store.calls] == ["batch_get_replica_desc"]


@pytest.mark.parametrize(("code", "size"), [(11, 11), (0, 0), (-704, None), (-703, None)])
def test_the_size_of_one_object_is_asked_for_in_one_call(tier: MooncakeTier, code: int, size: int | None) -> None:
    """-703: its publisher is still at it, or has died in it."""
    tier._store.answers = {"get_size": code}
    tier._store.calls.clear()
    assert tier.exists(["a"]) == [size]
    assert tier._store.calls == [("get_size", "a")]


def test_a_master_that_let_the_first_question_time_out_is_not_asked_a_second(
    tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(mooncake.time, "monotonic", lambda: now[0])

    def silent(names: list[str]) -> dict[str, Any]:
        now[0] += 2.0
        return {}

    tier._store.batch_get_replica_desc = silent
    tier._store.calls.clear()
    with pytest.raises(ConnectionError, match="does not answer"):
        tier.exists(["a", "b"])
    assert tier._store.calls == []


def test_with_no_limit_for_answers_an_empty_one_is_never_too_late(
    package: Callable[[str], None], listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "0")
    package(STAND_IN)
    tier = opened(listener)
    tier.connect([(4096, 100)])
    tier._store.answers = {"batch_get_replica_desc": {}, "get_size": -704}
    assert tier.exists(["a", "b"]) == [None, None]


def test_where_nothing_is_there_one_question_more_tells_that_somebody_answers(tier: MooncakeTier) -> None:
    tier._store.answers = {"batch_get_replica_desc": {}, "get_size": -704}
    tier._store.calls.clear()
    assert tier.exists(["a", "b", "c"]) == [None, None, None]
    assert tier._store.calls == [("batch_get_replica_desc", ["a", "b", "c"]), ("get_size", "a")]


@pytest.mark.parametrize(("code", "size"), [(11, 11), (-704, None)])
def test_what_lies_on_disk_or_has_gone_is_asked_for_by_itself(tier: MooncakeTier, code: int, size: int | None) -> None:
    tier._store.answers = {
        "batch_get_replica_desc": {"a": [Replica(3, memory=False)], "b": [Replica(9)]},
        "get_size": code,
    }
    assert tier.exists(["a", "b"]) == [size, 9]


@pytest.mark.parametrize(
    ("names", "answers"),
    [
        (["a"], {"get_size": -900}),
        (["a", "b"], {"batch_get_replica_desc": {}, "get_size": -901}),
        (["a", "b"], {"batch_get_replica_desc": {"b": [Replica(9)], "a": []}, "get_size": -900}),
    ],
)
def test_a_master_that_does_not_answer_is_an_error_and_no_miss(
    tier: MooncakeTier, names: list[str], answers: dict[str, Any]
) -> None:
    tier._store.answers = answers
    with pytest.raises(ConnectionError):
        tier.exists(names)


def test_no_call_reaches_the_client_after_its_close(tier: MooncakeTier) -> None:
    store = tier._store
    tier.close()
    tier.close()
    assert [call[0] for call in store.calls[-2:]] == ["unregister_buffer", "close"]
    for call in (
        lambda: tier.exists([]),
        lambda: tier.exists(["a"]),
        lambda: tier.publish([]),
        lambda: tier.fetch_many([]),
    ):
        with pytest.raises(CacheClosed):
            call()
    assert store.calls[-1] == ("close",)
