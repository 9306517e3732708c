"""The pytest plugin: which backends the conformance suite runs on, what it asks of each, and the report.

Loaded by every pytest run in an environment with ecoffload, so it imports neither torch nor hypothesis, changes nothing
for tests without the ``conformance`` marker, and reaches the rest of this package only when such a test runs.

A conformance test carries ``@asked(ID, since=N, when=...)`` (:mod:`ecoffload.testing.harness`). Whether it is asked of
a backend is decided after its fixtures are up, since limits are those of a live device; one that is not asked is
skipped with a reason that begins with "not asked:" and is listed in the report. A backend that was requested and is
not available fails the run, at once.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ecoffload.testing.harness import DeviceUnderTest

SUITE = 1
"""Version of the conformance suite. A test's ``since`` is the version that brought it."""

DEFAULT_BACKENDS = ("cpu", "sim-int64", "sim-uint64", "sim-top")

MARKER = "conformance"
NOT_ASKED = "not asked: "
_FIXTURE = "ecoffload_device"
_PROPERTY = "ecoffload"

_budget = 1.0


def scaled(amount: int, least: int = 1) -> int:
    """``amount`` (examples, bytes, repetitions) times the budget of this run, at least ``least``."""
    return max(least, int(amount * _budget))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ecoffload", "ecoffload's conformance suite (--pyargs ecoffload.testing.conformance)")
    group.addoption(
        "--ecoffload-backend",
        action="append",
        metavar="NAME",
        help="backend to run on; may be repeated; one that is not available fails "
        f"(default: {', '.join(DEFAULT_BACKENDS)})",
    )
    group.addoption(
        "--ecoffload-xfails",
        metavar="FILE",
        help='TOML file of tests known to fail: a table a backend of lines "id" = "reason"; one that passes fails',
    )
    group.addoption(
        "--ecoffload-suite",
        type=int,
        default=SUITE,
        metavar="N",
        help="ask only what suite version N asked (default: %(default)s, the newest)",
    )
    group.addoption("--ecoffload-report", metavar="FILE", help="write a JSON report, with what was not asked and why")
    group.addoption(
        "--ecoffload-budget",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share of the usual examples, bytes and repetitions, with time limits stretched by as much; "
        "0.1 for a slow device or an emulator (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARKER}(id, since, when): a test of ecoffload's conformance suite")
    global _budget
    _budget = config.getoption("--ecoffload-budget")
    if not 0 < _budget <= 100:
        raise pytest.UsageError(f"--ecoffload-budget={_budget}: give a share above 0, for example 0.1")
    suite = config.getoption("--ecoffload-suite")
    if not 1 <= suite <= SUITE:
        raise pytest.UsageError(f"--ecoffload-suite={suite}: this ecoffload has suites 1 to {SUITE}")
    report = config.getoption("--ecoffload-report")
    if report and not (os.access(Path(report).resolve().parent, os.W_OK) and not Path(report).is_dir()):
        raise pytest.UsageError(f"--ecoffload-report={report}: no such file can be written there")
    xfails = config.getoption("--ecoffload-xfails")
    config.pluginmanager.register(_Suite(config, _read_xfails(xfails) if xfails else {}), "ecoffload-suite")


