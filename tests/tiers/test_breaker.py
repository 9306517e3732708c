"""The circuit breaker, by a clock that is moved by hand."""

from __future__ import annotations

import pytest

from ecoffload.tiers.breaker import Breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broken(clock: Clock) -> Breaker:
    """One that has just opened."""
    breaker = Breaker(clock=clock)
    assert [breaker.failure() for _ in range(3)] == [False, False, True]
    return breaker


def test_it_opens_after_three_failures_in_a_row_only(clock: Clock) -> None:
    breaker = Breaker(clock=clock)
    for _ in range(5):
        breaker.failure()
        breaker.failure()
        breaker.success()
    assert breaker.state == "closed"
    assert breaker.allow()


def test_an_open_one_lets_nothing_through_until_its_pause_is_over_and_then_one_probe(
    broken: Breaker, clock: Clock
) -> None:
    assert not broken.ready()
    assert not broken.allow()
    clock.now += 0.5
    assert broken.ready()
    assert broken.allow()
    assert broken.state == "half-open"
    assert not broken.allow()
    assert not broken.ready()


def test_a_probe_that_succeeds_closes_it(broken: Breaker, clock: Clock) -> None:
    clock.now += 0.5
    assert broken.allow()
    broken.success()
    assert broken.state == "closed"
    assert not broken.failure()


def test_pauses_double_up_to_the_longest(broken: Breaker, clock: Clock) -> None:
    pauses = []
    for _ in range(4):
        begun = clock.now
        while not broken.ready():
            clock.now += 0.25
        pauses.append(clock.now - begun)
        assert broken.allow()
        broken.failure()
    assert pauses == [0.5, 1.0, 2.0, 2.0]


def test_an_answer_that_moved_no_bytes_closes_it_on_probation(broken: Breaker, clock: Clock) -> None:
    clock.now += 0.5
    assert broken.allow()
    broken.answered()
    assert broken.state == "closed"
    assert broken.failure()
    assert broken.state == "open"


def test_answers_do_not_hide_failures_of_moving_bytes(clock: Clock) -> None:
    breaker = Breaker(clock=clock)
    for _ in range(3):
        breaker.answered()
        breaker.failure()
    assert breaker.state == "open"
    assert breaker.opened == 1
