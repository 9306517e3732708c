"""Packages of third parties: the toy that is kept by hand, and what ``ecoffload new-backend`` writes."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ecoffload
from ecoffload import ConfigError
from ecoffload.scaffold import new_backend

TOY = Path(__file__).parents[2] / "examples" / "ecoffload-toy"


def python_files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*.py") if "build" not in p.parts)


def public_imports(root: Path) -> set[str]:
    """What a package imports of ecoffload, as "module.name"."""
    found = set()
    for path in python_files(root):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ecoffload":
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "ecoffload"}
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_backend("acme-npu", tmp_path_factory.mktemp("new") / "acme")


@pytest.fixture(scope="module")
def installed(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both packages, installed by pip into a folder of their own."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [*pip, "--disable-pip-version-check", "--target", str(target), str(written), str(TOY)], check=True, timeout=120
    )
    return target


def run(installed: Path, *command: str) -> subprocess.CompletedProcess[str]:
    paths = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, "-W", "error", *command],
        check=False,
        cwd=installed,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_toy_is_under_sixty_lines_of_python() -> None:
    assert sum(len(path.read_text().splitlines()) for path in python_files(TOY)) < 60


@pytest.mark.parametrize("package", ["toy", "written"])
def test_a_backend_sees_public_names_only(package: str, written: Path) -> None:
    names = public_imports(TOY if package == "toy" else written)
    allowed = {f"ecoffload.{name}" for name in ecoffload.__all__}
    allowed |= {"ecoffload.backend.BatchView", "ecoffload.backend.Direction", "ecoffload.drivers.words_at"}
    assert names
    assert names <= allowed


def test_both_are_listed_as_they_are_installed(installed: Path) -> None:
    code = (
        "import ecoffload, json\n"
        "print(json.dumps({r.name: [r.status, r.distribution] for r in ecoffload.list_backends()}))"
    )
    result = run(installed, "-c", code)
    assert result.returncode == 0, result.stderr
    records = json.loads(result.stdout)
    assert records["toy"] == ["ok", "ecoffload-toy"]
    assert records["acme-npu"] == ["ok", "ecoffload-acme-npu"]


def test_both_pass_the_suite_as_they_are(installed: Path) -> None:
    report = installed / "report.json"
    suite = ["-m", "pytest", "--pyargs", "ecoffload.testing.conformance", "-q", "-p", "no:cacheprovider"]
    backends = ["--ecoffload-backend=toy", "--ecoffload-backend=acme-npu"]
    result = run(installed, *suite, *backends, "--ecoffload-budget=0.1", f"--ecoffload-report={report}")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr
    counts = {name: entry["counts"] for name, entry in json.loads(report.read_text())["backends"].items()}
    assert counts.keys() == {"toy", "acme-npu"}
    assert all(count["passed"] > 50 for count in counts.values())


def test_a_new_package_is_complete_and_leaves_no_placeholder(written: Path) -> None:
    files = sorted(str(p.relative_to(written)) for p in written.rglob("*") if p.is_file())
    module = "src/ecoffload_acme_npu"
    assert files == sorted(
        ["README.md", "pyproject.toml", "tests/test_conformance.py"]
        + [f"{module}/{name}" for name in ("__init__.py", "backend.py", "plugin.py")]
    )
    assert not [name for name in files if "$" in (written / name).read_text()]
    assert "class AcmeNpuBackend(SwapBackend)" in (written / module / "backend.py").read_text()


@pytest.mark.parametrize("name", ["Acme", "acme_npu", "1acme", "acme-", "", "a" * 41, "acme npu", "../acme"])
def test_a_name_that_is_no_backends_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no name for a backend"):
        new_backend(name, tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["cpu", "cuda", "sim-top"])
def test_a_name_that_is_taken_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="taken"):
        new_backend(name, tmp_path / "x")


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="not an empty directory"):
        new_backend("acme", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
