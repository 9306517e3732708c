"""The command line in this process: exit code, stdout and stderr apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ecoffload.cli.app import app

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """``run("size", path)``: what the command answered. An exception that it did not foresee fails the test."""

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)

    return invoke
