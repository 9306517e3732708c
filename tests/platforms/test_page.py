"""The table of platforms is what the reports say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_reports_say() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "docs/platforms/generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_a_device_that_never_ran_is_not_in_the_table() -> None:
    rows = [line for line in (ROOT / "docs/platforms.md").read_text().splitlines() if line.startswith("| ")]
    named = {row.split("|")[1].strip() for row in rows} - {"backend"}
    kept = {path.stem.rpartition("-")[0] for path in (ROOT / "docs/platforms/reports").glob("*.json")}
    assert named == kept
