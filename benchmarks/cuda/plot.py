"""GB/s by block size from a results file of run.py: ``python benchmarks/cuda/plot.py RESULTS.json OUT.svg``.

Drawn is what a caller waits for: from the submit until the bytes are there, scattered blocks, 256 MiB a batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

LINES = {
    "ours": ("ecoffload", "#0b6e4f", "-", 2.4),
    "load/store kernel, 12 SMs": ("load/store kernel on 12 SMs", "#b5651d", "--", 1.4),
    "batch call": ("cuMemcpyBatchAsync, one call", "#3b5998", "-.", 1.4),
    "loop of copies": ("one copy after another", "#8a8a8a", ":", 1.6),
}


def main(source: str, target: str) -> None:
    data = json.loads(Path(source).read_text(encoding="utf-8"))
    about = data["about"]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, way, title in zip(axes, ("h2d", "d2h"), ("load (host to device)", "save (device to host)"), strict=True):
        axis.axhline(about["peak GB/s"][way], color="#444444", linewidth=0.9)
        axis.annotate("one large pinned copy", (2048, about["peak GB/s"][way] + 0.7), fontsize=8, color="#444444")
        for name, (label, colour, style, width) in LINES.items():
            points = sorted(
                (item["block"], item["gbps"])
                for item in data["ways"]
                if item["direction"] == way
                and item["way"] == f"{name}, submit included"
                and not isinstance(item["block"], str)
            )
            axis.plot(*zip(*points, strict=True), style, color=colour, linewidth=width, label=label, marker="o", ms=3)
        axis.set_xscale("log", base=2)
        ticks = [2 << 10, 8 << 10, 32 << 10, 128 << 10, 1 << 20]
        axis.set_xticks(ticks, ["2 KiB", "8 KiB", "32 KiB", "128 KiB", "1 MiB"])
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("block size")
        axis.set_ylim(0, 60)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("GB/s, submit included")
    axes[1].legend(fontsize=8, loc="lower right")
    figure.suptitle(f"Scattered blocks on an {about['device']}, driver {about['driver']}, {about['date']}", fontsize=10)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None} if target.endswith(".svg") else None, dpi=160)


if __name__ == "__main__":
    main(*sys.argv[1:3])
