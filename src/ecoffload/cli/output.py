"""What every command shares: where output goes, how errors end, what the exit codes mean, progress and tables.

JSON goes to stdout and nothing else does then; progress, warnings and errors go to stderr.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ecoffload.errors import (
    AmbiguousBackend,
    BackendUnavailable,
    ConfigError,
    EcoffloadError,
    NoSpace,
    PluginError,
    UnknownBackend,
)

__all__ = [
    "BAD_INPUT",
    "FAILED",
    "OK",
    "UNAVAILABLE",
    "errors_end_here",
    "missing",
    "print_json",
    "progress_bar",
    "shortened",
    "stderr",
    "stdout",
    "table",
]

OK, FAILED, BAD_INPUT, UNAVAILABLE = 0, 1, 2, 3

# Text is printed as it is: names of files may look like markup, and who reads a pipe wraps lines as they like.
_AS_IT_IS: Any = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
stdout = Console(**_AS_IT_IS)
stderr = Console(stderr=True, **_AS_IT_IS)


def print_json(document: Any, *, indent: int | None = 2) -> None:
    typer.echo(json.dumps(document, indent=indent, default=str))  # which a closed stdout does not trouble


@contextmanager
def errors_end_here() -> Iterator[None]:
    """Turn our own errors, and files that the system refuses, into one line on stderr and its exit code."""
    try:
        yield
    except EcoffloadError as exc:
        stderr.print(f"error: {exc}", style="red")
        unavailable = isinstance(exc, BackendUnavailable | PluginError | NoSpace)
        bad = isinstance(exc, ConfigError | UnknownBackend | AmbiguousBackend)
        raise typer.Exit(UNAVAILABLE if unavailable else BAD_INPUT if bad else FAILED) from None
    except OSError as exc:
        if exc.filename is not None:
            what = f"{str(exc.filename)!r} cannot be used: {exc.strerror}; name another"
        elif exc.errno == errno.ENOSPC:
            what = f"the output cannot be written: {exc.strerror}; send it where there is room"
        else:  # a pipe whose reader has seen enough, which is no error, or a bug of ours
            raise
        stderr.print(f"error: {what}", style="red")
        raise typer.Exit(BAD_INPUT) from None


def missing(what: str, exc: ModuleNotFoundError, extra: str) -> BackendUnavailable:
    """The error for a package that one of our extras brings."""
    return BackendUnavailable(
        f"{what} needs {exc.name}: pip install 'ecoffload[{extra}]', or in a clone: pip install '.[{extra}]'",
        name=exc.name,
        reason="not installed",
    )


@contextmanager
def progress_bar(description: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A bar with the time that remains, on stderr if that is a terminal, gone when it ends.

    Yields ``advance(n=1, description=None, total=None)``; a total of None is not known yet, or as it was.
    """
    text = TextColumn("{task.description:24.24}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(description, total=total)

        def advance(n: int = 1, description: str | None = None, total: int | None = None) -> None:
            bar.update(task, advance=n, total=total, description=description)

        yield advance


def shortened(name: str, width: int = 32) -> str:
    """A name that leaves a table's other columns their room: cut in the middle, since both ends tell names apart."""
    name = "".join(each if each.isprintable() else "\ufffd" for each in name)  # nothing that steers a terminal
    half = (width - 1) // 2
    return name if len(name) <= width else f"{name[: width - 1 - half]}…{name[-half:]}"


def table(*columns: str, text: int = 1) -> Table:
    """The one style of table: the first ``text`` columns hold text, the others numbers.

    The first column and numbers stay on one line, and so do the lines of headings.
    """
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        wraps = 0 < number < text
        widest = max(map(len, column.splitlines()))
        justify: Literal["left", "right"] = "left" if number < text else "right"
        result.add_column(column, justify=justify, no_wrap=not wraps, overflow="fold", min_width=widest)
    return result
