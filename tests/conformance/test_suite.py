"""The whole suite on ``cpu`` and the simulated devices, as ``pytest --pyargs ecoffload.testing.conformance`` runs it.

The report stays in ``.cache/reports``, from which the table of platforms is made.
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
REPORT = ROOT / ".cache" / "reports" / "core.json"

ALWAYS = {"declaration.listing-initialises-nothing"}  # asked of devices that torch can tell the state of
NO_STREAMS = {
    "completion.pending",
    "ordering.block-leaves-the-host-free",
    "ordering.consumer-after-load",
    "ordering.consumer-after-load-control",
    "ordering.load-after-reader",
    "ordering.load-after-reader-control",
    "ordering.save-after-producer",
    "ordering.save-after-producer-control",
    "ordering.streams-are-apart",
}
NO_REGISTRATION = {
    "copies.registration-edge",
    "registration.accepted",
    "registration.empty",
    "registration.part",
    "registration.refused",
    "registration.rolled-back",
    "registration.twice",
}
BLOCKING = {"completion.lease-held", "ordering.delay"}
NO_FAULTS = {"errors.late", "errors.lost", "errors.submit"}
NOT_ASKED = {
    "cpu": ALWAYS
    | NO_REGISTRATION
    | NO_FAULTS
    | {
        "completion.snapshot",
        "encoding.echo",
        "errors.global-index",
        "ordering.record-stream",
        "ordering.single-queue",
    },
    "sim-int64": ALWAYS | {"ordering.single-queue", "registration.not-needed"},
    "sim-uint64": ALWAYS
    | {"completion.snapshot", "ordering.record-stream", "ordering.single-queue", "registration.not-needed"},
    "sim-top": ALWAYS
    | NO_STREAMS
    | NO_REGISTRATION
    | BLOCKING
    | {"completion.snapshot", "errors.global-index", "ordering.record-stream"},
}


@functools.cache
def run_suite() -> tuple[dict[str, Any], str]:
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.unlink(missing_ok=True)
    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["--pyargs", "ecoffload.testing.conformance", f"--ecoffload-report={REPORT}"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ECOFFLOAD_", "PYTEST_"))}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    return json.loads(REPORT.read_text())["backends"] if REPORT.exists() else {}, run.stdout + run.stderr


@pytest.mark.parametrize("name", NOT_ASKED)
def test_everything_that_is_asked_holds(name: str) -> None:
    backends, printed = run_suite()
    assert set(backends) == set(NOT_ASKED), printed
    assert {test["outcome"] for test in backends[name]["tests"]} == {"passed"}, printed
    assert {test["id"] for test in backends[name]["not_asked"]} == NOT_ASKED[name]


def test_between_them_the_simulated_devices_are_asked_all_but_what_needs_a_real_one() -> None:
    assert set.intersection(*NOT_ASKED.values()) == ALWAYS
