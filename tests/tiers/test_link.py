"""A cluster of caches on a store that misbehaves: never a wrong byte, never a wait, always a miss."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ecoffload import CacheClosed, ConfigError, EncoderCache
from ecoffload.testing.tiers.fake import FakeStore, FakeTier
from ecoffload.tiers import TierLink, TierOptions, link
from ecoffload.tiers.couriers import Couriers, Fetch
from ecoffload.tiers.header import HEADER_BYTES, object_name

Node = Callable[..., EncoderCache]
Eventually = Callable[..., None]


def tensor(seed: int, rows: int = 25) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, 40), dtype=np.float32))


def tier(cache: EncoderCache) -> dict[str, Any]:
    return cache.stats().tier


def publish(cache: EncoderCache, key: str, value: torch.Tensor, eventually: Eventually) -> None:
    before = tier(cache)["published"]
    assert cache.put(key, value)
    eventually(lambda: tier(cache)["published"] > before)


def sound(cache: EncoderCache) -> None:
    cache._scheduler.index.check()


# --- encoded once, loaded anywhere


def test_what_one_node_put_another_gets_with_dtype_and_shape(node: Node, eventually: Eventually) -> None:
    one, two = node(), node()
    publish(one, "a", tensor(1).to(torch.bfloat16), eventually)
    got = two.get("a")
    assert got is not None
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, tensor(1).to(torch.bfloat16))
    assert tier(two)["hits"] == 1
    assert two.stats().hits == 1
    assert two.stats().misses == 0
    sound(two)


def test_an_entry_in_several_extents_arrives_whole(node: Node, eventually: Eventually) -> None:
    one, two = node(), node()
    for i in range(8):
        two.put(f"{i}", torch.zeros(28 << 10, dtype=torch.uint8))
    for i in (1, 3, 5):
        two.invalidate(f"{i}")
    value = torch.from_numpy(np.random.default_rng(7).integers(0, 256, 50_001, dtype=np.uint8))
    publish(one, "big", value, eventually)
    got = two.get("big")
    entry = two._scheduler.index.lookup(b"big")
    assert entry is not None
    assert len(entry.extents) > 1
    assert got is not None
    assert torch.equal(got, value)


def test_an_object_arrives_in_one_run_of_memory_and_its_header_takes_no_room_afterwards(
    node: Node, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []
    fetch = FakeTier._fetch
    monkeypatch.setattr(FakeTier, "_fetch", lambda self, each: (parts.append(len(each.parts)), fetch(self, each))[1])
    one, two = node(), node()
    value = torch.arange(8192, dtype=torch.uint8)  # whole granules
    publish(one, "a", value, eventually)
    got = two.get("a")
    assert got is not None
    assert torch.equal(got, value)
    assert parts == [1]
    assert two.stats().used_bytes == 8192
    sound(two)


@pytest.mark.parametrize("short", [0, 1, 100, 511])
def test_a_header_that_lies_across_two_extents_is_read_whole(
    node: Node, eventually: Eventually, monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    parts: list[int] = []
    fetch = FakeTier._fetch
    monkeypatch.setattr(
        FakeTier, "_fetch", lambda self, each: (parts.extend(n for _, n in each.parts), fetch(self, each))[1]
    )
    one, two = node(), node("64KiB", granule=4096, publish=False)
    for i in range(16):
        two.put(f"{i}", torch.zeros(4096, dtype=torch.uint8))
    for i in (3, 9):  # all that is free: two granules apart
        two.invalidate(f"{i}")
    value = torch.from_numpy(np.random.default_rng(short).integers(0, 256, 4096 - short, dtype=np.uint8))
    publish(one, "a", value, eventually)
    got = two.get("a")
    assert got is not None
    assert torch.equal(got, value)
    assert parts == [4096, HEADER_BYTES - short]
    sound(two)


def test_get_or_encode_encodes_once_in_the_cluster(node: Node, eventually: Eventually) -> None:
    one, two = node(), node()
    encoded = []

    def encode() -> torch.Tensor:
        encoded.append(1)
        return tensor(3)

    one.get_or_encode("a", encode)
    eventually(lambda: tier(one)["published"] == 1)
    assert torch.equal(two.get_or_encode("a", encode), tensor(3))
    assert len(encoded) == 1


def test_many_keys_are_fetched_together(node: Node, eventually: Eventually, store: FakeStore) -> None:
    one, two = node(), node()
    for i in range(10):
        publish(one, f"{i}", tensor(i), eventually)
    got = two.get_many([f"{i}" for i in range(12)])
    assert sorted(got) == [f"{i}" for i in range(10)]
    assert all(torch.equal(got[f"{i}"], tensor(i)) for i in range(10))
    assert tier(two)["misses"] == 2


def test_what_was_fetched_is_in_the_region_and_not_published_again(
    node: Node, eventually: Eventually, store: FakeStore
) -> None:
    one, two = node(), node()
    publish(one, "a", tensor(1), eventually)
    two.get("a")
    store.objects.clear()
    got = two.get("a")
    assert got is not None
    assert torch.equal(got, tensor(1))
    assert tier(two)["published"] == 0
    assert not store.objects


def test_what_the_store_has_already_is_not_sent_again(node: Node, eventually: Eventually, store: FakeStore) -> None:
    one, two = node(), node()
    publish(one, "a", tensor(1), eventually)
    two.put("a", tensor(1))
    eventually(lambda: tier(two)["already_there"] == 1)
    assert tier(two)["bytes_published"] == 0


def test_two_models_on_one_store_never_see_each_other(node: Node, eventually: Eventually) -> None:
    one, two = node(namespace="one"), node(namespace="two")
    publish(one, "a", tensor(1), eventually)
    assert two.get("a") is None
    publish(two, "a", tensor(2), eventually)
    third = node(namespace="one")
    got = third.get("a")
    assert got is not None
    assert torch.equal(got, tensor(1))


def test_keys_that_a_client_chose_stay_here_unless_trusted(
    node: Node, eventually: Eventually, store: FakeStore
) -> None:
    one, trusting = node(), node(trust_uuids=True)
    one.put("uuid", tensor(1), client_key=True)
    eventually(lambda: tier(one)["withheld"] == 1)
    assert not store.objects
    trusting.put("uuid", tensor(1), client_key=True)
    eventually(lambda: tier(trusting)["published"] == 1)


def test_news_of_a_fetch_wake_everybody_who_waits_for_some(eventually: Eventually) -> None:
    couriers = Couriers(FakeTier(), TierOptions(), "model")
    woken: list[bool] = []
    waiters = [
        threading.Thread(target=lambda: woken.append(couriers.await_news(0, 60.0)), daemon=True) for _ in range(3)
    ]
    for each in waiters:
        each.start()
    eventually(lambda: len(couriers._news._waiters) == 3)  # type: ignore[attr-defined]
    couriers._in_time([Fetch(b"a", 0.0, 0.0)], lambda due: None)
    eventually(lambda: len(woken) == 3)
    assert all(woken)


def test_a_get_of_what_somebody_else_asked_for_hears_of_an_answer_that_comes_as_it_begins(
    node: Node, eventually: Eventually, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look at what has been answered and its waiting."""
    monkeypatch.setattr(link, "_LOOK_AGAIN", 60.0)
    one, two = node(), node()
    publish(one, "a", tensor(1), eventually)
    courier = two._scheduler.tier._couriers  # type: ignore[union-attr]
    store.up.clear()
    with two._lock:
        assert two._scheduler.fetch(b"a")
        eventually(lambda: [call for call, _ in store.calls].count("exists") == 2)
    poll, seen = two._poll, courier.news

    def polled() -> None:
        poll()
        monkeypatch.setattr(two, "_poll", poll)
        store.up.set()
        eventually(lambda: courier.news > seen)

    monkeypatch.setattr(two, "_poll", polled)
    begun = time.monotonic()
    got = two.get("a")
    assert time.monotonic() - begun < 15
    assert got is not None
    assert torch.equal(got, tensor(1))


