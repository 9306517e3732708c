"""Asked: that what a backend says of itself is frozen, plain, true of the live device, and readable without it."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from ecoffload import Availability, BackendSpec, EncodingMismatch, Limits, get_backend, pointer_table
from ecoffload.testing.harness import DeviceUnderTest, asked


@asked("declaration.frozen")
def test_the_declaration_cannot_be_changed(device: DeviceUnderTest) -> None:
    with pytest.raises(ValidationError):
        device.spec.name = "other"


@asked("declaration.plain-data")
def test_the_declaration_survives_json_and_pickle(device: DeviceUnderTest, record_property: Any) -> None:
    spec = device.spec
    record_property("declaration", spec.model_dump(mode="json"))
    assert BackendSpec.model_validate_json(spec.model_dump_json()) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


@asked("declaration.available")
def test_a_backend_that_works_says_that_it_is_available_and_why(device: DeviceUnderTest) -> None:
    for probe in (False, True):
        answer = type(device.inner).availability(probe=probe)
        assert isinstance(answer, Availability)
        assert answer.ok, answer.reason
        assert answer.reason


def _no_initialised_query(device: DeviceUnderTest) -> str:
    kind = device.spec.device_type
    module = getattr(torch, kind, None) if kind != "cpu" else None
    return "" if hasattr(module, "is_initialized") else f"torch cannot tell whether {kind!r} is in use"


@asked("declaration.listing-initialises-nothing", when=_no_initialised_query)
def test_listing_backends_initialises_no_device(device: DeviceUnderTest) -> None:
    kind = device.spec.device_type
    code = f"import ecoffload, torch; ecoffload.list_backends(); print(torch.{kind}.is_initialized())"
    child = [sys.executable, "-c", code]
    result = subprocess.run(child, check=False, capture_output=True, text=True, timeout=device.limit_s * 4)
    assert result.stdout.strip() == "False", result.stdout + result.stderr


@asked("declaration.one-object")
def test_a_process_has_one_object_for_a_device(device: DeviceUnderTest) -> None:
    assert get_backend(device.spec.name) is device.backend


@asked("declaration.limits")
def test_limits_of_the_live_device_are_sound_and_no_wider_than_declared(device: DeviceUnderTest) -> None:
    for direction in ("d2h", "h2d"):
        limits = device.backend.limits(direction)
        assert isinstance(limits, Limits)
        assert limits.alignment >= 1
        assert limits.max_descriptors is None or limits.max_descriptors >= 1
        assert limits.max_bytes is None or limits.max_bytes >= limits.alignment


@asked("declaration.stats")
def test_stats_are_plain_data_and_name_the_switch_for_single_copies(
    device: DeviceUnderTest, record_property: Any
) -> None:
    stats = device.backend.stats()
    record_property("stats", stats)
    assert json.loads(json.dumps(stats)).keys() == stats.keys()
    assert stats["per_copy"] is device.backend.per_copy


def _table(device: DeviceUnderTest, placement: str, dtype: str, count: int = 4) -> torch.Tensor:
    if placement == "host":
        return torch.zeros(count, dtype=getattr(torch, dtype))
    return device.tensor(8 * count, 0).view(getattr(torch, dtype))


@asked("declaration.tables-accepted")
def test_a_table_as_each_kernel_declares_it_is_accepted(device: DeviceUnderTest) -> None:
    for kernel in device.spec.kernels:
        device.backend.check_table(kernel.name, _table(device, kernel.placement, kernel.address_dtype))
        device.backend.check_table(kernel.name, _table(device, kernel.placement, kernel.size_dtype), sizes=True)
        words = pointer_table([0, 2**63, 2**64 - 1], encoding=device.spec.encoding)
        if kernel.placement == "host" and kernel.address_dtype == device.spec.encoding.dtype:
            device.backend.check_table(kernel.name, words)


@asked("declaration.tables-refused")
def test_a_table_of_another_dtype_or_layout_is_refused_by_name(device: DeviceUnderTest) -> None:
    for kernel in device.spec.kernels:
        for sizes, declared in ((False, kernel.address_dtype), (True, kernel.size_dtype)):
            other = "int64" if declared == "uint64" else "uint64"
            with pytest.raises(EncodingMismatch, match=other) as caught:
                device.backend.check_table(kernel.name, _table(device, kernel.placement, other), sizes=sizes)
            assert (caught.value.expected, caught.value.actual) == (declared, other)
        strided = _table(device, kernel.placement, kernel.address_dtype, 8)[::2]
        with pytest.raises(EncodingMismatch, match="contiguous"):
            device.backend.check_table(kernel.name, strided)
    with pytest.raises(EncodingMismatch, match="no-such-kernel"):
        device.backend.check_table("no-such-kernel", torch.zeros(1, dtype=torch.int64))