def _read_xfails(path: str) -> dict[tuple[str, str], str]:
    """(backend, id) to reason. Every entry must have one: a failure that nobody can explain is no known failure."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as exc:
        raise pytest.UsageError(f"--ecoffload-xfails={path}: {exc}") from exc
    found = {}
    for backend, entries in tables.items():
        if not isinstance(entries, dict):
            raise pytest.UsageError(f"--ecoffload-xfails={path}: {backend!r} is no table; write [backend-name]")
        for name, reason in entries.items():
            if not isinstance(reason, str) or not reason.strip():
                raise pytest.UsageError(f'--ecoffload-xfails={path}: [{backend}] "{name}" has no reason; write one')
            found[backend, name] = reason
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _FIXTURE in metafunc.fixturenames:
        names = metafunc.config.getoption("--ecoffload-backend") or DEFAULT_BACKENDS
        metafunc.parametrize(_FIXTURE, list(dict.fromkeys(names)), indirect=True, scope="session")


@pytest.fixture(scope="session")
def ecoffload_device(request: pytest.FixtureRequest) -> Iterator[DeviceUnderTest]:
    """One requested backend and its device, for the whole session; ends the run, as failed, if it is not available."""
    from ecoffload.errors import EcoffloadError
    from ecoffload.testing.harness import DeviceUnderTest

    name = request.param
    try:
        device = DeviceUnderTest.named(name, budget=_budget)
    except EcoffloadError as exc:
        cause = f" (cause: {exc.__cause__!r})" if exc.__cause__ is not None else ""
        message = f"backend {name!r} was requested and is not available: {exc}{cause}"
        if hasattr(request.config, "workerinput"):  # xdist takes a worker that leaves for an error of its own
            pytest.fail(message, pytrace=False)
        suite = request.config.pluginmanager.get_plugin("ecoffload-suite")
        if isinstance(suite, _Suite):
            suite.unavailable[name] = message
        pytest.exit(message, returncode=pytest.ExitCode.TESTS_FAILED)
    yield device
    device.close()


class _Suite:
    """The hooks that know conformance tests, and what the report remembers of them."""

    def __init__(self, config: pytest.Config, xfails: dict[tuple[str, str], str]) -> None:
        self.config = config
        self.xfails = xfails
        self.results: dict[str, dict[str, Any]] = {}
        self.unavailable: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        collected: set[str] = set()
        for item in items:
            about = _about(item)
            if about is None:
                continue
            collected.add(about["id"])
            item.user_properties.append((_PROPERTY, about))
            reason = self.xfails.get((about["backend"], about["id"]))
            if reason is not None:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        groups = {name.partition(".")[0] for name in collected}
        for _, name in self.xfails:
            if name not in collected and name.partition(".")[0] in groups:
                raise pytest.UsageError(f"--ecoffload-xfails names {name!r}, and the suite has no test of that id")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        marker = item.get_closest_marker(MARKER)
        if marker is None:
            return
        since, suite = marker.kwargs["since"], self.config.getoption("--ecoffload-suite")
        if since > suite:
            pytest.skip(f"{NOT_ASKED}it came with suite {since}, and suite {suite} was asked for")
        device = getattr(item, "funcargs", {}).get(_FIXTURE) or getattr(item, "funcargs", {}).get("device")
        when = marker.kwargs["when"]
        reason = when(device) if when is not None and device is not None else ""
        if reason:
            pytest.skip(NOT_ASKED + reason)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        about: dict[str, Any] | None = dict(report.user_properties).get(_PROPERTY)  # type: ignore[assignment]
        if about is None:
            return
        entry = self.results.setdefault(
            report.nodeid, {**about, "outcome": "passed", "reason": "", "seconds": 0.0, "facts": {}}
        )
        entry["seconds"] = round(entry["seconds"] + report.duration, 4)
        entry["facts"].update({k: v for k, v in report.user_properties if k != _PROPERTY})
        if hasattr(report, "wasxfail"):
            entry["outcome"], entry["reason"] = "xfailed", str(report.wasxfail).removeprefix("reason: ")
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            reason = reason.removeprefix("Skipped: ")
            asked = not reason.startswith(NOT_ASKED)
            entry["outcome"] = "skipped" if asked else "not asked"
            entry["reason"] = reason.removeprefix(NOT_ASKED)
        elif report.failed:
            entry["outcome"] = "failed" if report.when == "call" else "error"
            entry["reason"] = _last_line(report.longreprtext)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.results:
            return
        terminalreporter.section("ecoffload conformance")
        for name, backend in self._by_backend().items():
            counts = ", ".join(f"{n} {outcome}" for outcome, n in backend["counts"].items())
            terminalreporter.write_line(f"{name}: suite {self.config.getoption('--ecoffload-suite')}: {counts}")
            for entry in backend["not_asked"]:
                terminalreporter.write_line(f"  not asked {entry['id']}: {entry['reason']}")

    def pytest_sessionfinish(self) -> None:
        path = self.config.getoption("--ecoffload-report")
        if path is None or hasattr(self.config, "workerinput"):  # with xdist, the controller has every result
            return
        from ecoffload import __version__

        report = {
            "suite": self.config.getoption("--ecoffload-suite"),
            "ecoffload": __version__,
            "budget": _budget,
            "backends": self._by_backend(),
            "unavailable": self.unavailable,
        }
        Path(path).write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")

    def _by_backend(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for entry in self.results.values():
            backend = found.setdefault(entry["backend"], {"counts": {}, "facts": {}, "tests": [], "not_asked": []})
            outcome = entry["outcome"]
            backend["counts"][outcome] = backend["counts"].get(outcome, 0) + 1
            backend["facts"].update(entry["facts"])
            kept = {k: entry[k] for k in ("id", "case", "since", "outcome", "reason", "seconds")}
            if outcome == "not asked":
                not_asked = {"id": kept["id"], "reason": kept["reason"]}
                if not_asked not in backend["not_asked"]:
                    backend["not_asked"].append(not_asked)
            else:
                backend["tests"].append(kept)
        return found


def _about(item: pytest.Item) -> dict[str, Any] | None:
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return None
    callspec = getattr(item, "callspec", None)
    backend = callspec.params.get(_FIXTURE, "") if callspec is not None else ""
    case = {k: v for k, v in callspec.params.items() if k != _FIXTURE} if callspec is not None else {}
    return {"id": marker.kwargs["id"], "since": marker.kwargs["since"], "backend": backend, "case": case}


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines()
    return lines[0].removeprefix("E").strip()[:500] if lines else ""
