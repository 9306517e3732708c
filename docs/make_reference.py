"""Writes the page that is made from the code, reference/cli.md.

Run it after changing a command; a test fails if the page is not what it would write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer.main

from ecoffload.cli.app import app

DOCS = Path(__file__).parent


def cli() -> str:
    """Every command with its text, arguments and options."""
    parts = [
        "# Command line",
        "",
        "JSON goes to stdout and nothing else does then; progress, warnings and errors go to stderr.",
        "",
        "| exit code | meaning |",
        "|---|---|",
        "| 0 | ok (`backends`: whatever it lists) |",
        "| 1 | a check failed |",
        "| 2 | bad input: an unknown option or backend, a bad value, a file that cannot be read |",
        "| 3 | what was asked for is unavailable: a device, a driver, an extra, memory |",
        "",
        '`pip install "ecoffload[cli]"`; plots need `ecoffload[plot]`, the demo `ecoffload[demo]`. The examples read',
        "an access trace of your own; in the source tree there are some:",
        "",
        *_bash("cp tests/data/traces/b_base.csv.gz trace.csv.gz"),
    ]
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        text, _, example = (command.help or "").rpartition("Example: ")
        parts += ["", f"## ecoffload {name}", "", *text.strip().splitlines(), "", *_bash(example.strip()), ""]
        parts += ["| argument or option | default | |", "|---|---|---|"]
        for option in command.params:
            if option.name != "help":
                parts.append(_row(option))
    return "\n".join(parts) + "\n"


def _bash(example: str) -> list[str]:
    """A block that the tests run, or its mark."""
    mark = "hardware" if "--backend cuda" in example else "service" if "--watch" in example else ""
    return [*([f"<!-- {mark} -->"] if mark else []), "```bash", example, "```"]


def _row(option: Any) -> str:
    is_option = option.param_type_name == "option"
    name = ", ".join(option.opts) if is_option else str(option.metavar or option.name).upper()
    value = "" if getattr(option, "is_flag", False) or not is_option else f" {option.metavar or 'VALUE'}"
    values = option.default if isinstance(option.default, list | tuple) else [option.default]
    default = "" if option.default in (None, False) or option.required else ", ".join(f"`{each}`" for each in values)
    return f"| `{name}{value}` | {default} | {getattr(option, 'help', None) or ''} |"


PAGES = {"reference/cli.md": cli}

if __name__ == "__main__":
    for page, text in PAGES.items():
        (DOCS / page).write_text(text(), encoding="utf-8")
