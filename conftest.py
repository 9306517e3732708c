"""Settings for every test of the tree."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes says more about what else the machine does than about the code: no test is a timed one.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
