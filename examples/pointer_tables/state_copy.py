"""Mamba-style states: gather the slots of some requests from every layer, and scatter them back, in one launch each.

Each layer keeps its states in an allocation of its own, of its own dtype and size, so no stride leads from one to the
next: the kernel is given a table of (source, destination, bytes), one row for each state to move, made by one
`pointer_table` call. The kernel does not care whether it is handed as int64 or as uint64.

    python examples/pointer_tables/state_copy.py        # on CUDA, or in Triton's interpreter where there is none
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

from ecoffload import PointerEncoding, as_addresses, block_addresses, pointer_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

BLOCK = 1024


@triton.jit
def copy_rows(table, BLOCK: tl.constexpr):  # noqa: N803 - Triton's way to write a compile-time constant
    """Row `program_id(0)` of the table: (source, destination, bytes); chunk `program_id(1)` of it."""
    row = table + tl.program_id(0) * 3
    source = tl.load(row).to(tl.pointer_type(tl.uint8))
    destination = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    nbytes = tl.load(row + 2).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < nbytes
    tl.store(destination + offsets, tl.load(source + offsets, mask=mask, other=0), mask=mask)


def copy_slots(
    sources: Sequence[torch.Tensor],
    source_slots: Sequence[int],
    destinations: Sequence[torch.Tensor],
    destination_slots: Sequence[int],
    encoding: PointerEncoding | None = None,
) -> torch.Tensor:
    """Copy slot `source_slots[i]` of every source to slot `destination_slots[i]` of its destination.

    Tensor `k` of both lists has the same dtype and the same contiguous shape behind its first dimension. `encoding`
    None is that of the device's backend. Returns the table, which must live until the kernel has read it.
    """
    rows, longest = [], 0
    for source, destination in zip(sources, destinations, strict=True):
        nbytes = source[0].numel() * source.element_size()
        moved = [
            block_addresses(source.data_ptr(), source_slots, source.stride(0) * source.element_size()),
            block_addresses(destination.data_ptr(), destination_slots, destination.stride(0) * source.element_size()),
            as_addresses([nbytes] * len(source_slots)),  # uint64 like its neighbours: numpy has nothing to promote
        ]
        rows.append(np.stack(moved, axis=1))
        longest = max(longest, nbytes)
    table = pointer_table(np.concatenate(rows), encoding=encoding, device=sources[0].device, address_columns=(0, 1))
    copy_rows[(len(table), triton.cdiv(longest, BLOCK))](table, BLOCK=BLOCK)
    return table


def main(encoding: PointerEncoding | None = None) -> None:
    """Gather three slots of four layers, change them, scatter them, and compare with torch's own indexing."""
    torch.manual_seed(0)
    # A convolution's state in 16 bits and a scan's state in 32, as hybrid models have them; odd sizes on purpose.
    layers = [
        torch.randn(9, 5, 7, device=DEVICE, dtype=torch.bfloat16 if layer % 2 else torch.float32) for layer in range(4)
    ]
    before = [layer.clone() for layer in layers]
    slots = [7, 0, 4]

    staging = [torch.zeros(3, 5, 7, device=DEVICE, dtype=layer.dtype) for layer in layers]
    copy_slots(layers, slots, staging, range(3), encoding)
    for layer, gathered in zip(before, staging, strict=True):
        assert torch.equal(gathered, layer[slots])

    for gathered in staging:
        gathered.mul_(2)
    copy_slots(staging, range(3), layers, slots, encoding)
    for layer, old in zip(layers, before, strict=True):
        expected = old.clone()
        expected[slots] *= 2
        assert torch.equal(layer, expected)


if __name__ == "__main__":
    for choice in (PointerEncoding.INT64, PointerEncoding.UINT64):
        main(choice)
        print(f"state_copy: gathered and scattered as torch does, on {DEVICE}, table of {choice.dtype}")
