"""Asked: that host memory becomes reachable for the device once, is refused in words, and can be given back."""

from __future__ import annotations

import numpy as np
import pytest

from ecoffload import Registration, RegistrationRefused
from ecoffload.testing.conformance.conditions import registers
from ecoffload.testing.harness import PAGE, DeviceUnderTest, HostBuffer, asked, random_bytes

NBYTES = 4 * PAGE


def _copies(device: DeviceUnderTest, host: HostBuffer, alias: int, seed: int) -> None:
    data = random_bytes(host.nbytes, seed)
    host.array[:] = 0
    tensor = device.tensor(host.nbytes, data)
    device.swap("d2h", [(device.address(tensor), alias, host.nbytes)])
    assert np.array_equal(host.array, data)
    host.array[:] = data[::-1]
    device.swap("h2d", [(alias, device.address(tensor), host.nbytes)])
    assert np.array_equal(device.read(tensor), data[::-1])


@asked("registration.plain")
def test_host_memory_as_the_backend_wants_it_can_be_copied_both_ways(device: DeviceUnderTest) -> None:
    with device.host(NBYTES) as host:
        _copies(device, host, host.alias, 1)


@asked("registration.accepted", when=registers)
def test_a_registered_range_is_copied_through_its_alias(device: DeviceUnderTest) -> None:
    host = HostBuffer(device.backend, NBYTES, register=False)
    registration = device.backend.register(host.address, NBYTES)
    try:
        assert isinstance(registration, Registration)
        assert (registration.address, registration.nbytes) == (host.address, NBYTES)
        assert 0 < registration.alias <= 2**64 - NBYTES
        _copies(device, host, registration.alias, 2)
    finally:
        device.backend.unregister(registration)


@asked("registration.part", when=registers)
def test_a_registration_inside_a_larger_mapping_has_its_own_alias(device: DeviceUnderTest) -> None:
    host = HostBuffer(device.backend, NBYTES, register=False)
    registration = device.backend.register(host.address + PAGE, PAGE)
    try:
        data = random_bytes(PAGE, 3)
        host.array[:] = 0
        tensor = device.tensor(PAGE, data)
        device.swap("d2h", [(device.address(tensor), registration.alias, PAGE)])
        assert np.array_equal(host.array[PAGE : 2 * PAGE], data)
        assert not host.array[:PAGE].any()
        assert not host.array[2 * PAGE :].any()
    finally:
        device.backend.unregister(registration)


@asked("registration.twice", when=registers)
def test_registering_a_range_twice_is_refused_and_changes_nothing(device: DeviceUnderTest) -> None:
    host = HostBuffer(device.backend, NBYTES, register=False)
    registration = device.backend.register(host.address, NBYTES)
    try:
        with pytest.raises(RegistrationRefused) as caught:
            device.backend.register(host.address, NBYTES)
        assert (caught.value.address, caught.value.nbytes) == (host.address, NBYTES)
        _copies(device, host, registration.alias, 4)
    finally:
        device.backend.unregister(registration)


@asked("registration.empty", when=registers)
def test_registering_nothing_is_refused(device: DeviceUnderTest) -> None:
    host = HostBuffer(device.backend, PAGE, register=False)
    with pytest.raises(RegistrationRefused):
        device.backend.register(host.address, 0)


@asked("registration.refused", when=registers)
def test_a_refusal_names_the_range_and_leaves_the_device_usable(device: DeviceUnderTest) -> None:
    host = HostBuffer(device.backend, NBYTES, register=False)
    if not device.inject("register"):
        pytest.skip("not asked: the backend offers no inject_fault('register')")
    with pytest.raises(RegistrationRefused) as caught:
        device.backend.register(host.address, NBYTES)
    assert (caught.value.address, caught.value.nbytes) == (host.address, NBYTES)
    registration = device.backend.register(host.address, NBYTES)
    try:
        _copies(device, host, registration.alias, 5)
    finally:
        device.backend.unregister(registration)


@asked("registration.rolled-back", when=registers)
def test_registrations_rolled_back_in_reverse_can_be_made_again(device: DeviceUnderTest) -> None:
    host = HostBuffer(device.backend, NBYTES, register=False)
    for _ in range(2):
        made = [device.backend.register(host.address + i * PAGE, PAGE) for i in range(3)]
        with pytest.raises(RegistrationRefused):
            device.backend.register(host.address + PAGE, PAGE)
        for registration in reversed(made):
            device.backend.unregister(registration)
    whole = device.backend.register(host.address, NBYTES)
    try:
        _copies(device, host, whole.alias, 6)
    finally:
        device.backend.unregister(whole)


def _no_registration(device: DeviceUnderTest) -> str:
    how = device.capabilities.host_memory
    return "" if how in ("none", "unified") else f"host_memory is {how!r}"


@asked("registration.not-needed", when=_no_registration)
def test_where_no_registration_is_needed_the_address_is_its_own_alias(device: DeviceUnderTest) -> None:
    host = HostBuffer(device.backend, NBYTES, register=False)
    registration = device.backend.register(host.address, NBYTES)
    assert registration.alias == host.address
    _copies(device, host, registration.alias, 7)
    device.backend.unregister(registration)
