"""``ecoffload doctor``: what an installation suffers from. Exit 1 if a check failed; warnings alone are 0."""

from __future__ import annotations

from dataclasses import asdict

import typer

from ecoffload.cli.output import FAILED, print_json, stdout
from ecoffload.doctor import run_checks

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def run(as_json: bool) -> None:
    checks = run_checks()
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        for check in checks:
            stdout.print(check.status.ljust(5), style=_COLOURS[check.status], end="")
            stdout.print(f"{check.name}: {check.detail}")
            if check.remedy:
                stdout.print(f"     remedy: {check.remedy}")
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(FAILED)
