"""A real vision tower at a small size: Qwen2-VL's architecture from transformers, with seeded random weights.

The weights are random because a hub cannot be reached from everywhere; the arithmetic, the shapes and the cost per
token are those of the architecture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ecoffload.errors import BackendUnavailable

if TYPE_CHECKING:
    from ecoffload.demo.images import Picture

__all__ = ["DESCRIPTION", "HIDDEN", "VisionTower"]

HIDDEN = 1536  # of Qwen2-VL-2B's language model: what an entry's row holds
DESCRIPTION = f"Qwen2-VL vision tower, 2 layers of width 256, output {HIDDEN}, seeded random weights"


class VisionTower:
    """``encode`` turns a picture into (tokens, 1536) bfloat16 on the device. Raises :class:`BackendUnavailable`."""

    def __init__(self, device: torch.device) -> None:
        try:
            from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
            from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
        except ImportError as exc:
            raise BackendUnavailable(
                f"the demo's vision tower needs transformers ({exc}): pip install 'ecoffload[demo]'",
                name="transformers",
                reason=str(exc),
            ) from exc
        config = Qwen2VLVisionConfig(depth=2, embed_dim=256, hidden_size=HIDDEN, num_heads=8, mlp_ratio=4)
        generator = torch.random.get_rng_state()
        torch.manual_seed(0)
        try:
            model: Any = Qwen2VisionTransformerPretrainedModel(config)
        finally:
            torch.random.set_rng_state(generator)
        self._model = model.eval().to(device)
        self._device = device

    @torch.inference_mode()
    def encode(self, picture: Picture) -> torch.Tensor:
        patches = torch.from_numpy(picture.patches).to(self._device)
        grid = torch.tensor([picture.grid], device=self._device)
        out = self._model(patches, grid_thw=grid)
        rows = out if isinstance(out, torch.Tensor) else out.pooler_output  # transformers 5 wraps it
        return rows.to(torch.bfloat16)
