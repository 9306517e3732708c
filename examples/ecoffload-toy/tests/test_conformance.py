"""Everything that ecoffload asks of a backend, asked of this one."""

import subprocess
import sys


def test_the_backend_conforms() -> None:
    suite = [sys.executable, "-m", "pytest", "--pyargs", "ecoffload.testing.conformance", "-q"]
    assert subprocess.call([*suite, "--ecoffload-backend=toy"]) == 0
