"""What the scheduler tells workers to do: a small, versioned message of plain data.

It crosses process boundaries by pickle inside engines' own messages, so it carries no tensor and no address: addresses
belong to one process; keys, numbers and extents of the region mean the same in all.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PLAN_VERSION", "LoadOp", "Plan", "SaveOp"]

PLAN_VERSION = 1

Extents = tuple[tuple[int, int], ...]


class SaveOp(NamedTuple):
    """Write the tensor of ``key`` into ``extents`` (offset and length in bytes), in that order."""

    number: int
    key: bytes
    extents: Extents
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


class LoadOp(NamedTuple):
    """Read the entry of ``key`` from ``extents`` into a tensor of its own.

    ``in_flight``: its save had not landed when this was planned, so only a worker that is at that save may load it.
    """

    number: int
    key: bytes
    extents: Extents
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    in_flight: bool = False


class Plan(NamedTuple):
    """Work for every worker of one engine instance. Numbers count up by kind within the instance, from 1.

    ``era`` is the region's when the plan was made: who has entered a later one must not carry it out any more, for its
    saves count as lost. ``saved`` and ``loaded`` are the numbers just before this plan's: where a worker that joins
    late begins. Never empty in the sense of ``bool()``: engines drop messages that are false.
    """

    version: int
    region_id: str
    instance: int
    era: int
    saved: int
    loaded: int
    saves: tuple[SaveOp, ...]
    loads: tuple[LoadOp, ...]
