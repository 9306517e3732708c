"""``ecoffload demo``: the main job, shown. Exit 1 for a mismatch, 2 if a file was no image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ecoffload.cli.output import BAD_INPUT, FAILED, missing, print_json, progress_bar, stderr, stdout, table
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
            stderr.print(f"skipped: {exc}", style="yellow", markup=False)
    if not pictures:
        raise ConfigError(f"none of the {len(skipped)} files is an image", option="images", value=str(images))
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
        stderr.print(f"{len(skipped)} files were no images: {', '.join(skipped)}", style="yellow", markup=False)
        raise typer.Exit(BAD_INPUT)


def _show(outcome: Outcome) -> None:
    stdout.print(f"{outcome.tower}; backend {outcome.backend}; {outcome.turns} turns", markup=False)
    result = table("image", "tokens", "bytes", "encode ms", "reload ms", "encoded / reloaded")
    for image in outcome.images:
        result.add_row(
            image.name,
            str(image.tokens),
            format_size(image.nbytes),
            f"{image.encode_ms:.1f}",
            f"{image.reload_ms:.2f}" if image.reloaded else "-",
            f"{image.encoded} / {image.reloaded}" + (f", {image.mismatched} DIFFER" if image.mismatched else ""),
        )
    stdout.print(result)
    t = outcome.totals
    stdout.print(
        f"hit rate {t['hit_rate']:.0%} ({t['hits']} of {t['lookups']} lookups); capacity {t['capacity']} of "
        f"{format_size(t['footprint_bytes'])} footprint, {t['evictions']} evictions"
    )
    stdout.print(
        f"saved {format_size(t['bytes_saved'])}, loaded {format_size(t['bytes_loaded'])} at "
        f"{t['reload_gb_per_s']:.1f} GB/s; {t['verified']} reloads verified bit for bit, {t['mismatched']} differ"
    )
    stdout.print(
        f"encode time {t['encode_ms'] / 1e3:.2f} s, reload time {t['reload_ms'] / 1e3:.3f} s, "
        f"encode time saved {t['encode_ms_saved'] / 1e3:.2f} s"
    )
