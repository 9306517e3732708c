"""A tiny LLaVA made on the spot: the model that the tests give to vLLM, without any download.

Owns the model's directory: configuration, tokenizer, processor (all that vLLM's scheduler needs) and weights (for the
tests that really generate). Never imports vLLM or ecoffload.

Weights are random from a fixed seed and scaled up: a freshly initialised LLaVA all but ignores its image, and a test
that compares outputs would pass whatever bytes came back from the cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlavaConfig

PATCH = 14
IMAGE = 56
TOKENS_PER_IMAGE = (IMAGE // PATCH) ** 2
"""Placeholder tokens of one image, 16: "default" drops the tower's class token."""
HIDDEN = 64
"""Width of an encoder output as the language model receives it, elements."""
WORDS = [
    *("<pad>", "<s>", "</s>", "<unk>", "<image>", "USER", "ASSISTANT", ":"),
    *(f"w{index}" for index in range(248)),
]
IMAGE_TOKEN = WORDS.index("<image>")


def _config() -> LlavaConfig:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE,
        patch_size=PATCH,
        projection_dim=32,
    )
    text = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=HIDDEN // 2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=TOKENS_PER_IMAGE,
    )
    config.architectures = ["LlavaForConditionalGeneration"]
    return config


def make_model(directory: Path, *, seed: int = 0, scale: float = 6.0) -> Path:
    """Write configuration, weights (float32, random, times `scale`), tokenizer and processor to `directory`."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPImageProcessor, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast

    directory.mkdir(parents=True, exist_ok=True)
    config = _config()
    config.save_pretrained(directory)
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config).to(torch.float32)
    weights = {}
    for name, tensor in model.state_dict().items():
        # vLLM reads the names of published checkpoints, which nest the tower once more than transformers 5 does.
        name = name.removeprefix("model.").replace("vision_tower.embeddings", "vision_tower.vision_model.embeddings")
        for part in ("encoder", "pre_layrnorm", "post_layernorm"):
            name = name.replace(f"vision_tower.{part}", f"vision_tower.vision_model.{part}")
        if name.startswith("language_model.") and not name.startswith("language_model.model."):
            name = name.replace("language_model.", "language_model.model.", 1)
        name = name.replace("lm_head", "language_model.lm_head") if name.startswith("lm_head") else name
        weights[name] = (tensor * scale if tensor.ndim >= 2 and "embed" not in name else tensor).contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": IMAGE}, crop_size={"height": IMAGE, "width": IMAGE}, do_center_crop=True
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(directory)
    # vLLM loads the two halves on their own as well.
    tokenizer.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    return directory
