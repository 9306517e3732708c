"""Prompt embeds: requests that bring their own embeddings, each in a tensor of its own with strides of its own.

A row of the table is (address, row stride, column stride, first token, tokens): an address beside four signed numbers.
Only the named column is an address; the others stay int64 by bits. A request without embeds has address 0.

    python examples/pointer_tables/prompt_embeds.py     # on CUDA, or in Triton's interpreter where there is none
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ecoffload import PointerEncoding, pointer_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def place_embeds(table, out, hidden, BLOCK: tl.constexpr):  # noqa: N803
    """Token `program_id(1)` of request `program_id(0)`, into its row of `out` (tokens, hidden) float32."""
    row = table + tl.program_id(0) * 5
    address = tl.load(row).to(tl.int64)  # the same bits where the table is uint64, as below
    row_stride = tl.load(row + 1).to(tl.int64)
    column_stride = tl.load(row + 2).to(tl.int64)
    first = tl.load(row + 3).to(tl.int64)
    tokens = tl.load(row + 4).to(tl.int64)
    token = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask = (columns < hidden) & (token < tokens) & (address != 0)
    source = address.to(tl.pointer_type(tl.float32)) + token * row_stride + columns * column_stride
    tl.store(out + (first + token) * hidden + columns, tl.load(source, mask=mask, other=0.0), mask=mask)


def place(
    embeds: Sequence[torch.Tensor | None],
    starts: Sequence[int],
    out: torch.Tensor,
    encoding: PointerEncoding | None = None,
) -> torch.Tensor:
    """Write `embeds[i]` (tokens, hidden) float32, of any strides, to `out` from row `starts[i]`; returns the table."""
    rows = [
        (0, 0, 0, start, 0) if e is None else (e.data_ptr(), *e.stride(), start, len(e))
        for e, start in zip(embeds, starts, strict=True)
    ]
    table = pointer_table(rows, encoding=encoding, device=out.device, address_columns=[0])
    longest = max(row[4] for row in rows)
    hidden = out.shape[1]
    place_embeds[(len(rows), max(longest, 1))](table, out, hidden, BLOCK=triton.next_power_of_2(hidden))
    return table


def main(encoding: PointerEncoding | None = None) -> None:
    """Contiguous, sliced, transposed and absent embeds in one launch, compared with torch's own assignment."""
    torch.manual_seed(0)
    hidden = 19
    embeds = [
        torch.randn(3, hidden, device=DEVICE),
        None,
        torch.randn(8, hidden + 4, device=DEVICE)[::2, 1:-3],
        torch.randn(hidden, 5, device=DEVICE).T,
    ]
    starts = [0, 3, 4, 9]
    out = torch.randn(15, hidden, device=DEVICE)
    expected = out.clone()
    for embed, start in zip(embeds, starts, strict=True):
        if embed is not None:
            expected[start : start + len(embed)] = embed
    place(embeds, starts, out, encoding)
    assert torch.equal(out, expected)


if __name__ == "__main__":
    for choice in (PointerEncoding.INT64, PointerEncoding.UINT64):
        main(choice)
        print(f"prompt_embeds: placed as torch does, on {DEVICE}, table of {choice.dtype}")
