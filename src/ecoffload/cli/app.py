"""All commands of ``ecoffload``, each one thin: read options, call the library, show the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ecoffload.cli.output import errors_end_here

__all__ = ["app"]

app = typer.Typer(
    name="ecoffload",
    help="Encoder outputs in host memory, reloaded instead of encoded again.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of a table.")]


@app.command()
def demo(
    images: Annotated[
        Path | None, typer.Option(help="A folder of pictures; default: scikit-image's photographs.")
    ] = None,
    turns: Annotated[int, typer.Option(help="Turns of the conversation.")] = 6,
    capacity: Annotated[
        str | None, typer.Option(help="Host memory, such as 8MiB; default: three quarters of what all pictures need.")
    ] = None,
    backend: Annotated[str, typer.Option(help="A backend's name; see 'ecoffload backends'.")] = "cpu",
    json: AsJson = False,
) -> None:
    """Encode photographs, drop and reload their encodings over a conversation, and verify every byte.

    Example: ecoffload demo --turns 6 --capacity 8MiB
    """
    with errors_end_here():
        from ecoffload.cli.demo import run

        run(images, turns, capacity, backend, json)


@app.command()
def backends(
    probe: Annotated[bool, typer.Option(help="Initialise each device, in a child process.")] = False,
    json: AsJson = False,
) -> None:
    """List installed backends: encoding, kernels, and whether each can run here and why not.

    Example: ecoffload backends --json
    """
    with errors_end_here():
        from ecoffload.cli.backends import run

        run(probe, json)
