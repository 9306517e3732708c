"""States of an entry, what leads from one to the next, and when its extents are free again."""

from __future__ import annotations

from matplotlib.patches import FancyBboxPatch
from style import BLUE, GREEN, GREY, ORANGE, RED, canvas, save

figure, axes = canvas(8.4, 3.3)


def box(x: float, y: float, text: str, colour: str) -> None:
    patch = FancyBboxPatch((x - 0.55, y - 0.2), 1.1, 0.4, boxstyle="round,pad=0.06", facecolor=colour, edgecolor="none")
    axes.add_patch(patch)
    axes.text(x, y, text, ha="center", va="center", color="white")


def arrow(
    start: tuple[float, float], end: tuple[float, float], text: str, at: tuple[float, float], bend: float = 0
) -> None:
    style = {"arrowstyle": "-|>", "color": GREY, "connectionstyle": f"arc3,rad={bend}"}
    axes.annotate("", end, start, arrowprops=style)
    axes.text(*at, text, ha="center", va="center", fontsize=7.5, color=GREY)


box(0.9, 2.3, "reserved", BLUE)
box(3.1, 2.3, "writing", BLUE)
box(5.3, 2.3, "ready", GREEN)
box(7.5, 2.3, "pinned", GREEN)
box(3.1, 0.6, "kept aside", ORANGE)
box(5.3, 0.6, "free", RED)
arrow((1.55, 2.3), (2.45, 2.3), "handed to\na worker", (2.0, 2.6))
arrow((3.75, 2.3), (4.65, 2.3), "landed", (4.2, 2.5))
arrow((5.95, 2.42), (6.85, 2.42), "a load", (6.4, 2.75), -0.3)
arrow((6.85, 2.18), (5.95, 2.18), "loads ended at the\nslowest worker", (6.4, 1.78), -0.3)
arrow((5.3, 2.0), (5.3, 0.9), "evicted or\ninvalidated", (5.85, 1.35))
arrow((3.5, 2.0), (4.75, 0.85), "failed", (4.35, 1.55))
arrow((3.1, 2.0), (3.1, 0.9), "its worker\ndied", (2.6, 1.45))
arrow((3.75, 0.6), (4.65, 0.6), "nobody is left who\nmay write it", (4.2, 0.25))
axes.text(0.9, 1.8, "in flight: neither found\nnor evicted nor reused", ha="center", fontsize=7.5, color=GREY)
axes.text(7.5, 1.75, "may not be evicted", ha="center", fontsize=7.5, color=GREY)
save(figure, __file__)
