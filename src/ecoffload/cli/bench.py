"""``ecoffload bench``: what the link gives, what we make of it, and what naive copies do; or two results compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ecoffload.benchmark import SIZES, bench, compare, steps
from ecoffload.cli.output import print_json, progress_bar, stdout, table
from ecoffload.cli.plots import check_plot, plot_bench
from ecoffload.errors import ConfigError
from ecoffload.registry import get_backend
from ecoffload.sizes import format_size, parse_size


def run(
    backend: str, sizes: list[str], total: str, rounds: int, entries: int, plot: Path | None, as_json: bool
) -> None:
    check_plot(plot)
    blocks = tuple(parse_size(text, option="--sizes") for given in sizes for text in given.split(",")) or SIZES
    with progress_bar("starting", steps(blocks)) as advance:
        document = bench(
            get_backend(backend),
            sizes=blocks,
            total=parse_size(total, option="--total"),
            rounds=rounds,
            entries=entries,
            progress=lambda done, what: advance(done, what or None),
        )
    if plot is not None:
        plot_bench(plot, document)
    if as_json:
        print_json(document)
    else:
        _show(document)


def run_compare(first: Path, second: Path, as_json: bool) -> None:
    rows = compare(_read(first), _read(second))
    if as_json:
        print_json(rows)
        return
    result = table("figure", first.name, second.name, "second is better by")
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        result.add_row(row["figure"], f"{row['first']:.4g}", f"{row['second']:.4g}", ratio)
    stdout.print(result)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"--compare {str(path)!r} cannot be read: {exc}", option="compare", value=str(path)) from exc
    if not isinstance(document, dict):
        raise ConfigError(f"--compare {str(path)!r} is no result of 'ecoffload bench --json'", option="compare")
    return document


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is no figure")


def _show(document: dict[str, Any]) -> None:
    peak, latency, start = document["peak"], document["latency"], document["start_up"]
    stdout.print(
        f"{document['backend']} on {document['device']}; GB/s with {format_size(document['total_bytes'])} a batch; "
        f"one contiguous copy: h2d {peak['h2d']:.1f}, d2h {peak['d2h']:.1f}",
    )
    ways = list(document["rates"][0]["gb_per_s"])
    result = table("blocks", *(f"{direction} {way}" for direction in ("h2d", "d2h") for way in ways))
    rates = {(row["direction"], row["block_bytes"]): row["gb_per_s"] for row in document["rates"]}
    for size in dict.fromkeys(size for _, size in rates):
        result.add_row(format_size(size), *(f"{rates[d, size][way]:.2f}" for d in ("h2d", "d2h") for way in ways))
    stdout.print(result)
    result = table(f"one entry of {format_size(latency['entry_bytes'])}, us", "p50", "p90", "p99")
    for name, what in (("save", "put and flush"), ("load", "get until it is there"), ("get_returns", "get returns")):
        result.add_row(what, *(f"{latency[name][point]:.0f}" for point in ("p50_us", "p90_us", "p99_us")))
    stdout.print(result)
    if start["registered"]:
        registered = f"registered in {start['register_s'] * 1e3:.1f} ms"
    else:
        registered = f"not registered: {start['reason']}"
    stdout.print(
        f"region of {format_size(start['region_bytes'])} reserved in {start['region_s'] * 1e3:.1f} ms, {registered}",
    )
