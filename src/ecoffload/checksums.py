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
    """Entries go in, (entry, checksum) come out when ``take`` is called; order is kept."""

    def __init__(self, region: HostRegion) -> None:
        self._region = region
        self._queue = HostQueue("ecoffload-checksums")
        self._done: deque[tuple[Entry, int | None]] = deque()
        self.waiting = 0
        """Entries handed in and not yet taken."""

    def put(self, entry: Entry) -> None:
        """The caller keeps the entry's bytes from changing until it is taken."""
        self.waiting += 1
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
        self.waiting -= len(taken)
        return taken

    def close(self) -> None:
        """Finish what was handed in, and end the thread."""
        self._queue.close()
