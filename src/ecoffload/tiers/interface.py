"""What a store must answer to be a tier: the whole of what an author implements.

A :class:`~ecoffload.tiers.link.TierLink` calls it, from threads of its own, several at a time; nothing else does. A
tier moves bytes between memory that it was told of and objects with names; it knows no entry, header or namespace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import ClassVar, NamedTuple

__all__ = ["Answer", "RemoteTier", "TierObject"]


class Answer(Enum):
    """What became of one object of a call."""

    DONE = "done"
    """Published: it was seen in the store afterwards. Fetched: all of its bytes are in the parts."""
    ABSENT = "absent"
    """Fetch: there is no such object, and no part was touched. Publish: accepted, and yet not there."""
    REFUSED = "refused"
    """The store said no (full, wrong size, ...), and no part was touched."""
    UNCONFIRMED = "unconfirmed"
    """Nobody knows: parts may hold anything, and may still be written or read."""


class TierObject(NamedTuple):
    """An object and the memory it comes from or goes to: parts (address, bytes) in this process, in their order."""

    name: str
    parts: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(length for _, length in self.parts)


class RemoteTier(ABC):
    """One process's access to a store. Entry point ``ecoffload.tiers``: a scheme and a subclass.

    Calls may block; whoever calls has threads for that. Anything raised counts as UNCONFIRMED for all objects of the
    call. Thread-safe. After ``close`` every call raises :class:`CacheClosed`.
    """

    scheme: ClassVar[str]
    """Of the URLs it serves."""
    grace: float = 10.0
    """Seconds after which nothing is written any more into the parts of a fetch that has ended UNCONFIRMED."""

    def __init__(self, address: str, options: Mapping[str, str]) -> None:
        """Of ``scheme://address?options``: checks both and reaches for nothing.

        Raises :class:`ConfigError` for what is wrong in them (an unknown option too) and :class:`BackendUnavailable`
        where a package is missing.
        """
        self.address = address
        if options:
            from ecoffload.errors import ConfigError

            name = next(iter(options))
            raise ConfigError(f"tier {self.scheme}: unknown option {name!r}", option=name, value=options[name])

    @abstractmethod
    def connect(self, memory: Sequence[tuple[int, int]]) -> None:
        """Reach the store. ``memory``: (address, bytes) of all that parts will ever lie in, valid until ``close``.

        Called until it returns without raising, and not again after that: from then on, reconnecting is the tier's.
        """

    @abstractmethod
    def publish(self, objects: Sequence[TierObject]) -> list[Answer]:
        """Store them, and see whether they are there. A name that is taken keeps what it had."""

    @abstractmethod
    def exists(self, names: Sequence[str]) -> list[int | None]:
        """Bytes of each object, None where there is none. Raises if the store does not answer."""

    @abstractmethod
    def fetch_many(self, objects: Sequence[TierObject]) -> list[Answer]:
        """Fill the parts. An object whose size is not that of its parts is no DONE."""

    @abstractmethod
    def close(self) -> None:
        """Let the memory go. Idempotent; called when no other call is running."""
