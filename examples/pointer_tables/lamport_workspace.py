"""A Lamport-style all-reduce workspace: every rank finds every rank's buffer and flag in one table.

Each rank owns a buffer with a slot for every rank, and a flag that counts the rounds it has read. A rank pushes its
values into its slot of every buffer; a reader needs no signal, because a word that has not arrived is still the
sentinel (negative zero). It puts the sentinels back and raises its flag, which tells the ranks that push next.

The ranks here are allocations of one process, so that the example runs anywhere; in an engine the addresses come from
IPC handles of other processes, and the table is made in the same one line.

    python examples/pointer_tables/lamport_workspace.py     # on CUDA, or in Triton's interpreter where there is none
"""

from __future__ import annotations

import os

import torch

from ecoffload import PointerEncoding, pointer_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def all_reduce(
    table, inputs, outputs, round_number, n,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, PUSH: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One program a rank. The table's rows: (buffer, flag). Pushes its inputs to all, or sums what all have pushed."""
    rank = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    if PUSH:
        values = tl.load(inputs + rank * n + offsets, mask=mask, other=0.0) + 0.0  # -0.0 + 0.0 is 0.0: no sentinel
        for peer in tl.static_range(WORLD):
            buffer = tl.load(table + peer * 2).to(tl.pointer_type(tl.float32))
            flag = tl.load(table + peer * 2 + 1).to(tl.pointer_type(tl.int32))
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != round_number:  # it still reads the last round
                pass
            tl.store(buffer + rank * n + offsets, values, mask=mask)
    else:
        buffer = tl.load(table + rank * 2).to(tl.pointer_type(tl.float32))
        flag = tl.load(table + rank * 2 + 1).to(tl.pointer_type(tl.int32))
        total = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(WORLD):
            slot = buffer + peer * n + offsets
            values = tl.load(slot, mask=mask, other=0.0, volatile=True)
            while tl.sum((values.to(tl.int32, bitcast=True) == -2147483648).to(tl.int32)) > 0:
                values = tl.load(slot, mask=mask, other=0.0, volatile=True)
            total += values
            tl.store(slot, tl.zeros((BLOCK,), tl.float32) * -1.0, mask=mask)
        tl.store(outputs + rank * n + offsets, total, mask=mask)
        tl.debug_barrier()  # every thread's sentinels are back before the flag says so
        tl.atomic_xchg(flag, round_number + 1, sem="release", scope="sys")


class Workspace:
    """The buffers and flags of `world` ranks for `n` float32 values, and the table that leads to them."""

    def __init__(self, world: int, n: int, encoding: PointerEncoding | None = None) -> None:
        self.world, self.n, self.round = world, n, 0
        self.buffers = [torch.full((world, n), -0.0, device=DEVICE) for _ in range(world)]
        self.flags = [torch.zeros(1, dtype=torch.int32, device=DEVICE) for _ in range(world)]
        self.table = pointer_table(
            [(buffer.data_ptr(), flag.data_ptr()) for buffer, flag in zip(self.buffers, self.flags, strict=True)],
            encoding=encoding,
            device=DEVICE,
        )

    def reduce(self, inputs: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of `inputs` (world, n) float32, as every rank sees it: (world, n)."""
        outputs = torch.empty_like(inputs)
        # Two launches, because the ranks share a device here and the interpreter runs programs one after another.
        for push in (True, False):
            all_reduce[(self.world,)](
                self.table, inputs, outputs, self.round, self.n,
                WORLD=self.world, BLOCK=triton.next_power_of_2(self.n), PUSH=push,
            )  # fmt: skip
        self.round += 1
        return outputs


def main(encoding: PointerEncoding | None = None) -> None:
    """Three rounds over four ranks, each compared with torch's sum; zeros of both signs among the inputs."""
    torch.manual_seed(0)
    workspace = Workspace(world=4, n=37, encoding=encoding)
    for round_number in range(1, 4):
        # Small whole numbers: the sum is exact in any order.
        inputs = torch.randint(-8, 9, (4, 37), device=DEVICE).float()
        inputs[:, 0], inputs[1, 1] = -0.0, -0.0
        outputs = workspace.reduce(inputs)
        assert torch.equal(outputs, inputs.sum(0).expand(4, 37))
        assert [int(flag.item()) for flag in workspace.flags] == [round_number] * 4


if __name__ == "__main__":
    for choice in (PointerEncoding.INT64, PointerEncoding.UINT64):
        main(choice)
        print(f"lamport_workspace: three rounds sum as torch does, on {DEVICE}, table of {choice.dtype}")
