"""A store behind the host region that many machines share: encoded once in the cluster, loaded anywhere.

`interface` says what a store must answer, `header` what an object looks like, `link` connects one scheduler with one
store (threads, breaker, deadlines), `opening` makes a link of a URL, `mooncake` is the store that is built in. Off
unless asked for. A trusted network is needed: objects are checked against faults, not against forgery.
"""

from __future__ import annotations

from ecoffload.tiers.interface import Answer, RemoteTier, TierObject
from ecoffload.tiers.link import TierLink
from ecoffload.tiers.opening import GROUP, open_tier
from ecoffload.tiers.options import TierOptions

__all__ = ["GROUP", "Answer", "RemoteTier", "TierLink", "TierObject", "TierOptions", "open_tier"]
