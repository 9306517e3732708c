"""Which descriptors go to the copy engine and which to the kernel: defaults, and the file of what was measured.

One idea: for each direction a list of size classes, each with the share of its descriptors that the copy engine takes;
the kernel takes the rest at the same time. A descriptor of the engine's costs the host 0.45 us (more below 32 KiB), in
which the link moves 25 KB: short ones are therefore the kernel's, and long ones the engine's, which is a little faster
and leaves every multiprocessor alone. In between both have a part.
"""

from __future__ import annotations

import json
import logging
import os
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ecoffload.backend import H2D, Direction
from ecoffload_cuda.kernel import cache_directory, write_whole

if TYPE_CHECKING:
    from ecoffload_cuda.driver import Device

__all__ = ["DEFAULTS", "Tuning", "Way", "load_tuning", "store_tuning", "tuning_file"]

_log = logging.getLogger("ecoffload.cuda")

_KIB: Final = 1024
_VERSION: Final = 1
_NEVER: Final = 2**64


@dataclass(frozen=True)
class Way:
    """One direction: ``classes`` of (from so many bytes, the engine's share), ascending, and multiprocessors to use.

    Descriptors below the first class are the kernel's. ``sms`` is for batches of mean size up to its bytes, likewise
    ascending: (0, 3), (3072, 2) means three below 3 KiB and two from there on.
    """

    classes: tuple[tuple[int, float], ...]
    sms: tuple[tuple[int, int], ...]
    edges: tuple[int, ...] = field(init=False, compare=False)
    whole: int = field(init=False, compare=False)
    """From so many bytes on, every descriptor is the engine's."""
    shares: tuple[float, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "edges", tuple(edge for edge, _ in self.classes))
        alone = bool(self.classes) and self.classes[-1][1] == 1.0
        object.__setattr__(self, "whole", self.edges[-1] if alone else _NEVER)
        object.__setattr__(self, "shares", (0.0, *(share for _, share in self.classes)))

    def blocks(self, mean: float) -> int:
        """Multiprocessors for a batch whose descriptors have ``mean`` bytes."""
        chosen = self.sms[0][1]
        for start, sms in self.sms:
            if mean >= start:
                chosen = sms
        return chosen

    def klass(self, nbytes: int) -> int:
        """Index into ``shares``."""
        return bisect_right(self.edges, nbytes)


@dataclass(frozen=True)
class Tuning:
    """Both directions; ``kernel_min``: fewer descriptors than this never start a kernel. ``source`` says whence."""

    h2d: Way
    d2h: Way
    kernel_min: int
    source: str

    def way(self, direction: Direction) -> Way:
        return self.h2d if direction == H2D else self.d2h


# Measured on an H200, PCIe Gen5 x16, driver 580 (docs/cuda.md). Where kernel and engine are within some percent of each
# other, the engine's part is kept small: it is the host that limits it there, and hosts differ more than links do.
DEFAULTS: Final = Tuning(
    h2d=Way(((40 * _KIB, 0.5), (56 * _KIB, 1.0)), ((0, 2),)),
    d2h=Way(((40 * _KIB, 0.5), (56 * _KIB, 1.0)), ((0, 4), (3 * _KIB, 2))),
    kernel_min=8,
    source="defaults",
)


def tuning_file(device_name: str) -> Path:
    """Where the tuning of devices of this name is kept."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return cache_directory() / "cuda" / f"tuning-{slug}.json"


def load_tuning(device: Device) -> Tuning:
    """What ``ecoffload tune`` stored for devices of this name, or the defaults; ``ECOFFLOAD_CUDA_SMS`` bounds it."""
    path = tuning_file(device.name)
    tuning = DEFAULTS
    try:
        tuning = _parse(json.loads(path.read_text(encoding="utf-8")), str(path))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as exc:
        _log.warning("the tuning in %s cannot be used (%s); run 'ecoffload tune --backend cuda' again", path, exc)
    return _bounded(tuning)


def _parse(data: dict[str, Any], source: str) -> Tuning:
    if data["version"] != _VERSION:
        raise ValueError(f"it has version {data['version']!r}, this release reads {_VERSION}")

    def way(item: dict[str, Any]) -> Way:
        classes = tuple((int(a), min(1.0, max(0.0, float(b)))) for a, b in item["classes"])
        sms = tuple((int(a), int(b)) for a, b in item["sms"])
        if not sms or list(classes) != sorted(classes) or any(count < 1 for _, count in sms):
            raise ValueError("its size classes are not ascending, or it names no multiprocessor")
        return Way(classes, sms)

    return Tuning(way(data["h2d"]), way(data["d2h"]), int(data["kernel_min"]), source)


def _bounded(tuning: Tuning) -> Tuning:
    raw = os.environ.get("ECOFFLOAD_CUDA_SMS", "")
    if not raw:
        return tuning
    if not raw.isdecimal() or int(raw) < 1:
        _log.warning("ECOFFLOAD_CUDA_SMS=%r is not a number of multiprocessors from 1 on, and is ignored", raw)
        return tuning

    def bound(way: Way) -> Way:
        return Way(way.classes, tuple((start, min(sms, int(raw))) for start, sms in way.sms))

    return Tuning(
        bound(tuning.h2d), bound(tuning.d2h), tuning.kernel_min, f"{tuning.source}, at most {raw} multiprocessors"
    )


def store_tuning(device_name: str, tuning: Tuning, measured: dict[str, Any]) -> Path:
    """Keep ``tuning`` for devices of this name, with what was measured. Raises OSError."""
    path = tuning_file(device_name)
    data = {
        "version": _VERSION,
        "device": device_name,
        "h2d": {"classes": tuning.h2d.classes, "sms": tuning.h2d.sms},
        "d2h": {"classes": tuning.d2h.classes, "sms": tuning.d2h.sms},
        "kernel_min": tuning.kernel_min,
        "measured": measured,
    }
    write_whole(path, json.dumps(data, indent=1).encode())
    return path
