"""One machine of the example: asks its cache for images, encodes what nobody in the cluster has encoded.

python node.py NAME URL FIRST LAST      images FIRST to LAST-1; prints one line of JSON
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

import torch

from ecoffload import EncoderCache


def pixels(number: int) -> torch.Tensor:
    """An image that every node can make for itself."""
    return torch.rand(3, 224, 224, generator=torch.Generator().manual_seed(number))


def main() -> None:
    name, url, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.manual_seed(0)
    encoder = torch.nn.Conv2d(3, 1024, 14, stride=14)  # the same weights everywhere: the namespace says so
    encoded = loaded = 0
    with EncoderCache("64MiB", namespace="example tower, seed 0", tier=url) as cache, torch.no_grad():
        for number in range(first, last):
            image = pixels(number)
            key = hashlib.sha256(image.numpy().tobytes()).digest()
            fresh: list[int] = []

            def encode(image: torch.Tensor = image, fresh: list[int] = fresh) -> torch.Tensor:
                fresh.append(1)
                return encoder(image).flatten(1).T.contiguous()

            got = cache.get_or_encode(key, encode)
            encoded += len(fresh)
            loaded += not fresh
            if not torch.equal(got, encoder(image).flatten(1).T):
                sys.exit(f"{name}: the bytes of image {number} are wrong")
        end = time.monotonic() + 10
        while cache.stats().tier["publish_queue"] and time.monotonic() < end:
            time.sleep(0.01)
        tier = cache.stats().tier
    print(json.dumps({"node": name, "encoded": encoded, "loaded": loaded, "published": tier["published"]}))


if __name__ == "__main__":
    main()
