"""The encoder cache on ecoffload-rocm: from ``put`` to ``get`` through region, engine and emulated runtime."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from ecoffload_rocm.backend import RocmBackend
from ecoffload_rocm.plugin import SPEC
from emulated_drivers import HIGH, LOW, Emulated, EmulatedDeviceOps, load

from ecoffload import EncoderCache
from ecoffload.errors import RegistrationRefused

OLD, NEW = 70_200_002, 71_500_000
SIZES = (1, 255, 4096, 70_001, 300_000)


def backend_on(emulated: Emulated) -> RocmBackend:
    return RocmBackend(SPEC, 0, EmulatedDeviceOps(emulated), library=emulated.path)


@pytest.fixture(params=[(OLD, LOW), (OLD, HIGH), (NEW, LOW), (NEW, HIGH)], ids=lambda p: f"{p[0]}-{p[1]:x}")
def backend(request: pytest.FixtureRequest) -> Iterator[RocmBackend]:
    version, base = request.param
    made = backend_on(load("hip", version=version, base=base, alias_offset=1 << 46))
    yield made
    made.close()


def tensors(backend: RocmBackend) -> dict[str, torch.Tensor]:
    """Random bytes on the device, one tensor a size."""
    made = {}
    for nbytes in SIZES:
        tensor = backend.ops.empty(nbytes)
        tensor.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))
        made[f"image-{nbytes}"] = tensor
    return made


def test_what_was_put_is_got_bit_for_bit(backend: RocmBackend) -> None:
    with EncoderCache("4MiB", backend=backend, register="require") as cache:
        wanted = tensors(backend)
        for key, tensor in wanted.items():
            assert cache.put(key, tensor)
        cache.flush()
        for key, tensor in wanted.items():
            found = cache.get(key)
            assert found is not None
            backend.ops.synchronize()
            assert backend.ops.owns(found)
            assert torch.equal(found, tensor)


def test_c7_where_registration_is_refused_the_cache_works_unpinned_and_says_so_once(
    backend: RocmBackend, caplog: pytest.LogCaptureFixture
) -> None:
    emulated = backend.ops.emulated  # type: ignore[attr-defined]
    emulated.set("refuse_registration", 801)
    with caplog.at_level(logging.WARNING), EncoderCache("2MiB", backend=backend, register="prefer") as cache:
        wanted = tensors(backend)["image-70001"]
        assert cache.put("image", wanted)
        cache.flush()
        found = cache.get("image")
        backend.ops.synchronize()
        assert found is not None
        assert torch.equal(found, wanted)
    said = [r.getMessage() for r in caplog.records if "801" in r.getMessage()]
    assert len(said) == 1
    assert "confidential" in said[0]


def test_c7_where_registration_is_required_a_refusal_ends_the_start(backend: RocmBackend) -> None:
    backend.ops.emulated.set("refuse_registration", 801)  # type: ignore[attr-defined]
    with pytest.raises(RegistrationRefused, match=r"hipErrorNotSupported \(801\)"):
        EncoderCache("2MiB", backend=backend, register="require")


def test_c4_closing_the_cache_unregisters_its_region(backend: RocmBackend) -> None:
    emulated = backend.ops.emulated  # type: ignore[attr-defined]
    cache = EncoderCache("2MiB", backend=backend, register="require")
    assert emulated.get("registrations") >= 1
    cache.close()
    assert emulated.get("registrations") == 0
