"""What an entry's bytes depend on, as text; and which keys may outlive the process that made them.

A namespace names everything that would change an encoder's output: model, weights, processor, dtype, parallelism,
engine. Where a part cannot be told, it says which, and the connector then keeps nothing for a restart. Scheduler and
workers compute it each for itself from vLLM's configuration, so only what is the same in all of them goes in.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

__all__ = ["identify", "is_content_hash", "key_of"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"(?:[0-9a-f]{64}|[0-9a-f]{128})")
_MAX_KEY = 256
_MAX_FILES = 4096


def key_of(identifier: str) -> bytes:
    """The entry's key for vLLM's identifier of an input; one too long for a key is hashed."""
    key = identifier.encode("utf-8", "surrogatepass")
    return key if 0 < len(key) <= _MAX_KEY else b"blake2b:" + hashlib.blake2b(key).digest()


def is_content_hash(identifier: str) -> bool:
    """Whether it has the form of vLLM's hash of an input's content (BLAKE3, SHA-256 or SHA-512 in hex).

    A client's own `uuid` rarely does, a LoRA's `name:hash` never: the name says nothing of the adapter's weights.
    """
    return _HASH.fullmatch(identifier) is not None


def identify(config: Any, *, epoch: int | str = "") -> tuple[str, str]:
    """The namespace of a `VllmConfig`, and why it is incomplete ("" if it is complete)."""
    import torch
    import vllm

    model, parallel = config.model_config, config.parallel_config
    missing: list[str] = []
    weights = _weights(model, missing)
    multimodal = model.multimodal_config
    load_format = str(getattr(config.load_config, "load_format", "auto"))
    if load_format == "dummy":
        missing.append("its weights are dummies")
    overrides = getattr(model, "hf_overrides", None)
    if callable(overrides):
        missing.append("hf_overrides is a function")
        overrides = None
    if any(getattr(config, name, None) is not None for name in ("weight_transfer_config",)):
        missing.append("its weights are transferred while it runs")
    parts = {
        "model": str(model.model),
        "revision": [str(getattr(model, name, None)) for name in ("revision", "code_revision", "hf_config_path")],
        "weights": weights,
        "load_format": load_format,
        "dtype": str(model.dtype),
        "quantization": [str(model.quantization), str(getattr(model, "quantization_config", None))],
        "overrides": repr(overrides),
        "multimodal": {
            name: str(getattr(multimodal, name, None))
            for name in (
                *("mm_processor_kwargs", "media_io_kwargs", "mm_hasher_algorithm", "mm_device_do_normalize"),
                *(
                    "mm_encoder_tp_mode",
                    "mm_encoder_attn_backend",
                    "mm_encoder_attn_dtype",
                    "mm_encoder_fp8_scale_path",
                ),
                *("video_pruning_rate", "video_pruning_method", "interleave_mm_strings"),
            )
        },
        # Adapters of the tower enter through their identifiers, which are never kept; the rest only by their presence.
        "lora": bool(getattr(config, "lora_config", None)),
        "parallel": [parallel.tensor_parallel_size, getattr(parallel, "prefill_context_parallel_size", 1)],
        "device": str(config.device_config.device_type),
        "engine": [vllm.__version__, torch.__version__],
        "epoch": str(epoch),
    }
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=20).hexdigest()
    return f"vllm {vllm.__version__} {model.model} {parts['dtype']} {digest}", "; ".join(missing)


def _weights(model: Any, missing: list[str]) -> list[Any]:
    """Names, sizes and times of a local model's files, or the commit of a hub's."""
    name = str(model.model)
    where = Path(name)
    if getattr(model, "model_weights", ""):
        missing.append(f"its weights come from {model.model_weights}")
        return []
    if where.is_file():
        status = where.stat()
        return [[where.name, status.st_size, status.st_mtime_ns]]
    if where.is_dir():
        files = sorted(_files(where))
        if len(files) >= _MAX_FILES:
            missing.append(f"the directory {name} holds more than {_MAX_FILES} files")
        if not files:
            missing.append(f"the directory {name} is empty")
        return [list(each) for each in files]
    commit = getattr(model.hf_config, "_commit_hash", None) or _commit(name, getattr(model, "revision", None))
    if commit is None:
        missing.append(f"the commit of {name} is not known; give --revision with a full commit hash")
    return [commit]


def _files(directory: Path) -> list[tuple[str, int, int]]:
    found: list[tuple[str, int, int]] = []
    for root, folders, names in os.walk(directory):
        folders[:] = [each for each in folders if not each.startswith((".", "__pycache__"))]
        for name in names:
            path = Path(root, name)
            try:
                status = path.stat()
            except OSError:  # a dangling link is no weight
                continue
            found.append((str(path.relative_to(directory)), status.st_size, status.st_mtime_ns))
            if len(found) >= _MAX_FILES:
                return found
    return found


def _commit(name: str, revision: str | None) -> str | None:
    """The commit from which the hub's cache serves the model's configuration: it was fetched before any worker ran."""
    if revision and _COMMIT.fullmatch(revision):
        return revision
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(name, "config.json", revision=revision)
    except Exception:  # not a hub's name, or no hub library: unknown, which is said
        return None
    commit = Path(path).parent.name if isinstance(path, str) else ""
    return commit if _COMMIT.fullmatch(commit) else None
