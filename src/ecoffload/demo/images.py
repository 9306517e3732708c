"""Photographs as the patches that a Qwen2-VL vision tower takes, prepared with PIL and numpy alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from ecoffload.errors import BackendUnavailable, ConfigError

__all__ = ["PATCH", "Picture", "bundled_photographs", "pictures_in", "read_picture"]

PATCH = 14  # pixels; two frames of each, merged two by two into a token
_MERGE = 2
_FRAMES = 2
_UNIT = PATCH * _MERGE
_MEAN = np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float32)  # of the pictures that CLIP was trained on
_STD = np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float32)

_BUNDLED = (
    "astronaut.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "coins.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
    "grass.png",
)


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture, ready to encode.

    ``patches``: float32 (grid_h * grid_w, 3 * 2 * 14 * 14); ``grid``: (frames, grid_h, grid_w); ``tokens``: rows that
    the tower gives for it.
    """

    name: str
    patches: NDArray[np.float32]
    grid: tuple[int, int, int]

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2] // _MERGE**2


def bundled_photographs() -> list[Path]:
    """Photographs that the scikit-image package ships. Raises :class:`BackendUnavailable` if it is not installed."""
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        raise BackendUnavailable(
            "the demo's photographs come with scikit-image: pip install 'ecoffload[demo]' (in a clone '.[demo]'), or "
            "give --images DIR",
            name="scikit-image",
            reason="not installed",
        )
    folder = Path(spec.origin).parent / "data"
    return [folder / name for name in _BUNDLED if (folder / name).is_file()]


def pictures_in(folder: Path) -> list[Path]:
    """Every visible file of a folder, in order of name. Raises :class:`ConfigError` if there is none."""
    if not folder.is_dir():
        raise ConfigError(f"--images {str(folder)!r} is no folder", option="images", value=str(folder))
    files = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    if not files:
        raise ConfigError(f"--images {str(folder)!r} holds no files", option="images", value=str(folder))
    return files


def read_picture(path: Path, max_tokens: int = 256) -> Picture:
    """Read and scale one picture so that it gives at most ``max_tokens`` tokens.

    Raises :class:`ConfigError` for a file that is no image, or not all of one, naming it.
    """
    name = os.fsencode(path.name).decode(errors="backslashreplace")  # it will be printed
    opened = False
    try:
        with Image.open(path) as image:
            opened = True
            rgb = image.convert("RGB")
    except UnidentifiedImageError as exc:
        why = "is empty" if not path.stat().st_size else "is not an image"
        raise ConfigError(f"{name} {why}", option="images", value=path) from exc
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as exc:  # PIL raises all of them
        why = "is a damaged image, perhaps cut short" if opened else "cannot be read"
        raise ConfigError(f"{name} {why}: {exc}", option="images", value=path) from exc
    width, height = rgb.size
    scale = min(1.0, (max_tokens * _UNIT**2 / (width * height)) ** 0.5)
    columns, rows = (max(1, int(side * scale) // _UNIT) for side in (width, height))
    rgb = rgb.resize((columns * _UNIT, rows * _UNIT), Image.Resampling.BICUBIC)
    pixels = (np.asarray(rgb, dtype=np.float32) / 255.0 - _MEAN) / _STD
    # Axes: window row, row in window, pixel row, window column, column in window, pixel column, channel. A token is
    # one window of 2 x 2 patches, so its patches come one after another; a still picture is two equal frames.
    windows = pixels.reshape(rows, _MERGE, PATCH, columns, _MERGE, PATCH, 3)
    patches = windows.transpose(0, 3, 1, 4, 6, 2, 5)
    frames = np.repeat(patches[..., None, :, :], _FRAMES, axis=-3)
    flat = frames.reshape(rows * columns * _MERGE**2, 3 * _FRAMES * PATCH * PATCH)
    return Picture(name, np.ascontiguousarray(flat), (1, rows * _MERGE, columns * _MERGE))
