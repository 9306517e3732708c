"""``ecoffload regions``: the host regions of this machine; read-only, and safe beside running engines.

``--reclaim`` alone changes something: it unlinks regions that nobody maps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Table

from ecoffload.cli.output import print_json, shortened, stderr, stdout, table
from ecoffload.errors import ConfigError
from ecoffload.regions import RegionInfo, check_id, list_regions, reclaim
from ecoffload.sizes import format_size
from ecoffload.telemetry import Activity, activity


def run(
    ids: list[str], directory: Path, unlink: bool, after: float, watch: bool, interval: float, count: int, as_json: bool
) -> None:
    if not directory.is_dir():
        raise ConfigError(f"{str(directory)!r} is no directory", option="directory", value=str(directory))
    wanted = tuple(check_id(id) for id in ids)
    if not watch:  # which may wait for one that is yet to come
        require(directory, wanted)
    if unlink:
        gone = reclaim(directory, after=after, ids=wanted or None)
        if as_json:
            print_json([asdict(info) for info in gone])
        else:
            _show(gone)
        freed = sum(info.nbytes for info in gone)
        stderr.print(f"{len(gone)} regions unlinked, {format_size(freed)} given back")
        return
    looks = _looks(directory, wanted, interval, count if watch else 1)
    if as_json:
        for look in looks:
            print_json([_document(*each) for each in look], indent=None if watch else 2)
    elif watch:
        before: dict[str, Activity] = {}
        with Live(console=stdout, auto_refresh=False) as live:
            for look in looks:
                live.update(_activity_table(look, before), refresh=True)
                before = {info.id: told for info, told in look if told is not None}
    else:
        _show([info for info, _ in next(looks)])


def require(directory: Path, ids: tuple[str, ...]) -> None:
    """Raise :class:`ConfigError` unless there is a region of each id; shared with ``ecoffload size``."""
    there = [info.id for info in list_regions(directory)] if ids else []
    for id in ids:
        if id not in there:
            raise ConfigError(
                f"there is no region {id!r} in {directory}; there are: {', '.join(there) or 'none'}",
                option="id",
                value=id,
            )


Look = list[tuple[RegionInfo, Activity | None]]


def _looks(directory: Path, wanted: tuple[str, ...], interval: float, count: int) -> Iterator[Look]:
    """``count`` listings, 0: until interrupted; what its scheduler tells beside each region that is live."""
    taken = 0
    while True:
        found = [info for info in list_regions(directory) if not wanted or info.id in wanted]
        yield [(info, activity(directory, info.id) if info.live else None) for info in found]
        taken += 1
        if taken == count:
            return
        time.sleep(interval)


def _document(info: RegionInfo, told: Activity | None) -> dict[str, Any]:
    return asdict(info) | {"activity": told and told.asdict()}


def _activity_table(look: Look, before: dict[str, Activity]) -> Table:
    columns = ["region", "state", "size", "in use", "entries", "hit\n%", "in\nMB/s", "out\nMB/s"]
    more = ["pins", "evicted", "oldest"] if stdout.width >= 110 else []  # what a narrow terminal has no room for
    result = table(*columns, *more)
    for info, told in look:
        row = [shortened(info.id, 22), info.state, format_size(info.nbytes)]
        if told is not None:
            last = before.get(info.id, told)
            seconds = told.at - last.at
            rates = (told.bytes_saved - last.bytes_saved, told.bytes_loaded - last.bytes_loaded)
            row += [format_size(told.used_bytes), str(told.entries), f"{100 * told.hit_rate:.1f}"]
            row += [f"{rate / seconds / 1e6:.1f}" if seconds > 0 else "0.0" for rate in rates]
            row += [str(told.pinned_entries), str(told.evictions), _age(told.oldest)][: len(more)]
        result.add_row(*row)
    return result


def _show(regions: list[RegionInfo]) -> None:
    """A table of what is short, and a line each for what is not: who maps it and what its entries depend on."""
    result = table("region", "state", "size", "age", "entries")
    result.columns[0].no_wrap = False  # rather two lines than an id that is cut
    for info in regions:
        entries = str(info.entries) if info.warm else "-"
        result.add_row(info.id, info.state, format_size(info.nbytes), _age(info.age), entries)
    stdout.print(result)
    for info in regions:
        mappers = f"processes {', '.join(map(str, info.mappers))}" if info.mappers else "no process seen"
        who = mappers if info.ownerless is None else f"ownerless for {_age(info.ownerless)}"
        stdout.print(f"{info.id}: {who}; namespace {shortened(info.namespace, 60) or '-'}")


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.0f} s"
