"""``ecoffload tune``: let a backend measure its device. Exit 3 if it has nothing to measure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ecoffload.cli.output import print_json, stderr, stdout
from ecoffload.errors import BackendUnavailable
from ecoffload.registry import get_backend


def run(name: str | None, as_json: bool) -> None:
    backend = get_backend(name)
    tune: Any = getattr(backend, "tune", None)
    if tune is None:
        raise BackendUnavailable(
            f"backend {backend.spec.name!r} has nothing to tune: it chooses between no ways of copying",
            name=backend.spec.name,
            reason="nothing to tune",
        )
    with stderr.status("measuring; nothing else should use the link meanwhile"):
        found = tune(stderr.print)
    if as_json:
        print_json(found)
        return
    for what, value in found.items():
        if what != "measured":
            for line in _lines(what, value):
                stdout.print(line, highlight=False)


def _lines(what: str, value: Any) -> Iterator[str]:
    """A line for each plain value, named by the keys above it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _lines(f"{what} {key}", inner)
    else:
        yield f"{what}: {value}"
