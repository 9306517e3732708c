"""The suite for tiers, on the fake."""

from __future__ import annotations

from ecoffload.testing.tiers.suite import *  # noqa: F403
