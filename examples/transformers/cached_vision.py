"""A Hugging Face vision-language model with an EncoderCache around its vision tower: same logits, less time.

Runs offline in a few seconds: LLaVA's architecture at a small size with seeded random weights. With a real checkpoint
only `small_model` changes. Needs `pip install "ecoffload[demo]"`.

    python cached_vision.py --turns 3
"""

from __future__ import annotations

import argparse
import hashlib
import time
from functools import partial
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from ecoffload import EncoderCache

IMAGE = 250  # the token that stands for one row of an image's encoding
SIDE, PATCH = 224, 14


def key(image: torch.Tensor) -> bytes:
    """All that the encoding depends on, as long as weights and options stay: the pixels."""
    return hashlib.sha256(image.numpy(force=True).tobytes()).digest()


class CachedVision:
    """Stands in for a model's ``get_image_features``: each image is encoded once, and reloaded after that."""

    def __init__(self, model: Any, cache: EncoderCache) -> None:
        self._encode = model.get_image_features
        self._cache = cache
        self._like: Any = None  # what get_image_features returns: transformers 5 wraps the list of tensors

    def __call__(self, pixel_values: torch.Tensor, **options: Any) -> Any:
        rows = [self._cache.get_or_encode(key(image), partial(self._one, image, options)) for image in pixel_values]
        if hasattr(self._like, "pooler_output"):
            return type(self._like)(pooler_output=rows)
        return rows

    def _one(self, image: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        found = self._encode(image[None], **options)
        self._like = found
        return getattr(found, "pooler_output", found)[0]


def small_model() -> LlavaForConditionalGeneration:
    """The vision tower is made heavier than the language model, as it is per token in real ones."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8, image_size=SIDE,
        patch_size=PATCH,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    return LlavaForConditionalGeneration(config).eval()


@torch.inference_mode()
def play(model: LlavaForConditionalGeneration, images: torch.Tensor, turns: int) -> tuple[list[torch.Tensor], float]:
    """In every turn one question about each image; the logits, and the seconds it took."""
    rows = (SIDE // PATCH) ** 2
    logits = []
    start = time.perf_counter()
    for turn in range(turns):
        prompt = torch.tensor([[1, *[IMAGE] * rows, 10 + turn, 11, 12]])
        for image in images:
            logits.append(model(input_ids=prompt, pixel_values=image[None]).logits)
    return logits, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    model = small_model()
    images = torch.rand(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    play(model, images[:1], 1)  # first use pays for lazy set-up
    plain, without = play(model, images, turns)
    with EncoderCache("16MiB") as cache:
        model.model.get_image_features = CachedVision(model.model, cache)
        cached, with_cache = play(model, images, turns)
        stats = cache.stats()
    same = all(torch.equal(a, b) for a, b in zip(plain, cached, strict=True))
    print(f"{len(plain)} prompts, {stats.encodes} encodes with the cache and {len(plain)} without")
    print(f"logits are {'the same, bit for bit' if same else 'NOT the same'}")
    print(f"{without:.2f} s without, {with_cache:.2f} s with: {without - with_cache:.2f} s saved")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
