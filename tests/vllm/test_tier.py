"""Engines that share a store: encoded once, loaded anywhere; requests wait for what is on its way, and not too long.

The store is a fake that answers late, badly or not at all; vLLM's scheduler is the real one, every message pickled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import HIDDEN, encoder_output

from ecoffload import EncoderCache
from ecoffload.errors import BackendUnavailable, ConfigError
from ecoffload.integrations.vllm.config import read_options
from ecoffload.integrations.vllm.scheduler import SchedulerHalf
from ecoffload.integrations.vllm.setup import set_up
from ecoffload.scheduler import OffloadScheduler
from ecoffload.testing.tiers.fake import FakeStore, FakeTier
from ecoffload.tiers import opening

ENTRY = 4096
REAL = os.environ.get("ECOFFLOAD_TIER", "")
"""URL of a real store, where there is one to try."""
PATIENT = "fake://store?wait=30&deadline=30&absent=0"
Make = Callable[..., Any]


def content(name: str) -> str:
    """An identifier as vLLM makes it of an input's content."""
    return hashlib.sha256(name.encode()).hexdigest()


A, B, C = content("a"), content("b"), content("c")


class Shared(FakeStore):
    """One store for all engines of a test. `hold()` keeps what is being fetched back until `let_go()`."""

    def __init__(self) -> None:
        super().__init__()
        self.tiers: list[FakeTier] = []
        self.asked = threading.Event()
        """A fetch has reached the store."""
        self._go = threading.Event()

    def connect(self, address: str, options: dict[str, str]) -> FakeTier:
        self.tiers.append(FakeTier(address, options, self))
        return self.tiers[-1]

    def hold(self) -> None:
        self._go.clear()
        self.spoil = self._late

    def let_go(self) -> None:
        self._go.set()

    def _late(self, name: str, data: bytes) -> bytes:
        self.asked.set()
        self._go.wait(60)
        return data


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Shared:
    shared = Shared()
    monkeypatch.setattr(opening, "_class_of", lambda scheme: shared.connect)
    return shared


@pytest.fixture
def node(store: Shared, engine: Make) -> Iterator[Make]:
    """Make an engine with the store behind it, as if on a machine of its own. One image fits vLLM's encoder cache."""

    def make(tier: str | None = PATIENT, *, extra: dict[str, Any] | None = None, **options: Any) -> Any:
        known = {"ec_cpu_bytes": 16 * ENTRY, **({} if tier is None else {"tier": tier}), **(extra or {})}
        return engine(connector="EcoffloadConnector", extra=known, **{"encoder_cache_items": 1, **options})

    yield make
    store.up.set()  # before the engines are shut down
    store.let_go()


def eventually(ready: Callable[[], Any], limit: float = 30.0) -> None:
    end = time.monotonic() + limit
    while not ready():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.001)


def half(vllm: Any) -> Any:
    return vllm.connector._decider


def link(vllm: Any) -> dict[str, Any]:
    """The link's counts as of now."""
    half(vllm)._poll()
    found: dict[str, Any] = half(vllm).engine.tier.stats()
    return found


def play(vllm: Any, *names: str, **options: Any) -> None:
    """One request an image, each finished before the next."""
    for name in names:
        vllm.add(f"{name[:8]}-{vllm.steps}", name, **options)
        vllm.run(1_000_000)


def publish(node: Make, *names: str, **options: Any) -> Any:
    """An engine that encoded these inputs and published them."""
    vllm = node(**options)
    play(vllm, *names)
    eventually(lambda: link(vllm)["published"] == len(names))
    return vllm


def settle(vllm: Any) -> None:
    """Nothing in flight, no pins, no extents without an owner, and the cache is on."""
    vllm.run(1_000_000)
    eventually(lambda: not half(vllm).engine.poll() and not half(vllm).engine.tier.pending())
    half(vllm).engine.index.check()
    assert half(vllm).engine.index.pinned == 0
    assert not half(vllm)._admission._since
    assert not half(vllm)._admission._asked
    assert not half(vllm)._admission._passed_over
    assert not vllm.connector.effective_configuration()["off"]


