"""``ecoffload demo``: the main job, shown. Exit 1 for a mismatch, 2 if a file could not be read as an image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ecoffload.cli.output import BAD_INPUT, FAILED, missing, print_json, progress_bar, shortened, stderr, stdout, table
from ecoffload.errors import ConfigError
from ecoffload.registry import get_backend
from ecoffload.sizes import format_size, parse_size

if TYPE_CHECKING:
    from ecoffload.demo.conversation import Outcome


def run(images: Path | None, turns: int, capacity: str | None, backend_name: str, as_json: bool) -> None:
    try:
        from ecoffload.demo.conversation import play
        from ecoffload.demo.images import Picture, bundled_photographs, pictures_in, read_picture
    except ModuleNotFoundError as exc:
        raise missing("the demo", exc, "demo") from exc
    nbytes = None if capacity is None else parse_size(capacity, option="--capacity")
    backend = get_backend(backend_name)
    pictures: list[Picture] = []
    skipped: list[str] = []
    for path in bundled_photographs() if images is None else pictures_in(images):
        try:
            pictures.append(read_picture(path))
        except ConfigError as exc:
            skipped.append(path.name)
            stderr.print(f"skipped: {exc}", style="yellow")
    if not pictures:
        raise ConfigError("there is no picture to encode", option="images", value=str(images))
    with progress_bar("encoding", None) as advance:
        outcome = play(
            pictures,
            backend=backend,
            turns=turns,
            capacity=nbytes,
            skipped=skipped,
            progress=lambda done, total, name: advance(1, name, total),
        )
    if as_json:
        print_json(outcome.asdict())
    else:
        _show(outcome)
    if outcome.totals["mismatched"]:
        stderr.print(f"error: {outcome.totals['mismatched']} reloaded tensors differ from what was saved", style="red")
        raise typer.Exit(FAILED)
    if skipped:
        raise typer.Exit(BAD_INPUT)


def _show(outcome: Outcome) -> None:
    turns = f"{outcome.turns} turn{'s' if outcome.turns > 1 else ''}"
    stdout.print(f"{outcome.tower}; backend {outcome.backend}; {turns}")
    result = table("image", "tokens", "bytes", "encode\nms", "reload\nms", "encoded", "reloaded")
    for image in outcome.images:
        result.add_row(
            shortened(image.name, 24),
            str(image.tokens),
            format_size(image.nbytes),
            f"{image.encode_ms:.1f}" if image.encoded else "-",
            f"{image.reload_ms:.2f}" if image.reloaded else "-",
            str(image.encoded),
            str(image.reloaded) + (f", {image.mismatched} DIFFER" if image.mismatched else ""),
        )
    stdout.print(result)
    for image in outcome.images:
        if image.same_as is not None:
            stdout.print(f"{image.name} has the same pixels as {image.same_as}: one encoding serves both")
    t = outcome.totals
    stdout.print(
        f"hit rate {t['hit_rate']:.0%} ({t['hits']} of {t['lookups']} lookups); capacity {t['capacity']} of "
        f"{format_size(t['footprint_bytes'])} footprint, {t['evictions']} evictions"
    )
    rate = "" if t["reload_gb_per_s"] is None else f" at {t['reload_gb_per_s']:.1f} GB/s"
    stdout.print(
        f"saved {format_size(t['bytes_saved'])}, loaded {format_size(t['bytes_loaded'])}{rate}; "
        f"{t['verified']} reloads verified bit for bit, {t['mismatched']} differ"
    )
    stdout.print(
        f"encode time {t['encode_ms'] / 1e3:.2f} s, reload time {t['reload_ms'] / 1e3:.3f} s, "
        f"encode time saved {t['encode_ms_saved'] / 1e3:.2f} s"
    )
    if not t["reloaded"]:
        why = "pictures come again from the second turn on" if outcome.turns == 1 else "a larger --capacity keeps more"
        stdout.print(f"nothing was reloaded, so nothing was verified: {why}")
