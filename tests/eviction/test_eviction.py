"""Each policy against its definition on small sequences, and all of them against what the index relies on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecoffload.errors import ConfigError
from ecoffload.eviction import EvictionPolicy, make_policy, policy_names

CAPACITY = 100


def policy(name: str, **params: Any) -> EvictionPolicy[str]:
    return make_policy(name, CAPACITY, **params)


def add(policy: EvictionPolicy[str], keys: Iterable[str], nbytes: int = 10) -> None:
    for key in keys:
        policy.add(key, nbytes)


def drain(policy: EvictionPolicy[str], count: int = 1_000, pinned: str = "") -> str:
    """Evict up to `count` entries as the index does; the keys in order."""
    evicted: list[str] = []
    for key in policy.victims():
        if len(evicted) == count:
            break
        if key not in pinned:
            policy.evict(key)
            evicted.append(key)
    return "".join(evicted)


# --- by name ----------------------------------------------------------------------------------------------------------


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'lfu'; known are fifo, lru, s3-fifo, gdsf, auto"):
        policy("lfu")


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match="small"):
        policy("lru", small=0.1)


@pytest.mark.parametrize("small", [0, 1, -0.5, 1.5, float("nan"), "much"])
def test_a_small_queue_that_is_no_share_is_refused(small: Any) -> None:
    with pytest.raises(ConfigError, match=r"s3-fifo|small"):
        policy("s3-fifo", small=small)


# --- definitions ------------------------------------------------------------------------------------------------------


def test_fifo_evicts_in_order_of_arrival_whatever_is_used() -> None:
    fifo = policy("fifo")
    add(fifo, "abc")
    fifo.touch("a")
    assert drain(fifo) == "abc"


def test_lru_evicts_the_least_recently_used() -> None:
    lru = policy("lru")
    add(lru, "abc")
    lru.touch("a")
    assert drain(lru) == "bca"


def test_s3_fifo_moves_what_was_used_in_the_small_queue_to_the_main_one() -> None:
    s3 = policy("s3-fifo", small=0.05)
    add(s3, "abcd")
    s3.touch("a")
    s3.touch("c")
    assert drain(s3) == "bdac"


def test_s3_fifo_evicts_from_main_while_the_small_queue_is_within_its_share() -> None:
    s3 = policy("s3-fifo", small=0.5)
    add(s3, "abcdefg")
    s3.touch("a")
    s3.touch("b")
    assert drain(s3, 1) == "a"  # a and b have moved on, c..g are within 50 bytes
    add(s3, "h")
    assert drain(s3, 1) == "c"


def test_s3_fifo_sends_an_entry_of_main_round_once_for_each_use() -> None:
    s3 = policy("s3-fifo", small=0.05)
    add(s3, "ab")
    s3.touch("a")
    s3.touch("b")
    add(s3, "c")
    assert drain(s3, 1) == "c"
    for _ in range(9):  # counts to three
        s3.touch("a")
    s3.touch("b")
    assert drain(s3) == "ba"


def test_s3_fifo_takes_a_ghost_into_main_at_once() -> None:
    s3 = policy("s3-fifo", small=0.05)
    add(s3, "ab")
    assert drain(s3, 1) == "a"
    add(s3, "acd")
    assert drain(s3) == "bcda"


def test_gdsf_evicts_the_least_uses_times_cost_by_size() -> None:
    gdsf = policy("gdsf")
    gdsf.add("a", 10, cost=30)  # 3 a byte
    gdsf.add("b", 20, cost=20)  # 1
    gdsf.add("c", 10, cost=10)  # 1, but used twice
    gdsf.touch("c")
    assert drain(gdsf) == "bca"


def test_gdsf_ages_what_was_once_popular() -> None:
    gdsf = policy("gdsf")
    add(gdsf, "a")
    for _ in range(3):
        gdsf.touch("a")  # priority 4
    order = ""
    for key in "bcdefg":  # each arrives at one above the last victim
        add(gdsf, key)
        order += drain(gdsf, 1)
    assert order == "bcdaef"


def test_auto_evicts_what_was_used_once_before_what_was_used_again() -> None:
    auto = policy("auto")
    add(auto, "abcd")
    auto.touch("a")
    auto.touch("b")
    assert drain(auto) == "cdab"


def test_auto_takes_uses_in_a_row_for_one() -> None:
    auto = policy("auto")
    add(auto, "ab")
    auto.touch("b")
    auto.touch("b")
    auto.touch("a")
    assert drain(auto) == "ba"


def test_auto_protects_a_quarter_and_no_more() -> None:
    auto = policy("auto")
    add(auto, "abcd")
    for key in "abc":
        auto.touch(key)  # 30 bytes in a quarter of 25: a returns to the hot end of probation
    assert drain(auto) == "dabc"


def test_auto_protects_a_ghost_at_once() -> None:
    auto = policy("auto")
    add(auto, "ab")
    assert drain(auto, 1) == "a"
    add(auto, "acd")
    assert drain(auto) == "bcda"


def test_a_scan_through_auto_leaves_the_protected_entries() -> None:
    auto = policy("auto")
    add(auto, "ab")
    auto.touch("a")
    auto.touch("b")
    add(auto, "cdefghij")
    for number in range(1_000):
        key = f"scan {number}"
        evicted = drain(auto, 1)
        assert evicted not in ("a", "b")
        auto.add(key, 10)
    assert "a" in auto
    assert "b" in auto


def test_auto_protects_an_entry_larger_than_the_quarter_only_until_the_next() -> None:
    auto = policy("auto")
    auto.add("a", 60)
    auto.add("b", 10)
    auto.touch("a")
    auto.add("c", 10)
    assert drain(auto) == "bac"


@pytest.mark.parametrize("name", ["s3-fifo", "auto"])
def test_an_invalidated_entry_leaves_no_ghost(name: str) -> None:
    chosen = policy(name)
    add(chosen, "ab")
    chosen.remove("a")
    add(chosen, "a")
    assert drain(chosen) == "ba"


@pytest.mark.parametrize("name", ["s3-fifo", "auto"])
def test_ghosts_are_bounded_in_bytes_and_in_number(name: str) -> None:
    chosen = policy(name)
    for number in range(2_000):
        chosen.add(str(number), number % 2)
        for key in chosen.victims():
            chosen.evict(key)
    ghosts = chosen._ghosts
    assert len(ghosts) <= 64
    for number in range(100):
        chosen.add(f"large {number}", 30)
        for key in chosen.victims():
            chosen.evict(key)
    assert ghosts.nbytes <= 2 * CAPACITY


# --- every policy -----------------------------------------------------------------------------------------------------

every_policy = pytest.mark.parametrize("name", policy_names())


@every_policy
def test_a_key_that_is_not_held_is_a_key_error(name: str) -> None:
    chosen = policy(name)
    for operation in (chosen.touch, chosen.remove, chosen.evict, chosen.unpin):
        with pytest.raises(KeyError):
            operation("a")


@every_policy
def test_looking_at_the_first_victim_changes_nothing(name: str) -> None:
    chosen = policy(name)
    add(chosen, "abc")
    for _ in range(3):
        assert next(iter(chosen.victims())) == "a"
    assert drain(chosen) == "abc"


@every_policy
def test_a_skipped_entry_is_offered_again_after_its_unpin_and_first(name: str) -> None:
    chosen = policy(name)
    add(chosen, "abcd")
    assert drain(chosen, 1, pinned="ab") == "c"
    chosen.unpin("a")
    chosen.unpin("d")  # was never skipped
    assert drain(chosen) in ("ad", "da")
    assert "b" in chosen
    chosen.unpin("b")
    assert drain(chosen) == "b"
    assert len(chosen) == 0


@every_policy
def test_pinned_entries_at_the_cold_end_are_walked_over_once(name: str) -> None:
    chosen = policy(name)
    pinned = [f"pinned {number}" for number in range(500)]
    add(chosen, pinned, nbytes=0)
    looked_at = 0
    for number in range(50):
        chosen.add(f"free {number}", 1)
        for key in chosen.victims():
            looked_at += 1
            if key in pinned:
                continue
            chosen.evict(key)
            break
    assert looked_at <= 500 + 50


@every_policy
def test_nothing_is_offered_when_all_is_pinned(name: str) -> None:
    chosen = policy(name)
    add(chosen, "abc")
    assert drain(chosen, pinned="abc") == ""
    assert list(chosen.victims()) == []
    assert len(chosen) == 3


@every_policy
def test_a_parked_entry_may_be_used_and_removed(name: str) -> None:
    chosen = policy(name)
    add(chosen, "abc")
    assert drain(chosen, pinned="abc") == ""
    chosen.touch("a")
    chosen.remove("b")
    assert "a" in chosen
    assert "b" not in chosen
    for key in "ac":
        chosen.unpin(key)
    assert sorted(drain(chosen)) == ["a", "c"]


steps = st.lists(
    st.tuples(
        st.sampled_from(["get", "get", "get", "pin", "unpin", "invalidate"]),
        st.integers(0, 25),
    ),
    max_size=120,
)


@every_policy
@settings(max_examples=60, deadline=None)
@given(steps=steps, sizes=st.lists(st.integers(0, 60), min_size=26, max_size=26))
def test_a_cache_never_exceeds_its_capacity_nor_evicts_a_pinned_entry(
    name: str, steps: list[tuple[str, int]], sizes: list[int]
) -> None:
    chosen: EvictionPolicy[int] = make_policy(name, CAPACITY)
    held: dict[int, int] = {}
    pinned: set[int] = set()
    for step, key in steps:
        if step == "get" and key in held:
            chosen.touch(key)
        elif step == "get":
            size = sizes[key]
            used = sum(held.values())
            if used + size > CAPACITY:
                for victim in chosen.victims():
                    assert victim in held
                    if victim in pinned:
                        continue
                    chosen.evict(victim)
                    used -= held.pop(victim)
                    if used + size <= CAPACITY:
                        break
                else:  # "no" only when nothing evictable is left
                    assert set(held) <= pinned
            if used + size <= CAPACITY:
                chosen.add(key, size, cost=float(size))
                held[key] = size
        elif step == "pin" and key in held:
            pinned.add(key)
        elif step == "unpin" and key in pinned:
            pinned.discard(key)
            chosen.unpin(key)
        elif step == "invalidate" and key in held and key not in pinned:
            chosen.remove(key)
            del held[key]
        assert sum(held.values()) <= CAPACITY
        assert pinned <= set(held)
        assert len(chosen) == len(held)
        assert all(key in chosen for key in held)
    for key in pinned:
        chosen.unpin(key)
    left = []
    for key in chosen.victims():
        chosen.evict(key)
        left.append(key)
    assert sorted(left) == sorted(held)
