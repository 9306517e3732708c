"""Makes torchvision's registry wheel importable beside a torch without CUDA; for tests/vllm.sh and tests/vllm-e2e.sh.

The wheel's operators need CUDA's libraries and do not load without them, and its import then stops where it describes
them. Declaring the two that it describes unasked is enough: vLLM uses the transforms only, which are plain torch.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

DECLARATION = """\
import torch
for _name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> int:
    """Patch the torchvision of this interpreter's environment if it cannot be imported; 0 if it can be afterwards."""
    probe = [sys.executable, "-c", "import torchvision"]
    if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        return 0
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        print("torchvision is not installed", file=sys.stderr)
        return 1
    init = Path(spec.origin)
    text = init.read_text()
    if not text.startswith(DECLARATION):
        init.write_text(DECLARATION + text)
    return subprocess.run(probe, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
