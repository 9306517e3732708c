"""Which requests wait for encoder outputs that are on their way from the tier, and for how long.

The scheduler half asks for each request with inputs, in each step, before vLLM schedules it. A "no" makes vLLM pass the
request over and go on with others; the engine keeps stepping while it has such a request, so the answer is asked for
again a moment later. Nothing here waits: fetches are started, and the region tells what has arrived.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ecoffload.integrations.vllm.namespace import key_of

if TYPE_CHECKING:
    from ecoffload.scheduler import OffloadScheduler
    from ecoffload.tiers.link import TierLink

__all__ = ["Admission", "all_computed"]

_REMEMBERED = 1 << 16  # inputs in vLLM's encoder cache: far more than it holds


def all_computed(request: Any, computed: int) -> bool:
    """Whether all inputs lie within the first `computed` tokens. vLLM keeps features in the order of positions."""
    last = request.mm_features[-1].mm_position
    return bool(last.offset + last.length <= computed)


class Admission:
    """Each request asks once for each of its inputs, and has one budget, counted from the first time that it was passed
    over. What did not come is encoded.

    `lasting`: whether an identifier may come from another process at all. `counts` ("deferrals": requests passed over,
    "deferrals_expired": those whose budget ran out) and `waits` (seconds) are for whoever reads them to clear.
    """

    def __init__(self, engine: OffloadScheduler, link: TierLink, lasting: Callable[[str], bool]) -> None:
        self._engine = engine
        self._link = link
        self._lasting = lasting
        self._asked: dict[str, int] = {}  # by request: for how many of its inputs
        self._since: dict[str, float] = {}  # by request: first passed over
        self._passed_over: set[str] = set()  # when they were last asked for
        self._here: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.waits: list[float] = []

    def admit(self, request: Any, computed: int) -> bool:
        """Whether vLLM may schedule `request`, of which `computed` tokens are done. Fetches what the region lacks."""
        who, coming = request.request_id, False
        asked = self._asked.get(who, 0)
        for index, feature in enumerate(request.mm_features):
            position, name = feature.mm_position, feature.identifier
            if position.offset + position.length <= computed:
                continue
            if index < asked:
                coming |= self._link.coming(key_of(name))
            elif name not in self._here and self._lasting(name):
                coming |= self._engine.fetch(key_of(name))
        self._asked[who] = len(request.mm_features)
        if coming and self._link.answering():
            now = time.monotonic()
            since = self._since.get(who, now)
            if now - since < self._link.options.wait:
                if who not in self._since:
                    self._since[who] = now
                    self.counts["deferrals"] += 1
                self._passed_over.add(who)
                return False
            self.counts["deferrals_expired"] += who in self._passed_over
        self._end(who)
        return True

    def _end(self, who: str) -> None:
        if who in self._passed_over:
            self._passed_over.remove(who)
            self.waits.append(time.monotonic() - self._since[who])

    def finished(self, who: str) -> None:
        """A request has ended, however it did."""
        self._end(who)
        self._since.pop(who, None)
        self._asked.pop(who, None)

    def allocated(self, identifier: str) -> None:
        """vLLM's encoder cache has the input, or will in this step: nobody need fetch it."""
        if len(self._here) >= _REMEMBERED:
            self._here.clear()  # vLLM does not tell of a reset
        self._here.add(identifier)

    def freed(self, identifiers: Iterable[str]) -> None:
        """vLLM's encoder cache gave these up."""
        self._here.difference_update(identifiers)

    def forget(self) -> None:
        """vLLM's encoder cache may have been emptied."""
        self._here.clear()
