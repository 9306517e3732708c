"""``ecoffload backends``: one row an installed backend. Exits 0 whatever it lists."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ecoffload.cli.output import print_json, stdout
from ecoffload.registry import BackendRecord, list_backends

_COLOURS = {"ok": "green", "unavailable": "yellow"}


def run(probe: bool, as_json: bool) -> None:
    rows = [_row(record, probe) for record in list_backends()]
    if as_json:
        print_json(rows)
        return
    table = Table(title="backends", title_justify="left")
    for column in ("name", "status", "package", "encoding", "kernels", "reason"):
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "status"))
    for row in rows:
        colour = _COLOURS.get(row["status"], "red")
        table.add_row(
            row["name"],
            f"[{colour}]{row['status']}[/]",
            f"{row['distribution']} {row['version']}",
            row["encoding"] or "-",
            ", ".join(k["name"] for k in row["kernels"]) or "-",
            row["reason"],
        )
    stdout.print(table)


def _row(record: BackendRecord, probe: bool) -> dict[str, Any]:
    status, reason = record.status, record.reason
    if probe and status == "ok":
        from ecoffload.probe import probe as probe_backend

        available = probe_backend(record.name)
        reason = available.reason
        if not available.ok:
            status = "unavailable"
    spec = record.spec
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "status": status,
        "reason": reason,
        "device_type": spec.device_type if spec else None,
        "encoding": spec.encoding.dtype if spec else None,
        "kernels": [kernel.model_dump() for kernel in spec.kernels] if spec else [],
        "capabilities": spec.capabilities.model_dump() if spec else None,
    }
