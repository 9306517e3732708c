"""ecoffload-rocm on a real HIP runtime without a device: Debian's libamdhip64-5 (5.2, before batched copies).

Run by ``tests/rocm-debian.sh``, not with the other tests: it needs the package installed on the system. Nothing is
emulated here; no device is there either, so no byte is copied.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ecoffload_rocm.backend import RocmBackend
from ecoffload_rocm.hip import Hip, version_text
from ecoffload_rocm.plugin import SPEC

from ecoffload import list_backends
from ecoffload.cpu_ops import CpuOps
from ecoffload.drivers import HIP, Driver, loaded_libraries
from ecoffload.errors import BackendUnavailable

NO_DEVICE = 100


@pytest.fixture(scope="module")
def hip() -> Hip:
    return Hip.open()


def test_the_systems_library_is_found_by_its_soname(hip: Hip) -> None:
    (mapped,) = loaded_libraries("libamdhip64")
    assert os.path.basename(mapped).startswith("libamdhip64.so.5.2.")
    again = Driver.open(HIP)
    assert again.path == hip.driver.path == mapped
    assert again.library._handle == hip.driver.library._handle


def test_its_version_is_read(hip: Hip) -> None:
    assert version_text(hip.version()).startswith("5.2.")


def test_it_has_no_batched_copy_and_that_is_the_reason(hip: Hip) -> None:
    way = hip.way(hip.version())
    assert way.call is None
    assert "has no hipMemcpyBatchAsync (it came with 7.1)" in way.why


def test_its_errors_are_worded_by_itself(hip: Hip) -> None:
    assert hip.driver.error_text(NO_DEVICE) == "hipErrorNoDevice (100)"


def test_a_probe_says_that_it_is_there_and_finds_no_device() -> None:
    answer = RocmBackend.availability(probe=True)
    assert not answer
    assert "HIP 5.2." in answer.reason
    assert "finds no device: hipErrorNoDevice (100)" in answer.reason


def test_a_backend_on_it_is_unavailable_with_that_reason(hip: Hip) -> None:
    with pytest.raises(BackendUnavailable, match=r"HIP 5\.2\.\d+ .*finds no device: hipErrorNoDevice \(100\)"):
        RocmBackend(SPEC, 0, CpuOps(), library=hip.driver.path)


def test_a_second_copy_beside_it_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "libamdhip64.so.5"
    copy.write_bytes(Path(loaded_libraries("libamdhip64")[0]).read_bytes())
    script = (
        "import ctypes\n"
        "from ecoffload.drivers import HIP, Driver\n"
        "from ecoffload.errors import BackendUnavailable\n"
        f"ctypes.CDLL('libamdhip64.so.5'), ctypes.CDLL({str(copy)!r})\n"
        "try:\n"
        "    Driver.open(HIP)\n"
        "except BackendUnavailable as exc:\n"
        "    print(exc.reason)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "holds 2 copies of libamdhip64" in run.stdout


def test_listing_shows_the_backend_as_unavailable_with_what_to_do() -> None:
    record = next(r for r in list_backends() if r.name == "rocm")
    assert record.status == "unavailable"
    assert "not for ROCm; install the ROCm build" in record.reason


def test_a_query_of_nothing_is_answered_not_crashed(hip: Hip) -> None:
    assert hip.pointer_range(ctypes.addressof(ctypes.c_int()), hip.version()) is None
