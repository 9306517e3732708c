"""Checksums over entries' bytes in the region, computed on a thread of their own: never on the scheduler's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash

from ecoffload.host_queue import HostQueue

if TYPE_CHECKING:
    from ecoffload.index import Entry
    from ecoffload.region import HostRegion

__all__ = ["Checksums", "checksum_of"]


def checksum_of(region: HostRegion, extents: Iterable[tuple[int, int]], nbytes: int) -> int:
    """XXH3 (64 bits) over the ``nbytes`` that lie in ``extents``, in their order."""
    digest = xxhash.xxh3_64()
    left = nbytes
    for view in region.view(extents):
        digest.update(view[:left] if left < len(view) else view)
        left -= min(left, len(view))
        view.release()
    return digest.intdigest()


class Checksums:
    """Entries go in, (entry, checksum) come out when ``take`` is called. What an earlier process left has a thread of
    its own: a save must not wait until a whole region was read."""

    def __init__(self, region: HostRegion) -> None:
        self._region = region
        self._queue = HostQueue("ecoffload-checksums")
        self._recovery = HostQueue("ecoffload-recovery")
        self._done: deque[tuple[Entry, int | None]] = deque()
        self._closing = False
        self.waiting: set[Entry] = set()
        """Entries handed in and not yet taken."""

    def put(self, entry: Entry, *, recovered: bool = False) -> None:
        """The caller keeps the entry's bytes from changing until it is taken."""
        self.waiting.add(entry)
        if recovered:
            self._recovery.put(lambda: None if self._closing else self._compute(entry))
        else:
            self._queue.put(lambda: self._compute(entry))

    def _compute(self, entry: Entry) -> None:
        try:
            value: int | None = checksum_of(self._region, entry.extents, entry.nbytes)
        except Exception:  # the region was closed meanwhile: no checksum, and so no promise
            value = None
        self._done.append((entry, value))

    def take(self) -> list[tuple[Entry, int | None]]:
        """What has been computed since the last call; None as a checksum where the bytes could not be read."""
        taken = []
        while self._done:
            taken.append(self._done.popleft())
        self.waiting.difference_update(entry for entry, _ in taken)
        return taken

    def close(self) -> None:
        """Finish what was handed in, and end the threads. What an earlier process left stays for the next one."""
        self._closing = True
        self._queue.close()
        self._recovery.close()
