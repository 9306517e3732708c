"""Keys, states, pins, and who may be evicted. No bytes move here."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ecoffload.errors import RegionError
from ecoffload.eviction import make_policy
from ecoffload.extents import Extent, ExtentAllocator
from ecoffload.index import Entry, EntryIndex

G = 4096


def make(granules: int = 8, policy: str = "lru") -> EntryIndex:
    return EntryIndex(ExtentAllocator(granules * G, G), make_policy(policy, capacity=granules * G))


def add(index: EntryIndex, key: bytes, granules: int = 1) -> Entry:
    entry = index.reserve(key, granules * G, "uint8", (granules * G,))
    assert entry is not None
    index.writing(entry)
    index.commit(entry)
    return entry


def test_an_entry_goes_from_reserved_to_writing_to_ready_to_pinned_and_back() -> None:
    index = make()
    entry = index.reserve(b"a", G, "bfloat16", (2, 1024))
    assert entry is not None
    states = [entry.state]
    for move in (index.writing, index.commit, index.pin, index.unpin):
        move(entry)
        states.append(entry.state)
        index.check()
    assert states == ["reserved", "writing", "ready", "pinned", "ready"]
    assert (entry.dtype, entry.shape, entry.nbytes) == ("bfloat16", (2, 1024), G)
    index.drop(entry)
    assert entry.state == "ended"


def test_a_key_has_one_entry() -> None:
    index = make()
    index.reserve(b"a", G, "uint8", (G,))
    with pytest.raises(RegionError, match="has an entry already"):
        index.reserve(b"a", G, "uint8", (G,))
    index.check()


def test_the_least_recently_used_goes_first() -> None:
    index = make(3)
    first, second = add(index, b"a"), add(index, b"b")
    add(index, b"c")
    index.touch(first)
    add(index, b"d")
    assert index.lookup(b"b") is None
    assert index.lookup(b"a") is first
    assert second.state == "ended"
    assert (index.evictions, index.evicted_bytes) == (1, G)


def test_eviction_skips_what_is_pinned() -> None:
    index = make(3)
    index.pin(add(index, b"a"))
    add(index, b"b"), add(index, b"c")
    add(index, b"d", 2)
    assert [entry.key for entry in index] == [b"a", b"d"]
    index.check()


def test_a_pin_counts_for_each_reader() -> None:
    index = make(2)
    entry = add(index, b"a", 2)
    index.pin(entry), index.pin(entry)
    index.unpin(entry)
    assert index.reserve(b"b", G, "uint8", (G,)) is None
    index.unpin(entry)
    assert index.reserve(b"b", G, "uint8", (G,)) is not None
    with pytest.raises(RegionError, match="more often"):
        index.unpin(entry)


def test_what_is_larger_than_the_region_is_refused_every_time_and_evicts_nothing() -> None:
    index = make(4)
    add(index, b"a"), add(index, b"b")
    for _ in range(3):
        assert index.reserve(b"big", 4 * G + 1, "uint8", (4 * G + 1,)) is None
    assert (len(index), index.evictions, index.refused_too_large) == (2, 0, 3)


@pytest.mark.parametrize("policy", ["fifo", "lru", "s3-fifo", "gdsf", "auto"])
def test_when_nothing_may_be_evicted_the_answer_is_no_and_nothing_has_changed(policy: str) -> None:
    index = make(4, policy)
    pinned = [add(index, key, 2) for key in (b"a", b"b")]
    for entry in pinned:
        index.pin(entry)
    assert index.reserve(b"c", G, "uint8", (G,)) is None
    assert (len(index), index.evictions, index.refused_no_room) == (2, 0, 1)
    index.unpin(pinned[0])
    assert index.reserve(b"c", G, "uint8", (G,)) is not None


def test_nothing_is_evicted_for_what_will_not_fit_beside_the_pinned() -> None:
    index = make(4)
    index.pin(add(index, b"a", 2))
    add(index, b"b"), add(index, b"c")
    assert index.reserve(b"d", 3 * G, "uint8", (3 * G,)) is None
    assert len(index) == 3


def test_an_entry_in_flight_is_not_evicted() -> None:
    index = make(2)
    reserved, writing = (index.reserve(key, G, "uint8", (G,)) for key in (b"a", b"b"))
    assert reserved is not None
    assert writing is not None
    index.writing(writing)
    assert index.reserve(b"c", G, "uint8", (G,)) is None
    assert index.lookup(b"a") is reserved


@pytest.mark.parametrize("ending", ["commit", "drop"])
def test_invalidated_in_flight_it_is_not_found_and_keeps_its_extents_until_its_write_has_ended(ending: str) -> None:
    index = make(2)
    entry = index.reserve(b"a", 2 * G, "uint8", (2 * G,))
    assert entry is not None
    index.writing(entry)
    assert index.invalidate(b"a") == 1
    assert index.lookup(b"a") is None
    assert index.reserve(b"b", G, "uint8", (G,)) is None, "its extents may still be written"
    getattr(index, ending)(entry)
    index.check()
    assert index.used_bytes == 0
    assert index.reserve(b"b", G, "uint8", (G,)) is not None


def test_the_key_of_an_entry_in_flight_that_was_invalidated_may_be_used_again_at_once() -> None:
    index = make(4)
    old = index.reserve(b"a", G, "uint8", (G,))
    assert old is not None
    index.writing(old)
    index.invalidate()
    new = add(index, b"a")
    assert set(new.extents).isdisjoint(old.extents)
    index.commit(old)
    assert index.lookup(b"a") is new
    index.check()


def test_dropped_while_it_is_read_it_keeps_its_extents_until_the_last_reader_has_gone() -> None:
    index = make(1)
    entry = add(index, b"a")
    index.pin(entry), index.pin(entry)
    index.drop(entry)
    assert index.lookup(b"a") is None
    index.unpin(entry)
    assert index.reserve(b"b", G, "uint8", (G,)) is None
    index.unpin(entry)
    assert index.reserve(b"b", G, "uint8", (G,)) is not None


def test_quarantined_extents_are_nobodys_until_they_are_released() -> None:
    index = make(2)
    entry = index.reserve(b"a", G, "uint8", (G,))
    assert entry is not None
    index.writing(entry)
    index.quarantine(entry)
    assert index.lookup(b"a") is None
    assert index.quarantined_bytes == G
    assert index.reserve(b"b", 2 * G, "uint8", (2 * G,)) is None
    index.check()
    assert index.release_quarantine() == 1
    assert index.quarantined_bytes == 0
    assert index.reserve(b"b", 2 * G, "uint8", (2 * G,)) is not None


def test_an_empty_entry_needs_no_room() -> None:
    index = make(1)
    add(index, b"full")
    entry = add(index, b"empty", 0)
    assert entry.extents == ()
    assert index.lookup(b"full") is not None
    assert index.invalidate() == 2
    index.check()


def test_what_turned_out_smaller_in_flight_holds_and_counts_as_much_as_it_needs() -> None:
    index = make(4)
    entry = index.reserve(b"a", 3 * G, "uint8", (3 * G,), durable=False)
    assert entry is not None
    index.writing(entry)
    index.shorten(entry, G + 2, "bfloat16", (1, G // 2 + 1))
    index.check()
    index.commit(entry)
    index.check()
    assert (entry.nbytes, entry.held_bytes, entry.dtype, entry.shape) == (G + 2, 2 * G, "bfloat16", (1, G // 2 + 1))
    assert index.used_bytes == 2 * G
    add(index, b"b", 2)
    assert index.lookup(b"a") is entry


def test_what_needs_a_little_less_keeps_it_so_that_the_next_like_it_fits_where_it_was() -> None:
    index = make(10 * 65 + 1)
    rng = random.Random(1)
    for i in range(500):
        key = b"%d" % int(rng.paretovariate(0.5))
        entry = index.lookup(key)
        if entry is not None:
            index.touch(entry)
            continue
        entry = index.reserve(key, 64 * G + 512, "uint8", (64 * G + 512,), durable=False)
        assert entry is not None, i
        assert len(entry.extents) == 1
        index.writing(entry)
        index.shorten(entry, 64 * G, "uint8", (64 * G,))
        index.commit(entry)
    assert index.evictions > 100
    assert len(index) == 10
    index.check()


def test_every_extent_of_what_was_shortened_holds_something_of_it() -> None:
    """An extent without a byte of the entry would be a descriptor of nothing, however small it is beside the rest."""
    allocator = ExtentAllocator(200 * G, G)
    index = EntryIndex(allocator, make_policy("lru", capacity=200 * G))
    allocator.reserve([Extent(0, G), Extent(101 * G, 98 * G)])  # free: 100 granules, and one apart
    entry = index.reserve(b"a", 100 * G + 512, "uint8", (100 * G + 512,), durable=False)
    assert entry is not None
    assert len(entry.extents) == 2
    index.writing(entry)
    index.shorten(entry, 100 * G, "uint8", (100 * G,))
    assert entry.extents == (Extent(G, 100 * G),)


def test_a_durable_entry_is_not_shortened() -> None:
    index = make(4)
    entry = index.reserve(b"a", 3 * G, "uint8", (3 * G,))
    assert entry is not None
    with pytest.raises(RegionError, match="is durable"):
        index.shorten(entry, G, "uint8", (G,))
    assert (entry.nbytes, entry.held_bytes) == (3 * G, 3 * G)


def test_a_journal_forgets_an_entry_before_what_it_no_longer_needs_is_anybody_elses() -> None:
    said: list[str] = []
    journal = SimpleNamespace(intent=lambda *args: 7, drop=lambda handle: said.append(f"drop {handle}"))
    allocator = ExtentAllocator(8 * G, G)
    free = allocator.free
    allocator.free = lambda extents: (said.append("free"), free(extents))[1]  # type: ignore[method-assign]
    index = EntryIndex(allocator, make_policy("lru", capacity=8 * G), cast("Any", journal))
    entry = index.reserve(b"a", 3 * G, "uint8", (3 * G,), durable=False)
    assert entry is not None
    index.writing(entry)
    index.shorten(entry, G, "uint8", (G,))
    index.commit(entry)
    assert said == ["drop 7", "free"]
    index.check()


class IndexMachine(RuleBasedStateMachine):
    """Any order of calls: every granule has one owner, pinned and flying entries survive, refusals change nothing."""

    @initialize(policy=st.sampled_from(["fifo", "lru", "s3-fifo", "gdsf", "auto"]))
    def open(self, policy: str) -> None:
        self.index = make(16, policy)
        self.flying: list[Entry] = []
        self.read: list[Entry] = []

    @rule(key=st.integers(0, 9), granules=st.integers(0, 18))
    def reserve(self, key: int, granules: int) -> None:
        name = b"%d" % key
        if self.index.lookup(name) is not None:
            return
        safe = {entry.key for entry in self.index if entry.pins or entry.write != "ended"}
        before = {entry.key for entry in self.index}
        entry = self.index.reserve(name, granules * G, "uint8", (granules * G,), durable=False)
        after = {entry.key for entry in self.index}
        assert safe <= after
        if granules > 16:
            assert entry is None
            assert after == before
        if entry is not None:
            self.flying.append(entry)

    def pick(self, entries: list[Entry], data: Any) -> Entry | None:
        return data.draw(st.sampled_from(entries)) if entries else None

    @rule(data=st.data(), ending=st.sampled_from(["commit", "commit", "drop", "quarantine", "writing"]))
    def end(self, data: Any, ending: str) -> None:
        if entry := self.pick(self.flying, data):
            getattr(self.index, ending)(entry)
            if ending != "writing":
                self.flying.remove(entry)

    @rule(data=st.data(), share=st.floats(0, 1))
    def shorten(self, data: Any, share: float) -> None:
        if entry := self.pick([entry for entry in self.flying if entry.listed], data):
            nbytes = int(entry.nbytes * share)
            self.index.shorten(entry, nbytes, "uint8", (nbytes,))
            assert entry.held_bytes == -(-nbytes // G) * G  # all are small

    @rule(data=st.data())
    def pin(self, data: Any) -> None:
        if entry := self.pick([entry for entry in self.index if entry.write == "ended"], data):
            self.index.pin(entry)
            self.index.touch(entry)
            self.read.append(entry)

    @rule(data=st.data(), failed=st.booleans())
    def unpin(self, data: Any, failed: bool) -> None:
        if entry := self.pick(self.read, data):
            self.read.remove(entry)
            if failed and entry.listed:
                self.index.drop(entry)
            self.index.unpin(entry)

    @rule(key=st.none() | st.integers(0, 9))
    def invalidate(self, key: int | None) -> None:
        self.index.invalidate(None if key is None else b"%d" % key)
        assert key is not None or len(self.index) == 0

    @rule()
    def everybody_else_is_gone(self) -> None:
        self.index.release_quarantine()
        assert self.index.quarantined_bytes == 0

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "index"):
            self.index.check()

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        for entry in self.flying:
            self.index.commit(entry)
        for entry in self.read:
            self.index.unpin(entry)
        self.index.release_quarantine()
        self.index.invalidate()
        self.index.check()
        assert self.index.used_bytes == 0
        assert self.index.pinned == 0


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
