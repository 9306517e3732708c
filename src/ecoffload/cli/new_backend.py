"""``ecoffload new-backend``: a package that installs and passes the suite, to put a device into."""

from __future__ import annotations

from pathlib import Path

from ecoffload.cli.output import print_json, stderr, stdout
from ecoffload.scaffold import new_backend


def run(name: str, directory: Path, as_json: bool) -> None:
    path = new_backend(name, directory)
    files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    if as_json:
        print_json({"name": name, "path": str(path), "files": files})
    else:
        stdout.print(path)
    stderr.print(
        f"next: pip install -e {path} && pytest --pyargs ecoffload.testing.conformance --ecoffload-backend={name}",
    )
