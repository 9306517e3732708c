"""The emulated libraries answer as the real ones were measured (CUDA) or read (HIP) to answer."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from emulated_drivers import HIGH, LOW, STRADDLE, Emulated, EmulatedDeviceOps, Kind, load

from ecoffload.drivers import ORDER_DURING_CALL, SIZE_MAX, BatchCall, MemcpyAttributes
from ecoffload.errors import AddressError, DeviceLost, SwapFailed

BLOCK = 512
COUNT = 8


class Rig:
    """One emulated device with a block table on each side, and the batch call on raw addresses."""

    def __init__(self, kind: Kind, **knobs: int) -> None:
        self.emulated = load(kind, **knobs)
        self.ops = EmulatedDeviceOps(self.emulated)
        driver = self.emulated.driver
        if kind == "cuda":
            entry = driver.resolve("cuMemcpyBatchAsync", 12080)
        else:
            entry = ctypes.cast(driver.library.hipMemcpyBatchAsync, ctypes.c_void_p).value
        if entry is None:
            raise LookupError("no batch call")
        self.entry = entry
        attributes = kind == "cuda" or self.emulated.get("version") >= 71300000
        self.batch = BatchCall(entry, attributes=attributes)
        register = "cuMemHostRegister_v2" if kind == "cuda" else "hipHostRegister"
        self.register = driver.function(register, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint)
        self.tensor = self.ops.empty(COUNT * BLOCK)
        self.host = np.random.default_rng(7).integers(0, 256, COUNT * BLOCK, dtype=np.uint8)
        self.register(self.host.ctypes.data, self.host.nbytes, 1)
        self.stream = self.ops.stream()
        step = np.arange(COUNT, dtype=np.uint64) * np.uint64(BLOCK)
        self.device_words = np.uint64(self.ops.address_of(self.tensor)) + step
        self.host_words = np.uint64(self.host.ctypes.data) + step
        self.sizes = np.full(COUNT, BLOCK, np.uint64)

    def load(self, stream: int | None = None, count: int = COUNT) -> tuple[int, int | None]:
        handle = self.stream.cuda_stream if stream is None else stream
        return self.batch(
            self.device_words.ctypes.data, self.host_words.ctypes.data, self.sizes.ctypes.data, count, handle
        )

    def raw(self, number: int, attributes: MemcpyAttributes | None, fail: ctypes.c_size_t | None) -> int:
        """The call itself, with attributes and failIdx as given."""
        first = ctypes.c_size_t(0)
        words = (self.device_words, self.host_words, self.sizes)
        function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 9)(self.entry)
        code: int = function(
            *(w.ctypes.data for w in words),
            COUNT,
            0 if attributes is None else ctypes.addressof(attributes),
            ctypes.addressof(first),
            number,
            0 if fail is None else ctypes.addressof(fail),
            self.stream.cuda_stream,
        )
        return code

    def arrived(self) -> bool:
        return bool((self.tensor.numpy() == self.host).all())


OLD, NEW = 70200002, 71500000
EVERY = [("cuda", 13000), ("hip", OLD), ("hip", NEW)]


@pytest.fixture(params=EVERY, ids=["cuda-13.0", "hip-7.2.2", "hip-7.15"])
def rig(request: pytest.FixtureRequest) -> Rig:
    kind, version = request.param
    return Rig(kind, version=version)


@pytest.fixture
def cuda() -> Rig:
    return Rig("cuda")


@pytest.mark.parametrize("base", [LOW, HIGH, STRADDLE])
@pytest.mark.parametrize(("kind", "version"), EVERY)
def test_a_batch_carries_every_byte_wherever_device_memory_lies(kind: Kind, version: int, base: int) -> None:
    rig = Rig(kind, version=version, base=base)
    assert rig.device_words[0] == base
    assert rig.load() == (0, None)
    rig.ops.synchronize(rig.stream)
    assert rig.arrived()


def test_a_copy_is_late_and_the_arrays_are_consumed_at_the_call(rig: Rig) -> None:
    with rig.emulated.gate():
        assert rig.load() == (0, None)
        for words in (rig.device_words, rig.host_words, rig.sizes):
            words[:] = 0xDEAD
        event = rig.ops.event()
        rig.ops.record(event, rig.stream)
        assert not rig.ops.query(event)
        assert not rig.arrived()
    rig.ops.synchronize(event)
    assert rig.arrived()


def test_the_source_is_read_when_the_copy_runs(rig: Rig) -> None:
    with rig.emulated.gate():
        rig.load()
        rig.host[:] = 7
    rig.ops.synchronize(rig.stream)
    assert (rig.tensor == 7).all()


def test_a_real_address_of_device_memory_is_not_the_devices_name_for_it(rig: Rig) -> None:
    assert rig.tensor.data_ptr() != rig.ops.address_of(rig.tensor)
    with pytest.raises(AddressError, match="does not lie on"):
        rig.ops.address_of(rig.tensor.clone())


def test_work_on_one_stream_waits_for_an_event_of_another(rig: Rig) -> None:
    other, event = rig.ops.stream(), rig.ops.event()
    with rig.emulated.gate():
        rig.load()
        rig.ops.record(event, rig.stream)
        rig.ops.wait(other, event)
        behind = rig.ops.event()
        rig.ops.delay(other, 0)
        rig.ops.record(behind, other)
        assert not rig.ops.query(behind)
    rig.ops.synchronize(behind)
    assert rig.arrived()


def test_freed_memory_is_not_reused_while_a_copy_may_still_write_it(rig: Rig) -> None:
    with rig.emulated.gate():
        rig.load()
        address = rig.ops.address_of(rig.tensor)
        del rig.tensor
        assert rig.ops.address_of(rig.ops.empty(COUNT * BLOCK)) != address
    rig.ops.synchronize()
    assert rig.ops.address_of(rig.ops.empty(COUNT * BLOCK)) == address


def test_a_failure_of_a_running_copy_is_told_by_the_next_call_and_every_one_after(rig: Rig) -> None:
    rig.emulated.set("fail_late", 719)
    assert rig.load() == (0, None)
    with pytest.raises(DeviceLost, match="719"):
        rig.ops.synchronize(rig.stream)
    with pytest.raises(DeviceLost, match="719"):
        rig.ops.event()
    assert not rig.arrived()


def test_a_submit_fails_when_told_to_with_the_index_it_was_told(rig: Rig) -> None:
    rig.emulated.set("fail_submit_index", 5)
    rig.emulated.set("fail_submit", 1)
    assert rig.load() == (1, 5)
    assert rig.load() == (0, None)


def test_registering_past_the_refusal_gives_its_code(rig: Rig) -> None:
    rig.emulated.set("registrations_before_refusal", 1)
    rig.emulated.set("refuse_registration", 801)
    memory = np.zeros(8192, np.uint8)
    assert rig.register(memory.ctypes.data, 4096, 1) == 0
    assert rig.register(memory.ctypes.data + 4096, 4096, 1) == 801


def test_a_second_registration_is_an_error_for_cuda_and_passes_in_silence_for_hip(rig: Rig) -> None:
    again = rig.register(rig.host.ctypes.data, rig.host.nbytes, 1)
    assert again == (712 if rig.emulated.kind == "cuda" else 0)


def test_a_copy_across_a_registration_edge_is_refused(rig: Rig) -> None:
    memory = np.zeros(3 * 4096, np.uint8)
    start = -(-memory.ctypes.data // 4096) * 4096
    rig.register(start, 4096, 1)
    rig.register(start + 4096, 4096, 1)
    rig.host_words[2] = start + 4096 - BLOCK // 2
    assert rig.load() == (1, None if rig.emulated.kind == "cuda" else 2)


def test_a_copy_past_the_end_of_an_allocation_is_refused_by_index(rig: Rig) -> None:
    rig.sizes[7] = BLOCK + 1
    assert rig.load() == (1, 7)


# --- CUDA, as measured on an H200 with driver 580 ---


@pytest.mark.parametrize(("version", "entry"), [(12080, "9"), (12090, "9"), (13000, "8"), (12070, None), (99000, None)])
def test_the_batch_entry_depends_on_the_version_asked_for(cuda: Rig, version: int, entry: str | None) -> None:
    driver = cuda.emulated.driver
    exported = {
        "9": ctypes.cast(driver.library.cuMemcpyBatchAsync, ctypes.c_void_p).value,
        "8": ctypes.cast(driver.library.cuMemcpyBatchAsync_v2, ctypes.c_void_p).value,
        None: None,
    }
    assert driver.resolve("cuMemcpyBatchAsync", version) == exported[entry]


def test_a_driver_older_than_the_version_asked_for_answers_with_an_error() -> None:
    old = load("cuda", version=12040)
    assert old.driver.resolve("cuMemcpyBatchAsync", 12080) is None


@pytest.mark.parametrize("stream", [0, 1])
def test_the_default_stream_is_refused_by_either_name(cuda: Rig, stream: int) -> None:
    assert cuda.load(stream) == (1, None)


def test_the_per_thread_stream_works(cuda: Rig) -> None:
    assert cuda.load(2) == (0, None)


def test_no_copies_or_no_attributes_or_no_order_are_refused_without_an_index(cuda: Rig) -> None:
    fail = ctypes.c_size_t()
    assert cuda.load(count=0) == (1, None)
    for number, attributes in ((0, MemcpyAttributes(srcAccessOrder=1)), (1, MemcpyAttributes(srcAccessOrder=0))):
        fail.value = 0
        assert cuda.raw(number, attributes, fail) == 1
        assert fail.value == SIZE_MAX


def test_fail_index_may_be_left_out(cuda: Rig) -> None:
    assert cuda.raw(1, MemcpyAttributes(srcAccessOrder=1), None) == 0


@pytest.mark.parametrize("column", ["sizes", "device_words", "host_words"])
def test_a_zero_in_any_column_is_refused_by_index(cuda: Rig, column: str) -> None:
    getattr(cuda, column)[2] = 0
    assert cuda.load() == (1, 2)


def test_sources_read_during_the_call_make_it_wait(cuda: Rig) -> None:
    cuda.batch = BatchCall(cuda.entry, order=ORDER_DURING_CALL)
    cuda.load()
    assert cuda.arrived()


def test_plain_host_memory_is_copied_before_the_call_returns(cuda: Rig) -> None:
    plain = np.full(COUNT * BLOCK, 3, np.uint8)
    cuda.host_words += np.uint64(plain.ctypes.data) - np.uint64(cuda.host.ctypes.data)
    assert cuda.load() == (0, None)
    assert (cuda.tensor == 3).all()


def test_an_address_of_nobodys_ends_the_process() -> None:
    script = "from test_emulated_drivers import Rig\nrig = Rig('cuda')\nrig.device_words[2] = 0x10\nrig.load()\n"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert run.returncode == -6
    assert "an address of nobody's: copy 0x2" in run.stderr


def test_a_thread_without_a_current_context_is_told_so(cuda: Rig) -> None:
    answers = []
    thread = threading.Thread(target=lambda: answers.append(cuda.load()))
    thread.start()
    thread.join()
    assert answers == [(201, None)]


def test_a_query_on_another_thread_ruins_a_capture_unless_it_is_relaxed(cuda: Rig) -> None:
    event, driver = cuda.ops.event(), cuda.emulated.driver

    def query(relaxed: bool) -> None:
        if relaxed:
            with driver.relaxed_capture():
                assert cuda.ops.query(event)
        else:
            with pytest.raises(SwapFailed, match="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
                cuda.ops.query(event)

    def on_a_thread(relaxed: bool) -> None:
        failures: list[BaseException] = []

        def run() -> None:
            try:
                query(relaxed)
            except BaseException as exc:
                failures.append(exc)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert failures == []

    with cuda.ops.capturing(cuda.stream):
        on_a_thread(relaxed=True)
    with pytest.raises(SwapFailed, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"), cuda.ops.capturing(cuda.stream):
        on_a_thread(relaxed=False)


# --- HIP, as read in its sources ---


def test_the_old_runtime_refuses_attributes_before_anything_is_enqueued() -> None:
    rig = Rig("hip", version=OLD)
    fail = ctypes.c_size_t()
    assert rig.raw(1, MemcpyAttributes(srcAccessOrder=1), fail) == 801
    rig.ops.synchronize()
    assert rig.emulated.get("finished_copies") == 0


@pytest.mark.parametrize("version", [OLD, NEW])
def test_hip_needs_a_place_for_the_index(version: int) -> None:
    rig = Rig("hip", version=version)
    assert rig.raw(0, None, None) == 1


@pytest.mark.parametrize(("version", "queued"), [(OLD, 2), (NEW, 0)])
def test_the_old_runtime_leaves_what_came_before_the_bad_copy_queued(version: int, queued: int) -> None:
    rig = Rig("hip", version=version)
    rig.device_words[2] = 0x10
    assert rig.load() == (1, 2)
    rig.ops.synchronize()
    assert rig.emulated.get("finished_copies") == queued


def test_the_new_runtime_faults_above_8192_copies() -> None:
    script = (
        "import numpy as np\n"
        "from test_emulated_drivers import Rig, NEW\n"
        "rig = Rig('hip', version=NEW)\n"
        "rig.sizes = np.ones(8193, np.uint64)\n"
        "rig.device_words = np.full(8193, rig.device_words[0])\n"
        "rig.host_words = np.full(8193, rig.host_words[0])\n"
        "assert rig.load(count=8192) == (0, None)\n"
        "rig.load(count=8193)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert run.returncode == -6
    assert "Memory access fault" in run.stderr


@pytest.mark.parametrize(("version", "types"), [(50200003, (1, 0, None)), (NEW, (2, 1, 0))])
def test_memory_types_are_numbered_by_generation(version: int, types: tuple[int, int, int | None]) -> None:
    rig = Rig("hip", version=version)
    query = rig.emulated.driver.function("hipPointerGetAttributes", ctypes.c_void_p, ctypes.c_size_t)
    plain = np.zeros(1, np.uint8)
    for address, expected in zip((rig.device_words[0], rig.host_words[0], plain.ctypes.data), types, strict=True):
        attributes = (ctypes.c_int * 8)()
        code = query(attributes, int(address))
        assert (attributes[0] if code == 0 else None) == expected


def test_a_runtime_before_7_1_has_no_batch_call() -> None:
    old: Emulated = load("hip", "-DWITHOUT_BATCH", version=60400000)
    assert old.driver.find("hipMemcpyBatchAsync") is None
    assert old.driver.find("hipMemcpyAsync") is not None


def test_the_runtime_remembers_a_threads_last_error() -> None:
    rig = Rig("hip", version=NEW)
    last = rig.emulated.driver.function("hipGetLastError")
    rig.load(count=0)
    assert last() == 1
    assert last() == 0
