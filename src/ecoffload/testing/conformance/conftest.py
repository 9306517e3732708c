"""The suite's one fixture; sessions, because hypothesis runs a test many times with the fixtures of one."""

from __future__ import annotations

import pytest

from ecoffload.testing.harness import DeviceUnderTest


@pytest.fixture(scope="session")
def device(ecoffload_device: DeviceUnderTest) -> DeviceUnderTest:
    return ecoffload_device
