"""A conversation that re-sends its earlier images every turn, as chat clients do, over an :class:`EncoderCache`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import torch

from ecoffload.backend import SwapBackend
from ecoffload.cache import DEFAULT_GRANULE, EncoderCache
from ecoffload.demo.images import Picture
from ecoffload.demo.tower import DESCRIPTION, HIDDEN, VisionTower
from ecoffload.errors import ConfigError
from ecoffload.sizes import format_size

__all__ = ["Outcome", "PictureOutcome", "default_capacity", "play"]


@dataclass(slots=True)
class PictureOutcome:
    """What happened to one picture. Times in ms; ``encode_ms`` and ``reload_ms`` are means of one.

    ``same_as``: the earlier picture with the same pixels, whose encoding serves this one too; None for most.
    """

    name: str
    tokens: int
    nbytes: int
    same_as: str | None = None
    encoded: int = 0
    reloaded: int = 0
    verified: int = 0
    mismatched: int = 0
    encode_ms: float = 0.0
    reload_ms: float = 0.0


@dataclass(slots=True)
class Outcome:
    """The whole conversation. ``skipped``: files that could not be read as images."""

    tower: str
    backend: str
    turns: int
    capacity_bytes: int
    images: list[PictureOutcome]
    skipped: list[str]
    totals: dict[str, Any] = field(default_factory=dict)

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def _nbytes(picture: Picture) -> int:
    return picture.tokens * HIDDEN * 2


def _held(pictures: list[Picture]) -> list[int]:
    """Bytes that each different picture's encoding takes in the cache, largest first."""
    different = {_key(picture): _nbytes(picture) for picture in pictures}
    return sorted((nbytes + -nbytes % DEFAULT_GRANULE for nbytes in different.values()), reverse=True)


def _key(picture: Picture) -> bytes:
    """Of all that the encoding depends on: the same patches in another grid are another picture."""
    return hashlib.sha256(repr(picture.grid).encode() + picture.patches.tobytes()).digest()


def default_capacity(pictures: list[Picture]) -> int:
    """Three quarters of all encodings, so that eviction really happens; two of them at least, so that reloads do."""
    sizes = _held(pictures)
    return max(sum(sizes[:2]), sum(sizes) * 3 // 4)


def play(
    pictures: list[Picture],
    *,
    backend: SwapBackend,
    turns: int,
    capacity: int | None = None,
    skipped: list[str] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Outcome:
    """Play ``turns`` turns: each brings new pictures and re-sends every earlier one, newest first.

    Every reloaded tensor is compared bit for bit with what was encoded. Raises :class:`ConfigError` for a conversation
    that cannot be played.
    """
    if turns < 1:
        raise ConfigError(f"--turns {turns} must be at least 1", option="turns", value=turns)
    if not pictures:
        raise ConfigError("there is no picture to encode", option="images", value=None)
    sizes = _held(pictures)
    capacity = default_capacity(pictures) if capacity is None else capacity
    if capacity < sizes[-1]:
        raise ConfigError(
            f"--capacity {format_size(capacity)} holds no picture: the smallest encoding takes "
            f"{format_size(sizes[-1])}, all of them {format_size(sum(sizes))}",
            option="capacity",
            value=capacity,
        )
    ops = backend.ops
    tower = VisionTower(ops.device)
    tower.encode(pictures[0])  # first use pays for lazy set-up; it belongs to no picture
    keys = [_key(picture) for picture in pictures]
    first = [keys.index(key) for key in keys]  # where each picture's pixels come first
    outcomes = [
        PictureOutcome(p.name, p.tokens, _nbytes(p), pictures[at].name if at < i else None)
        for i, (p, at) in enumerate(zip(pictures, first, strict=True))
    ]
    truth: dict[bytes, torch.Tensor] = {}
    spent: dict[bytes, list[float]] = {key: [] for key in keys}  # ms of each encode
    schedule = _schedule(len(pictures), turns)
    total = sum(map(len, schedule))
    done = 0
    with EncoderCache(capacity, backend=backend) as cache:
        for turn in schedule:
            for i in turn:
                picture, outcome, key = pictures[i], outcomes[i], keys[i]
                ops.synchronize()
                start = time.perf_counter()
                tensor = cache.get(key)
                if tensor is not None:
                    ops.synchronize()
                    outcome.reload_ms += 1e3 * (time.perf_counter() - start)
                    outcome.reloaded += 1
                    same = torch.equal(_bytes(tensor), truth[key])
                    outcome.verified += same
                    outcome.mismatched += not same
                else:
                    tensor = _on_device(tower.encode(picture), backend)
                    ops.synchronize()
                    spent[key].append(1e3 * (time.perf_counter() - start))
                    outcome.encode_ms += spent[key][-1]
                    outcome.encoded += 1
                    # What the encoder gave this time: random weights are fixed, but no two encodes need be equal.
                    truth[key] = _bytes(tensor)
                    cache.put(key, tensor)
                del tensor  # the device tensor is dropped; only the host copy is left
                done += 1
                if progress is not None:
                    progress(done, total, picture.name)
        cache.flush()
        stats = cache.stats()
    encode_ms = sum(o.encode_ms for o in outcomes)
    reload_ms = sum(o.reload_ms for o in outcomes)
    # Pictures with the same pixels share their encodes, whichever of them came first.
    avoided = sum(o.reloaded * fmean(spent[key]) for o, key in zip(outcomes, keys, strict=True) if o.reloaded)
    reloaded_bytes = sum(o.reloaded * o.nbytes for o in outcomes)
    for outcome in outcomes:
        outcome.encode_ms /= max(1, outcome.encoded)
        outcome.reload_ms /= max(1, outcome.reloaded)
    result = Outcome(DESCRIPTION, backend.spec.name, turns, capacity, outcomes, skipped or [])
    result.totals = {
        "lookups": stats.hits + stats.misses,
        "hits": stats.hits,
        "hit_rate": stats.hit_rate,
        "encoded": sum(o.encoded for o in outcomes),
        "reloaded": sum(o.reloaded for o in outcomes),
        "verified": sum(o.verified for o in outcomes),
        "mismatched": sum(o.mismatched for o in outcomes),
        "evictions": stats.evictions,
        "bytes_saved": stats.bytes_saved,
        "bytes_loaded": stats.bytes_loaded,
        "footprint_bytes": sum(sizes),
        "encode_ms": encode_ms,
        "reload_ms": reload_ms,
        "encode_ms_saved": avoided - reload_ms,
        "reload_gb_per_s": reloaded_bytes / reload_ms / 1e6 if reload_ms else None,
        "capacity": format_size(capacity),
        "registered": stats.worker["registered"],
    }
    return result


def _schedule(pictures: int, turns: int) -> list[list[int]]:
    """Pictures of each turn: its new ones first, then every earlier one, newest first."""
    turns_with_new = min(turns, pictures)
    edges = [pictures * t // turns_with_new for t in range(turns_with_new + 1)]
    plan = []
    for turn in range(turns):
        start, end = (edges[turn], edges[turn + 1]) if turn < turns_with_new else (pictures, pictures)
        plan.append([*range(start, end), *reversed(range(start))])
    return plan


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8).clone()


def _on_device(tensor: torch.Tensor, backend: SwapBackend) -> torch.Tensor:
    """Simulated devices have memory of their own, which torch's encoder does not write to."""
    if backend.ops.owns(tensor):
        return tensor
    there = backend.ops.empty(tensor.numel() * tensor.element_size()).view(tensor.dtype).reshape(tensor.shape)
    return there.copy_(tensor)
