"""Initialise a backend in a child process: the only way to ask a device that may crash, hang, or spoil a later fork.

``ecoffload backends --probe`` and ``ecoffload doctor`` call :func:`probe`; the child runs this module as a program. The
parent imports no driver.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from ecoffload.backend import Availability

__all__ = ["probe"]

_MARK = "ecoffload-probe:"  # drivers and plugins may print what they like around it


def probe(name: str, *, timeout: float = 60.0) -> Availability:
    """Whether backend ``name`` starts here, seen from a child process that is killed after ``timeout`` seconds.

    The child makes the backend, a stream and an event, and asks for its limits. Never raises for what the child does:
    an error, a crash or a hang is an answer with a reason.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "ecoffload.probe", name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return Availability(False, f"its device did not answer within {timeout:g} s; the driver or the device hangs")
    for line in reversed(out.splitlines()):
        if line.startswith(_MARK):
            ok, reason = json.loads(line.removeprefix(_MARK))
            return Availability(ok, reason)
    if child.returncode < 0:
        ending = f"crashed with {signal.Signals(-child.returncode).name}"
    else:
        ending = f"ended with code {child.returncode} and no answer"
    last = err.strip().splitlines()[-1:] or ["nothing on stderr"]
    return Availability(False, f"a child process that initialised its device {ending} ({last[0]})")


def _answer(name: str) -> Availability:
    from ecoffload.registry import get_backend

    try:
        backend = get_backend(name)
        said = backend.spec.load_class().availability(probe=True)
        if not said:
            return said
        ops = backend.ops
        event = ops.event()
        ops.record(event, ops.stream())
        ops.synchronize(event)
        limits = backend.limits("d2h")
        backend.close()
    except Exception as exc:  # whatever a driver or a plugin raises is the answer
        return Availability(False, f"{type(exc).__name__}: {exc}")
    most = "any number of" if limits.max_descriptors is None else f"at most {limits.max_descriptors}"
    return Availability(True, f"{said.reason}; device {ops.device} answers, {most} descriptors a submit")


if __name__ == "__main__":
    sys.stdout.write(f"\n{_MARK}{json.dumps(_answer(sys.argv[1]))}\n")
