"""Pictures of what the commands found, drawn with matplotlib if it is installed; no window is ever opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecoffload.cli.output import missing
from ecoffload.errors import ConfigError
from ecoffload.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ecoffload.replay import Outcome
    from ecoffload.sizing import Curve, Recommendation

__all__ = ["check_plot", "plot_bench", "plot_curve", "plot_replay"]

_GIB = 1 << 30


def check_plot(path: Path | None) -> None:
    """Say what would keep a plot from being written, before the work is done."""
    if path is None:
        return
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as exc:
        raise missing("--plot", exc, "plot") from exc
    kinds = FigureCanvasAgg(Figure()).get_supported_filetypes()
    if path.suffix.lstrip(".") not in kinds:
        raise ConfigError(
            f"--plot {str(path)!r}: no picture of that kind can be written; end it in .png, .svg or .pdf",
            option="plot",
            value=str(path),
        )
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {str(path)!r}: its folder does not exist", option="plot", value=str(path))


def _figure(columns: int = 1) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * columns, 4.2), layout="constrained")
    axes = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.3)
    return figure, list(axes)


def plot_replay(path: Path, name: str, outcomes: dict[str, dict[str, Outcome]]) -> None:
    """Byte-hit by capacity, a line a policy, Belady's bound above."""
    figure, (axes,) = _figure()
    bound: dict[int, float] = {}
    for policy, by_capacity in outcomes.items():
        found = sorted(by_capacity.values(), key=lambda outcome: outcome.capacity_bytes)
        bound |= {each.capacity_bytes: each.belady_byte_hit for each in found}
        axes.plot([o.capacity_bytes / _GIB for o in found], [100 * o.byte_hit for o in found], "o-", label=policy)
    points = sorted(bound.items())
    axes.plot([c / _GIB for c, _ in points], [100 * h for _, h in points], "k--", label="Belady's bound")
    axes.set(xlabel="capacity, GiB", ylabel="byte hit, %", title=name, ylim=(0, None), xlim=(0, None))
    axes.legend()
    figure.savefig(path)


def plot_curve(path: Path, name: str, curve: Curve, advice: Recommendation | None) -> None:
    """The miss-ratio curve, with the recommended capacity marked."""
    figure, (axes,) = _figure()
    points = [(0, 0.0), *curve.points(200)]
    axes.plot([c / _GIB for c, _ in points], [100 * (1 - h) for _, h in points])
    if advice is not None:
        axes.axvline(advice.capacity / _GIB, color="k", linestyle=":")
        axes.annotate(
            f" {advice.capacity / _GIB:.3g} GiB: {advice.share:.0%} of the best",
            (advice.capacity / _GIB, 100 * (1 - advice.byte_hit)),
            va="bottom",
        )
    axes.set(xlabel="capacity, GiB", ylabel="bytes missed, %", title=name, ylim=(0, 100), xlim=(0, None))
    figure.savefig(path)


_WAYS = {"ours": "ours: one batch", "loop": "loop: a copy each", "pack": "pack: gather, then one copy"}


def plot_bench(path: Path, document: dict[str, Any]) -> None:
    """Rates by block size, a line a way, both directions."""
    figure, axes = _figure(2)
    for each, direction in zip(axes, ("h2d", "d2h"), strict=True):
        rows = [row for row in document["rates"] if row["direction"] == direction]
        sizes = [row["block_bytes"] for row in rows]
        for way in rows[0]["gb_per_s"] if rows else ():
            each.plot(sizes, [row["gb_per_s"][way] for row in rows], "o-", label=_WAYS.get(way, way))
        each.axhline(document["peak"][direction], color="k", linestyle=":", label="one contiguous copy")
        each.set_xscale("log", base=2)
        each.set_xticks(sizes, [format_size(size) for size in sizes], rotation=30)
        each.set(xlabel="block", title=f"{document['backend']}: {direction}")
    axes[0].set_ylim(0, None)
    axes[0].set_ylabel("GB/s")
    axes[0].legend()
    figure.savefig(path)
