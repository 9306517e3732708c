"""The whole conformance suite on ecoffload-rocm over each emulated runtime, as a vendor would run it.

In a process of its own, with the folder of the emulated drivers on its path (that is where their entry points are). The
report stays in ``.cache/reports``, from which the table of platforms is made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
REPORT = ROOT / ".cache" / "reports" / "rocm-emulated.json"
BACKENDS = ("rocm-old-low", "rocm-old-high", "rocm-new-low", "rocm-new-high", "rocm-copies", "rocm-per-copy")

NOT_ASKED = {
    "completion.snapshot",  # declared: descriptor arrays are left alone until the end
    "declaration.listing-initialises-nothing",  # asked of devices that torch knows
    "encoding.echo",  # asked of backends with a kernel that reads a table
    "errors.late",  # a copy that fails late has lost the device: asked as errors.lost
    "ordering.single-queue",
    "registration.not-needed",
}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Outcomes by backend; one run of the suite over all of them, with a tenth of the usual examples."""
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.unlink(missing_ok=True)
    paths = [ROOT / "tests" / "emulated", ROOT / "backends" / "rocm" / "src", os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["--pyargs", "ecoffload.testing.conformance", "--ecoffload-budget=0.1", f"--ecoffload-report={REPORT}"]
    command += [f"--ecoffload-backend={name}" for name in BACKENDS]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ECOFFLOAD_", "PYTEST_"))}
    environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if path)
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    found: dict[str, Any] = json.loads(REPORT.read_text())["backends"]
    return found


@pytest.mark.parametrize("name", BACKENDS)
def test_everything_that_is_asked_holds(report: dict[str, Any], name: str) -> None:
    assert {test["outcome"] for test in report[name]["tests"]} == {"passed"}
    # Copies one by one know no longest batch, so that nothing is ever split.
    expected = NOT_ASKED | ({"errors.global-index"} if name in ("rocm-copies", "rocm-per-copy") else set())
    assert {test["id"] for test in report[name]["not_asked"]} == expected
