"""Fake distributions on sys.path, and a registry that has not looked yet."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecoffload import registry
from ecoffload.registry import GROUP

Install = Callable[..., Path]

DECLARE = """
from ecoffload import BackendSpec, Capabilities, KernelSpec, PointerEncoding, hookimpl

ECOFFLOAD_HOOK_API = 1

@hookimpl
def ecoffload_register_backend():
    return BackendSpec(
        name="{name}", device_type="{device_type}", encoding=PointerEncoding.UINT64,
        kernels=(KernelSpec(name="copy", address_dtype="uint64"),), factory="{module}:Backend",
    )
"""
BACKEND = """
from ecoffload import Availability, SwapBackend

class Backend(SwapBackend):
    made = 0

    def __init__(self, *args):
        super().__init__(*args)
        type(self).made += 1

    @classmethod
    def availability(cls, *, probe=False):
        return {available}

    def submit(self, batch, direction, stream):
        return None
"""


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the core and what a test installs is there, whatever backends this environment has."""
    everything = importlib.metadata.distributions

    def distributions() -> Iterator[importlib.metadata.Distribution]:
        for dist in everything():
            if dist.name == "ecoffload" or str(dist.locate_file("")).startswith(str(tmp_path)):
                yield dist

    monkeypatch.setattr(importlib.metadata, "distributions", distributions)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ECOFFLOAD_BACKEND", "ECOFFLOAD_ALLOW_BACKENDS", "ECOFFLOAD_STRICT", "ECOFFLOAD_PER_COPY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(registry, "_registry", registry._Registry())
    # Whether this machine has a vendor's backend installed must not matter to what is asked here.
    found = registry._entry_points
    ours = ("ecoffload-cuda", "ecoffload-rocm", "ecoffload-xpu")
    monkeypatch.setattr(
        registry, "_entry_points", lambda: [e for e in found() if e.dist is None or e.dist.name not in ours]
    )
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """``install(name, code, ...)``: a distribution with the module ``fake_NAME`` and an entry point of that name."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(
        name: str,
        code: str,
        *,
        entry: str | None = None,
        value: str | None = None,
        distribution: str | None = None,
        group: str = GROUP,
        metadata: bool = True,
    ) -> Path:
        module = "fake_" + name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(code)
        distribution = distribution or f"dist-{name}"
        info = tmp_path / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        if metadata:
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry or name} = {value or module}\n")
        return info

    return make


@pytest.fixture
def healthy(install: Install) -> Install:
    """``healthy(name, device_type, available=...)``: a distribution whose backend loads."""

    def make(name: str, device_type: str = "acme", available: str = "Availability(True, 'there')", **more: str) -> Path:
        module = "fake_" + name.replace("-", "_")
        code = DECLARE.format(name=more.get("entry", name), device_type=device_type, module=module)
        return install(name, code + BACKEND.format(available=available), **more)

    return make
