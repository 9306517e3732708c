"""The killing test in its short form; `make soak` runs it for as long as you like."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def test_kills_at_random_moments_tear_nothing_lose_nothing_and_leak_nothing() -> None:
    script = Path(__file__).with_name("killing.py")
    directory = os.environ.get("ECOFFLOAD_TEST_SHM", "/dev/shm")
    command = [sys.executable, "-W", "error", str(script), "--kills", "24", "--directory", directory]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    last = ended.stdout.splitlines()[-1] if ended.stdout else ""
    counts = re.fullmatch(r"kills=(\d+) served=(\d+) torn=0 lost=0 leaked=0", last)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert counts is not None, ended.stdout + ended.stderr
    assert int(counts[1]) >= 24
    assert int(counts[2]) >= 100, "too few entries were served to say anything"
