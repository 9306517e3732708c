"""The whole conformance suite on ecoffload-rocm and ecoffload-cuda over each emulated driver, as a vendor would run it.

In processes of their own, with the folder of the emulated drivers on their path (that is where the entry points are).
Reports stay in ``.cache/reports``, from which the table of platforms is made.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = {
    "rocm": ("rocm-old-low", "rocm-old-high", "rocm-new-low", "rocm-new-high", "rocm-copies", "rocm-per-copy"),
    "cuda": ("cuda-low", "cuda-high", "cuda-copies"),
}

NOT_ASKED = {
    "declaration.listing-initialises-nothing",  # asked of devices that torch knows
    "encoding.echo",  # asked of backends with a kernel that reads a table
    "errors.late",  # a copy that fails late has lost the device: asked as errors.lost
    "ordering.single-queue",
    "registration.not-needed",
}
NO_LONGEST_BATCH = {"errors.global-index"}  # so that nothing is ever split
ARRAYS_ARE_LEFT_ALONE = {"completion.snapshot"}


def not_asked(name: str) -> set[str]:
    if name.startswith("cuda"):
        return NOT_ASKED | NO_LONGEST_BATCH
    return NOT_ASKED | ARRAYS_ARE_LEFT_ALONE | (NO_LONGEST_BATCH if name in ("rocm-copies", "rocm-per-copy") else set())


@functools.cache
def run_suite(platform: str) -> tuple[dict[str, Any], str]:
    """Outcomes by backend, and what was printed; one run over a platform's, with a tenth of the usual examples."""
    path = ROOT / ".cache" / "reports" / f"{platform}-emulated.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    paths = [ROOT / "tests" / "emulated", *(ROOT / "backends" / name / "src" for name in BACKENDS)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["--pyargs", "ecoffload.testing.conformance", "--ecoffload-budget=0.1", f"--ecoffload-report={path}"]
    command += [f"--ecoffload-backend={name}" for name in BACKENDS[platform]]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ECOFFLOAD_", "PYTEST_"))}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    return json.loads(path.read_text())["backends"] if path.exists() else {}, run.stdout + run.stderr


@pytest.mark.parametrize(("platform", "name"), [(p, name) for p, names in BACKENDS.items() for name in names])
def test_everything_that_is_asked_holds(platform: str, name: str) -> None:
    backends, printed = run_suite(platform)
    assert name in backends, printed
    found = backends[name]
    assert {test["outcome"] for test in found["tests"]} == {"passed"}, printed
    assert {test["id"] for test in found["not_asked"]} == not_asked(name)
