"""What the URL of every tier may say."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["TierOptions"]


class TierOptions(BaseModel):
    """How a link uses its tier; all other options in a URL are the scheme's own.

    * ``publish``, ``fetch``: which of the two is done (both).
    * ``wait``: seconds that a caller of :class:`EncoderCache` waits for an entry on its way before it is a miss.
    * ``deadline``: seconds after which a fetch is given up.
    * ``queue``: entries that may wait to be published, and keys that may be on their way; further ones are dropped or
      skipped, and counted.
    * ``publishers``, ``fetchers``: threads that do the one and the other, each with one call at a time. More may
      help where calls wait for a network (not measured); on two cores two fetchers took a fifth to two fifths longer
      than one for 32 objects of 1 MiB from Mooncake.
    * ``share``: of the region's bytes that may be in fetches (after a failure they go one at a time until bytes move
      again). Up to twice that may be kept aside after unconfirmed ones, above which nothing more is fetched; up to once
      that may be waiting to be published.
    * ``absent``: seconds for which a key that was not there is not asked for again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    publish: bool = True
    fetch: bool = True
    wait: float = Field(default=0.25, ge=0, allow_inf_nan=False)
    deadline: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    queue: int = Field(default=256, ge=1)
    publishers: int = Field(default=1, ge=1, le=16)
    fetchers: int = Field(default=1, ge=1, le=16)
    share: float = Field(default=0.125, gt=0, le=0.25)
    absent: float = Field(default=1.0, ge=0, allow_inf_nan=False)