def test_who_asks_while_the_only_fetcher_is_stuck_does_not_wait_and_all_is_well_when_it_goes_on(
    node: Node, eventually: Eventually, store: FakeStore
) -> None:
    """One call that does not end is one failure, and not the three that open the breaker."""
    one, two = node(), node(wait=15.0, deadline=0.2)
    publish(one, "a", tensor(1), eventually)
    eventually(lambda: tier(two)["connected"])
    store.up.clear()
    assert two.get("a") is None  # late
    tier_link = two._scheduler.tier
    assert tier_link is not None
    assert tier(two)["breakers"]["fetch"] == "closed"
    assert not tier_link.answering()
    begun = time.monotonic()
    assert [two.get(f"{i}") for i in range(5)] == [None] * 5
    assert time.monotonic() - begun < 10
    assert tier(two)["skipped"] == 5
    store.up.set()
    eventually(tier_link.answering)
    eventually(lambda: two.get("a") is not None)


# --- a lying store


@pytest.mark.parametrize("at", [0, 20, 60, 200, HEADER_BYTES - 1, HEADER_BYTES, 3000, -1])
def test_a_flipped_byte_anywhere_is_a_miss(node: Node, eventually: Eventually, store: FakeStore, at: int) -> None:
    one, two = node(), node()
    publish(one, "a", tensor(1), eventually)

    def spoil(name: str, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at] ^= 1
        return bytes(changed)

    store.spoil = spoil
    assert two.get("a") is None
    assert tier(two)["corrupt"] == 1
    assert len(two) == 0
    sound(two)
    store.spoil = None
    got = two.get("a")
    assert got is not None
    assert torch.equal(got, tensor(1))


