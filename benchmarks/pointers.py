"""What a pointer table costs, in ns per address, beside the element assignment that it replaces.

    python benchmarks/pointers.py [--count 4096] [--seconds 0.2]

One line a figure: name, ns per address (best of the runs), and the same relative to assigning one element of a torch
int64 tensor at a time, which is what engines do today and which works for low addresses only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from ecoffload import PointerEncoding, PointerTable, as_addresses, block_addresses, offset_addresses, pointer_table


def best_ns(call: Callable[[], object], count: int, seconds: float) -> float:
    """ns per address: the best of the runs that fit in `seconds`, at least five."""
    best, runs, end = float("inf"), 0, time.perf_counter() + seconds
    while runs < 5 or time.perf_counter() < end:
        started = time.perf_counter_ns()
        call()
        best, runs = min(best, time.perf_counter_ns() - started), runs + 1
    return best / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=4096, help="addresses a call")
    parser.add_argument("--seconds", type=float, default=0.2, help="time a figure")
    options = parser.parse_args()
    count = options.count

    low = [0x7FD6_E000_0000 + 4096 * i for i in range(count)]
    ints = [0xFFFF_D556_B640_0000 + 4097 * i for i in range(count)]
    rows = [(a, -64, 3) for a in ints]
    u64 = np.array(ints, dtype=np.uint64)
    i64, i64_tensor = u64.view(np.int64), torch.from_numpy(u64.view(np.int64))
    steps, ids = np.arange(count, dtype=np.int64), np.arange(count, dtype=np.int32)
    naive, table = torch.zeros(count, dtype=torch.int64), PointerTable(count, PointerEncoding.INT64)
    encoding = PointerEncoding.INT64

    def setitem() -> None:
        for i, address in enumerate(low):
            naive[i] = address

    figures: dict[str, Callable[[], object]] = {
        "torch setitem, low addresses": setitem,
        "torch.tensor(list), low addresses": lambda: torch.tensor(low, dtype=torch.int64),
        "np.array(list, uint64), nothing checked": lambda: np.array(ints, dtype=np.uint64),
        "as_addresses(list of ints)": lambda: as_addresses(ints),
        "as_addresses(uint64 array)": lambda: as_addresses(u64),
        "as_addresses(int64 array)": lambda: as_addresses(i64),
        "as_addresses(int64 tensor)": lambda: as_addresses(i64_tensor),
        "encode(list of ints)": lambda: encoding.encode(ints),
        "encode(uint64 array)": lambda: encoding.encode(u64),
        "pointer_table(list of ints)": lambda: pointer_table(ints, encoding=encoding),
        "pointer_table(uint64 array)": lambda: pointer_table(u64, encoding=encoding),
        "pointer_table(rows of 3, address_columns), a row": lambda: pointer_table(
            rows, encoding=encoding, address_columns=[0]
        ),
        "PointerTable.fill(list of ints)": lambda: table.fill(0, ints),
        "PointerTable.fill(uint64 array)": lambda: table.fill(0, u64),
        "offset_addresses(base, int64 array)": lambda: offset_addresses(ints[0], steps),
        "block_addresses(base, int32 ids)": lambda: block_addresses(ints[0], ids, 65536),
    }
    reference = best_ns(setitem, count, options.seconds)
    for name, call in figures.items():
        ns = best_ns(call, count, options.seconds)
        print(f"pointers: {name}: {ns:.2f} ns/address, {reference / ns:.0f}x torch setitem")


if __name__ == "__main__":
    main()
