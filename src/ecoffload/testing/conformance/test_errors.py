"""Asked: that a failure is an error of ours at the scope which the backend declares, and that the next swap works.

Failures of a device are provoked where the backend, or its emulated driver, offers ``inject_fault(kind, index)`` with
kinds "submit", "late", "lost" and "register"; it answers whether the fault is armed.
"""

from __future__ import annotations

import numpy as np
import pytest

from ecoffload import DescriptorError, DeviceLost, SwapFailed
from ecoffload.backend import Completion
from ecoffload.descriptors import AddressRanges
from ecoffload.testing.harness import DeviceUnderTest, HostBuffer, asked, random_bytes

SIZE = 1024


def _arm(device: DeviceUnderTest, kind: str, index: int = 0) -> None:
    if not device.inject(kind, index):
        pytest.skip(f"not asked: the backend offers no inject_fault({kind!r})")


def _works(device: DeviceUnderTest) -> None:
    data = random_bytes(SIZE, 9)
    tensor = device.tensor(SIZE, data)
    with device.host(SIZE, 0) as host:
        device.finish(device.save(tensor, host))
        assert np.array_equal(host.array, data)


def _outcome(device: DeviceUnderTest, submit: object) -> SwapFailed:
    """What a swap that must fail raises, at its submit or at its end; never a success."""
    try:
        completion: Completion = submit()  # type: ignore[operator]
        device.finish(completion)
    except SwapFailed as exc:
        return exc
    pytest.fail("a swap that failed was reported as done")


@asked("errors.refused-before-the-driver")
def test_a_descriptor_past_its_memory_is_refused_by_index(device: DeviceUnderTest) -> None:
    with device.host(4 * SIZE, 0) as host:
        tensor = device.tensor(4 * SIZE, 1)
        base = device.address(tensor)
        ours, theirs = AddressRanges([(base, 4 * SIZE)]), AddressRanges([(host.alias, 4 * SIZE)])
        good = [(base + i * SIZE, host.alias + i * SIZE, SIZE) for i in range(3)]
        for bad in (
            (base + 3 * SIZE + 1, host.alias, SIZE),
            (base, host.alias + 3 * SIZE + 1, SIZE),
            (base - 1, host.alias, 1),
        ):
            with pytest.raises(DescriptorError) as caught:
                device.submit("d2h", [*good, bad], sources=ours, destinations=theirs)
            assert (caught.value.index, caught.value.src, caught.value.dst, caught.value.size) == (3, *bad)
        assert not host.array.any(), "a refused batch must not have moved a byte"
        assert device.pool.leased == 0


@asked("errors.wrap")
def test_a_range_past_two_to_the_64_is_refused(device: DeviceUnderTest) -> None:
    with pytest.raises(DescriptorError, match=r"2\*\*64"):
        device.submit("h2d", [(2**64 - 8, 0x1000, 16)])
    assert device.pool.leased == 0


def _three(device: DeviceUnderTest, host: HostBuffer, base: int) -> list[tuple[int, int, int]]:
    return [(base + i * SIZE, host.alias + i * SIZE, SIZE) for i in range(3)]


@asked("errors.submit")
def test_a_submit_that_fails_names_what_the_backend_declares(device: DeviceUnderTest) -> None:
    with device.host(3 * SIZE, 0) as host:
        tensor = device.tensor(3 * SIZE, 1)
        _arm(device, "submit", 1)
        error = _outcome(device, lambda: device.submit("d2h", _three(device, host, device.address(tensor))))
    index = getattr(error, "index", None)
    assert index == 1 if device.capabilities.error_scope == "descriptor" else index in (None, 1)
    assert device.pool.leased == 0
    _works(device)


@asked("errors.global-index")
def test_a_failure_in_a_later_part_of_a_split_batch_names_the_global_index(device: DeviceUnderTest) -> None:
    limit = device.backend.limits("d2h").max_descriptors
    if limit is None or limit > 10_000:
        pytest.skip("not asked: it takes batches of any length that this suite makes")
    count, size = limit + 2, device.alignment
    with device.host(count * size, 0) as host:
        tensor = device.tensor(count * size, 1)
        base = device.address(tensor)
        _arm(device, "submit", limit + 1)
        error = _outcome(
            device,
            lambda: device.submit("d2h", [(base + i * size, host.alias + i * size, size) for i in range(count)]),
        )
        device.ops.synchronize(device.side)
    index = getattr(error, "index", None)
    assert index == limit + 1 if device.capabilities.error_scope == "descriptor" else index in (None, limit + 1)
    assert device.pool.leased == 0
    _works(device)


@asked("errors.late")
def test_a_copy_that_fails_late_is_never_reported_as_done(device: DeviceUnderTest) -> None:
    with device.host(3 * SIZE, 0) as host:
        tensor = device.tensor(3 * SIZE, 1)
        _arm(device, "late")
        _outcome(device, lambda: device.submit("d2h", _three(device, host, device.address(tensor))))
        _arm(device, "late")

        def poll() -> Completion:
            completion = device.submit("d2h", _three(device, host, device.address(tensor)))
            while not completion.done():
                pass
            return completion

        _outcome(device, poll)
    assert device.pool.leased == 0
    _works(device)


@asked("errors.lost")
def test_a_lost_device_is_told_apart_from_a_failed_copy(device: DeviceUnderTest) -> None:
    other = device.fresh()
    with device.host(SIZE, 0):  # the harness's own memory stays with the device that lives on
        tensor = other.tensor(SIZE, 1)
        buffer = HostBuffer(other.backend, SIZE, register=other.capabilities.host_memory == "register")
        _arm(other, "lost")
        error = _outcome(other, lambda: other.save(tensor, buffer))
        assert isinstance(error, DeviceLost)
    _works(device)
