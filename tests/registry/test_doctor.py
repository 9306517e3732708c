"""``doctor`` and ``probe``: each fault of an installation is found, judged, and comes with a remedy."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from ecoffload import doctor
from ecoffload.doctor import Check, run_checks
from ecoffload.hostmem import Headroom
from ecoffload.probe import probe

Install = Callable[..., Path]


def found(name: str) -> list[Check]:
    return [check for check in run_checks() if check.name == name]


def test_every_finding_that_is_not_well_has_a_remedy_and_every_one_a_detail() -> None:
    checks = run_checks()
    assert {"torch", "numpy", "metadata", "backend cpu", "memlock", "shm", "memory limit", "cache directory"} <= {
        check.name for check in checks
    }
    assert all(check.detail for check in checks)
    assert all(check.remedy for check in checks if check.status != "ok")


@pytest.mark.parametrize(
    ("version", "status"), [("2.9.1", "fail"), ("2.10.0", "ok"), ("2.13.0+cpu", "ok"), ("3.0", "ok")]
)
def test_a_torch_that_is_too_old_fails(version: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: version if name == "torch" else "2.1")
    (check,) = found("torch")
    assert check.status == status


def test_metadata_that_are_there_twice_are_found(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = tmp_path / "again"
    for root in (tmp_path, again):
        info = root / "ecoffload_acme-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ecoffload_acme\nVersion: 1.0\n")
        monkeypatch.syspath_prepend(root)
    (check,) = found("metadata")
    assert check.status == "warn"
    assert "ecoffload-acme is installed 2 times" in check.detail
    assert "pip uninstall ecoffload-acme" in check.remedy


def test_stale_metadata_of_our_own_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "__version__", "99.0")
    (check,) = found("metadata")
    assert check.status == "warn"
    assert "the code is 99.0" in check.detail


def test_a_broken_plugin_fails_and_an_absent_device_does_not(install: Install, healthy: Install) -> None:
    install("broken", "raise ImportError('no driver bindings')")
    healthy("absent", available="Availability(False, 'no /dev/acme0')")
    (broken,), (absent,) = found("backend broken"), found("backend absent")
    assert (broken.status, absent.status) == ("fail", "ok")
    assert "no driver bindings" in broken.detail
    assert "dist-broken" in broken.remedy
    assert "no /dev/acme0" in absent.detail


def test_a_broken_plugin_fails_in_strict_mode_too(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("broken", "raise ImportError('no driver bindings')")
    monkeypatch.setenv("ECOFFLOAD_STRICT", "1")
    (check,) = found("backends")
    assert check.status == "fail"
    assert "no driver bindings" in check.detail


def test_two_copies_of_a_driver_library_fail_and_both_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = {"libcuda": ["/a/libcuda.so.1"], "libamdhip64": ["/torch/libamdhip64.so", "/opt/rocm/libamdhip64.so.7"]}
    monkeypatch.setattr(doctor, "loaded_libraries", lambda stem: copies.get(stem, []))
    by_status = {check.status: check for check in found("driver libraries")}
    assert "/torch/libamdhip64.so" in by_status["fail"].detail
    assert "/opt/rocm/libamdhip64.so.7" in by_status["fail"].detail
    assert "/a/libcuda.so.1" in by_status["ok"].detail


REGISTERS = "host_memory='register'"


@pytest.mark.parametrize(
    ("limit", "registers", "status"),
    [
        (8 << 20, True, "warn"),
        (8 << 20, False, "ok"),
        (128 << 30, True, "ok"),
        (resource.RLIM_INFINITY, True, "ok"),
    ],
)
def test_a_low_memlock_matters_where_a_backend_registers(
    limit: int, registers: bool, status: str, healthy: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy("acme")
    if registers:
        path = tmp_path / "fake_acme.py"
        declared = "capabilities=Capabilities(host_memory='register'), factory="
        path.write_text(path.read_text().replace("factory=", declared))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    (check,) = found("memlock")
    assert check.status == status


def test_a_directory_that_is_no_tmpfs_is_no_place_for_a_region(tmp_path: Path) -> None:
    if os.statvfs(tmp_path).f_fsid == os.statvfs("/dev/shm").f_fsid:
        pytest.skip("temporary files lie in /dev/shm here")
    (check,) = doctor._shm(str(tmp_path))
    assert (check.name, check.status) == ("shm", "fail")


def test_a_missing_dev_shm_fails(tmp_path: Path) -> None:
    (check,) = doctor._shm(str(tmp_path / "none"))
    assert check.status == "fail"
    assert "--shm-size" in check.remedy


@pytest.mark.parametrize(("left", "status"), [(64 << 20, "warn"), (64 << 30, "ok")])
def test_a_cgroup_with_little_left_is_a_warning(left: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cgroup_headroom", lambda: Headroom(left, "/sys/fs/cgroup/memory.max"))
    (check,) = found("memory limit")
    assert check.status == status
    assert "/sys/fs/cgroup/memory.max" in check.detail


def test_a_cache_directory_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ECOFFLOAD_CACHE_DIR", str(tmp_path / "file" / "cache"))
    (check,) = found("cache directory")
    assert check.status == "warn"
    assert "ECOFFLOAD_CACHE_DIR" in check.remedy
    monkeypatch.setenv("ECOFFLOAD_CACHE_DIR", str(tmp_path / "not" / "yet" / "there"))
    (check,) = found("cache directory")
    assert check.status == "ok"
    assert not (tmp_path / "not").exists()


def test_a_check_that_breaks_is_a_finding_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise PermissionError("/proc is hidden")

    monkeypatch.setattr(doctor, "cgroup_headroom", broken)
    (check,) = found("cgroup")
    assert check.status == "warn"
    assert "/proc is hidden" in check.detail
    assert found("cache directory")


# --- probe


@pytest.fixture
def visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_a_backend_that_starts_is_available_and_says_what_it_saw() -> None:
    answer = probe("cpu")
    assert answer.ok
    assert "device cpu answers" in answer.reason


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        ("raise OSError('bus error')", "bus error"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("import os; os._exit(3)", "code 3"),
    ],
    ids=["raises", "crashes", "exits"],
)
@pytest.mark.usefixtures("visible")
def test_a_backend_that_does_not_start_is_a_reason_and_not_a_crash(
    start: str, reason: str, healthy: Install, tmp_path: Path
) -> None:
    healthy("acme")
    path = tmp_path / "fake_acme.py"
    path.write_text(path.read_text().replace("super().__init__(*args)", start))
    answer = probe("acme")
    assert not answer.ok
    assert reason in answer.reason


@pytest.mark.usefixtures("visible")
def test_a_device_that_hangs_is_given_up_in_time(healthy: Install, tmp_path: Path) -> None:
    healthy("acme")
    path = tmp_path / "fake_acme.py"
    path.write_text(path.read_text().replace("super().__init__(*args)", "import time; time.sleep(600)"))
    answer = probe("acme", timeout=0.5)
    assert not answer.ok
    assert "0.5 s" in answer.reason
