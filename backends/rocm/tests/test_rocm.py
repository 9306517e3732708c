"""ecoffload-rocm on the emulated HIP runtime: old (7.2.2) and new (7.15), device memory low and above 2**63.

Emulated, not run on hardware. Letters and digits in names (B4, C7) are entries of the list of faults that users of this
field reported.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
import torch
from ecoffload_rocm import backend as module
from ecoffload_rocm.backend import RocmBackend
from ecoffload_rocm.hip import version_text
from ecoffload_rocm.plugin import SPEC
from emulated_drivers import HIGH, LOW, Emulated, EmulatedDeviceOps, EmulatedStream, load

from ecoffload.backend import Availability, BackendSpec, Completion, Direction
from ecoffload.descriptors import DescriptorPool
from ecoffload.errors import (
    BackendUnavailable,
    ConfigError,
    DescriptorError,
    DeviceLost,
    RegistrationRefused,
    SwapFailed,
)
from ecoffload.registry import GROUP, BackendRecord, _Plugin, _Registry, get_backend
from ecoffload.submission import submit_batch

OLD, NEW = 70_200_002, 71_500_000
BEFORE_BATCHES = ("-DWITHOUT_BATCH",)
BLOCK = 256
COUNT = 24


class Rig:
    """A backend on an emulated runtime of its own, with as many blocks on the host as on the device."""

    def __init__(
        self, *defines: str, index: int = 0, most: int | None = None, count: int = COUNT, **knobs: int
    ) -> None:
        self.emulated: Emulated = load("hip", *defines, **knobs)
        self.ops = EmulatedDeviceOps(self.emulated, index)
        self.backend = RocmBackend(SPEC, index, self.ops, library=self.emulated.path, max_descriptors=most)
        self.pool = DescriptorPool()
        self.count = count
        memory = np.random.default_rng(3).integers(0, 256, count * BLOCK + 4096, dtype=np.uint8)
        skip = -memory.ctypes.data % 4096
        self.host = memory[skip : skip + count * BLOCK]
        self.registration = self.backend.register(self.host.ctypes.data, self.host.nbytes)
        self.tensor = self.ops.empty(count * BLOCK)
        self.base = self.ops.address_of(self.tensor)
        self.stream = self.ops.stream()

    def descriptors(self, direction: Direction = "h2d") -> list[tuple[int, int, int]]:
        host = self.registration.alias
        pairs = [(host + i * BLOCK, self.base + i * BLOCK, BLOCK) for i in range(self.count)]
        return pairs if direction == "h2d" else [(dst, src, size) for src, dst, size in pairs]

    def submit(
        self,
        descriptors: list[tuple[int, int, int]] | None = None,
        direction: Direction = "h2d",
        stream: EmulatedStream | None = None,
    ) -> Completion:
        """Through the core, as users do."""
        batch = self.pool.lease()
        for descriptor in self.descriptors(direction) if descriptors is None else descriptors:
            batch.append(*descriptor)
        return submit_batch(self.backend, batch, direction, stream or self.stream)

    def arrived(self) -> bool:
        return bool(np.array_equal(self.tensor.numpy(), self.host))

    def last_error(self) -> int:
        """What torch would raise at its next call."""
        return int(self.emulated.driver.function("hipPeekAtLastError")())


EVERY: list[Any] = [
    pytest.param(lambda **k: Rig(version=OLD, base=LOW, **k), id="7.2.2-low"),
    pytest.param(lambda **k: Rig(version=OLD, base=HIGH, **k), id="7.2.2-high"),
    pytest.param(lambda **k: Rig(version=NEW, base=LOW, **k), id="7.15-low"),
    pytest.param(lambda **k: Rig(version=NEW, base=HIGH, **k), id="7.15-high"),
    pytest.param(lambda **k: Rig(*BEFORE_BATCHES, version=60_400_000, base=HIGH, **k), id="6.4-high"),
]
Make = Callable[..., Rig]


@pytest.fixture(params=EVERY)
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


@pytest.fixture
def rig(make: Make) -> Rig:
    return make()


def on_a_thread(work: Callable[[], Any]) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as exc:
            failures.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


# --- copies ---


def test_bytes_go_there_and_back(rig: Rig) -> None:
    before = rig.host.copy()
    assert rig.submit().wait(10)
    assert rig.arrived()
    rig.host[:] = 0
    assert rig.submit(direction="d2h").wait(10)
    assert np.array_equal(rig.host, before)


def test_a_swap_is_done_when_its_bytes_are_there_and_not_before(rig: Rig) -> None:
    with rig.emulated.gate():
        completion = rig.submit()
        assert not completion.done()
        assert not completion.wait(0.001)
        assert not rig.arrived()
    assert completion.wait(10)
    assert completion.done()
    assert rig.arrived()


def test_later_work_on_another_stream_waits_for_a_swap(rig: Rig) -> None:
    other = rig.ops.stream()
    with rig.emulated.gate():
        rig.submit().block(other)
        rig.ops.delay(other, 0)
        event = rig.ops.event()
        rig.ops.record(event, other)
        assert not rig.ops.query(event)
    rig.ops.synchronize(event)
    assert rig.arrived()


def test_b1_the_default_stream_is_a_stream_like_any_other(rig: Rig) -> None:
    assert rig.submit(stream=rig.ops.current_stream()).wait(10)
    assert rig.arrived()


@pytest.mark.parametrize(
    ("defines", "version", "path", "reason"),
    [
        ((), NEW, "hipMemcpyBatchAsync", "HIP 7.15.0 takes attributes"),
        ((), 71_300_000, "hipMemcpyBatchAsync", "HIP 7.13.0 takes attributes"),
        ((), 71_299_999, "hipMemcpyBatchAsync without attributes", "refuses attributes"),
        ((), OLD, "hipMemcpyBatchAsync without attributes", "HIP 7.2.2 refuses attributes (taken from 7.13 on)"),
        (BEFORE_BATCHES, 60_400_000, "hipMemcpyAsync", "HIP 6.4.0 has no hipMemcpyBatchAsync (it came with 7.1)"),
    ],
)
def test_the_path_and_its_reason_follow_from_the_version(
    defines: tuple[str, ...], version: int, path: str, reason: str
) -> None:
    rig = Rig(*defines, version=version)
    stats = rig.backend.stats()
    assert stats["path"] == path
    assert reason in stats["reason"]
    assert stats["library"] == rig.emulated.path
    assert rig.submit().wait(10)
    assert rig.arrived()


@pytest.mark.parametrize("make", EVERY[:4])
def test_b6_attributes_are_passed_from_7_13_on_only(make: Make) -> None:
    rig = make()
    rig.submit().wait(10)
    new = rig.emulated.get("version") == NEW
    assert rig.emulated.get("batch_calls") == 1  # nothing was tried and refused
    assert rig.emulated.get("batch_with_attributes") == (1 if new else 0)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was warned of; a test before this one may have left loggers talking of less."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_b6_a_runtime_that_refuses_attributes_against_its_version_is_asked_once_more_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(version=NEW, attributes_refused=1)
    with caplog.at_level(logging.WARNING, "ecoffload.rocm"):
        for calls in (2, 3):  # the retry is made once, not for every batch
            assert rig.submit().wait(10)
            assert rig.emulated.get("batch_calls") == calls
    assert rig.arrived()
    assert len(warnings_in(caplog)) == 1
    assert rig.backend.stats()["path"] == "hipMemcpyBatchAsync without attributes"
    assert "refused attributes (801)" in rig.backend.stats()["reason"]
    assert rig.last_error() == 0


@pytest.mark.parametrize("version", [OLD, NEW])
def test_b6_a_runtime_that_refuses_every_batch_copies_one_by_one_and_says_so_once(
    version: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(version=version, batch_refused=1)
    with caplog.at_level(logging.WARNING, "ecoffload.rocm"):
        for _ in range(3):
            assert rig.submit().wait(10)
    assert rig.arrived()
    assert warnings_in(caplog)[-1].endswith("from here on: hipMemcpyAsync")
    assert len(warnings_in(caplog)) == (1 if version == OLD else 2)
    assert rig.backend.stats()["single_copies"] == 3 * COUNT
    assert "altogether" in rig.backend.stats()["reason"]
    assert rig.last_error() == 0


def test_b7_a_switch_forces_copies_one_by_one_and_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOFFLOAD_PER_COPY", "1")
    rig = Rig(version=NEW)
    assert rig.submit().wait(10)
    assert rig.arrived()
    assert rig.emulated.get("batch_calls") == 0
    assert rig.emulated.get("single_copies") == COUNT
    stats = rig.backend.stats()
    assert (stats["per_copy"], stats["path"], stats["reason"]) == (True, "hipMemcpyAsync", "ECOFFLOAD_PER_COPY is set")


def test_b4_a_batch_of_8193_is_cut_at_8192() -> None:
    rig = Rig(version=NEW)
    src, dst, _ = rig.descriptors()[0]
    assert rig.submit([(src, dst, 1)] * 8193).wait(10)
    assert rig.emulated.get("largest_batch") == 8192
    assert rig.emulated.get("batch_copies") == 8193


@pytest.mark.parametrize("most", [1, 2, COUNT - 1, COUNT, COUNT + 1])
def test_b4_where_batches_are_cut_can_be_configured(make: Make, most: int) -> None:
    rig = make(most=most)
    assert rig.submit().wait(10)
    assert rig.arrived()
    assert rig.emulated.get("largest_batch") <= most
    assert rig.backend.stats()["max_descriptors"] == most


def test_b4_the_environment_says_where_batches_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOFFLOAD_ROCM_MAX_BATCH", "5")
    assert Rig(version=NEW).backend.limits("d2h").max_descriptors == 5


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_a_limit_that_is_no_number_from_one_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ECOFFLOAD_ROCM_MAX_BATCH", text)
    with pytest.raises(ConfigError, match="ECOFFLOAD_ROCM_MAX_BATCH"):
        Rig(version=NEW)


def test_b4_a_submit_past_the_limit_is_refused_before_the_runtime_faults() -> None:
    rig = Rig(version=NEW, most=4)
    batch = rig.pool.lease()
    for descriptor in rig.descriptors():
        batch.append(*descriptor)
    with pytest.raises(DescriptorError, match="takes 4") as caught:
        rig.backend.submit(batch, "h2d", rig.stream)
    assert caught.value.index == 4
    assert rig.emulated.get("batch_calls") == 0


def test_b12_an_empty_batch_is_done_and_zero_sizes_never_reach_the_runtime(rig: Rig) -> None:
    assert rig.submit([]).done()
    src, dst, _ = rig.descriptors()[0]
    assert rig.submit([(src, dst, 0), (src, dst, BLOCK), (src, dst, 0)]).wait(10)
    assert rig.emulated.get("batch_copies") + rig.emulated.get("single_copies") == 1


def test_b12_the_direction_that_the_caller_stated_is_the_kind_of_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOFFLOAD_PER_COPY", "1")
    rig = Rig(version=NEW)
    kinds: list[int] = []
    real = rig.backend._hip.memcpy_async

    def noted(dst: int, src: int, size: int, kind: int, stream: int) -> int:
        kinds.append(kind)
        return int(real(dst, src, size, kind, stream))

    monkeypatch.setattr(rig.backend._hip, "memcpy_async", noted)
    rig.submit(rig.descriptors()[:1]).wait(10)
    rig.submit(rig.descriptors("d2h")[:1], "d2h").wait(10)
    assert kinds == [1, 2]  # hipMemcpyHostToDevice, hipMemcpyDeviceToHost


def test_b12_the_backends_device_is_used_whatever_the_thread_had_and_given_back(make: Make) -> None:
    rig = make(index=1, devices=2)
    current, now = rig.emulated.driver.function("hipGetDevice", ctypes.c_void_p), ctypes.c_int(-1)

    def work() -> None:
        rig.emulated.driver.function("hipSetDevice", ctypes.c_int)(0)
        registration = rig.backend.register(0x7000_0000, 4096)
        rig.backend.unregister(registration)
        rig.backend.pointer_range(rig.base)
        current(ctypes.addressof(now))

    on_a_thread(work)
    assert now.value == 0
    found = rig.backend.pointer_range(rig.base)
    assert found is not None
    assert found.device == 1


def test_any_thread_may_swap(rig: Rig) -> None:
    on_a_thread(lambda: rig.submit().wait(10))
    assert rig.arrived()


# --- failures ---


@pytest.mark.parametrize("bad", [0, 7, COUNT - 1])
@pytest.mark.parametrize("most", [None, 5])
def test_b2_a_refused_descriptor_is_named_with_its_global_index_and_words(
    make: Make, bad: int, most: int | None
) -> None:
    rig = make(most=most)
    descriptors = rig.descriptors()
    descriptors[bad] = (descriptors[bad][0], 0x10, BLOCK)
    with pytest.raises(SwapFailed) as caught:
        rig.submit(descriptors)
    assert caught.value.details == {"code": 1, "index": bad}
    text = str(caught.value)
    assert "hipErrorInvalidValue (1): invalid argument" in text
    assert f"descriptor {bad} (source {descriptors[bad][0]:#x}, destination 0x10, {BLOCK} bytes)" in text
    assert rig.last_error() == 0
    assert rig.pool.leased == 0
    assert rig.submit().wait(10)
    assert rig.arrived()


def test_b2_an_index_of_two_to_the_64_minus_one_means_that_no_one_descriptor_is_to_blame() -> None:
    rig = Rig(version=NEW, fail_submit=999, fail_submit_index=2**64 - 1)
    with pytest.raises(SwapFailed, match=r"a batch of 24 \(which one is not said\)") as caught:
        rig.submit()
    assert caught.value.details == {"code": 999, "index": None}


def test_a_copy_that_fails_late_is_a_lost_device_whoever_asks(rig: Rig) -> None:
    rig.emulated.set("fail_late", 719)
    completion = rig.submit()
    with pytest.raises(DeviceLost, match=r"\(719\)"):
        completion.wait(10)
    with pytest.raises(DeviceLost):
        completion.done()
    with pytest.raises(DeviceLost):
        completion.block(rig.stream)
    assert not rig.arrived()


def test_what_torch_raises_for_an_event_is_a_lost_device_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(version=NEW)
    completion = rig.submit()

    def query(event: object) -> bool:
        raise RuntimeError("HIP error: unspecified launch failure")

    monkeypatch.setattr(rig.ops, "query", query)
    with pytest.raises(DeviceLost, match="unspecified launch failure") as caught:
        completion.done()
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child does nothing but be refused
def test_a_forked_child_is_told_so() -> None:
    rig = Rig(version=NEW)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            batch = rig.pool.lease()
            batch.append(*rig.descriptors()[0])
            rig.backend.submit(batch, "h2d", rig.stream)
        except SwapFailed as exc:
            os.write(write, str(exc).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert "was forked after ROCm device 0 was used" in answer.read()


# --- graph capture ---


def test_a_swap_on_a_stream_under_capture_is_refused_and_the_capture_survives(rig: Rig) -> None:
    with rig.ops.capturing(rig.stream), pytest.raises(SwapFailed, match="is being captured"):
        rig.submit()
    assert rig.pool.leased == 0
    assert rig.submit().wait(10)
    assert rig.arrived()


def test_swaps_queries_and_registrations_leave_another_threads_capture_intact(rig: Rig) -> None:
    memory = np.zeros(8192, np.uint8)
    captured = rig.ops.stream()

    def work() -> None:
        completion = rig.submit()
        while not completion.done():
            continue
        rig.backend.pointer_range(rig.base)
        rig.backend.unregister(rig.backend.register(memory.ctypes.data, 4096))

    with rig.ops.capturing(captured):
        on_a_thread(work)
    assert rig.emulated.get("invalidated") == 0
    assert rig.arrived()


# --- host memory ---


def test_the_alias_is_the_devices_address_and_copies_take_either(make: Make) -> None:
    rig = make(alias_offset=1 << 46)
    address = rig.host.ctypes.data
    assert rig.registration.alias == address + (1 << 46)
    assert rig.submit().wait(10)
    assert rig.arrived()
    rig.host[:] = 1
    assert rig.submit([(address, rig.base, rig.host.nbytes)]).wait(10)
    assert rig.arrived()


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 4096), (0, 1), (-4096, 4097), (COUNT * BLOCK - 1, 4096)])
def test_c4_registering_what_is_registered_is_our_error_although_hip_takes_it(
    rig: Rig, offset: int, nbytes: int
) -> None:
    address = rig.host.ctypes.data + offset
    with pytest.raises(RegistrationRefused, match="registered already") as caught:
        rig.backend.register(address, nbytes)
    assert caught.value.details == {"address": address, "nbytes": nbytes, "code": None}
    assert rig.emulated.get("registrations") == 1


def test_c4_a_range_can_be_registered_again_once_it_was_unregistered(rig: Rig) -> None:
    rig.backend.unregister(rig.registration)
    with pytest.raises(RegistrationRefused, match="are not registered"):
        rig.backend.unregister(rig.registration)
    rig.registration = rig.backend.register(rig.host.ctypes.data, rig.host.nbytes)
    assert rig.submit().wait(10)
    assert rig.arrived()


def test_c4_closing_unregisters_what_is_left_after_the_work_in_flight_and_may_be_repeated(rig: Rig) -> None:
    completion = rig.submit()
    rig.backend.close()
    rig.backend.close()
    assert completion.done()
    assert rig.arrived()
    assert rig.emulated.get("registrations") == 0


def test_c7_registration_that_is_not_supported_says_so_and_swaps_still_work(rig: Rig) -> None:
    rig.backend.unregister(rig.registration)
    rig.emulated.set("refuse_registration", 801)
    with pytest.raises(RegistrationRefused, match=r"hipErrorNotSupported \(801\)") as caught:
        rig.backend.register(rig.host.ctypes.data, rig.host.nbytes)
    assert caught.value.details == {"address": rig.host.ctypes.data, "nbytes": rig.host.nbytes, "code": 801}
    assert "confidential virtual machines" in str(caught.value)
    assert rig.last_error() == 0
    assert rig.backend.stats()["registered_bytes"] == 0
    pageable = [(rig.host.ctypes.data, rig.base, rig.host.nbytes)]
    assert rig.submit(pageable).wait(10)
    assert rig.arrived()


def test_c7_a_memlock_limit_below_the_range_is_named(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    rig.emulated.set("refuse_registration", 2)
    with pytest.raises(RegistrationRefused, match=r"memlock limit is 1048576 bytes.*hipErrorOutOfMemory \(2\)"):
        rig.backend.register(0x7000_0000, 8 << 20)


def test_a_range_that_has_no_device_address_is_not_left_registered(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.zeros(8192, np.uint8)
    monkeypatch.setattr(rig.backend._hip, "host_alias", lambda address: (1, 0))
    with pytest.raises(RegistrationRefused, match="no device address"):
        rig.backend.register(memory.ctypes.data, 4096)
    assert rig.emulated.get("registrations") == 1


@pytest.mark.parametrize("version", [50_200_003, OLD, NEW])
@pytest.mark.parametrize("base", [LOW, HIGH])
def test_the_runtime_knows_what_an_address_is_in_both_generations_of_its_memory_types(version: int, base: int) -> None:
    rig = Rig(version=version, base=base)
    host, plain = rig.host.ctypes.data, np.zeros(64, np.uint8)
    for at in (0, 1, COUNT * BLOCK - 1):
        assert rig.backend.pointer_range(rig.base + at) == (rig.base, COUNT * BLOCK, "device", 0)
        assert rig.backend.pointer_range(host + at) == (host, COUNT * BLOCK, "host", 0)
    assert rig.backend.pointer_range(plain.ctypes.data) is None
    assert rig.backend.pointer_range(rig.base + COUNT * BLOCK) is None
    assert rig.last_error() == 0


# --- can it run here? ---


@pytest.fixture
def torch_for_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.2.26015")


def test_a_torch_for_something_else_is_the_reason_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    answer = RocmBackend.availability()
    assert not answer
    assert "is built for CUDA 13.0, not for ROCm; install the ROCm build" in answer.reason
    with pytest.raises(BackendUnavailable, match="not for ROCm"):
        RocmBackend(SPEC)


@pytest.mark.usefixtures("torch_for_rocm")
def test_a_missing_device_file_is_the_reason_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    answer = RocmBackend.availability()
    assert not answer
    assert "/dev/kfd is not there" in answer.reason
    assert "--device /dev/kfd" in answer.reason


@pytest.mark.usefixtures("torch_for_rocm")
def test_with_torch_device_file_and_library_it_is_available_and_names_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulated = load("hip", version=NEW)
    monkeypatch.setattr(module, "_no_device_file", lambda: "")
    monkeypatch.setenv("ECOFFLOAD_ROCM_LIBRARY", emulated.path)
    assert RocmBackend.availability() == (True, f"HIP runtime {emulated.path}")
    assert RocmBackend.availability(probe=True).ok


@pytest.mark.usefixtures("torch_for_rocm")
def test_a_library_that_cannot_be_opened_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_no_device_file", lambda: "")
    monkeypatch.setenv("ECOFFLOAD_ROCM_LIBRARY", "/nowhere/libamdhip64.so")
    answer = RocmBackend.availability()
    assert not answer
    assert "/nowhere/libamdhip64.so" in answer.reason


def test_a_probe_asks_the_runtime_whatever_else_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = load("hip", version=50_200_003, devices=0)
    monkeypatch.setenv("ECOFFLOAD_ROCM_LIBRARY", emulated.path)
    reason = RocmBackend.availability(probe=True).reason
    assert "not for ROCm" in reason
    assert f"HIP 5.2.3 ({emulated.path}) finds no device: hipErrorNoDevice (100)" in reason


def test_a_runtime_without_a_device_is_unavailable() -> None:
    with pytest.raises(BackendUnavailable, match=r"finds no device: hipErrorNoDevice \(100\).*groups render and video"):
        Rig(devices=0)


def test_an_index_past_the_devices_is_unavailable() -> None:
    with pytest.raises(BackendUnavailable, match=r"sees 2 devices, and none has index 2; check HIP_VISIBLE_DEVICES"):
        Rig(devices=2, index=2)


@pytest.mark.parametrize(("number", "text"), [(70_200_002, "7.2.2"), (71_500_000, "7.15.0"), (50_221_151, "5.2.21151")])
def test_versions_are_read_as_hip_writes_them(number: int, text: str) -> None:
    assert version_text(number) == text


# --- beside ecoffload-cuda, whose devices torch calls "cuda" as well ---


def registry_of(monkeypatch: pytest.MonkeyPatch, **available: Availability) -> _Registry:
    """A registry that knows backends of these names, all for devices of type "cuda"."""
    registry = _Registry()
    registry.plugins = {}
    for name, answer in available.items():
        spec = BackendSpec.model_validate({**SPEC.model_dump(), "name": name})
        plugin = _Plugin(EntryPoint(name, f"{name}.plugin", GROUP), testing=False)
        plugin.record = BackendRecord(name, name, "1", "ok" if answer else "unavailable", answer.reason, spec=spec)
        registry.plugins[name] = plugin
    monkeypatch.setattr("ecoffload.registry._registry", registry)
    monkeypatch.delenv("ECOFFLOAD_BACKEND", raising=False)
    return registry


@pytest.mark.parametrize("chosen", ["cuda", "rocm"])
def test_of_two_backends_for_the_device_type_the_one_that_can_run_is_chosen(
    monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    states = {name: Availability(name == chosen, "torch is built for the other") for name in ("cuda", "rocm")}
    registry = registry_of(monkeypatch, **states)
    rig = Rig(version=NEW)
    registry.instances[chosen, 0, os.getpid()] = rig.backend
    assert get_backend(device="cuda:0") is rig.backend


def test_where_neither_can_run_both_reasons_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    registry_of(monkeypatch, cuda=Availability(False, "no libcuda"), rocm=Availability(False, "no /dev/kfd"))
    with pytest.raises(BackendUnavailable, match=r"cuda: no libcuda; rocm: no /dev/kfd"):
        get_backend(device="cuda:0")
