"""That the conformance suite bites: each seeded fault fails it, by the test that was made for that fault."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parent / "mutants" / "ecoffload_mutants.py"
HEALTHY = ("sim-int64", "sim-uint64", "sim-top")


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ecoffload_mutants", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutants = _load()


def _install(root: Path) -> None:
    info = root / "ecoffload_mutants-1.dist-info"
    info.mkdir()
    shutil.copy(SOURCE, root)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ecoffload-mutants\nVersion: 1\n")
    lines = [f"{mutants.backend_name(m)} = ecoffload_mutants:plugin_{m.__name__}" for m in mutants.FAULTS]
    (info / "entry_points.txt").write_text("\n".join(["[ecoffload.test_backends]", *lines]) + "\n")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Ids of the tests that failed, for each backend; one run of the suite over all of them."""
    root = tmp_path_factory.mktemp("mutants")
    _install(root)
    backends = [*map(mutants.backend_name, mutants.FAULTS), *HEALTHY]
    report = root / "report.json"
    command = [sys.executable, "-W", "error", "-m", "pytest", "--pyargs", "ecoffload.testing.conformance"]
    command += ["-q", "--tb=no", "-r", "N", "-p", "no:cacheprovider", "-p", "ecoffload_mutants"]
    command += ["--ecoffload-budget=0.1", f"--ecoffload-report={report}"]
    command += [f"--ecoffload-backend={name}" for name in backends]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(
        command, check=False, cwd=root, env=environment, capture_output=True, text=True, timeout=200
    )
    assert report.exists(), result.stdout + result.stderr
    found = json.loads(report.read_text())["backends"]
    return {
        name: {test["id"] for test in found[name]["tests"] if test["outcome"] in ("failed", "error")}
        for name in backends
    }


@pytest.mark.parametrize("mutant", mutants.FAULTS, ids=lambda m: m.__name__)
def test_the_suite_fails_a_backend_with_this_fault(mutant: type, failed: dict[str, set[str]]) -> None:
    assert failed[mutants.backend_name(mutant)] == {mutants.FAULTS[mutant]}


@pytest.mark.parametrize("name", HEALTHY)
def test_the_same_tests_pass_a_device_without_a_fault(name: str, failed: dict[str, set[str]]) -> None:
    assert failed[name] == set()
