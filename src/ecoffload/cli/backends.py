"""``ecoffload backends``: one row an installed backend. Exits 0 whatever it lists."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from ecoffload.cli.output import print_json, stdout, table
from ecoffload.registry import BackendRecord, list_backends

_COLOURS = {"ok": "green", "unavailable": "yellow"}


def run(probe: bool, as_json: bool) -> None:
    rows = [_row(record, probe) for record in list_backends()]
    if as_json:
        print_json(rows)
        return
    result = table("name", "status", "package", "encoding", "kernels", text=5)
    for row in rows:
        result.add_row(
            row["name"],
            Text(row["status"], _COLOURS.get(row["status"], "red")),
            f"{row['distribution']} {row['version']}",
            row["encoding"] or "-",
            ", ".join(k["name"] for k in row["kernels"]) or "-",
        )
    stdout.print(result)
    for row in rows:  # reasons are sentences, which no column of a table holds
        stdout.print(f"{row['name']}: {row['reason']}")


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
