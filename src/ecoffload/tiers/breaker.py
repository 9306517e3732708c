"""A circuit breaker: after some failures in a row nobody asks any more, but for a single probe from time to time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

__all__ = ["Breaker"]


class Breaker:
    """Closed, open after ``limit`` failures in a row, half-open while one probe is under way. Thread-safe.

    An open one lets a probe through after ``pause`` seconds, twice as long after each failed one, ``longest`` at most.
    """

    def __init__(
        self,
        *,
        limit: int = 3,
        pause: float = 0.5,
        longest: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._first = pause
        self._pause = pause
        self._longest = longest
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self.state: Literal["closed", "open", "half-open"] = "closed"
        self.opened = 0
        """Times that it went from closed to open."""

    def ready(self) -> bool:
        """Whether asking has any prospect; changes nothing."""
        return self.state == "closed" or (self.state == "open" and self._clock() >= self._until)

    @property
    def sound(self) -> bool:
        """Whether bytes have moved since the last failure, if there was one."""
        return not self._failures

    def allow(self) -> bool:
        """Whether to make a call now; True must be followed by ``success``, ``answered`` or ``failure``."""
        with self._lock:
            if self.state == "closed":
                return True
            if self.state == "open" and self._clock() >= self._until:
                self.state = "half-open"
                return True
            return False

    def answered(self) -> None:
        """Somebody is there, which does not say that bytes move: the next failure opens a half-open one again."""
        with self._lock:
            if self.state == "half-open":
                self.state = "closed"
                self._failures = self._limit - 1

    def success(self) -> None:
        """Bytes have moved."""
        with self._lock:
            self.state = "closed"
            self._failures = 0
            self._pause, self._until = self._first, 0.0

    def failure(self) -> bool:
        """True if that opened a closed one."""
        with self._lock:
            self._failures += 1
            if self.state == "closed" and self._failures < self._limit:
                return False
            fresh = self.state == "closed"
            self.opened += fresh
            if self._until:
                self._pause = min(2 * self._pause, self._longest)
            self.state = "open"
            self._until = self._clock() + self._pause
            return fresh