def deferrals(vllm: Any) -> tuple[int, int]:
    """Requests that waited, and those of them whose budget ran out."""
    counts = vllm.totals() + half(vllm)._counts + half(vllm)._admission.counts
    return counts["deferrals"], counts["deferrals_expired"]


# -- encoded once, loaded anywhere -------------------------------------------------------------------------------------


def test_what_one_engine_encoded_another_loads(node: Make, runner: str) -> None:
    publish(node, A, B, runner=runner)
    vllm = node(runner=runner)
    play(vllm, A, B, A)
    assert vllm.encodes() == []
    assert link(vllm)["hits"] == 2
    settle(vllm)


def test_both_ranks_load_what_came_from_the_store(node: Make, runner: str) -> None:
    publish(node, A, runner=runner, ranks=2)
    vllm = node(runner=runner, ranks=2)
    play(vllm, A)
    assert vllm.encodes(0) == vllm.encodes(1) == []
    settle(vllm)


def test_the_region_is_looked_into_first(node: Make, runner: str, store: Shared) -> None:
    vllm = publish(node, A, B, runner=runner)
    calls = len(store.calls)
    play(vllm, A)
    assert len(store.calls) == calls
    assert vllm.encodes() == [A, B]


def test_a_producer_publishes_and_asks_for_nothing(node: Make, runner: str, store: Shared) -> None:
    vllm = node(runner=runner, role="ec_producer")
    for name in (A, B, A):
        vllm.add(f"r{vllm.steps}", name, max_tokens=1)
        vllm.run(100_000)
    eventually(lambda: link(vllm)["published"] == 2)
    assert not [call for call, _ in store.calls if call == "fetch_many"]
    assert half(vllm)._admission is None


def test_a_consumer_fetches_and_publishes_nothing(node: Make, runner: str, store: Shared) -> None:
    publish(node, A, runner=runner)
    vllm = node(runner=runner, role="ec_consumer")
    play(vllm, A, B)
    assert vllm.encodes() == [B]
    assert len(store.objects) == 1


def test_the_store_is_never_called_from_the_engines_thread(node: Make, runner: str, store: Shared) -> None:
    publish(node, A, runner=runner)
    vllm = node(runner=runner)
    play(vllm, A, B)
    vllm.shutdown()
    assert len(store.calls) > 4
    assert all(thread.startswith("ecoffload-tier-") for _, thread in store.calls)


@pytest.mark.skipif(not REAL, reason="ECOFFLOAD_TIER names no store")
def test_what_one_engine_encoded_another_loads_from_a_real_store(engine: Make, runner: str) -> None:
    epoch = secrets.token_hex(8)  # a namespace that the store has never seen

    def make() -> Any:
        extra = {"ec_cpu_bytes": 256 * ENTRY, "tier": f"{REAL}?wait=20&deadline=20", "weight_epoch": epoch}
        return engine(connector="EcoffloadConnector", extra=extra, encoder_cache_items=1, runner=runner)

    one, names = make(), [content(f"i{turn}") for turn in range(10)]
    play(one, *names)
    eventually(lambda: link(one)["published"] == 10)
    two = make()
    play(two, *names)
    assert two.encodes() == []
    settle(two)


# -- admission ---------------------------------------------------------------------------------------------------------


def test_a_request_waits_for_what_is_on_its_way_while_others_run(node: Make, runner: str, store: Shared) -> None:
    publish(node, A, runner=runner)
    vllm = node(runner=runner)
    store.hold()
    vllm.add("waits", A)
    vllm.step()
    vllm.add("runs", "local")
    vllm.add("text")
    while vllm.tokens["runs"] < 2 or vllm.tokens["text"] < 2 or not store.asked.is_set():
        vllm.step()
    assert vllm.tokens["waits"] == 0
    store.let_go()
    settle(vllm)
    assert vllm.tokens["waits"] == 2
    assert vllm.encodes() == ["local"]
    assert deferrals(vllm) == (1, 0)


