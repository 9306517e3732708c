"""Leases: who may use the arrays of a batch, and when they come back."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ecoffload.descriptors import Batch, DescriptorPool
from ecoffload.drivers import words_at
from ecoffload.errors import ConfigError, DescriptorError, StaleBatch


def columns(batch: Batch) -> list[tuple[int, int, int]]:
    """What a backend would read at the addresses that it is given."""
    return list(zip(*(words_at(at, batch.count) for at in (batch.src, batch.dst, batch.size)), strict=True))


def test_a_backend_reads_what_was_appended() -> None:
    batch = DescriptorPool().lease()
    batch.append(2**64 - 8, 2**63, 8)
    batch.append(0, 1, 2**63 - 1)
    assert columns(batch) == [(2**64 - 8, 2**63, 8), (0, 1, 2**63 - 1)]
    assert batch.nbytes == 8 + 2**63 - 1
    assert batch.first == 0


def test_append_and_extend_write_the_same_words() -> None:
    one, many = DescriptorPool().lease(), DescriptorPool().lease()
    rows = [(2**64 - 4096 * i - 1, 2**63 + i, i + 1) for i in range(100)]
    for row in rows:
        one.append(*row)
    src, dst, size = (np.array(column, dtype=np.uint64) for column in zip(*rows, strict=True))
    many.extend(src.view(np.int64), dst, size)
    assert columns(one) == columns(many) == rows


@pytest.mark.parametrize("growing", ["append", "extend"])
def test_a_batch_that_outgrows_its_arrays_keeps_what_it_has(growing: str) -> None:
    pool = DescriptorPool(4)
    batch = pool.lease()
    rows = [(i, 1000 + i, 1 + i) for i in range(50)]
    for at in range(0, 50, 10):
        part = rows[at : at + 10]
        if growing == "append":
            for row in part:
                batch.append(*row)
        else:
            batch.extend(*(list(column) for column in zip(*part, strict=True)))
    assert columns(batch) == rows
    assert pool.leased == 1
    batch.release()
    assert pool.leased == 0


def test_a_lease_has_room_for_what_was_asked_for() -> None:
    pool = DescriptorPool(4)
    batch = pool.lease(1000)
    at = batch.src
    batch.extend(np.arange(1000), np.arange(1000), 1)
    assert batch.src == at, "it did not have to grow"


def test_arrays_are_lent_again_after_their_return() -> None:
    pool = DescriptorPool(4)
    first = pool.lease()
    at = first.src
    other = pool.lease()
    assert other.src != at, "two leases share nothing"
    first.release()
    assert pool.lease().src == at


def test_a_new_lease_of_used_arrays_is_empty() -> None:
    pool = DescriptorPool(4)
    batch = pool.lease()
    batch.append(1, 2, 3)
    batch.release()
    assert (pool.lease().count, pool.lease().nbytes) == (0, 0)


USES: dict[str, Callable[[Batch], Any]] = {
    "append": lambda batch: batch.append(1, 2, 3),
    "append of nothing": lambda batch: batch.append(1, 2, 0),
    "extend": lambda batch: batch.extend([1], [2], [3]),
    "check": lambda batch: batch.check(None, None),
    "split": lambda batch: list(batch.split(2)),
    "split by bytes": lambda batch: list(batch.split(2, 10)),
    "merge": lambda batch: batch.merge(),
    "src": lambda batch: batch.src,
    "dst": lambda batch: batch.dst,
    "size": lambda batch: batch.size,
    "nbytes": lambda batch: batch.nbytes,
}


@pytest.mark.parametrize("ending", ["release", "abandon"])
@pytest.mark.parametrize("use", USES)
def test_a_batch_is_of_no_use_after_its_return(use: str, ending: str) -> None:
    batch = DescriptorPool().lease()
    for i in range(40):
        batch.append(2 * i, 2 * i, 1)
    if ending == "release":
        batch.release()
    else:
        batch.abandon(lambda: True)
    with pytest.raises(StaleBatch, match="lease a new one"):
        USES[use](batch)


def test_a_second_release_does_nothing() -> None:
    pool = DescriptorPool()
    batch = pool.lease()
    batch.release()
    other = pool.lease()
    batch.release()
    assert pool.leased == 1
    other.append(1, 2, 3)
    assert columns(other) == [(1, 2, 3)]


def test_abandoned_arrays_come_back_once_their_copy_has_ended() -> None:
    pool, ended = DescriptorPool(4), threading.Event()
    batch = pool.lease()
    at = batch.src
    batch.abandon(ended.is_set)
    assert pool.lease().src != at
    assert pool.leased == 2, "the abandoned ones are still lent"
    ended.set()
    pool.lease(1)
    assert pool.leased == 2, "and now they are not"


def test_abandoned_arrays_outlive_their_pool() -> None:
    pool, ended = DescriptorPool(4), threading.Event()
    batch = pool.lease()
    batch.append(2**64 - 1, 2, 3)
    at, gone = batch.src, weakref.ref(pool)
    batch.abandon(ended.is_set)
    del batch, pool
    gc.collect()
    assert words_at(at, 1) == [2**64 - 1]
    ended.set()
    DescriptorPool().lease()
    gc.collect()
    assert gone() is None


def test_many_threads_may_lease_while_arrays_are_abandoned() -> None:
    pool, errors = DescriptorPool(4), []

    def work() -> None:
        try:
            for i in range(200):
                batch = pool.lease()
                batch.append(i, i, i + 1)
                assert columns(batch) == [(i, i, i + 1)]
                if i % 2:
                    batch.release()
                else:
                    batch.abandon(lambda: True)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    pool.lease().release()
    assert pool.leased == 0


def test_a_pool_without_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        DescriptorPool(0)


# --- zero sizes


def test_zero_sizes_are_left_out_wherever_they_stand() -> None:
    batch = DescriptorPool().lease()
    batch.append(5, 6, 0)
    batch.extend([1, 2, 3, 4], [10, 20, 30, 40], [0, 7, 0, 9])
    batch.extend([8, 9], [80, 90], 0)
    assert columns(batch) == [(2, 20, 7), (4, 40, 9)]


def test_a_scalar_stands_for_a_column() -> None:
    batch = DescriptorPool().lease()
    batch.extend([1, 2, 3], 2**64 - 100, 4)
    assert columns(batch) == [(1, 2**64 - 100, 4), (2, 2**64 - 100, 4), (3, 2**64 - 100, 4)]


# --- what is refused, and what is left after it

BAD_ROWS = {
    "a negative source": (-1, 0, 1),
    "a source past 64 bits": (2**64, 0, 1),
    "a negative destination": (0, -5, 1),
    "a size past 64 bits": (0, 0, 2**64),
    "a float": (0.5, 0, 1),
    "a string": ("0", 0, 1),
    "nothing": (None, 0, 1),
}


@pytest.mark.parametrize("row", BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_word_that_is_none_is_refused_and_nothing_is_appended(row: tuple[Any, Any, Any]) -> None:
    batch = DescriptorPool().lease()
    batch.append(1, 2, 3)
    with pytest.raises(DescriptorError, match="descriptor 1") as caught:
        batch.append(*row)
    assert (caught.value.index, caught.value.src, caught.value.dst, caught.value.size) == (1, *row)
    assert columns(batch) == [(1, 2, 3)]


BAD_TABLES: dict[str, tuple[Any, Any, Any]] = {
    "lengths that differ": ([1, 2], [1, 2, 3], [1, 2]),
    "only scalars": (1, 2, 3),
    "a table of rows": ([[1, 2], [3, 4]], [1, 2], [1, 2]),
    "three tables of rows": ([[1, 2], [3, 4]], [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
    "a source that is none": ([1, -2], [1, 2], [1, 2]),
    "a destination that is none": ([1, 2], [1, 2**64], [1, 2]),
    "a size that is none": ([1, 2], [1, 2], [1, 1.5]),
}


@pytest.mark.parametrize("tables", BAD_TABLES.values(), ids=BAD_TABLES.keys())
def test_a_refused_table_adds_nothing(tables: tuple[Any, Any, Any]) -> None:
    batch = DescriptorPool(2).lease()
    batch.append(1, 2, 3)
    with pytest.raises(ValueError, match=r"1-D|\d") as caught:
        batch.extend(*tables)
    assert type(caught.value).__module__ == "ecoffload.errors"
    assert columns(batch) == [(1, 2, 3)]
    batch.extend([4], [5], [6])
    assert columns(batch) == [(1, 2, 3), (4, 5, 6)]
