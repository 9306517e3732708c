"""Paths for running from a checkout, and the mark ``hardware``: tests that need an NVIDIA GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("ecoffload_cuda") is None:  # runs from a checkout, installed or not
    sys.path.insert(0, str(ROOT / "src"))
sys.path[:0] = [str(ROOT / "tests"), str(ROOT.parents[1] / "tests" / "emulated")]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hardware: needs an NVIDIA GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("hardware"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder for the session, so that kernels are compiled once and no user's tuning is read."""
    monkeypatch.setenv("ECOFFLOAD_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