def test_an_engine_with_nothing_but_a_waiting_request_goes_on_stepping(node: Make, runner: str, store: Shared) -> None:
    publish(node, A, runner=runner)
    vllm = node(runner=runner)
    store.hold()
    vllm.add("waits", A)
    while not store.asked.is_set():
        vllm.step()
    assert vllm.scheduler.has_requests()
    assert vllm.step().total_num_scheduled_tokens == 0
    store.let_go()
    vllm.run(1_000_000)
    assert vllm.encodes() == []


def test_a_request_whose_budget_is_spent_is_encoded_here(node: Make, runner: str, store: Shared) -> None:
    publish(node, A, runner=runner)
    vllm = node("fake://store?wait=0.05&deadline=30", runner=runner)
    store.hold()
    begun = time.monotonic()
    play(vllm, A)
    assert time.monotonic() - begun >= 0.05
    assert vllm.encodes() == [A]
    assert deferrals(vllm) == (1, 1)
    store.let_go()
    settle(vllm)
    play(vllm, B, A)
    assert vllm.encodes() == [A, B]


def test_what_lands_after_the_budget_is_in_the_region_the_next_time(node: Make, runner: str, store: Shared) -> None:
    publish(node, A, runner=runner)
    vllm = node("fake://store?wait=0.02&deadline=30", runner=runner, role="ec_consumer")
    store.hold()
    play(vllm, A)
    store.let_go()
    eventually(lambda: link(vllm)["hits"] == 1)
    play(vllm, B, A)
    assert vllm.encodes() == [A, B]


def test_with_no_budget_nobody_waits_and_fetches_are_made_all_the_same(node: Make, runner: str) -> None:
    publish(node, A, runner=runner)
    vllm = node("fake://store?wait=0", runner=runner, role="ec_consumer")
    play(vllm, A)
    eventually(lambda: link(vllm)["hits"] == 1)
    assert vllm.encodes() == [A]
    assert deferrals(vllm) == (0, 0)


def test_a_request_has_one_budget_however_often_it_is_preempted(node: Make, runner: str, store: Shared) -> None:
    publish(node, A, runner=runner)
    vllm = node("fake://store?wait=0.05&deadline=30", runner=runner, role="ec_consumer")
    store.hold()
    vllm.add("one", A, max_tokens=40)
    while vllm.tokens["one"] < 3:
        vllm.step()
    for _ in range(3):
        vllm.preempt_all()
        vllm.scheduler.reset_encoder_cache()
        vllm.workers[0].cache.clear()
        half(vllm)._admission.forget()
        before = vllm.tokens["one"]
        vllm.step()
        assert vllm.tokens["one"] == before + 1
    assert vllm.encodes() == [A] * 4
    assert deferrals(vllm) == (1, 1)


def test_a_running_request_is_passed_over_before_a_later_chunk(node: Make, runner: str, store: Shared) -> None:
    first = node(runner=runner)
    vllm = node(runner=runner, encoder_cache_items=4, max_batched_tokens=20)
    request = vllm.add("chunked", A, B)
    while not request.num_computed_tokens:
        vllm.step()
    assert request.num_computed_tokens < request.num_prompt_tokens
    play(first, B)
    eventually(lambda: link(first)["published"] == 1)
    store.hold()
    assert half(vllm).engine.fetch(B.encode())  # as for another request
    vllm.add("text")
    while vllm.tokens["text"] < 2 or not store.asked.is_set():
        vllm.step()
    assert vllm.tokens["chunked"] == 0
    store.let_go()
    settle(vllm)
    assert vllm.encodes() == [A]


def test_nothing_is_asked_for_a_request_that_is_past_its_inputs(node: Make, runner: str, store: Shared) -> None:
    vllm = node(runner=runner, role="ec_consumer")
    vllm.add("one", A, max_tokens=50)
    while vllm.tokens["one"] < 2:
        vllm.step()
    calls = len(store.calls)
    vllm.run()
    assert vllm.tokens["one"] == 50
    assert len(store.calls) == calls


