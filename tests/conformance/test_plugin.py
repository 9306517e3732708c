"""What the pytest plugin promises to those who run the suite, and to those who have it installed and do not."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from ecoffload.testing import conformance
from ecoffload.testing.plugin import SUITE

# A suite in miniature, whose device needs no torch: what is tested here is the plugin.
DEVICE = """
import pytest

@pytest.fixture(scope="session")
def ecoffload_device(request):
    return request.param
"""
MINIATURE = """
import pytest

def asked(id, since=1, when=None):
    return pytest.mark.conformance(id=id, since=since, when=when)

@asked("group.good")
def test_good(ecoffload_device, record_property):
    record_property("fact", ecoffload_device.upper())

@asked("group.bad")
def test_bad(ecoffload_device):
    assert ecoffload_device != "b"

@asked("group.some", when=lambda device: "" if device == "a" else "it is not a")
@pytest.mark.parametrize("way", ["up", "down"])
def test_some(ecoffload_device, way): pass

@asked("group.newer", since=2)
def test_newer(ecoffload_device): pass

def test_without_a_mark(): pass
"""


def run_pytest(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, away from this repository's settings, with every warning an error."""
    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ECOFFLOAD_", "PYTEST_"))}
    return subprocess.run(command, check=False, cwd=where, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def miniature(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(DEVICE)
    (tmp_path / "test_miniature.py").write_text(MINIATURE)
    return tmp_path


def test_the_plugin_imports_neither_torch_nor_hypothesis_and_leaves_other_projects_alone(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_light(): assert not {'torch', 'numpy', 'pydantic', 'hypothesis'} & set(sys.modules)\n"
        "def test_mine(device): assert device == 'mine'\n"
    )
    (tmp_path / "conftest.py").write_text("import pytest\n@pytest.fixture\ndef device(): return 'mine'\n")
    result = run_pytest(tmp_path, "-p", "no:hypothesispytest", "--strict-markers")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed" in result.stdout
    assert "ecoffload" not in result.stdout


@pytest.mark.parametrize("how", [["-p", "no:xdist"], ["-n", "1"]])
def test_the_report_lists_what_passed_what_failed_and_what_was_not_asked(miniature: Path, how: list[str]) -> None:
    report = miniature / "report.json"
    result = run_pytest(
        miniature, *how, "--ecoffload-backend=a", "--ecoffload-backend=b", f"--ecoffload-report={report}"
    )
    assert result.returncode == 1, result.stdout + result.stderr
    data = json.loads(report.read_text())
    a, b = data["backends"]["a"], data["backends"]["b"]
    assert data["suite"] == SUITE
    assert (a["counts"], a["facts"]) == ({"passed": 4, "not asked": 1}, {"fact": "A"})
    assert b["counts"] == {"passed": 1, "failed": 1, "not asked": 3}
    assert [test["reason"] for test in b["tests"] if test["id"] == "group.bad"] == ["AssertionError: assert 'b' != 'b'"]
    assert [test["case"] for test in a["tests"] if test["id"] == "group.some"] == [{"way": "up"}, {"way": "down"}]
    assert sorted(entry["id"] for entry in b["not_asked"]) == ["group.newer", "group.some"]
    assert {"id": "group.some", "reason": "it is not a"} in b["not_asked"]
    assert "not asked group.some: it is not a" in result.stdout


def test_a_known_failure_is_expected_and_keeps_its_reason(miniature: Path) -> None:
    known, report = miniature / "known.toml", miniature / "report.json"
    known.write_text('[b]\n"group.bad" = "driver 580 does that"\n')
    result = run_pytest(
        miniature, "--ecoffload-backend=b", f"--ecoffload-xfails={known}", f"--ecoffload-report={report}"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    tests = json.loads(report.read_text())["backends"]["b"]["tests"]
    bad = [(test["outcome"], test["reason"]) for test in tests if test["id"] == "group.bad"]
    assert bad == [("xfailed", "driver 580 does that")]


def test_a_known_failure_that_passes_fails(miniature: Path) -> None:
    known = miniature / "known.toml"
    known.write_text('[a]\n"group.good" = "long since mended"\n')
    result = run_pytest(miniature, "--ecoffload-backend=a", f"--ecoffload-xfails={known}")
    assert result.returncode == 1
    assert "XPASS(strict)" in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[a]\n"group.good" = ""\n', "has no reason"),
        ('[a]\n"group.no-such-test" = "why"\n', "no test of that id"),
        ('a = "why"\n', "is no table"),
        ("[a\n", "--ecoffload-xfails"),
    ],
    ids=["no reason", "no test", "no table", "no TOML"],
)
def test_a_file_of_known_failures_that_says_nothing_true_is_refused(miniature: Path, text: str, message: str) -> None:
    known = miniature / "known.toml"
    known.write_text(text)
    result = run_pytest(miniature, "--ecoffload-backend=a", f"--ecoffload-xfails={known}")
    assert result.returncode == 4
    assert message in result.stdout + result.stderr


@pytest.mark.parametrize("bad", ["--ecoffload-suite=99", "--ecoffload-budget=0"])
def test_options_out_of_range_are_refused_in_words(tmp_path: Path, bad: str) -> None:
    result = run_pytest(tmp_path, bad)
    assert result.returncode == 4
    assert bad.partition("=")[0] in result.stdout + result.stderr


def test_a_requested_backend_that_is_not_available_fails_instead_of_being_skipped(tmp_path: Path) -> None:
    suite = ["--pyargs", "ecoffload.testing.conformance.test_declaration"]
    report = tmp_path / "report.json"
    result = run_pytest(tmp_path, *suite, "--ecoffload-backend=no-such-device", f"--ecoffload-report={report}")
    assert result.returncode == 1
    assert (result.stdout + result.stderr).count("was requested and is not available") == 1
    assert "skipped" not in result.stdout.splitlines()[-1]
    assert "was requested" in json.loads(report.read_text())["unavailable"]["no-such-device"]


def test_a_requested_backend_that_is_not_available_fails_with_workers_too(tmp_path: Path) -> None:
    suite = ["--pyargs", "ecoffload.testing.conformance.test_declaration"]
    result = run_pytest(tmp_path, "-n", "1", *suite, "--ecoffload-backend=no-such-device")
    assert result.returncode == 1
    assert "was requested and is not available" in result.stdout
    assert "skipped" not in result.stdout.splitlines()[-1]


@pytest.mark.parametrize("where", [".", "no/such/folder/report.json"])
def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(miniature: Path, where: str) -> None:
    result = run_pytest(miniature, "--ecoffload-backend=a", f"--ecoffload-report={miniature / where}")
    assert result.returncode == 4
    assert "--ecoffload-report" in result.stdout + result.stderr
    assert "passed" not in result.stdout


def test_ids_differ_have_a_group_and_say_since_when_they_are_asked() -> None:
    marks = []
    for module in pkgutil.iter_modules(conformance.__path__, conformance.__name__ + "."):
        if module.name.rpartition(".")[2].startswith("test_"):
            loaded = importlib.import_module(module.name)
            tests = [value for name, value in vars(loaded).items() if name.startswith("test_")]
            found = [[m for m in test.pytestmark if m.name == "conformance"] for test in tests]
            assert all(len(m) == 1 for m in found), module.name
            marks += [m[0].kwargs for m in found]
    ids = [mark["id"] for mark in marks]
    assert len(ids) == len(set(ids)) >= 50
    assert all(group and rest for group, _, rest in (name.partition(".") for name in ids))
    assert {mark["since"] for mark in marks} == set(range(1, SUITE + 1))