def test_another_keys_object_under_this_name_is_a_miss(node: Node, eventually: Eventually, store: FakeStore) -> None:
    one, two = node(), node()
    publish(one, "a", tensor(1), eventually)
    store.objects[object_name("model", b"b")] = store.objects[object_name("model", b"a")]
    assert two.get("b") is None
    assert tier(two)["corrupt"] == 1


FAULTS = st.tuples(
    st.sampled_from(["good", "cut", "grown", "foreign", "changed", "noise", "gone"]),
    st.floats(0, 1, exclude_max=True),
    st.binary(min_size=1, max_size=1500),
)


def spoilt(store: FakeStore, names: list[str], good: bytes, kind: str, share: float, noise: bytes) -> bytes | None:
    """An object that lies under a name in place of a good one."""
    at = int(share * len(good))
    if kind == "cut":
        return good[:at]
    if kind == "grown":
        return good + noise
    if kind == "foreign":
        return store.objects.get(names[int(share * len(names))])
    if kind == "changed":
        return good[:at] + bytes([good[at] ^ (noise[0] or 1)]) + good[at + 1 :]
    return {"good": good, "noise": noise}.get(kind)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(faults=st.lists(FAULTS, min_size=4, max_size=4))
def test_whatever_lies_in_the_store_no_wrong_byte_is_ever_given_out(
    node: Node, store: FakeStore, eventually: Eventually, faults: list[tuple[str, float, bytes]]
) -> None:
    """One writer, one reader, and objects that are cut, grown, swapped, changed or made up between them."""
    store.objects.clear()
    with node() as one, node() as two:
        keys = [f"{i}" for i in range(4)]
        for i, key in enumerate(keys):
            one.put(key, tensor(i, rows=1 + i))
        eventually(lambda: tier(one)["published"] == 4)
        names = [object_name("model", key.encode()) for key in keys]
        for name, fault in zip(names, faults, strict=True):
            there = spoilt(store, names, store.objects[name], *fault)
            if there is None:
                del store.objects[name]
            else:
                store.objects[name] = there
        for key, got in two.get_many(keys).items():
            assert torch.equal(got, tensor(int(key), rows=1 + int(key)))
        sound(two)