def test_nothing_is_asked_for_what_vllms_encoder_cache_holds_until_it_is_evicted(
    node: Make, runner: str, store: Shared
) -> None:
    vllm = node(runner=runner, role="ec_consumer")
    play(vllm, A)
    calls = len(store.calls)
    play(vllm, A)
    assert len(store.calls) == calls
    assert vllm.encodes() == [A]
    play(vllm, B)
    calls = len(store.calls)
    play(vllm, A)
    assert len(store.calls) > calls


def test_an_input_that_the_store_has_not_delays_its_request_by_one_question(node: Make, runner: str) -> None:
    vllm = node(runner=runner)
    play(vllm, A)
    assert vllm.encodes() == [A]
    assert deferrals(vllm) == (1, 0)
    settle(vllm)


def test_an_abort_while_waiting_leaves_nothing_behind(node: Make, runner: str, store: Shared) -> None:
    publish(node, A, runner=runner)
    vllm = node(runner=runner)
    store.hold()
    vllm.add("waits", A)
    while not store.asked.is_set():
        vllm.step()
    vllm.abort("waits")
    vllm.run()
    assert not vllm.scheduler.has_requests()
    store.let_go()
    settle(vllm)


def test_steps_scheduled_ahead_load_what_came_from_the_store(node: Make, runner: str) -> None:
    publish(node, A, B, C, runner=runner)
    vllm = node(runner=runner, asynchronous=True)
    for turn, name in enumerate((A, B, A, C, B, A)):
        vllm.add(f"r{turn}", name, max_tokens=3)
        vllm.step()
    settle(vllm)
    assert vllm.encodes() == []
    assert set(vllm.tokens.values()) == {3}


# -- a store that is dead, lies or is left out -------------------------------------------------------------------------


def test_nobody_waits_for_a_store_that_is_known_to_be_dead(node: Make, runner: str, store: Shared) -> None:
    store.dead = True
    vllm = node(runner=runner)
    for turn in range(3):
        play(vllm, content(f"i{turn}"))
    assert link(vllm)["breakers"]["fetch"] == "open"
    before = deferrals(vllm)[0]
    eventually(half(vllm).engine.tier._breakers["fetch"].ready)  # a probe may go out: nobody waits for that one either
    for turn in range(3, 9):
        vllm.add(f"r{turn}", content(f"i{turn}"))
        assert vllm.step().total_num_scheduled_tokens > 0
        vllm.run()
    assert deferrals(vllm)[0] == before
    assert len(vllm.encodes()) == 9
    assert not vllm.connector.effective_configuration()["off"]


def test_a_store_that_comes_back_is_used_again(node: Make, runner: str, store: Shared) -> None:
    publish(node, A, runner=runner)
    vllm = node(runner=runner, encoder_cache_items=8)
    store.dead = True
    for turn in range(4):
        play(vllm, content(f"i{turn}"))
    store.dead = False
    turns = iter(range(4, 100_000))
    eventually(lambda: play(vllm, content(f"i{next(turns)}")) or link(vllm)["breakers"]["fetch"] == "closed")
    play(vllm, A)
    assert A not in vllm.encodes()


@pytest.mark.parametrize("at", [20, 300, 600, -1])
def test_a_flipped_byte_is_a_miss(node: Make, runner: str, store: Shared, at: int) -> None:
    publish(node, A, runner=runner)

    def spoil(name: str, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at] ^= 1
        return bytes(changed)

    store.spoil = spoil
    vllm = node(runner=runner)
    play(vllm, A)
    assert vllm.encodes() == [A]
    assert link(vllm)["corrupt"] == 1
    settle(vllm)


@pytest.mark.parametrize("shape", [(17, HIDDEN), (16, HIDDEN + 1), (16 * HIDDEN,)], ids=str)
def test_what_a_peer_sent_and_no_encoder_of_ours_makes_is_a_miss(
    node: Make, runner: str, store: Shared, shape: tuple[int, ...]
) -> None:
    vllm = node(runner=runner)
    if shape[1:] == (HIDDEN + 1,) and not hasattr(vllm.config.ec_transfer_config, "mm_encoder_output_widths"):
        pytest.skip("vLLM measures widths from 0.32 on")
    cache = EncoderCache("64KiB", namespace=half(vllm).setup.namespace, tier=FakeTier(store=store))
    with cache:
        cache.put(A, torch.zeros(shape))
        eventually(lambda: cache.stats().tier["published"] == 1)
    play(vllm, A)
    assert vllm.encodes() == [A]
    assert half(vllm).engine.index.lookup(A.encode()).shape == (16, HIDDEN)
    settle(vllm)


