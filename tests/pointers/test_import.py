"""Engines may take only this part."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_pointers_import_and_compute_without_torch():
    code = """
import sys
from ecoffload.pointers import PointerEncoding, PointerTable, as_addresses, block_addresses, offset_addresses
P = 0xFFFFD556B6400000
assert offset_addresses([P], [4097]).tolist() == [P + 4097]
assert block_addresses(P, [1], 64).tolist() == [P + 64]
assert PointerEncoding.INT64.decode(PointerEncoding.INT64.encode([P])).tolist() == [P]
PointerTable(2, PointerEncoding.UINT64).fill(0, [P])
try:
    as_addresses([object()])
except ValueError:
    pass
else:
    raise SystemExit("not refused")
assert "torch" not in sys.modules, "torch was imported"
"""
    assert run(code) is None


def test_torch_is_imported_when_a_tensor_is_asked_for():
    code = """
import sys
from ecoffload.pointers import PointerEncoding, pointer_table
assert "torch" not in sys.modules
table = pointer_table([1], encoding=PointerEncoding.UINT64)
import torch
assert table.dtype is torch.uint64
"""
    assert run(code) is None
