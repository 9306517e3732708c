"""Makes this package and the emulated runtime importable from a checkout, installed or not."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(_ROOT / "tests" / "emulated"), str(_ROOT / "backends" / "rocm" / "src")]