def test_a_bug_in_admission_turns_the_tier_off_and_not_the_cache(
    node: Make, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(node, A, runner=runner)
    vllm = node(runner=runner)

    def broken(*args: Any) -> bool:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(half(vllm)._admission, "admit", broken)
    play(vllm, A, B, A)
    assert vllm.encodes() == [A, B]
    told = vllm.connector.effective_configuration()
    assert "a bug of ours" in told["tier_off"]
    assert not told["off"]


def test_a_bug_in_the_link_turns_the_tier_off_and_not_the_cache(
    node: Make, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(node, A, runner=runner)
    vllm = node(runner=runner)

    def broken(*args: Any) -> bool:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(half(vllm).engine.tier, "_heard", broken)
    play(vllm, A, B, A)
    monkeypatch.undo()
    assert vllm.encodes() == [A, B]
    told = vllm.connector.effective_configuration()
    assert "a bug of ours" in told["tier_off"]
    assert not told["off"]


def test_after_weights_were_updated_in_place_the_tier_is_left_out(
    node: Make, runner: str, store: Shared, tmp_path: Path
) -> None:
    publish(node, A, B, runner=runner)
    epoch = tmp_path / "epoch"
    epoch.write_text("0")
    vllm = node(runner=runner, extra={"weight_epoch_file": str(epoch)})
    play(vllm, A)
    os.utime(epoch, ns=(1, 1))
    play(vllm, B)
    assert vllm.encodes() == [B]
    assert "invalidated" in vllm.connector.effective_configuration()["tier_off"]
    assert link(vllm)["published"] == 0


def test_an_input_that_was_forgotten_is_not_fetched_back(node: Make, runner: str) -> None:
    vllm = publish(node, A, B, runner=runner)
    assert vllm.connector.invalidate(A) == 1
    play(vllm, A)
    assert vllm.encodes() == [A, B, A]


def test_shutting_down_lets_the_store_go_before_the_region(
    node: Make, runner: str, store: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = publish(node, A, runner=runner)
    region, seen = half(vllm).region, []
    close = region.close
    monkeypatch.setattr(region, "close", lambda: (seen.append(store.tiers[-1].closed), close()))
    vllm.shutdown()
    assert seen == [True]


def test_so_does_shutting_down_with_a_fault(
    node: Make, runner: str, store: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = publish(node, A, runner=runner)
    monkeypatch.setattr(half(vllm).engine, "poll", lambda: 1 // 0)
    vllm.shutdown()
    assert store.tiers[-1].closed


def test_so_does_a_start_that_is_interrupted_while_it_waits(
    node: Make, store: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = node()
    setup = dataclasses.replace(vllm.connector.setup, region_id=f"interrupted-{secrets.token_hex(4)}")

    def interrupted(engine: Any, timeout: float) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(OffloadScheduler, "await_recovered", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SchedulerHalf(setup, SimpleNamespace(ec_transfer_config=None))
    assert store.tiers[-1].closed


# -- whose entries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["my-cat", "adapter:" + "0" * 64, "renderer0-mm-1-image-0"])
def test_a_key_that_a_client_or_an_adapter_chose_neither_leaves_nor_is_asked_for(
    node: Make, runner: str, store: Shared, key: str
) -> None:
    vllm = node(runner=runner)
    play(vllm, key, A, key)
    eventually(lambda: link(vllm)["published"] == 1)
    assert link(vllm)["withheld"] == 1
    assert link(vllm)["misses"] == 1
    assert len(store.objects) == 1


def test_such_a_key_is_shared_if_uuids_are_trusted(node: Make, runner: str) -> None:
    publish(node, "my-cat", runner=runner, extra={"trust_uuids": True})
    vllm = node(runner=runner, extra={"trust_uuids": True})
    play(vllm, "my-cat")
    assert vllm.encodes() == []
    doubting = node(runner=runner)
    play(doubting, "my-cat")
    assert doubting.encodes() == ["my-cat"]


@pytest.mark.parametrize("other", [{"revision": "other"}, {"extra": {"weight_epoch": 2}}, {"ranks": 2}], ids=str)
def test_two_models_on_one_store_never_see_each_others_bytes(
    node: Make, runner: str, store: Shared, other: dict[str, Any]
) -> None:
    publish(node, A, runner=runner)
    vllm = publish(node, A, runner=runner, **other)
    assert vllm.encodes() == [A]
    assert link(vllm)["hits"] == 0
    assert len(store.objects) == 2


def test_a_namespace_that_cannot_be_told_leaves_the_tier_out_and_says_so(model: Path, store: Shared) -> None:
    from harness import make_config

    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    config = make_config(
        model,
        connector="EcoffloadConnector",
        module="ecoffload.integrations.vllm",
        extra={"ec_cpu_bytes": 65536, "tier": PATIENT},
        hf_overrides=lambda hf: hf,
    )
    setup = set_up(config)
    assert setup.tier == ""
    assert setup.why_no_tier == "hf_overrides is a function"
    assert any("the tier is left out" in note for note in setup.notes)


# -- options, statistics, cost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "says"),
    [
        ("mooncake", "no URL like mooncake://host:port"),
        ("nosuch://host:1", "no installed package brings a tier for nosuch://"),
        ("mooncake://host", "mooncake://host names no master; write mooncake://host:port"),
        ("mooncake://host:1?wait=soon", "wait='soon'"),
        ("mooncake://host:1?replica=2", "unknown option 'replica'"),
        ("mooncake://host:1", "pip install mooncake-transfer-engine"),
        (17, "tier is 17"),
    ],
)
def test_a_tier_that_cannot_be_is_an_error_at_the_start_with_its_remedy(tier: Any, says: str) -> None:
    with pytest.raises((ConfigError, BackendUnavailable), match=says):
        read_options({"ec_cpu_bytes": 65536, "tier": tier})


def test_without_a_tier_nothing_is_added(node: Make, runner: str) -> None:
    vllm = node(None, runner=runner)
    play(vllm, A, B, A)
    assert half(vllm)._admission is None
    assert half(vllm).engine.tier is None
    assert not [each for each in threading.enumerate() if each.name.startswith("ecoffload-tier")]
    assert not [stats for stats in vllm.stats if "tier" in stats or "deferrals" in stats]
    assert vllm.connector.effective_configuration()["tier"] == ""
    assert vllm.connector.effective_configuration()["why_no_tier"] == "not asked for"


def test_hits_are_told_apart_by_where_they_came_from(node: Make, runner: str) -> None:
    pytest.importorskip("vllm.distributed.ec_transfer.ec_connector.metrics", reason="hooks exist from vLLM 0.31 on")
    from ecoffload.integrations.vllm.metrics import Statistics

    publish(node, A, runner=runner)
    vllm = node(runner=runner)
    play(vllm, A, B, A, B)
    total = Statistics()
    for stats in vllm.stats:
        total.aggregate(Statistics(stats))
    assert (total.data["hits"], total.data["hits_from_store"], total.data["misses"]) == (3, 2, 1)
    assert total.data["tier"]["tier_fetches"]["hits"] == 1
    assert total.data["tier"]["tier_bytes_fetched"] == ENTRY
    assert total.data["tier"]["tier_breaker_open"] == {"publish": 0, "fetch": 0}
    assert len(total.data["seconds"]["tier_fetch"]) == 1
    assert len(total.data["seconds"]["deferral"]) == total.data["deferrals"] == 2


def test_the_references_bytes_are_what_an_engine_publishes(node: Make, runner: str, store: Shared) -> None:
    publish(node, A, runner=runner)
    (data,) = store.objects.values()
    assert data[:ENTRY] == encoder_output(A, 16).numpy().tobytes()
