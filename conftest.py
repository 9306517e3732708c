"""Settings for every test of the tree."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# How long an example takes says more about what else the machine does than about the code: no test is a timed one.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# pytest-timeout's, by its variable: who runs the conformance suite in a clone need not have that plugin, and pytest
# refuses options of one that is not there.
os.environ.setdefault("PYTEST_TIMEOUT", "300")
