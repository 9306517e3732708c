"""The recorder: a libsycl that writes calls down, and the backend on it. Needs g++, and no SYCL at all."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("ecoffload_xpu") is None:  # runs from a checkout, installed or not
    sys.path.insert(0, str(ROOT / "src"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The tests on the real runtime run when they are named (tests/xpu.sh): one process, one libsycl."""
    if collection_path == Path(__file__).with_name("runtime"):
        return not any("runtime" in argument for argument in config.args)
    return None


@pytest.fixture(scope="session")
def build_hook() -> Any:
    """The package's build hook as a module."""
    spec = importlib.util.spec_from_file_location("ecoffload_xpu_hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Recorder:
    """What the recorder wrote down, and its switches."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.recorder_queue.restype = ctypes.c_size_t
        self.library.recorder_queue.argtypes = [ctypes.c_bool]
        self.library.recorder_queue_id.restype = ctypes.c_size_t
        self.library.recorder_queue_id.argtypes = [ctypes.c_size_t]
        self.library.recorder_count.restype = ctypes.c_size_t
        self.library.recorder_journal.restype = ctypes.c_char_p
        self.library.recorder_throw_at.argtypes = [ctypes.c_uint64, ctypes.c_int]
        self.library.recorder_usm_host.argtypes = [ctypes.c_uint64, ctypes.c_uint64]

    def queue(self, *, in_order: bool = True) -> int:
        return self.library.recorder_queue(in_order)

    def queue_id(self, queue: int) -> int:
        return self.library.recorder_queue_id(queue)

    def stream(self, *, in_order: bool = True) -> SimpleNamespace:
        return SimpleNamespace(sycl_queue=self.queue(in_order=in_order))

    @property
    def copies(self) -> np.ndarray:
        """One row a copy: queue, destination, source, size."""
        rows = np.zeros((self.library.recorder_count(), 4), dtype=np.uint64)
        self.library.recorder_read(ctypes.c_void_p(rows.ctypes.data))
        return rows

    @property
    def journal(self) -> list[str]:
        return self.library.recorder_journal().decode().splitlines()

    def throw_at(self, copy: int, kind: str = "std") -> None:
        self.library.recorder_throw_at(copy, {"std": 0, "other": 1, "lost": 2}[kind])

    def usm_host(self, first: int, nbytes: int) -> None:
        self.library.recorder_usm_host(first, first + nbytes - 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, f"recorder_{name}")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, build_hook: Any) -> Path:
    """A folder with the shim, built as the package builds it, and the recorder under libsycl's name."""
    folder = tmp_path_factory.mktemp("xpu")
    problem = build_hook.compile_shim(ROOT / "src" / "ecoffload_xpu" / "shim.cpp", folder / "_shim.so")
    assert problem is None, problem
    source = Path(__file__).with_name("recorder.cpp")
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-o", folder / "libsycl.so.8", source]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="session")
def loaded_recorder(built: Path) -> Recorder:
    return Recorder(built / "libsycl.so.8")


@pytest.fixture
def recorder(loaded_recorder: Recorder) -> Iterator[Recorder]:
    loaded_recorder.reset()
    yield loaded_recorder
    loaded_recorder.reset()


class Table:
    """A batch as a backend sees it."""

    def __init__(self, rows: list[tuple[int, int, int]], first: int = 0) -> None:
        self.words = np.ascontiguousarray(np.array(rows, dtype=np.uint64).reshape(-1, 3).T)
        self.count = self.words.shape[1]
        self.src, self.dst, self.size = (row.ctypes.data for row in self.words)
        self.first = first


@pytest.fixture
def table() -> type[Table]:
    """Makes a batch from rows of (source, destination, size)."""
    return Table


@pytest.fixture
def backend(recorder: Recorder, built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The real backend with the real shim; only libsycl and torch's device are stand-ins."""
    from ecoffload_xpu import ways
    from ecoffload_xpu.backend import XpuBackend
    from ecoffload_xpu.plugin import SPEC

    monkeypatch.setattr(ways, "SHIM", built / "_shim.so")
    stream = recorder.stream()
    made = XpuBackend(SPEC, 0, SimpleNamespace(current_stream=lambda: stream))
    yield made
    recorder.finish()
    made.close()
