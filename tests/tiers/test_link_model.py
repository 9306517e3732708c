"""The link as a state machine: any order of saves, fetches, answers, harm and time, over a real index and allocator.

The couriers are played by the machine, so that every order of answers occurs, the latest ones included. After every
step: each granule has one owner, the link's sums are those of its jobs, and no memory that a call may still touch is
anybody else's. At the end nothing is left pinned, kept aside or in flight.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from ecoffload.eviction import make_policy
from ecoffload.extents import ExtentAllocator
from ecoffload.index import Entry, EntryIndex
from ecoffload.testing.tiers.fake import FakeTier
from ecoffload.tiers import Answer, TierLink, TierOptions
from ecoffload.tiers.breaker import Breaker
from ecoffload.tiers.couriers import Call, Fetch, Publication
from ecoffload.tiers.header import HEADER_BYTES, Header

GRANULE = 256
CAPACITY = 64 * GRANULE
SHARE = 8 * GRANULE
KEYS = st.sampled_from([b"%d" % i for i in range(12)])
SIZES = st.integers(1, 6 * GRANULE)
SMALL = st.integers(HEADER_BYTES + 1, HEADER_BYTES + 4 * GRANULE)
FOUND = st.one_of(SMALL, SMALL, SMALL, SMALL, st.sampled_from([None, -5, 0, HEADER_BYTES, 2 * CAPACITY]))
RARELY = st.sampled_from([False] * 9 + [True])


class Played:
    """Couriers whose work the machine does, or leaves undone."""

    def __init__(self, clock: Any) -> None:
        self.breakers = {"publish": Breaker(clock=clock), "fetch": Breaker(clock=clock)}
        self.published: deque[Publication] = deque()
        self.answered: deque[Fetch] = deque()
        self.connected = True
        self.outgoing: list[Publication] = []
        self.incoming: list[Fetch] = []
        self.stopped = False

    def start(self, region: Any) -> None:
        assert region.capacity == CAPACITY

    def publish(self, job: Publication) -> None:
        self.outgoing.append(job)

    def fetch(self, job: Fetch) -> None:
        self.incoming.append(job)

    def failed(self, kind: str, why: str) -> None:
        self.breakers[kind].failure()

    def tell(self) -> None:
        pass

    def stop(self, limit: float) -> bool:
        self.stopped = True
        self.published.extend(self.outgoing)
        self.answered.extend(self.incoming)
        self.outgoing, self.incoming = [], []
        return True


class LinkMachine(RuleBasedStateMachine):
    saves = Bundle("saves")

    @initialize()
    def begin(self) -> None:
        self.now = 100.0
        clock = lambda: self.now  # noqa: E731
        options = TierOptions(queue=5, share=SHARE / CAPACITY, deadline=2.0, absent=1.0)
        self.link = TierLink(FakeTier(), options, namespace="model", clock=clock)
        self.played = Played(clock)
        self.link._couriers = self.played  # type: ignore[assignment]
        self.link._breakers = self.played.breakers
        self.index = EntryIndex(ExtentAllocator(CAPACITY, GRANULE), make_policy("lru", capacity=CAPACITY), None)
        self.link.attach(SimpleNamespace(capacity=CAPACITY), self.index)  # type: ignore[arg-type]
        self.invalidated = False
        self.doubtful: list[tuple[float, Entry]] = []

    # -- the scheduler's part

    @rule(target=saves, key=KEYS, nbytes=SIZES, durable=st.booleans())
    def save(self, key: bytes, nbytes: int, durable: bool) -> Entry | None:
        known = self.index.lookup(key)
        if known is not None and not (known.fetched and known.write != "ended"):
            return None
        if known is not None:
            self.link.give_way(known)
        entry = self.index.reserve(key, nbytes, "uint8", (nbytes,), durable=durable)
        if entry is not None:
            self.index.writing(entry)
        return entry

    @rule(entry=consumes(saves), good=st.booleans())
    def land(self, entry: Entry | None, good: bool) -> None:
        if entry is None:
            return
        if good:
            self.index.commit(entry)
            self.link.offer(entry)
        else:
            self.index.drop(entry)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4))
    def ask(self, keys: list[bytes]) -> None:
        for key in keys:
            if self.index.lookup(key) is None:
                self.link.fetch(key)

    @rule()
    def settle(self) -> None:
        self.link.settle()

    @rule(seconds=st.sampled_from([0.1, 0.1, 1.1, 2.5, 12.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=KEYS, really=RARELY)
    def invalidate(self, key: bytes, really: bool) -> None:
        if really:
            self.index.invalidate(key)
            self.link.forget(key)

    @precondition(lambda self: not self.invalidated)
    @rule(really=RARELY, quite=RARELY)
    def invalidate_all(self, really: bool, quite: bool) -> None:
        if really and quite:
            self.invalidated = True
            self.index.invalidate()
            self.link.forget(None)

    # -- the couriers' and the store's part

    @precondition(lambda self: any(job.entry is None for job in self.played.incoming))
    @rule(size=FOUND, fails=RARELY, at=st.integers(0, 9))
    def locate(self, size: int | None, fails: bool, at: int) -> None:
        jobs = [job for job in self.played.incoming if job.entry is None]
        job = jobs[at % len(jobs)]
        self.played.incoming.remove(job)
        if fails:
            self.played.breakers["fetch"].failure()
        else:
            self.played.breakers["fetch"].answered()
            job.size, job.answer = size, Answer.ABSENT if size is None else Answer.DONE
        self.played.answered.append(job)

    @precondition(lambda self: any(job.entry is not None and job.call is None for job in self.played.incoming))
    @rule(at=st.integers(0, 9))
    def begin_load(self, at: int) -> None:
        jobs = [job for job in self.played.incoming if job.entry is not None and job.call is None]
        jobs[at % len(jobs)].call = Call()

    @precondition(lambda self: any(job.call for job in self.played.incoming))
    @rule(answer=st.sampled_from(Answer), right=st.booleans(), at=st.integers(0, 9))
    def end_load(self, answer: Answer, right: bool, at: int) -> None:
        jobs = [job for job in self.played.incoming if job.call]
        job = jobs[at % len(jobs)]
        self.played.incoming.remove(job)
        job.call.ended = True
        job.call, job.answer = None, answer
        assert job.entry is not None
        if answer is Answer.UNCONFIRMED:
            self.played.breakers["fetch"].failure()
            self.doubtful.append((self.now + self.link.tier.grace, job.entry))
        else:
            self.played.breakers["fetch"].success()
        if answer is Answer.DONE and right:
            nbytes = job.entry.nbytes - HEADER_BYTES
            job.header = Header("uint8", (nbytes,), nbytes, 1)
        elif answer is Answer.DONE:
            job.problem = "wrong"
        self.played.answered.append(job)

    @precondition(lambda self: self.played.outgoing)
    @rule(outcome=st.sampled_from(["published", "publish_failed", "not_kept", "already_there", "dropped"]))
    def send(self, outcome: str) -> None:
        job = self.played.outgoing.pop(0)
        job.outcome = outcome
        self.played.published.append(job)

    # -- what always holds

    def _jobs(self) -> list[Fetch]:
        return [*self.played.incoming, *self.played.answered]

    @invariant()
    def every_granule_has_one_owner(self) -> None:
        self.index.check()

    @invariant()
    def the_link_never_faults(self) -> None:
        assert "Error" not in self.link.off
        assert bool(self.link.off) == self.invalidated

    @invariant()
    def memory_that_a_call_may_touch_is_nobody_elses(self) -> None:
        owners = set(self.index._owners())
        assert all(job.entry in owners for job in self._jobs() if job.entry is not None)
        assert all(entry in owners for until, entry in self.doubtful if self.now < until)
        assert all(job.entry in owners and job.entry.pins for job in [*self.played.outgoing, *self.played.published])

    @invariant()
    def sums_are_those_of_the_jobs(self) -> None:
        link = self.link
        loads = [job for job in self._jobs() if job.entry is not None]
        left = [job.entry for job in loads if link._flights.get(job.key) is not job]
        aside = [entry for _, entry in link._aside]
        assert link._open == len(self._jobs())
        assert link._aside_bytes == sum(entry.held_bytes for entry in [*left, *aside] if entry is not None)
        assert link._fetching_bytes == sum(
            entry.held_bytes for entry in [*(job.entry for job in loads), *aside] if entry is not None
        )
        sending = [*self.played.outgoing, *self.played.published]
        assert link._queued == len(sending) <= link.options.queue
        assert link._queued_bytes == sum(job.entry.held_bytes for job in sending)

    @invariant()
    def no_more_is_taken_than_its_share(self) -> None:
        # What was on its way when twice the share was reached may come on top: a share, or one entry.
        assert self.link._aside_bytes <= 3 * SHARE + 4 * GRANULE
        assert self.link._open + len(self.link._waiting) <= self.link.options.queue

    @invariant()
    def what_is_on_its_way_cannot_be_found_as_ready(self) -> None:
        for job in self._jobs():
            if job.entry is not None:
                assert job.entry.write != "ended"

    def teardown(self) -> None:
        if not hasattr(self, "link"):
            return
        assert self.link.close()
        assert self.played.stopped
        assert self.link._queued == self.link._open == self.link._aside_bytes == self.link._fetching_bytes == 0
        assert self.index.pinned == 0
        assert not [entry for entry in self.index._owners() if entry.fetched and entry.write != "ended"]
        self.index.check()


LinkMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)
TestLink = LinkMachine.TestCase


def test_a_call_that_does_not_end_is_one_failure_however_many_keys_it_was_for() -> None:
    machine = LinkMachine()
    machine.begin()
    machine.ask([b"1", b"2", b"3", b"4"])
    call = Call()
    for job in machine.played.incoming:
        job.call = call
    machine.wait(2.5)
    machine.settle()
    assert machine.link.stats()["late"] == 4
    assert machine.link.stats()["breakers"]["fetch"] == "closed"
