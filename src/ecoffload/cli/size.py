"""``ecoffload size``: how large the cache should be, from a trace or from a running engine."""

from __future__ import annotations

from pathlib import Path

from ecoffload.cli.output import print_json, progress_bar, stdout, table
from ecoffload.cli.plots import check_plot, plot_curve
from ecoffload.cli.regions import require
from ecoffload.errors import BackendUnavailable, ConfigError
from ecoffload.regions import check_id
from ecoffload.sizes import format_size
from ecoffload.sizing import Curve, ReuseTimes
from ecoffload.telemetry import activity
from ecoffload.traces import Trace

_SHARES = (0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


def run(trace: Trace, share: float, plot: Path | None, as_json: bool) -> None:
    check_plot(plot)
    times = ReuseTimes(most=max(2, 2 * len(trace.sizes)))
    sizes: list[int] = trace.sizes.tolist()
    keys = [b"%d" % number for number in range(len(sizes))]
    with progress_bar("reading", len(trace)) as advance:
        for at, number in enumerate(trace.objects.tolist()):
            times.use(keys[number], sizes[number])
            if not at % 4096:
                advance(4096)
    show(trace.name, times.curve(), share, plot, as_json)


def run_live(id: str, directory: Path, share: float, plot: Path | None, as_json: bool) -> None:
    """From what the region's scheduler tells the outside."""
    check_plot(plot)
    require(directory, (check_id(id),))
    told = activity(directory, id)
    if told is None or told.curve is None:
        raise BackendUnavailable(
            f"region {id!r} in {directory} tells no ghost statistics: open its cache with ghost_stats=True, and "
            "wait for its first lookups",
            name=id,
            reason="no ghost statistics",
        )
    show(id, told.curve, share, plot, as_json)


def show(name: str, curve: Curve, share: float, plot: Path | None, as_json: bool) -> None:
    """A curve as plot and table or JSON, with the advice."""
    if not 0 < share <= 1:
        raise ConfigError(f"--share {share} is not above 0 and at most 1", option="share", value=share)
    advice = curve.recommend(share)
    if plot is not None:
        plot_curve(plot, name, curve, advice)
    if as_json:
        print_json({"name": name} | curve.asdict() | {"recommendation": advice and advice.asdict()})
        return
    stdout.print(
        f"{name}: {curve.lookups} lookups, {format_size(curve.footprint)} of distinct objects; "
        f"an infinite cache would hit {curve.best:.1%} of the bytes",
    )
    if advice is None:
        stdout.print("nothing was asked for twice: no cache of any size would help")
        return
    result = table("of the best", "capacity", "byte hit %")
    for each in sorted({*_SHARES, share}):
        if (at := curve.recommend(each)) is not None:
            result.add_row(f"{each:.0%}", format_size(at.capacity), f"{100 * at.byte_hit:.1f}")
    stdout.print(result)
    # In whole MiB, so that it can be pasted: "9.94GiB" is no whole number of bytes.
    stdout.print(
        f"{-(-advice.capacity >> 20)}MiB ({format_size(advice.capacity)}) reaches {share:.0%} of what "
        "an infinite cache would"
    )
