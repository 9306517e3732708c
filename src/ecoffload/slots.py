"""Where each worker tells how far it has got: one slot a worker, in the region's header.

A slot holds the highest finished save and load number, each one aligned 64-bit word that is written with one store, and
a ring of the numbers that failed. Workers write (`WorkerSlot`), one scheduler reads (`SlotBoard`); both reach the words
through the region, never through each other. A slot belongs to whoever holds the lock on its byte range: the kernel
drops that lock when the process dies, however it dies, so nobody has to guess from pids or times.

Numbers count from 1 within one engine instance; 0 means nothing finished. What a slot says is counted only by the
scheduler whose instance it has adopted. Nothing read here is trusted: any 64 bits give an answer, never a fault.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Literal, NamedTuple

from ecoffload.errors import RegionError
from ecoffload.hostmem import Gone, Words, lock_is_held, reopen, try_lock, unlock

__all__ = ["RING", "SLOT_BYTES", "Failure", "LostSlot", "SlotBoard", "WorkerSlot"]

SLOT_BYTES = 1024
_SLOT_WORDS = SLOT_BYTES // 8
# Words of a slot. `claim` is 0 for a free slot, else the number of the claim, which only grows: the newest wins a rank.
_CLAIM, _RANK, _INSTANCE, _PID, _SAVED, _LOADED, _FAILED, _SINCE = range(8)
_RING = 16
_CELLS = _SLOT_WORDS - _RING
RING = _CELLS - 1  # failures that a slot remembers: the oldest cell may be half written anew
_LOAD_BIT = 1 << 63
_LOST_BIT = 1 << 62
_NUMBER = _LOAD_BIT - 1
_NEVER = 1 << 64  # above every word
_PROBE_SECONDS = 0.05  # how late a death may be noticed; a probe is one system call a slot


class Failure(NamedTuple):
    """One failed save or load. A kind of "saves-through" or "loads-through" tells that the ring has overflowed: every
    save (load) of this rank that was not settled before, up to and including `number`, may have failed. "saves-lost"
    says so of saves alone, and exactly: the worker was never told of them."""

    rank: int
    kind: Literal["save", "load", "saves-through", "loads-through", "saves-lost"]
    number: int


class LostSlot(NamedTuple):
    """A worker that died, or was replaced by a newer one of its rank, with the last numbers it had finished.

    Later saves of that rank may still be written by its device: their extents must not be reused while
    `HostRegion.alone()` is False.
    """

    rank: int
    saved: int
    loaded: int


def _order(lock: Lock = Lock()) -> None:  # noqa: B008 - one lock for all is what is wanted
    """Keep memory accesses before this call before those after it, also on CPUs that reorder stores.

    Two lock cycles: a release followed by an acquire of the same lock is a full barrier.
    """
    with lock:
        pass
    with lock:
        pass


def _after_fork() -> None:
    """In a forked child: another thread of the parent may have held the lock."""
    _order.__defaults__ = (Lock(),)


os.register_at_fork(after_in_child=_after_fork)


class WorkerSlot:
    """A worker's place in the region. From `HostRegion.claim_slot`; released by `release` or by the process's death.

    Methods cost one or a few stores and never block. Not thread-safe: one thread (or the worker's lock) writes. A slot
    that is dropped unreleased counts as dead.
    """

    def __init__(self, fd: int, words: Words, table: SlotTable, index: int, rank: int, instance: int) -> None:
        self._let_go = weakref.finalize(self, os.close, fd)  # the lock goes with the descriptor
        self._let_go.atexit = False
        self._words = words
        self._table = table
        self._at = table.word_of(index)
        self.index = index
        self.rank = rank
        self.instance = instance
        self._saved_at, self._loaded_at = self._at + _SAVED, self._at + _LOADED

    def adopt(self, instance: int, saved: int = 0, loaded: int = 0) -> None:
        """Work for this engine instance from now on; numbers up to `saved` and `loaded` are none of this worker's.

        A worker calls it when the first plan of an instance arrives, with the numbers just before those of the plan.
        """
        _order()
        words = self._words
        words[self._at + _INSTANCE] = 0  # nobody counts the slot while its numbers change
        words[self._at + _FAILED] = 0  # what failed before is none of this instance's
        words[self._saved_at], words[self._loaded_at] = saved, loaded
        _order()
        words[self._at + _INSTANCE] = instance
        self.instance = instance
        self._table.touch()

    def finish_save(self, number: int) -> None:
        """Every save up to `number` has ended: its bytes are in the region, or `fail_save` was called for it."""
        self._words[self._saved_at] = number

    def finish_load(self, number: int) -> None:
        """Every load up to `number` has ended: its bytes have left the region, or `fail_load` was called for it."""
        self._words[self._loaded_at] = number

    def fail_save(self, number: int) -> None:
        """Save `number` failed. Call it before `finish_save` passes `number`."""
        self._fail(number)

    def fail_load(self, number: int) -> None:
        """Load `number` failed. Call it before `finish_load` passes `number`."""
        self._fail(number | _LOAD_BIT)

    def lose_saves(self, number: int) -> None:
        """No save up to `number` that is not settled yet will be made. Call it before `finish_save` passes `number`."""
        self._fail(number | _LOST_BIT)

    def _fail(self, word: int) -> None:
        words = self._words
        count = words[self._at + _FAILED]
        words[self._at + _RING + count % _CELLS] = word
        _order()
        words[self._at + _FAILED] = (count + 1) & _NUMBER
        _order()

    def release(self) -> None:
        """Give the slot back. Idempotent. Call it only when nothing of this worker is in flight."""
        if self._let_go.alive:
            self._words[self._at + _CLAIM] = 0
            self._table.touch()
            self.forget(Gone(RegionError, f"the slot of rank {self.rank} was released"))

    @property
    def held(self) -> bool:
        """Whether this object still holds the slot's lock."""
        return self._let_go.alive

    def forget(self, gone: Gone) -> None:
        """Let the lock go without a word to anybody, as a death does; `gone` answers every later call."""
        self._words = gone
        self._let_go()


class SlotTable:
    """The words of all slots and the counter that tells readers that one was claimed, adopted or released."""

    def __init__(self, fd: int, words: Words, *, offset: int, count: int, epoch: int, claims: int, mutex: int) -> None:
        """`offset` (bytes) of the first slot in the file; `epoch`, `claims`: word indices of the counters of changes
        and of claims; `mutex`: the byte of the file whose lock guards claims."""
        self.fd = fd
        self.words = words
        self.count = count
        self.epoch = epoch
        self._offset = offset
        self._claims = claims
        self._mutex = mutex

    def touch(self) -> None:
        """Tell readers to look again. Two at once may count as one, which is as good."""
        self.words[self.epoch] = (self.words[self.epoch] + 1) & _NUMBER

    def word_of(self, index: int) -> int:
        """Word index of a slot's first word."""
        return self._offset // 8 + index * _SLOT_WORDS

    def range_of(self, index: int) -> tuple[int, int]:
        """Start and length of a slot's byte range in the file: what its owner locks."""
        return self._offset + index * SLOT_BYTES, SLOT_BYTES

    def held(self, index: int) -> bool:
        """Whether a live process holds the slot."""
        return lock_is_held(self.fd, *self.range_of(index))

    def ranks(self) -> frozenset[int]:
        """Ranks whose slots live workers hold, of whatever instance."""
        words = self.words
        claimed = [index for index in range(self.count) if words[self.word_of(index) + _CLAIM]]
        return frozenset(words[self.word_of(index) + _RANK] for index in claimed if self.held(index))

    def claim(self, rank: int, instance: int) -> WorkerSlot:
        """Take a free slot for `rank`. Raises RegionError if every slot is held by a live worker.

        Slots of the dead are used only when no other is left, so that a scheduler sees who died.
        """
        fd = reopen(self.fd)
        try:
            with _Mutex(fd, self._mutex):
                claims = [self.words[self.word_of(index) + _CLAIM] for index in range(self.count)]
                # Free ones first, in turn, so that a reader still finds the last words of one just released; then
                # those whose claim is oldest.
                turn = self.words[self._claims] % self.count
                for index in sorted(range(self.count), key=lambda each: (claims[each], (each - turn) % self.count)):
                    if try_lock(fd, *self.range_of(index)):
                        break
                else:
                    raise RegionError(
                        f"all {self.count} slots of the region are held by live workers; "
                        f"open it with more, e.g. slots={2 * self.count}",
                        expected=self.count,
                        actual=self.count + 1,
                    )
                at = self.word_of(index)
                words = self.words
                words[at + _CLAIM] = 0
                _order()
                for word in range(at + 1, at + _SLOT_WORDS):
                    words[word] = 0
                words[at + _RANK], words[at + _INSTANCE], words[at + _PID] = rank, instance, os.getpid()
                words[at + _SINCE] = int(time.time())
                _order()
                claim = self.words[self._claims] % _NUMBER + 1  # never 0, never one that was there before
                self.words[self._claims] = words[at + _CLAIM] = claim
                self.touch()
        except BaseException:
            os.close(fd)
            raise
        return WorkerSlot(fd, self.words, self, index, rank, instance)

    def bury(self, index: int, claim: int) -> None:
        """Make a dead worker's slot free, unless somebody has claimed it since."""
        fd = reopen(self.fd)
        try:
            if try_lock(fd, *self.range_of(index)) and self.words[self.word_of(index) + _CLAIM] == claim:
                self.words[self.word_of(index) + _CLAIM] = 0
        finally:
            os.close(fd)

    def clear(self) -> None:
        """Forget every slot. For the one process that holds the region exclusively."""
        for index in range(self.count):
            at = self.word_of(index)
            for word in range(at, at + _SLOT_WORDS):
                self.words[word] = 0


class _Mutex:
    """A byte of the file as a lock between processes; freed by the kernel if its holder dies."""

    def __init__(self, fd: int, byte: int) -> None:
        self._fd = fd
        self._byte = byte

    def __enter__(self) -> None:
        end = time.monotonic() + 10.0
        while not try_lock(self._fd, self._byte, 1):
            if time.monotonic() > end:
                raise RegionError("another process has been claiming a slot of the region for 10 s; is it stopped?")
            time.sleep(0.001)

    def __exit__(self, *exc: object) -> None:
        unlock(self._fd, self._byte, 1)


@dataclass(slots=True, eq=False)
class _Seen:
    """What the scheduler knows of one rank's slot. `state` goes from "live" to "released", or through "lost" (not yet
    handed out: the rank stands still) to "dead" (left out). `taken`: failures handed out so far."""

    rank: int
    index: int
    claim: int
    at: int
    state: Literal["live", "released", "lost", "dead"] = "live"
    taken: int = 0
    saved: int = 0
    loaded: int = 0


class SlotBoard:
    """A scheduler's view of the slots: how far every rank is, what failed, who died. One instance, one thread."""

    def __init__(self, table: SlotTable, instance: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._instance = instance
        self._clock = clock
        self._ranks: dict[int, _Seen] = {}  # the newest of each rank
        self._lost: list[_Seen] = []  # not yet handed out
        self._failures: list[Failure] = []  # of slots that are gone, not yet handed out
        self._known: set[tuple[int, int]] = set()  # (index, claim) that were counted once
        self._epoch = -1
        self._epoch_at = table.epoch
        self._due = float("-inf")
        self._world = 0
        self._points: list[tuple[int, int]] = []  # the usual case: word indices of (saved, loaded) to take the least of
        self._fixed = (0, 0)  # the least of those ranks that stand still: unclaimed, or lost
        self._saved = self._loaded = 0  # the highest answer so far

    def progress(self, world: int) -> tuple[int, int]:
        """Highest save and load number that every live rank of 0..world-1 has finished. Never goes back.

        A rank that never claimed a slot counts as (0, 0). One that died counts with its last numbers until `take_lost`
        has handed it out, then it is left out, as one is that released its slot. With no rank left nothing moves.
        The words are the workers': a number beyond the last one that was given out is a broken slot's.
        """
        words = self._table.words
        if words[self._epoch_at] != self._epoch or world != self._world or self._clock() > self._due:
            self._look(world)
        saved, loaded = self._fixed
        for saved_at, loaded_at in self._points:
            number = words[saved_at]
            if number < saved:
                saved = number
            number = words[loaded_at]
            if number < loaded:
                loaded = number
        if saved > self._saved:
            self._saved = saved
        if loaded > self._loaded:
            self._loaded = loaded
        return self._saved, self._loaded

    def saved_by(self, rank: int) -> int:
        """Highest save number that `rank` itself has finished, its last one if it is gone. Call it after `progress`."""
        seen = self._ranks.get(rank)
        if seen is None:
            return 0
        number = self._table.words[seen.at + _SAVED]
        # Read first, asked then: the slot may be somebody else's since the last look.
        return number if seen.state == "live" and self._table.words[self._epoch_at] == self._epoch else seen.saved

    @property
    def lost_waiting(self) -> bool:
        """Whether workers are known to be lost that `take_lost` has yet to hand out."""
        return bool(self._lost)

    def take_lost(self) -> list[LostSlot]:
        """Workers lost since the last call. Quarantine their unfinished saves before asking for progress again."""
        self._look(self._world)
        lost, self._lost = self._lost, []
        for seen in lost:
            seen.state = "dead"
            self._table.bury(seen.index, seen.claim)
        self._epoch = -1  # their ranks move again
        return [LostSlot(seen.rank, seen.saved, seen.loaded) for seen in lost]

    def dead_ranks(self, world: int) -> frozenset[int]:
        """Ranks of 0..world-1 whose newest worker is dead."""
        self._look(world)
        return frozenset(
            rank for rank, seen in self._ranks.items() if 0 <= rank < world and seen.state in ("lost", "dead")
        )

    def take_failures(self) -> list[Failure]:
        """Failures since the last call, in each worker's order. Take them after `progress` and before acting on it."""
        _order()
        failures, self._failures = self._failures, []
        for seen in self._ranks.values():
            if seen.state == "live":
                failures += self._failures_of(seen)
        return failures

    def _look(self, world: int) -> None:
        """Read the whole table: who is there, who is new, who is gone."""
        table, words = self._table, self._table.words
        self._epoch, self._world, self._due = words[self._epoch_at], world, self._clock() + _PROBE_SECONDS
        claims: list[tuple[int, int, int]] = []  # claim, slot, rank
        for index in range(table.count):
            at = table.word_of(index)
            claim, rank = words[at + _CLAIM], words[at + _RANK]
            if claim and words[at + _INSTANCE] == self._instance:
                claims.append((claim, index, rank))
        claims.sort()
        newest = {rank: (claim, index) for claim, index, rank in claims}
        for rank, seen in list(self._ranks.items()):
            if seen.state == "live":
                if newest.get(rank) == (seen.claim, seen.index) and table.held(seen.index):
                    seen.saved, seen.loaded = words[seen.at + _SAVED], words[seen.at + _LOADED]
                else:
                    self._gone(seen)
        for claim, index, rank in claims:
            if (index, claim) not in self._known:
                self._known.add((index, claim))
                at = table.word_of(index)
                seen = _Seen(rank, index, claim, at, saved=words[at + _SAVED], loaded=words[at + _LOADED])
                replaced = newest[rank] != (claim, index)  # before anybody looked: what it was told to save is in doubt
                if not replaced:
                    self._ranks[rank] = seen
                if replaced or not table.held(index):
                    self._gone(seen)
        fixed = [(seen.saved, seen.loaded) for seen in self._lost if seen.rank < world]
        self._points = []
        for rank in range(world):
            current = self._ranks.get(rank)
            if current is None:
                fixed.append((0, 0))
            elif current.state == "live":
                self._points.append((current.at + _SAVED, current.at + _LOADED))
        if not fixed:
            fixed = [(_NEVER, _NEVER)] if self._points else [(0, 0)]
        self._fixed = min(saved for saved, _ in fixed), min(loaded for _, loaded in fixed)

    def _gone(self, seen: _Seen) -> None:
        """A slot that was counted is its worker's no more. Its last words count unless it was claimed since."""
        words = self._table.words
        claim = words[seen.at + _CLAIM]
        if claim in (seen.claim, 0):
            seen.saved, seen.loaded = words[seen.at + _SAVED], words[seen.at + _LOADED]
            _order()
            self._failures += self._failures_of(seen)
        seen.state = "lost" if claim else "released"
        if claim:
            self._lost.append(seen)

    def _failures_of(self, seen: _Seen) -> list[Failure]:
        words = self._table.words
        count = words[seen.at + _FAILED]
        if count == seen.taken:
            return []
        _order()
        fresh = (count - seen.taken) & _NUMBER
        ring = [words[seen.at + _RING + (seen.taken + at) % _CELLS] for at in range(max(0, fresh - RING), fresh)]
        _order()
        found = []
        # Asked again: the worker may have lapped this reader, over words that were taken here for older ones.
        if (words[seen.at + _FAILED] - seen.taken) & _NUMBER > RING:
            saved, loaded = words[seen.at + _SAVED], words[seen.at + _LOADED]
            found += [Failure(seen.rank, "saves-through", saved), Failure(seen.rank, "loads-through", loaded)]
        for word in ring:
            if word & _LOST_BIT:
                found.append(Failure(seen.rank, "saves-lost", word & (_LOST_BIT - 1)))
            else:
                found.append(Failure(seen.rank, "load" if word & _LOAD_BIT else "save", word & _NUMBER))
        seen.taken = count
        return found
