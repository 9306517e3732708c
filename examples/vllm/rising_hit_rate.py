"""Watch the hit rate rise: a few images, asked about again and again.

    python rising_hit_rate.py MODEL [--images 12] [--rounds 5] [--cpu-bytes 2GiB]
        [--prompt "USER: <image>\nWhat is it?"]

MODEL: any vision-language model that vLLM serves, such as llava-hf/llava-1.5-7b-hf. Images are made up, nothing else
is downloaded. Needs vLLM 0.31 or newer and ecoffload with the backend of this machine's device.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, so that its encoder cache can be reset

import numpy as np
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.config.ec_transfer import ECTransferConfig


def picture(seed: int, side: int) -> Image.Image:
    """Coloured noise; its content is all that matters for the cache's key."""
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def counted(llm: LLM) -> tuple[float, float]:
    """Hits and misses so far, from vLLM's own metrics."""
    values = {"vllm:ec_offload_hits": 0.0, "vllm:ec_offload_misses": 0.0}
    for metric in llm.get_metrics():
        if metric.name in values:  # hits come by where the entry was from
            values[metric.name] += metric.value
    return values["vllm:ec_offload_hits"], values["vllm:ec_offload_misses"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, default=336, help="pixels of an image's side")
    parser.add_argument("--cpu-bytes", default="2GiB")
    parser.add_argument("--prompt", default="USER: <image>\nWhat is this? ASSISTANT:")
    parser.add_argument("--max-model-len", type=int, default=2048)
    options = parser.parse_args()
    llm = LLM(
        model=options.model,
        max_model_len=options.max_model_len,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=False,  # a cached prefix would spare the encoder its work, and us the demonstration
        disable_log_stats=False,
        ec_transfer_config=ECTransferConfig(
            ec_connector="EcoffloadConnector",
            ec_role="ec_both",
            ec_connector_extra_config={"ec_cpu_bytes": options.cpu_bytes},
        ),
    )
    order = np.random.default_rng(0)
    before = counted(llm)
    for turn in range(options.rounds):
        # vLLM's own encoder cache would hold so few images; real traffic has long pushed them out when they come back.
        llm.llm_engine.engine_core.engine_core.reset_encoder_cache()
        for seed in order.permutation(options.images).tolist():
            llm.generate(
                {"prompt": options.prompt, "multi_modal_data": {"image": picture(seed, options.side)}},
                SamplingParams(temperature=0, max_tokens=4),
                use_tqdm=False,
            )
        now = counted(llm)
        hits, misses = now[0] - before[0], now[1] - before[1]
        before = now
        print(f"round {turn + 1}: {hits:.0f} of {hits + misses:.0f} images reloaded, {hits / (hits + misses):.0%}")


if __name__ == "__main__":
    main()
