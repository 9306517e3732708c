"""The command line ``ecoffload``: a thin layer of typer and rich over the library. The top of the house."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point. Without the extra, one line says which pip command brings it (exit code 3)."""
    try:
        from ecoffload.cli.app import app
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.stderr.write(
            "the ecoffload command needs its extra: pip install 'ecoffload[cli]', or in a clone: pip install '.[cli]'\n"
        )
        sys.exit(3)
    app(prog_name="ecoffload")
