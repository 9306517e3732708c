"""What the pictures share: colours, fonts, and files that do not change unless the picture does."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GREY = "#3f51b5", "#e67e22", "#2e7d32", "#c62828", "#757575"
mpl.rcParams |= {"svg.hashsalt": "ecoffload", "svg.fonttype": "path", "font.size": 9}


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty area of that many inches, coordinates 0..width by 0..height, no axes."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def save(figure: Figure, script: str) -> None:
    """Beside the script, or in the folder given as argument, under the script's name."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(script).parent
    figure.savefig(folder / f"{Path(script).stem}.svg", metadata={"Date": None, "Creator": None})
