"""What must hold for a test to be asked, each a function from the device to the reason why not ("" if it is asked)."""

from __future__ import annotations

from ecoffload.testing.harness import DeviceUnderTest

__all__ = [
    "any_alignment",
    "asynchronous",
    "echoes",
    "registers",
    "single_queue",
    "snapshots",
    "streams",
    "streams_and_asynchronous",
    "wants_record_stream",
]


def registers(device: DeviceUnderTest) -> str:
    how = device.capabilities.host_memory
    return "" if how == "register" else f"host_memory is {how!r}"


def streams(device: DeviceUnderTest) -> str:
    return "" if device.capabilities.ordering == "streams" else f"ordering is {device.capabilities.ordering!r}"


def single_queue(device: DeviceUnderTest) -> str:
    return "" if device.capabilities.ordering == "single-queue" else f"ordering is {device.capabilities.ordering!r}"


def asynchronous(device: DeviceUnderTest) -> str:
    return "" if device.capabilities.submission == "async" else f"submission is {device.capabilities.submission!r}"


def streams_and_asynchronous(device: DeviceUnderTest) -> str:
    return streams(device) or asynchronous(device)


def snapshots(device: DeviceUnderTest) -> str:
    return "" if device.capabilities.snapshots_descriptors else "snapshots_descriptors is False"


def any_alignment(device: DeviceUnderTest) -> str:
    return "" if device.alignment == 1 else f"its kernels copy multiples of {device.alignment} bytes"


def wants_record_stream(device: DeviceUnderTest) -> str:
    return "" if device.capabilities.needs_record_stream else "needs_record_stream is False"


def echoes(device: DeviceUnderTest) -> str:
    return "" if hasattr(device.inner, "echo") else "the backend has no echo(kernel, table)"
