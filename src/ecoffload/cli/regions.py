"""``ecoffload regions``: the host regions of this machine; read-only, and safe beside running engines.

``--reclaim`` alone changes something: it unlinks regions that nobody maps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.live import Live
from rich.table import Table

from ecoffload.cli.output import print_json, stderr, stdout, table
from ecoffload.errors import ConfigError
from ecoffload.regions import RegionInfo, check_id, list_regions, reclaim
from ecoffload.sizes import format_size


def run(
    ids: list[str], directory: Path, unlink: bool, after: float, watch: bool, interval: float, count: int, as_json: bool
) -> None:
    if not directory.is_dir():
        raise ConfigError(f"{str(directory)!r} is no directory", option="directory", value=str(directory))
    wanted = tuple(check_id(id) for id in ids)
    if unlink:
        gone = reclaim(directory, after=after, ids=wanted or None)
        if as_json:
            print_json([asdict(info) for info in gone])
        else:
            stdout.print(_table(gone))
        freed = sum(info.nbytes for info in gone)
        stderr.print(f"{len(gone)} regions unlinked, {format_size(freed)} given back")
        return
    snapshots = _snapshots(directory, wanted, interval, count if watch else 1)
    if as_json:
        for regions in snapshots:
            print_json([asdict(info) for info in regions], indent=None if watch else 2)
    elif watch:
        with Live(console=stdout, auto_refresh=False, transient=False) as live:
            for regions in snapshots:
                live.update(_table(regions), refresh=True)
    else:
        stdout.print(_table(next(snapshots)))


def _snapshots(directory: Path, wanted: tuple[str, ...], interval: float, count: int) -> Iterator[list[RegionInfo]]:
    """``count`` listings, 0: until interrupted."""
    taken = 0
    while True:
        yield [info for info in list_regions(directory) if not wanted or info.id in wanted]
        taken += 1
        if taken == count:
            return
        time.sleep(interval)


def _table(regions: list[RegionInfo]) -> Table:
    result = table("region", "state", "size", "age", "entries", "processes", "namespace")
    for info in regions:
        state = info.state if info.ownerless is None else f"{info.state} {_age(info.ownerless)}"
        result.add_row(
            info.id,
            state,
            format_size(info.nbytes),
            _age(info.age),
            str(info.entries) if info.warm else "-",
            ", ".join(map(str, info.mappers)) or "-",
            info.namespace[:40] or "-",
        )
    return result


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.0f} s"
