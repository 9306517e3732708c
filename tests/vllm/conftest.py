"""Tests against the real vLLM; they are collected only where vLLM is installed (tests/vllm.sh, tests/vllm-e2e.sh)."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
collect_ignore_glob = ["*.py", "e2e/*.py"] if importlib.util.find_spec("vllm") is None else []

sys.path.insert(0, str(HERE))
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            # What vLLM and its dependencies warn about is theirs; ours stay errors.
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings(r"error:::ecoffload.*"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny LLaVA."""
    from tinymodel import make_model

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["v1", "v2"])
def runner(request: pytest.FixtureRequest) -> str:
    """Whose semantics the worker follows: model runner V1 or V2."""
    return str(request.param)


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Make an `Engine` with the reference connector (options may name another); it is shut down at the end."""
    from harness import Engine
    from reference_connector import CLOCK

    engines: list[Any] = []

    def make(*, extra: dict[str, Any] | None = None, **options: Any) -> Any:
        settings = {"connector": "ReferenceConnector", "module": "reference_connector", "tick": CLOCK.tick, **options}
        if settings["connector"] == "ReferenceConnector":
            extra = {"directory": str(tmp_path / "cache"), **(extra or {})}
        engines.append(Engine(model, extra=extra, **settings))
        return engines[-1]

    yield make
    for one in engines:
        one.shutdown()
    CLOCK.reset()