# --- a store that does not answer


def test_half_an_entry_without_an_answer_is_a_miss_and_its_extents_are_kept_aside_for_a_while(
    node: Node, eventually: Eventually, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTier, "grace", 0.3)
    one, two = node(), node()
    publish(one, "a", tensor(1), eventually)
    store.spoil = lambda name, data: None
    assert two.get("a") is None
    assert tier(two)["aside_bytes"] >= 4000
    assert two.stats().used_bytes >= 4000
    sound(two)
    eventually(lambda: tier(two)["aside_bytes"] == 0)
    assert two.stats().used_bytes == 0
    sound(two)


def test_a_frozen_store_delays_a_get_by_its_budget_and_a_put_not_at_all(node: Node, store: FakeStore) -> None:
    cache = node(wait=0.1, deadline=0.3)
    store.up.clear()
    begun = time.monotonic()
    assert cache.get("a") is None
    assert 0.1 <= time.monotonic() - begun < 5
    calls = len(store.calls)
    assert cache.put("b", tensor(2))
    got = cache.get("b")
    assert got is not None
    assert torch.equal(got, tensor(2))
    assert len(store.calls) <= calls + 1  # nobody waits for the first answer to ask again


def test_what_arrives_after_its_deadline_is_not_used(node: Node, eventually: Eventually, store: FakeStore) -> None:
    one, two = node(), node(wait=0.05, deadline=0.1)
    publish(one, "a", tensor(1), eventually)
    store.up.clear()
    assert two.get("a") is None
    eventually(lambda: tier(two)["late"] == 1)
    store.up.set()
    eventually(lambda: two.stats() and not two._scheduler.has_pending())
    assert len(two) == 0
    sound(two)


