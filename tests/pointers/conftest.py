"""Hypothesis settings of the pointer tests: no deadline, since CI machines pause at will."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("pointers", deadline=None)
settings.load_profile("pointers")
