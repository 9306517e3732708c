"""The journal: what was committed is found whole after any death, and nothing that cannot be is believed."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ecoffload import journal as module
from ecoffload.errors import ConfigError
from ecoffload.journal import MAX_KEY, RECORD_BYTES, Journal, JournalRecord, JournalScan, count_commits
from ecoffload.region import HostRegion

GRANULE, CAPACITY = 4096, 64 * 4096


def make(count: int = 16, content: bytes | None = None, edges: tuple[int, ...] = (0,)) -> tuple[Journal, bytearray]:
    memory = bytearray(content if content is not None else count * RECORD_BYTES)
    return Journal(memoryview(memory), capacity=CAPACITY, granule=GRANULE, edges=edges), memory


def intent(journal: Journal, key: bytes = b"k", at: int = 0, granules: int = 1, generation: int = 1) -> int:
    handle = journal.intent(
        key, generation, [(at * GRANULE, granules * GRANULE)], granules * GRANULE, "uint8", (granules * GRANULE,)
    )
    assert handle is not None
    return handle


def read(memory: bytes) -> JournalScan:
    """As the next process sees it."""
    return make(content=memory)[0].records()


def test_a_committed_entry_reads_back_as_it_was_written() -> None:
    journal, memory = make()
    extents = ((8192, 8192), (0, 4096))
    handle = journal.intent(b"\x00key\xff", 2**64 - 1, extents, 10_000, "bfloat16", (50, 100))
    assert handle is not None
    journal.commit(handle, 2**64 - 1)
    assert read(memory).records == (
        JournalRecord(handle, b"\x00key\xff", 2**64 - 1, extents, 10_000, "bfloat16", (50, 100), 2**64 - 1),
    )


def test_an_entry_without_checksum_or_bytes_or_dimensions_reads_back() -> None:
    journal, memory = make()
    for key, extents, nbytes, shape in ((b"empty", [], 0, (3, 0)), (b"scalar", [(0, 4096)], 4, ())):
        handle = journal.intent(key, 0, extents, nbytes, "float32", shape)
        assert handle is not None
        journal.commit(handle)
    assert {each.key: (each.shape, each.checksum) for each in read(memory).records} == {
        b"empty": ((3, 0), None),
        b"scalar": ((), None),
    }


def test_an_intent_without_a_commit_is_pending_with_its_extents() -> None:
    journal, memory = make()
    handle = intent(journal, at=3, granules=2)
    scan = read(memory)
    assert scan.records == ()
    assert [(each.handle, each.extents) for each in scan.pending] == [(handle, ((3 * GRANULE, 2 * GRANULE),))]


def test_once_every_writer_has_ended_intents_are_forgotten_and_commits_are_not() -> None:
    journal, memory = make()
    journal.commit(intent(journal, b"whole", 0))
    intent(journal, b"torn", 1)
    memory[5 * RECORD_BYTES] = 77  # neither empty, intent nor commit
    after, _ = make(content=memory)
    after.end_intents()
    scan = after.records()
    assert [each.key for each in scan.records] == [b"whole"]
    assert (scan.pending, scan.dropped, scan.unreadable) == ((), 0, False)


def test_a_dropped_record_is_gone_and_its_place_is_used_again() -> None:
    journal, memory = make(count=1)
    handle = intent(journal)
    assert journal.intent(b"other", 1, [], 0, "uint8", (0,)) is None  # full
    journal.drop(handle)
    journal.drop(handle)
    assert read(memory) == JournalScan((), (), 0, False)
    assert intent(journal, b"other") == handle
    assert journal.intent(b"third", 1, [], 0, "uint8", (0,)) is None


def test_clear_forgets_everything() -> None:
    journal, memory = make(count=4)
    for at in range(4):
        journal.commit(intent(journal, b"%d" % at, at))
    assert len(journal) == 4
    journal.clear()
    assert len(journal) == 0
    assert read(memory).records == ()
    assert intent(journal) in range(4)


def test_of_two_records_that_claim_the_same_bytes_neither_is_believed() -> None:
    journal, memory = make()
    for key, at, granules in ((b"a", 0, 4), (b"b", 3, 2), (b"c", 8, 1)):
        journal.commit(intent(journal, key, at, granules))
    scan = read(memory)
    assert [each.key for each in scan.records] == [b"c"]
    assert scan.dropped == 2


def test_a_committed_entry_whose_bytes_somebody_may_be_writing_is_not_believed() -> None:
    journal, memory = make()
    journal.commit(intent(journal, b"a", 0, 4))
    pending = intent(journal, b"b", 2)
    scan = read(memory)
    assert scan.records == ()
    assert [each.handle for each in scan.pending] == [pending]


def test_an_entry_that_claims_the_same_bytes_twice_is_not_believed() -> None:
    journal, memory = make()
    handle = journal.intent(b"k", 1, [(0, 8192), (4096, 8192)], 16384, "uint8", (16384,))
    assert handle is not None
    journal.commit(handle)
    assert read(memory).records == ()


def test_of_two_records_of_one_key_the_later_generation_counts() -> None:
    journal, memory = make()
    for generation, at in ((5, 0), (7, 1), (6, 2)):
        journal.commit(intent(journal, b"k", at, generation=generation))
    scan = read(memory)
    assert [(each.key, each.generation) for each in scan.records] == [(b"k", 7)]
    assert scan.dropped == 2


def test_an_unreadable_intent_of_a_living_writer_is_told() -> None:
    journal, memory = make()
    journal.commit(intent(journal, b"a", 0))
    torn = intent(journal, b"b", 1)
    memory[torn * RECORD_BYTES + 40] ^= 1
    scan = read(memory)
    assert [each.key for each in scan.records] == [b"a"]
    assert scan.unreadable
    assert scan.dropped == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": b""}, {"key": b"x" * (MAX_KEY + 1)}, {"dtype": "float7"}, {"shape": (1,) * 9}, {"shape": (-4096,)},
        {"shape": (4095,)}, {"nbytes": 4095}, {"extents": [(0, 8192)]}, {"extents": []}, {"extents": [(1, 4096)]},
        {"extents": [(CAPACITY, 4096)]}, {"extents": [(-4096, 4096)]}, {"generation": -1}, {"generation": 2**64},
        {"extents": [(4096 * at, 4096) for at in range(9)], "nbytes": 9 * 4096, "shape": (9 * 4096,)},
    ],
)  # fmt: skip
def test_what_no_reader_would_accept_is_refused_when_it_is_written(wrong: dict[str, Any]) -> None:
    journal, memory = make()
    record = {"key": b"k", "generation": 1, "extents": [(0, 4096)], "nbytes": 4096, "dtype": "uint8", "shape": (4096,)}
    with pytest.raises(ConfigError):
        journal.intent(**(record | wrong))
    assert memory == bytes(len(memory))
    assert len(journal) == 0


def test_an_extent_across_an_edge_is_refused() -> None:
    journal, _ = make(edges=(0, 8192))
    with pytest.raises(ConfigError):
        intent(journal, at=1, granules=2)
    assert intent(journal, at=2, granules=2) == 0


def test_every_dtype_of_torch_is_known_with_its_size() -> None:
    dtypes = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    sizes = {str(each).removeprefix("torch."): each.itemsize for each in dtypes}
    assert {name: module._ITEMSIZE.get(name) for name in sizes} == sizes


def test_a_listing_counts_commits_without_a_journal(tmp_path: Path) -> None:
    journal, memory = make()
    for at in range(5):
        handle = intent(journal, b"%d" % at, at)
        if at % 2 == 0:
            journal.commit(handle)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100 + memory)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert count_commits(fd, 100, 16) == 3
        assert count_commits(fd, 100, 1 << 20) == 3  # a header may say more than there is
    finally:
        os.close(fd)


@settings(deadline=None)
@given(content=st.binary(max_size=4 * RECORD_BYTES))
def test_random_bytes_hold_no_entries(content: bytes) -> None:
    content = content.ljust(4 * RECORD_BYTES, b"\0")
    assert read(content).records == ()


@settings(deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 4 * RECORD_BYTES - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_record_with_a_changed_byte_is_dropped_and_the_others_stand(edits: list[tuple[int, int]]) -> None:
    journal, memory = make(count=4)
    for at in range(4):
        journal.commit(intent(journal, b"key %d" % at, at), at)
    before = {each.handle: each for each in read(memory).records}
    original = bytes(memory)
    for at, value in edits:
        memory[at] = value
    # What lies behind the body is nobody's.
    used = 24 + module._BODY.size
    changed = {
        at // RECORD_BYTES for at in range(len(memory)) if memory[at] != original[at] and at % RECORD_BYTES < used
    }
    after = {each.handle: each for each in read(memory).records}
    assert after == {handle: record for handle, record in before.items() if handle not in changed}


numbers = st.one_of(
    st.integers(0, 5), st.sampled_from([4096, 8192, CAPACITY, 2**63, 2**64 - 4096]), st.integers(0, 2**64 - 1)
)


@settings(deadline=None)
@given(
    generation=numbers, nbytes=numbers, key_length=st.integers(0, 2**16 - 1), extent_count=st.integers(0, 255),
    ndim=st.integers(0, 255), dtype=st.one_of(st.sampled_from([b"uint8", b"float32"]), st.binary(max_size=20)),
    shape=st.lists(numbers, min_size=8, max_size=8), pairs=st.lists(numbers, min_size=8, max_size=8),
    key=st.binary(max_size=256), has_checksum=st.integers(0, 3),
)  # fmt: skip
def test_a_record_with_a_right_checksum_and_wrong_numbers_is_followed_nowhere(
    generation: int, nbytes: int, key_length: int, extent_count: int, ndim: int, dtype: bytes,
    shape: list[int], pairs: list[int], key: bytes, has_checksum: int,
) -> None:  # fmt: skip
    body = module._BODY.pack(generation, nbytes, key_length, extent_count, ndim, dtype, *shape, *pairs, key)
    head = struct.pack("<QQ", 0, has_checksum)
    state = module._COMMIT | crc32(head, crc32(body))
    memory = (struct.pack("<Q", state) + head + body).ljust(RECORD_BYTES, b"\0")
    scan = read(memory)
    for record in scan.records:
        assert 0 < len(record.key) <= MAX_KEY
        assert sum(length for _, length in record.extents) == record.nbytes + -record.nbytes % GRANULE
        assert all(offset + length <= CAPACITY for offset, length in record.extents)
        assert torch.empty(record.shape, dtype=getattr(torch, record.dtype), device="meta").nbytes == record.nbytes
    assert len(scan.records) + scan.dropped == 1


def stores_of(action: Callable[[Journal], object], memory: bytearray) -> list[bytes]:
    """Every content that the memory has between two stores of an action."""
    states = []
    words, buffer = memoryview(memory).cast("Q"), memoryview(memory)

    class Recorder:
        def __init__(self, view: Any) -> None:
            self.view = view

        def __getitem__(self, index: Any) -> Any:
            return self.view[index]

        def __setitem__(self, index: Any, value: Any) -> None:
            if isinstance(index, slice):  # a block of bytes may be cut off anywhere
                start = index.start
                for done in range(0, len(value), 7):
                    self.view[start : start + done] = value[:done]
                    states.append(bytes(memory))
            self.view[index] = value
            states.append(bytes(memory))

    journal, _ = make(content=memory)
    journal._words, journal._buffer = Recorder(words), Recorder(buffer)  # type: ignore[assignment]
    action(journal)
    return states


def test_a_kill_between_any_two_stores_leaves_the_entry_or_nothing() -> None:
    journal, memory = make(count=4)
    journal.commit(intent(journal, b"other", 9), 1)
    handle = intent(journal, b"old", 3)
    journal.commit(handle, 5)
    journal.drop(handle)  # so that the place holds the bytes of another record

    handles = []
    states = stores_of(lambda journal: handles.append(intent(journal, b"new", 4)), memory)
    for state in states[:-1]:
        assert [each.key for each in read(state).records] == [b"other"]
        assert read(state).pending == ()
    assert [each.extents for each in read(states[-1]).pending] == [((4 * GRANULE, GRANULE),)]
    states = stores_of(lambda journal: journal.commit(handles[0], 7), memory)
    for state in states[:-1]:
        scan = read(state)
        assert [each.key for each in scan.records] == [b"other"]
        assert [each.handle for each in scan.pending] == handles
    assert {each.key: each.checksum for each in read(states[-1]).records} == {b"other": 1, b"new": 7}
    states = stores_of(lambda journal: journal.drop(handles[0]), memory)
    assert [each.key for each in read(states[-1]).records] == [b"other"]
    assert len(states) == 1


class Journalling(RuleBasedStateMachine):
    """Intents, commits and drops in any order, with restarts in between, beside a model in plain Python."""

    @initialize()
    def start(self) -> None:
        self.journal, self.memory = make(count=8)
        self.pending: dict[int, int] = {}  # handle -> granule
        self.whole: dict[int, int] = {}
        self.serial = 0

    def taken(self) -> set[int]:
        return {*self.pending.values(), *self.whole.values()}

    @rule(at=st.integers(0, 63))
    def intend(self, at: int) -> None:
        if at in self.taken():
            return
        self.serial += 1
        handle = self.journal.intent(b"%d" % self.serial, 1, [(at * GRANULE, GRANULE)], 9, "int8", (3, 3))
        if len(self.pending) + len(self.whole) == 8:
            assert handle is None
        else:
            assert handle is not None
            self.pending[handle] = at

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if self.pending:
            handle = data.draw(st.sampled_from(sorted(self.pending)))
            self.journal.commit(handle, handle)
            self.whole[handle] = self.pending.pop(handle)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.pending or self.whole:
            handle = data.draw(st.sampled_from(sorted({**self.pending, **self.whole})))
            self.journal.drop(handle)
            self.pending.pop(handle, None)
            self.whole.pop(handle, None)

    @rule()
    def restart_beside_a_living_writer(self) -> None:
        self.journal, self.memory = make(content=self.memory)
        self.journal.records()

    @rule()
    def restart_alone(self) -> None:
        self.journal, self.memory = make(content=self.memory)
        self.journal.end_intents()
        self.pending = {}

    @invariant()
    def a_reader_sees_the_model(self) -> None:
        if hasattr(self, "memory"):
            scan = read(self.memory)
            assert {each.handle: each.extents[0].offset // GRANULE for each in scan.records} == self.whole
            assert {each.handle: each.extents[0].offset // GRANULE for each in scan.pending} == self.pending
            assert (scan.dropped, scan.unreadable) == (0, False)
            assert len(self.journal) == len(self.whole) + len(self.pending)


TestJournalling = Journalling.TestCase
TestJournalling.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_region_that_is_not_warm_has_no_journal(shm: Path) -> None:
    with HostRegion.open("a", capacity=65536, granule=4096, directory=shm) as region:
        assert region.journal is None
