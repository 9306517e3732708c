"""Hypothesis strategies for addresses, offsets and batches, dense where arithmetic on them goes wrong."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from ecoffload.testing.plugin import scaled

__all__ = ["Descriptor", "addresses", "batches", "examples", "offsets", "sizes"]

TOP = 2**64
_EDGES = (
    0,
    2**31,
    2**32,
    2**47,  # where the low canonical half ends
    2**53,  # the last power of two below which float64 is exact
    2**63,  # where int64 changes sign
    0xFFFF_8000_0000_0000,  # where the high canonical half begins
    0xFFFF_D556_B640_0000,  # an address of Intel XPU device memory
    TOP - 1,
)


def examples(number: int) -> settings:
    """Settings for ``number`` examples at full budget: the same ones in every run, with no limit on a slow device.

    Failures are made small at full budget only, since that takes a device hundreds of swaps.
    """
    phases = (Phase.explicit, Phase.generate) + ((Phase.shrink,) if scaled(10) >= 10 else ())
    return settings(
        max_examples=scaled(number, 3),
        deadline=None,
        database=None,
        derandomize=True,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )


def addresses(nbytes: int = 1) -> st.SearchStrategy[int]:
    """Addresses of ``nbytes`` bytes that end at 2**64 or below: around the edges of every encoding, and anywhere."""
    last = TOP - nbytes
    near = st.builds(lambda edge, off: edge + off, st.sampled_from(_EDGES), st.integers(-4099, 4099))
    return st.one_of(near.map(lambda a: min(max(a, 0), last)), st.integers(0, last))


def offsets(limit: int = 1 << 20) -> st.SearchStrategy[int]:
    """Byte offsets in [0, ``limit``]. Odd ones come first: offsets of whole pages hide the loss of float64."""
    odd = st.integers(0, max(0, (limit - 1) // 2)).map(lambda n: min(2 * n + 1, limit))
    return st.one_of(odd, st.integers(0, limit))


def sizes(limit: int = 1 << 16) -> st.SearchStrategy[int]:
    """Sizes in bytes in [1, ``limit``], around powers of two and anywhere."""
    powers = [2**i for i in range(limit.bit_length())]
    near = st.builds(lambda p, d: min(max(p + d, 1), limit), st.sampled_from(powers), st.integers(-1, 1))
    return st.one_of(near, st.integers(1, limit))


class Descriptor(NamedTuple):
    """One copy inside two areas: offsets from their starts, in bytes."""

    src: int
    dst: int
    size: int


@st.composite
def batches(draw: st.DrawFn, area: int = 1 << 16, *, max_descriptors: int = 24, alignment: int = 1) -> list[Descriptor]:
    """Descriptors between two areas of ``area`` bytes: sources anywhere, destinations apart and in any order.

    Offsets and sizes are multiples of ``alignment``.
    """
    units = area // alignment
    count = draw(st.integers(1, max_descriptors))
    cuts = sorted(draw(st.lists(st.integers(0, units), min_size=2 * count, max_size=2 * count)))
    found = []
    for start, end in zip(cuts[::2], cuts[1::2], strict=True):
        size = end - start
        if size:
            src = draw(st.integers(0, units - size))
            found.append(Descriptor(src * alignment, start * alignment, size * alignment))
    return draw(st.permutations(found))
