"""Runs a real vLLM on the CPU over a list of rounds and prints one JSON object; the tests start it as a process.

    python generate.py MODEL '{"ec": {...ECTransferConfig...}, "rounds": [[image seeds], ...], ...}'

A round is a batch of prompts, one image each (an integer: the seed of its pixels). The last line of stdout is
{"version", "rounds": [[{"tokens", "logprobs"}]], "encodes": int | null, "metrics": {name: value}}; vLLM's own log goes
to stderr. `encodes` counts images that the vision tower encoded, known only where the model lives in this process.

Options: `tensor_parallel`; `in_process` (engine core and model in this process; default true); `encoder_cache_items`
(in-process only; default 1); `processor_cache_gb`; `zero_before` (in-process, ecoffload's connector only: the round
before which every stored byte is set to zero); `linger` (print the result, then wait to be killed).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def _counting_encodes() -> dict[str, int]:
    """Count the images that the vision tower encodes from now on (this process only)."""
    from vllm.model_executor.models.llava import LlavaForConditionalGeneration

    counted = {"images": 0}
    original = LlavaForConditionalGeneration.embed_multimodal

    def embed_multimodal(self: Any, **kwargs: Any) -> Any:
        outputs = original(self, **kwargs)
        counted["images"] += len(outputs)
        return outputs

    LlavaForConditionalGeneration.embed_multimodal = embed_multimodal
    return counted


def _metrics(llm: Any) -> dict[str, float]:
    """vLLM's Prometheus values whose names tell of an encoder cache, summed over labels."""
    values: dict[str, float] = {}
    for metric in llm.get_metrics():
        if "ec_" in metric.name and hasattr(metric, "value"):
            values[metric.name] = values.get(metric.name, 0) + metric.value
    return values


def _zero_everything(connector: Any) -> None:
    half = connector._decider
    for entry in half.engine.index:
        for view in half.region.view(entry.extents):
            view[:] = bytes(len(view))
            view.release()


def main(model: str, options: dict[str, Any]) -> dict[str, Any]:
    in_process = options.get("in_process", True)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    import numpy as np
    from PIL import Image
    from vllm import LLM, SamplingParams, __version__
    from vllm.config.ec_transfer import ECTransferConfig

    counted = _counting_encodes() if in_process else None
    llm = LLM(
        model=model,
        dtype="float32",
        seed=0,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        mm_processor_cache_gb=options.get("processor_cache_gb", 0.1),
        limit_mm_per_prompt={"image": 2},
        tensor_parallel_size=options.get("tensor_parallel", 1),
        ec_transfer_config=ECTransferConfig(**options["ec"]) if options.get("ec") else None,
    )
    if counted is not None:
        # An encoder cache of one image: whatever comes back later comes from the connector.
        core = llm.llm_engine.engine_core.engine_core
        manager = core.scheduler.encoder_cache_manager
        manager.cache_size = manager.num_free_slots = manager.num_freeable_slots = 16 * options.get(
            "encoder_cache_items", 1
        )
        counted["images"] = 0
    rounds = []
    for number, seeds in enumerate(options["rounds"]):
        if number == options.get("zero_before"):
            _zero_everything(llm.llm_engine.engine_core.engine_core.scheduler.ec_connector)
        prompts = [
            {
                "prompt": "USER <image> w1 w2 w3 ASSISTANT",
                "multi_modal_data": {
                    "image": Image.fromarray(np.random.default_rng(seed).integers(0, 255, (56, 56, 3), dtype=np.uint8))
                },
            }
            for seed in seeds
        ]
        sampling = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
        results = llm.generate(prompts, sampling, use_tqdm=False)
        rounds.append(
            [
                {
                    "tokens": list(result.outputs[0].token_ids),
                    "logprobs": [
                        max(step.values(), key=lambda p: p.logprob).logprob for step in result.outputs[0].logprobs
                    ],
                }
                for result in results
            ]
        )
    return {
        "version": __version__,
        "rounds": rounds,
        "encodes": counted["images"] if counted is not None else None,
        "metrics": _metrics(llm),
    }


if __name__ == "__main__":
    chosen = json.loads(sys.argv[2])
    # vLLM's child processes write to their inherited stdout, also after the answer: they get stderr in its place.
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        print(json.dumps(main(sys.argv[1], chosen)), file=stdout, flush=True)
        if chosen.get("linger"):
            time.sleep(600)
