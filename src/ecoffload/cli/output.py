"""What every command shares: where output goes, how errors end, and what the exit codes mean.

JSON goes to stdout and nothing else does then; progress, warnings and errors go to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from ecoffload.errors import (
    AmbiguousBackend,
    BackendUnavailable,
    ConfigError,
    EcoffloadError,
    NoSpace,
    PluginError,
    UnknownBackend,
)

__all__ = ["BAD_INPUT", "FAILED", "OK", "UNAVAILABLE", "errors_end_here", "print_json", "stderr", "stdout"]

OK, FAILED, BAD_INPUT, UNAVAILABLE = 0, 1, 2, 3

stdout = Console(soft_wrap=False, highlight=False)
stderr = Console(stderr=True, highlight=False)


def print_json(document: Any) -> None:
    json.dump(document, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


@contextmanager
def errors_end_here() -> Iterator[None]:
    """Turn our own errors into one line on stderr and the exit code that belongs to them."""
    try:
        yield
    except EcoffloadError as exc:
        stderr.print(f"error: {exc}", style="red", markup=False)
        unavailable = isinstance(exc, BackendUnavailable | PluginError | NoSpace)
        bad = isinstance(exc, ConfigError | UnknownBackend | AmbiguousBackend)
        raise typer.Exit(UNAVAILABLE if unavailable else BAD_INPUT if bad else FAILED) from None
