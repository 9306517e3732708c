"""``ecoffload replay``: a trace through the real index, beside Belady's bound. Exit 1 if moved bytes differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from ecoffload.cli.output import FAILED, print_json, progress_bar, stderr, stdout, table
from ecoffload.cli.plots import check_plot, plot_replay
from ecoffload.errors import ConfigError
from ecoffload.eviction import make_policy
from ecoffload.replay import GRANULE, Moved, Outcome, belady, move, parse_capacity, replay
from ecoffload.sizes import format_size
from ecoffload.traces import Columns, Trace, read_trace


def read(path: Path, key: str | None, tokens: str | None, nbytes: str | None, token_bytes: int, rows: int) -> Trace:
    """The trace that the options name; shared with ``ecoffload size``."""
    trace = read_trace(path, columns=Columns(key, tokens, nbytes), token_bytes=token_bytes)
    return trace.head(rows) if rows else trace


def run(
    trace: Trace,
    policies: list[str],
    capacities: list[str],
    backend: str,
    moving: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    check_plot(plot)
    nbytes = {text: parse_capacity(text, trace.footprint) for text in capacities}
    for text, capacity in nbytes.items():
        if capacity < GRANULE:
            raise ConfigError(
                f"--capacity {text} is {capacity} bytes; {GRANULE} is the least", option="capacity", value=text
            )
    for policy in policies:
        make_policy(policy, GRANULE)  # an unknown name is said before the work begins
    outcomes: dict[str, dict[str, Outcome]] = {policy: {} for policy in policies}
    moves: dict[str, dict[str, Moved]] = {policy: {} for policy in policies}
    passes = len(outcomes) * len(nbytes) * (3 if moving else 2)
    with progress_bar("replaying", len(trace) * passes) as advance:
        for text, capacity in nbytes.items():
            bound = belady(trace, capacity)
            for policy in outcomes:
                advance(0, f"{policy} at {text}")
                outcomes[policy][text] = replay(trace, policy, capacity, bound=bound, progress=advance)
                if moving:
                    moves[policy][text] = _move(trace, policy, capacity, backend, advance)
    if plot is not None:
        plot_replay(plot, trace.name, outcomes)
    if as_json:
        print_json({policy: _document(outcomes[policy], moves[policy]) for policy in outcomes})
    else:
        _show(trace, outcomes, moves)
    differ = sum(moved.mismatched for by_capacity in moves.values() for moved in by_capacity.values())
    if differ:
        stderr.print(f"error: {differ} reloaded tensors differ from what was saved", style="red")
        raise typer.Exit(FAILED)


def _move(trace: Trace, policy: str, capacity: int, backend: str, advance: Any) -> Moved:
    from ecoffload.registry import get_backend

    return move(trace, policy, capacity, backend=get_backend(backend), progress=advance)


def _document(outcomes: dict[str, Outcome], moves: dict[str, Moved]) -> dict[str, Any]:
    return {
        text: outcome.asdict() | ({"moved": moves[text].asdict()} if text in moves else {})
        for text, outcome in outcomes.items()
    }


def _show(trace: Trace, outcomes: dict[str, dict[str, Outcome]], moves: dict[str, dict[str, Moved]]) -> None:
    stdout.print(
        f"{trace.name}: {len(trace)} lookups of {len(trace.sizes)} objects, {format_size(trace.footprint)} in all",
    )
    result = table("policy", "capacity", "hit %", "byte %", "Belady", "region", "evicted", "extents", "us")
    for policy, by_capacity in outcomes.items():
        for text, o in by_capacity.items():
            result.add_row(
                policy,
                text,
                f"{100 * o.object_hit:.1f}",
                f"{100 * o.byte_hit:.1f}",
                f"{100 * o.belady_byte_hit:.1f}",
                f"{100 * o.region_byte_hit:.1f}",
                str(o.evictions),
                f"{o.extents_per_entry:.2f}",
                f"{o.us_per_op:.1f}",
            )
    stdout.print(result)
    for policy, moved_by in moves.items():
        for text, moved in moved_by.items():
            stdout.print(
                f"{policy} at {text} on {moved.backend}: {moved.verified} reloads verified bit for bit, "
                f"{moved.mismatched} differ; {format_size(moved.bytes_saved)} saved, "
                f"{format_size(moved.bytes_loaded)} loaded, {moved.seconds:.1f} s"
            )
