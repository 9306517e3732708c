"""Tuning files, the cache of kernels, and what availability says: no driver needed."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from ecoffload_cuda import kernel
from ecoffload_cuda.backend import CudaBackend
from ecoffload_cuda.plugin import SPEC, ecoffload_register_backend
from ecoffload_cuda.tuning import DEFAULTS, Tuning, Way, load_tuning, store_tuning, tuning_file

from ecoffload.backend import D2H, H2D


class Device:
    name = "NVIDIA H200"


DEVICE: Device = Device()
STORED = Tuning(Way(((65536, 0.5),), ((0, 2),)), Way(((1 << 20, 1.0),), ((0, 3), (3072, 2))), 8, "a test")


def test_without_a_file_the_defaults_hold() -> None:
    assert load_tuning(DEVICE) is DEFAULTS  # type: ignore[arg-type]


def test_what_was_stored_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOFFLOAD_CACHE_DIR", str(tmp_path))
    path = store_tuning(DEVICE.name, STORED, {})
    found = load_tuning(DEVICE)  # type: ignore[arg-type]
    assert (found.h2d, found.d2h, found.kernel_min) == (STORED.h2d, STORED.d2h, 8)
    assert found.source == str(path)


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"version": 99}', json.dumps({"version": 1, "h2d": {"classes": [[9, 1], [1, 1]], "sms": [[0, 1]]}})],
)
def test_a_file_that_cannot_be_used_is_said_and_left_alone(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ECOFFLOAD_CACHE_DIR", str(tmp_path))
    path = tuning_file(DEVICE.name)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert load_tuning(DEVICE) is DEFAULTS  # type: ignore[arg-type]
    assert "ecoffload tune" in caplog.text
    assert path.read_text() == text


def test_the_number_of_multiprocessors_can_be_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOFFLOAD_CUDA_SMS", "1")
    tuning = load_tuning(DEVICE)  # type: ignore[arg-type]
    assert {tuning.way(way).blocks(size) for way in (H2D, D2H) for size in (1, 4096, 1 << 20)} == {1}
    assert "at most 1" in tuning.source


def test_a_bound_that_is_no_number_is_said_and_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ECOFFLOAD_CUDA_SMS", "none")
    with caplog.at_level(logging.WARNING):
        assert load_tuning(DEVICE) is DEFAULTS  # type: ignore[arg-type]
    assert "ECOFFLOAD_CUDA_SMS" in caplog.text


def test_a_class_begins_at_its_edge() -> None:
    way = Way(((100, 0.25), (200, 1.0)), ((0, 3), (50, 2)))
    assert [way.shares[way.klass(n)] for n in (1, 99, 100, 199, 200, 10**9)] == [0.0, 0.0, 0.25, 0.25, 1.0, 1.0]
    assert [way.blocks(n) for n in (1, 49.9, 50, 10**6)] == [3, 3, 2, 2]


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder should be")
    monkeypatch.setattr(kernel, "_said_unwritable", False)
    with caplog.at_level(logging.WARNING):
        kernel._store(blocked / "cuda" / "a.cubin", b"code")
        kernel._store(blocked / "cuda" / "b.cubin", b"code")
    assert caplog.text.count("ECOFFLOAD_CACHE_DIR") == 1


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("disk full")

    kernel.write_whole(tmp_path / "deep" / "a", b"first")
    monkeypatch.setattr(kernel.os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        kernel.write_whole(tmp_path / "deep" / "a", b"second")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["a"]
    assert (tmp_path / "deep" / "a").read_bytes() == b"first"


def test_bulk_shapes_fit_a_block_of_a_hopper_and_of_a_smaller_device() -> None:
    class Fits:
        compute = (9, 0)
        shared_memory = 232448

    class Small(Fits):
        compute = (12, 0)
        shared_memory = 101376

    class Old(Fits):
        compute = (8, 0)

    for way in (H2D, D2H):
        assert kernel.shape_for(Fits, way) == kernel.BULK[way]  # type: ignore[arg-type]
        assert kernel.shape_for(Small, way).shared_bytes < 101376 - 1024  # type: ignore[arg-type]
        assert kernel.shape_for(Old, way) == kernel.PLAIN  # type: ignore[arg-type]


def test_the_declaration_names_int64_and_a_class_that_loads() -> None:
    spec = ecoffload_register_backend()
    assert spec is SPEC
    assert spec.encoding.dtype == "int64"
    assert spec.load_class() is CudaBackend


def test_a_missing_driver_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOFFLOAD_CUDA_LIBRARY", "/nonexistent/libcuda.so.1")
    found = CudaBackend.availability()
    assert not found
    assert "/nonexistent/libcuda.so.1" in found.reason
