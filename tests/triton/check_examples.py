"""The pointer-table examples against torch, and what a kernel makes of high addresses.

Named `check_*` so that the default run, in an environment without triton, does not collect it: `tests/triton.sh`.
The interpreter dereferences real addresses, and those of a CPU are low: high ones are compared as words.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from ecoffload.pointers import PointerEncoding, pointer_table

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "pointer_tables"))
DEVICE = import_module("state_copy").DEVICE  # chooses the interpreter before triton is imported

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

P = 0xFFFFD556B6400000
HIGH = [P, P + 4097, 2**63 - 1, 2**63, 2**64 - 1, 0]
BOTH = pytest.mark.parametrize("encoding", [PointerEncoding.INT64, PointerEncoding.UINT64], ids=["int64", "uint64"])


@triton.jit
def echo(table, words, steps, n, BLOCK: tl.constexpr):  # noqa: N803
    """The table's words as the kernel sees them, and the same through a pointer moved by a step in bytes."""
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    address = tl.load(table + offsets, mask=mask, other=0)
    moved = address.to(tl.pointer_type(tl.uint8)) + tl.load(steps + offsets, mask=mask, other=0)
    tl.store(words + offsets, address.to(tl.int64), mask=mask)
    tl.store(words + n + offsets, moved.to(tl.int64), mask=mask)


@BOTH
@pytest.mark.parametrize("example", ["state_copy", "lamport_workspace", "prompt_embeds"])
def test_an_example_does_what_torch_does(example, encoding):
    assert import_module(example).main(encoding) is None


@BOTH
def test_a_kernel_reads_high_addresses_and_moves_pointers_exactly(encoding):
    steps = [4097, 1, 0, 1, -1, 2**33 + 1]
    words = torch.zeros(2, len(HIGH), dtype=torch.int64, device=DEVICE)
    table = pointer_table(HIGH, encoding=encoding, device=DEVICE)
    echo[(1,)](table, words, torch.tensor(steps, device=DEVICE), len(HIGH), BLOCK=8)
    read, moved = words.tolist()
    assert [w % 2**64 for w in read] == HIGH
    assert [w % 2**64 for w in moved] == [a + s for a, s in zip(HIGH, steps, strict=True)]


@BOTH
def test_the_rows_of_prompt_embeds_hold_high_addresses_beside_signed_strides(encoding):
    rows = [(P, -5, 1, 0, 3), (0, 0, 0, 3, 0), (2**64 - 8, 7, -1, 4, 1)]
    table = pointer_table(rows, encoding=encoding, device=DEVICE, address_columns=[0])
    assert [tuple(r) for r in table.view(torch.int64).tolist()] == [(r[0] - 2**64 if r[0] else 0, *r[1:]) for r in rows]
