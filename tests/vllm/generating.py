"""Runs e2e/generate.py as a process of its own, to its end or until it is killed. Used by the tests in e2e/."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def generate(model: Path, *, kill: bool = False, **options: Any) -> dict[str, Any]:
    """The answer of one run; fails with the end of vLLM's log. `kill`: once it has answered, the engine's processes
    are ended by SIGKILL, as a container's are when memory runs out."""
    before = _segments()
    process = subprocess.Popen(
        [sys.executable, str(HERE / "e2e" / "generate.py"), str(model), json.dumps({**options, "linger": kill})],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Ranks are bound to cores by hand: by itself vLLM wants a NUMA node for each rank.
            "VLLM_CPU_OMP_THREADS_BIND": "0|1" if options.get("tensor_parallel", 1) > 1 else "auto",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(HERE),
        },
    )
    log: list[str] = []
    try:
        if kill:
            answer = _answer_of_the_living(process, log)
        else:
            answer, errors = process.communicate(timeout=800)
            log.append(errors)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # vLLM's own, between its processes: some it always leaves behind, all of them if it is killed.
        mapped = _mapped()
        for left in _segments() - before:
            if str(left) not in mapped:
                left.unlink(missing_ok=True)
    if not answer or (not kill and process.returncode != 0):
        pytest.fail(f"generate.py exited with {process.returncode}:\n{''.join(log)[-4000:]}")
    result: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return result


def _segments() -> set[Path]:
    """Shared memory as vLLM and multiprocessing name it."""
    return {path for kind in ("vllm_dist_*", "psm_*", "sem.mp-*") for path in Path("/dev/shm").glob(kind)}


def _mapped() -> str:
    """The memory maps of every live process: what is named there is somebody's."""
    maps = []
    for process in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            maps.append(process.read_text(errors="replace"))
    return "".join(maps)


def _answer_of_the_living(process: subprocess.Popen[str], log: list[str]) -> str:
    """The first line of its stdout; its log is read aside, so that it never waits for us."""
    import threading

    def follow() -> None:
        for line in process.stderr or ():
            log.append(line)

    threading.Thread(target=follow, daemon=True).start()
    return process.stdout.readline() if process.stdout else ""
