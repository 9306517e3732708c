"""What an engine that ends without a word leaves behind in shared memory: nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from harness import Engine
vllm = Engine(Path({model!r}), connector="EcoffloadConnector", extra={{"ec_cpu_bytes": 65536}}, runner="v2")
vllm.add("one", "a")
vllm.run()
print(vllm.connector.effective_configuration()["path"])
"""


def test_a_single_process_engine_that_never_shuts_down_leaves_no_region(model: Path) -> None:
    code = CODE.format(here=str(Path(__file__).parent), model=str(model))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path = Path(done.stdout.splitlines()[-1])
    assert path.name.startswith("ecoffload.vllm-")
    assert not path.exists()