def test_the_breaker_opens_lets_probes_through_and_closes_when_the_store_is_back(
    node: Node, eventually: Eventually, store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = node(), node()
    publish(one, "a", tensor(1), eventually)
    store.dead = True
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert two.get("a") is None
    assert tier(two)["breakers"]["fetch"] == "open"
    assert caplog.text.count("no more fetch") == 1
    calls = len(store.calls)
    for _ in range(20):
        assert two.get("a") is None
    assert len(store.calls) <= calls + 1
    assert tier(two)["skipped"] > 0
    store.dead = False
    back = time.monotonic()
    eventually(lambda: two.get("a") is not None)
    assert time.monotonic() - back < 5
    assert tier(two)["breakers"]["fetch"] == "closed"


def test_a_store_that_is_not_there_at_the_start_is_connected_later(
    node: Node, eventually: Eventually, store: FakeStore
) -> None:
    store.dead = True
    cache = node()
    assert cache.get("a") is None
    assert not tier(cache)["connected"]
    store.dead = False
    eventually(lambda: cache.get("b") is None and tier(cache)["connected"])


def test_the_store_is_connected_before_it_is_needed(node: Node, eventually: Eventually, store: FakeStore) -> None:
    cache = node()
    eventually(lambda: tier(cache)["connected"])
    assert [call for call, _ in store.calls] == ["connect"]


def test_closing_while_the_store_is_being_reached_waits_for_one_attempt_only(
    node: Node, eventually: Eventually, store: FakeStore
) -> None:
    store.dead = True
    store.up.clear()
    cache = node(wait=0.0)
    cache.get("a")
    cache.put("b", tensor(1))
    eventually(lambda: store.calls)
    closing = threading.Thread(target=cache.close)
    closing.start()
    eventually(lambda: cache._scheduler.tier is not None and cache._scheduler.tier._couriers._stopping)
    store.up.set()
    closing.join(20)
    assert [call for call, _ in store.calls] == ["connect"]


class Panic(BaseException):
    """What a client written in Rust raises for a fault of its own: no Exception."""


@pytest.mark.parametrize("call", ["exists", "publish", "fetch_many"])
@pytest.mark.parametrize("kind", [Panic, SystemExit])
def test_whatever_a_client_raises_is_a_miss_and_its_threads_live_on(
    node: Node, eventually: Eventually, monkeypatch: pytest.MonkeyPatch, call: str, kind: type[BaseException]
) -> None:
    one, two = node(), node(wait=0.5, deadline=0.5)
    publish(one, "a", tensor(1), eventually)

    def panics(given: Any) -> Any:
        raise kind("a bug of the client's")

    link = two._scheduler.tier
    assert link is not None
    monkeypatch.setattr(link.tier, call, panics)
    two.put("b", tensor(2))
    two.get("a")
    eventually(lambda: tier(two)["publish_queue"] == 0)
    assert all(thread.is_alive() for thread in link._couriers.threads)
    assert two._scheduler.index.pinned == 0
    monkeypatch.undo()
    eventually(lambda: torch.equal(got, tensor(1)) if (got := two.get("a")) is not None else False)


@pytest.mark.parametrize(
    ("call", "answer", "counted"),
    [
        ("exists", True, "publish_failed"),
        ("exists", -5, "publish_failed"),
        ("exists", "x", "publish_failed"),
        ("publish", True, "publish_failed"),
    ],
)
def test_an_answer_that_no_tier_may_give_is_a_failure_and_said(
    node: Node,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    answer: Any,
    counted: str,
) -> None:
    cache = node()
    link = cache._scheduler.tier
    assert link is not None
    monkeypatch.setattr(link.tier, call, lambda given: [answer] * len(given))
    for turn in range(3):
        cache.put(f"k{turn}", tensor(turn))
        eventually(lambda turn=turn: tier(cache)[counted] == turn + 1)
    assert f"{answer!r} is no answer that a tier may give" in caplog.text
    assert not tier(cache)["off"]


def test_a_fetch_answered_with_no_answer_may_still_be_writing(
    node: Node, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = node(), node()
    publish(one, "a", tensor(1), eventually)
    link = two._scheduler.tier
    assert link is not None
    monkeypatch.setattr(link.tier, "fetch_many", lambda given: [True] * len(given))
    assert two.get("a") is None
    assert tier(two)["failed"] == 1
    assert tier(two)["aside_bytes"] > 0


def test_an_acknowledgement_is_no_proof_of_storage(node: Node, eventually: Eventually, store: FakeStore) -> None:
    store.forgetful = True
    cache = node()
    cache.put("a", tensor(1))
    eventually(lambda: tier(cache)["not_kept"] == 1)
    assert tier(cache)["published"] == 0


def test_a_full_store_refuses_and_the_entry_stays_here(node: Node, eventually: Eventually, store: FakeStore) -> None:
    store.capacity = 1000
    cache = node()
    cache.put("a", tensor(1))
    eventually(lambda: tier(cache)["not_kept"] == 1)
    assert cache.get("a") is not None
    assert tier(cache)["breakers"]["publish"] == "closed"


def test_a_slow_store_makes_publishing_drop_and_never_block(
    node: Node, eventually: Eventually, store: FakeStore
) -> None:
    cache = node(queue=2)
    cache.put("first", tensor(0))
    eventually(lambda: tier(cache)["published"] == 1)
    store.up.clear()
    for i in range(12):
        assert cache.put(f"{i}", tensor(i))
    assert tier(cache)["publish_queue"] <= 2
    assert tier(cache)["dropped"] >= 10
    store.up.set()
    eventually(lambda: tier(cache)["publish_queue"] == 0)
    assert cache.stats().pinned_entries == 0
    sound(cache)


def test_entries_on_their_way_out_are_not_evicted_and_leave_room_for_others(
    node: Node, eventually: Eventually, store: FakeStore
) -> None:
    cache = node("64KiB")
    store.up.clear()
    for i in range(100):
        assert cache.put(f"{i}", tensor(i))
        sound(cache)
    store.up.set()
    eventually(lambda: tier(cache)["publish_queue"] == 0)
    other = node()
    for key, got in other.get_many([f"{i}" for i in range(100)]).items():
        assert torch.equal(got, tensor(int(key)))
    assert tier(other)["hits"] == tier(cache)["published"] > 0


def test_the_store_is_only_ever_called_from_the_links_own_threads(
    node: Node, eventually: Eventually, store: FakeStore
) -> None:
    one, two = node(), node()
    publish(one, "a", tensor(1), eventually)
    two.get("a")
    two.get_or_encode("b", lambda: tensor(2))
    one.close()
    two.close()
    assert len(store.calls) > 4
    assert all(thread.startswith("ecoffload-tier-") for _, thread in store.calls)


# --- together with what the engine does meanwhile


def test_a_put_while_its_key_is_on_its_way_counts_and_the_fetch_gives_way(
    node: Node, eventually: Eventually, store: FakeStore
) -> None:
    one, two = node(), node(wait=0.01)
    publish(one, "a", tensor(1), eventually)
    arrived, go = threading.Event(), threading.Event()

    def spoil(name: str, data: bytes) -> bytes:
        arrived.set()
        go.wait(20)
        return data

    store.spoil = spoil
    end = time.monotonic() + 20
    while not arrived.is_set():
        assert two.get("a") is None
        assert time.monotonic() < end
    assert two.put("a", tensor(2))
    go.set()
    eventually(lambda: two.stats() and not two._scheduler.has_pending())
    got = two.get("a")
    assert got is not None
    assert torch.equal(got, tensor(2))
    sound(two)


def test_a_put_while_its_key_is_being_located_counts_and_the_fetch_ends(
    node: Node, eventually: Eventually, store: FakeStore
) -> None:
    one, two = node(), node(wait=0.01)
    publish(one, "a", tensor(1), eventually)
    store.up.clear()
    assert two.get("a") is None
    assert two.put("a", tensor(2))
    store.up.set()
    eventually(lambda: tier(two)["fetching"] == 0)
    got = two.get("a")
    assert got is not None
    assert torch.equal(got, tensor(2))
    sound(two)


def test_what_was_invalidated_while_it_waited_to_be_published_is_not(
    node: Node, eventually: Eventually, store: FakeStore
) -> None:
    cache = node()
    store.up.clear()
    cache.put("a", tensor(1))
    cache.invalidate("a")
    store.up.set()
    eventually(lambda: tier(cache)["withheld"] == 1)
    assert not store.objects
    assert cache.stats().pinned_entries == 0
    sound(cache)


def test_after_a_failure_fetches_go_one_at_a_time_and_little_is_kept_aside(
    node: Node, eventually: Eventually, store: FakeStore
) -> None:
    one, two = node(), node(share=0.25, wait=0.2)
    for i in range(12):
        publish(one, f"{i}", tensor(i), eventually)
    store.spoil = lambda name, data: None
    for _ in range(4):
        assert two.get_many([f"{i}" for i in range(12)]) == {}
        assert tier(two)["aside_bytes"] <= 2 * 0.25 * (256 << 10) + 4096
    store.spoil = None
    eventually(lambda: len(two.get_many([f"{i}" for i in range(12)])) == 12)
    assert tier(two)["aside_bytes"] > 0  # recovered long before these are given back
    sound(two)


def test_what_only_waits_for_room_says_nothing_of_the_store(
    node: Node, eventually: Eventually, store: FakeStore
) -> None:
    one, two = node(), node(share=0.02, wait=0.01, deadline=0.2)
    for i in range(8):
        publish(one, f"{i}", tensor(i), eventually)
    begun, go = threading.Event(), threading.Event()

    def spoil(name: str, data: bytes) -> bytes:
        begun.set()
        go.wait(20)
        return data

    store.spoil = spoil
    keys = [f"{i}" for i in range(8)]
    eventually(lambda: two.get_many(keys) == {} and begun.is_set())
    eventually(lambda: two.stats().tier["late"] >= 4)
    go.set()  # two calls at most were under way, of two threads
    assert tier(two)["breakers"]["fetch"] == "closed"


def test_an_invalidated_key_is_not_fetched_back(node: Node, eventually: Eventually) -> None:
    cache = node()
    publish(cache, "a", tensor(1), eventually)
    publish(cache, "b", tensor(2), eventually)
    assert cache.invalidate("a") == 1
    assert cache.get("a") is None
    other = node()
    assert other.get("b") is not None


def test_after_everything_was_invalidated_the_tier_is_left_out(
    node: Node, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    cache = node()
    publish(cache, "a", tensor(1), eventually)
    with caplog.at_level(logging.WARNING):
        cache.invalidate()
        cache.invalidate()
    assert caplog.text.count("left out from now on") == 1
    assert "invalidated" in tier(cache)["off"]
    assert cache.get("a") is None
    cache.put("c", tensor(3))
    assert tier(cache)["published"] == 1


def test_an_entry_larger_than_the_readers_region_is_a_miss(node: Node, eventually: Eventually) -> None:
    one, two = node("256KiB"), node("16KiB")
    publish(one, "a", tensor(1, rows=200), eventually)
    assert two.get("a") is None
    assert tier(two)["no_room"] == 1
    sound(two)


def test_a_warm_region_forgets_what_came_from_the_store_and_fetches_it_again(
    node: Node, eventually: Eventually, store: FakeStore
) -> None:
    one = node()
    publish(one, "a", tensor(1), eventually)
    two = node(warm=True, id="warm")
    assert two.get("a") is not None
    two.close()
    two = node(warm=True, id="warm")
    assert len(two) == 0
    got = two.get("a")
    assert got is not None
    assert torch.equal(got, tensor(1))


def test_closing_with_a_call_that_is_stuck_keeps_its_memory(
    node: Node, store: FakeStore, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_CLOSING", 0.05)
    cache = node(wait=0.0)
    eventually(lambda: tier(cache)["connected"])
    store.up.clear()
    cache.get("a")
    eventually(lambda: len(store.calls) == 2)
    stuck = cache._scheduler.tier
    assert stuck is not None
    cache.close()
    assert stuck.close() is False
    assert not stuck.tier.closed
    store.up.set()
    for thread in stuck._couriers.threads:
        thread.join(10)
    link._stuck.remove(stuck)
    stuck._hold = None
    with pytest.raises(CacheClosed):
        cache.get("a")


def test_a_forked_child_neither_calls_nor_closes_the_store(
    node: Node, eventually: Eventually, store: FakeStore
) -> None:
    cache = node()
    publish(cache, "a", tensor(1), eventually)
    there = cache._scheduler.tier
    assert there is not None
    child = os.fork()
    if not child:
        try:
            os._exit(10 * there.fetch(b"b") + there.tier.closed if there.close() else 7)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not there.tier.closed


@pytest.mark.parametrize("where", ["offer", "fetch", "settle"])
def test_a_fault_of_the_link_itself_turns_the_tier_off_and_not_the_cache(
    node: Node, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    cache = node()
    there = cache._scheduler.tier
    assert there is not None

    def broken(*args: Any) -> Any:
        raise RuntimeError("a bug of ours")

    couriers = there._couriers
    whose, name = {"offer": (couriers, "publish"), "fetch": (couriers, "fetch"), "settle": (there, "_heard")}[where]
    monkeypatch.setattr(whose, name, broken)
    assert cache.get("a") is None
    cache.put("a", tensor(1))
    got = cache.get("a")
    assert got is not None
    assert torch.equal(got, tensor(1))
    assert where in tier(cache)["off"]
    monkeypatch.undo()


# --- options


def test_a_tier_without_a_namespace_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a namespace"):
        EncoderCache("64KiB", tier=FakeTier())


def test_a_link_that_was_never_attached_closes(store: FakeStore) -> None:
    fake = FakeTier(store=store)
    assert TierLink(fake, namespace="model").close()
    assert fake.closed
