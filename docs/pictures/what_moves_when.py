"""Time from left to right: what the host, the compute stream and the side streams do for one entry."""

from __future__ import annotations

from style import BLUE, GREEN, GREY, ORANGE, canvas, save

figure, axes = canvas(8.4, 3.5)
LANES = {"host (Python)": 2.9, "compute stream": 2.2, "save stream": 1.5, "load stream": 0.8}
for name, y in LANES.items():
    axes.text(0.1, y, name, va="center", color=GREY)
    axes.plot([1.35, 8.3], [y, y], color="#dddddd", zorder=0)


def bar(lane: str, start: float, end: float, text: str, colour: str) -> None:
    y = LANES[lane]
    axes.barh(y, end - start, 0.36, left=start, color=colour, zorder=2)
    axes.text((start + end) / 2, y, text, ha="center", va="center", color="white", fontsize=7.5, zorder=3)


def arrow(x0: float, lane0: str, x1: float, lane1: str) -> None:
    y0, y1 = LANES[lane0], LANES[lane1]
    sign = 1 if y0 > y1 else -1
    axes.annotate(
        "",
        (x1, y1 + sign * 0.18),
        (x0, y0 - sign * 0.18),
        arrowprops={"arrowstyle": "-|>", "color": GREY, "lw": 0.9},
        zorder=1,
    )


bar("host (Python)", 1.4, 2.3, "encode, put", BLUE)
bar("host (Python)", 5.75, 6.15, "get", BLUE)
bar("compute stream", 1.5, 2.9, "encode", ORANGE)
bar("compute stream", 2.9, 5.75, "language model: goes on", "#9e9e9e")
bar("compute stream", 7.15, 8.3, "uses the tensor", ORANGE)
bar("save stream", 2.95, 4.2, "device to host", GREEN)
bar("load stream", 6.0, 7.1, "host to device", GREEN)
arrow(1.62, "host (Python)", 1.62, "compute stream")
arrow(2.9, "compute stream", 3.0, "save stream")
arrow(5.95, "host (Python)", 6.08, "load stream")
arrow(7.1, "load stream", 7.2, "compute stream")
axes.text(4.25, 1.72, "landed: from here on\ncontains() says yes", va="center", fontsize=7.5, color=GREY)
axes.text(2.4, 3.05, "both return at once", va="center", fontsize=7.5, color=GREY)
axes.text(6.25, 3.05, "returns at once", va="center", fontsize=7.5, color=GREY)
axes.text(1.35, 0.25, "time", color=GREY, fontsize=7.5)
axes.annotate("", (8.3, 0.3), (1.7, 0.3), arrowprops={"arrowstyle": "-|>", "color": GREY, "lw": 0.8})
save(figure, __file__)
