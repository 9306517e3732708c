"""Another machine: a process with a cache of its own on the store, told what to do line by line.

    python peer.py URL CAPACITY DIRECTORY

reads "put KEY BYTES", "get KEY BYTES", "encode KEY BYTES", "settle", "stats"

and answers each with one line of JSON. ``content`` is what every process knows the bytes of a key to be.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from typing import Any

import numpy as np
import torch

from ecoffload import EncoderCache


def content(key: str, nbytes: int) -> torch.Tensor:
    rng = np.random.default_rng(zlib.crc32(key.encode()))
    return torch.from_numpy(rng.integers(0, 256, nbytes, dtype=np.uint8))


def answer(cache: EncoderCache, words: list[str]) -> Any:
    if words[0] == "stats":
        return cache.stats().asdict()
    if words[0] == "settle":
        end = time.monotonic() + 30
        while cache.stats().tier["publish_queue"] and time.monotonic() < end:
            time.sleep(0.005)
        return cache.stats().tier
    key, nbytes = words[1], int(words[2])
    if words[0] == "put":
        return cache.put(key, content(key, nbytes))
    encoded: list[str] = []

    def encode() -> torch.Tensor:
        encoded.append(key)
        return content(key, nbytes)

    got = cache.get_or_encode(key, encode) if words[0] == "encode" else cache.get(key)
    if got is None:
        return "miss"
    return "WRONG" if not torch.equal(got, content(key, nbytes)) else "encoded" if encoded else "hit"


def main() -> None:
    url, capacity, directory = sys.argv[1:]
    with EncoderCache(capacity, directory=directory, namespace="cluster", tier=url) as cache:
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(cache, line.split())), flush=True)


if __name__ == "__main__":
    main()
