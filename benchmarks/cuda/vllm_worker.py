"""The vLLM connector on a GPU: a thousand steps of random saves, loads and evictions, every loaded byte verified.

    python benchmarks/cuda/vllm_worker.py [--device cuda] [--steps 1000] [--capacity 1GiB] [--out FILE.json]

Both halves of EcoffloadConnector run in this process, called hook by hook in vLLM's order around a dict of device
tensors, which stands for a model runner's encoder cache. vLLM itself need not be installed: its few classes that the
connector subclasses are stood in for. What an "encoder" makes of an input is computed anew from the input's number to
verify a load, on the compute stream and right after the load was enqueued, so a missing wait shows as wrong bytes.
`--device cpu` runs the same without a GPU. Prints figures; exit code 1 for a wrong byte, a lost promise or a pin left.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

HIDDEN = 3584
DTYPE = torch.bfloat16


def stand_in_for_vllm() -> None:
    """The classes and names of vLLM that the connector touches, if vLLM is not installed."""
    try:
        import vllm  # noqa: F401
    except ImportError:
        pass
    else:
        return

    class Base:
        def __init__(self, vllm_config: Any, role: Any) -> None:
            self._role = role
            self.bound: Any = None

        def bind_connector_metadata(self, connector_metadata: Any) -> None:
            self.bound = connector_metadata

        def clear_connector_metadata(self) -> None:
            self.bound = None

    def module(name: str, **names: Any) -> None:
        made = types.ModuleType(name)
        made.__dict__.update(names)
        made.__path__ = []
        sys.modules[name] = made

    module("vllm", __version__="0.33.0")
    for name in ("distributed", "distributed.ec_transfer", "distributed.ec_transfer.ec_connector"):
        module(f"vllm.{name}")
    module("vllm.distributed.parallel_state")
    sys.modules["vllm.distributed"].parallel_state = sys.modules["vllm.distributed.parallel_state"]  # type: ignore[attr-defined]
    module(
        "vllm.distributed.ec_transfer.ec_connector.base",
        ECConnectorBase=Base,
        ECConnectorMetadata=type("ECConnectorMetadata", (), {}),
        ECConnectorWorkerMetadata=type("ECConnectorWorkerMetadata", (), {}),
        ECConnectorRole=SimpleNamespace(SCHEDULER=0, WORKER=1),
    )


def configuration(model: Path, device: str, capacity: str, encoder_cache_rows: int) -> SimpleNamespace:
    """What the connector reads of a VllmConfig."""
    return SimpleNamespace(
        instance_id=str(time.time_ns()),
        model_config=SimpleNamespace(
            model=str(model),
            revision=None,
            dtype=DTYPE,
            quantization=None,
            hf_config=SimpleNamespace(),
            multimodal_config=None,
            get_inputs_embeds_size=lambda: HIDDEN,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, data_parallel_index=0
        ),
        load_config=SimpleNamespace(load_format="auto"),
        device_config=SimpleNamespace(device_type=device),
        scheduler_config=SimpleNamespace(encoder_cache_size=encoder_cache_rows),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        ec_transfer_config=SimpleNamespace(
            is_ec_producer=True,
            is_ec_consumer=True,
            ec_connector_extra_config={"ec_cpu_bytes": capacity},
            mm_encoder_output_widths={"image": HIDDEN},
        ),
    )


class Runner:
    """A model runner and a scheduler around one connector: one step is vLLM's sequence of hooks."""

    def __init__(self, config: SimpleNamespace, device: str, images: int, seed: int) -> None:
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

        from ecoffload.integrations.vllm.connector import EcoffloadConnector

        self.worker = EcoffloadConnector(config, ECConnectorRole.WORKER)
        self.scheduler = EcoffloadConnector(config, ECConnectorRole.SCHEDULER)
        self.random = np.random.default_rng(seed)
        self.rows = np.clip(np.exp(self.random.normal(6.9, 0.9, images)), 16, 8192).astype(int).tolist()
        self.device = device
        self.cache: dict[str, torch.Tensor] = {}
        self.loads = self.encodes = self.wrong = self.missing = 0
        self.bad: list[torch.Tensor] = []
        self.took: dict[str, list[float]] = {
            "scheduler": [],
            "worker": [],
            "worker_with_load": [],
            "worker_with_save": [],
        }

    def encode(self, number: int) -> torch.Tensor:
        """The one right output of an input: [rows, HIDDEN] in bfloat16, from its number alone."""
        generator = torch.Generator(self.device).manual_seed(number)
        return torch.randn(self.rows[number], HIDDEN, generator=generator, device=self.device, dtype=DTYPE)

    def step(self) -> None:
        """One to four inputs, some of them old acquaintances."""
        wanted = {int(self.random.zipf(1.3)) % len(self.rows) for _ in range(int(self.random.integers(1, 5)))}
        wanted = {number for number in wanted if f"i{number}" not in self.cache}
        features = [self.feature(number) for number in wanted]
        request = SimpleNamespace(mm_features=features)
        start = time.perf_counter()
        self.scheduler.ensure_cache_available(request, 0)
        promised = {number for number in wanted if self.scheduler.has_cache_item(f"i{number}")}
        if promised and self.random.random() < 0.05:  # no KV blocks: vLLM does not follow a promise up
            dropped = promised.pop()
            wanted.discard(dropped)
        order = [number for number in wanted if number not in promised] + [n for n in wanted if n in promised]
        numbers = [int(feature.identifier[1:]) for feature in features]
        for number in order:
            self.scheduler.update_state_after_alloc(request, numbers.index(number))
        plan = self.scheduler.build_connector_meta(None)
        self.took["scheduler"].append(time.perf_counter() - start)

        start = time.perf_counter()
        self.worker.bind_connector_metadata(plan)
        self.worker.start_load_caches(self.cache)
        spent = time.perf_counter() - start
        for number in order:
            if number in promised:
                self.verify(number)
            else:
                self.encodes += 1
                self.cache[f"i{number}"] = self.encode(number)
                start = time.perf_counter()
                self.worker.save_caches(encoder_cache=self.cache, mm_hash=f"i{number}")
                spent += time.perf_counter() - start
        start = time.perf_counter()
        self.worker.get_finished(set())
        report = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        spent += time.perf_counter() - start
        kind = "worker" if not order else "worker_with_load" if promised else "worker_with_save"
        self.took[kind].append(spent)
        self.scheduler.update_connector_output(SimpleNamespace(ec_connector_worker_meta=report))
        self.scheduler.get_ec_connector_stats()
        for name in [name for name in self.cache if self.random.random() < 0.6]:
            del self.cache[name]  # vLLM's own eviction, also of what is being saved

    def feature(self, number: int) -> SimpleNamespace:
        """As vLLM's MultiModalFeatureSpec."""
        position = SimpleNamespace(get_num_embeds=lambda: self.rows[number])
        return SimpleNamespace(identifier=f"i{number}", modality="image", mm_position=position)

    def verify(self, number: int) -> None:
        """Compare on the compute stream, without waiting; the verdicts are read at the end of a stretch."""
        self.loads += 1
        got = self.cache.get(f"i{number}")
        if got is None:
            self.missing += 1
            return
        want = self.encode(number)
        if got.shape != want.shape or got.dtype != want.dtype:
            self.wrong += 1
            return
        self.bad.append((got.view(torch.int16) != want.view(torch.int16)).any())
        if len(self.bad) >= 64:
            self.judge()

    def judge(self) -> None:
        """Read the verdicts."""
        if self.bad:
            self.wrong += int(torch.stack(self.bad).sum())
            self.bad = []

    def drain(self) -> None:
        """As an idle engine does: until nothing is in flight."""
        end = time.monotonic() + 30
        while self.scheduler.has_pending_push_work() and time.monotonic() < end:
            time.sleep(0.001)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--capacity", default="1GiB")
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    stand_in_for_vllm()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "model.safetensors").write_bytes(b"stands for weights")
        config = configuration(Path(directory), options.device, options.capacity, 16384)
        runner = Runner(config, options.device, options.images, options.seed)
        begin = time.monotonic()
        for _ in range(options.steps):
            runner.step()
        runner.judge()
        runner.drain()
        seconds = time.monotonic() - begin
        half = runner.scheduler._decider
        mover = runner.worker._mover
        if half is None or mover is None:
            print("a half of the connector is not there", file=sys.stderr)
            return 1
        counters = half.engine.counters()
        pinned, off, stats = half.engine.index.pinned, half.off or mover.off, mover.engine.stats()
        half.engine.index.check()
        runner.worker.shutdown()
        runner.scheduler.shutdown()
    medians = {f"{name}_us": round(1e6 * float(np.median(times)), 1) for name, times in runner.took.items() if times}
    result = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "steps": options.steps,
        "seconds": round(seconds, 2),
        "encodes": runner.encodes,
        "loads": runner.loads,
        "wrong": runner.wrong,
        "missing": runner.missing,
        "pinned_at_the_end": pinned,
        "off": off,
        **counters,
        **medians,
        "backend": stats["backend"],
        "registered": stats["registered"],
    }
    for name, value in result.items():
        print(f"{name} {value}")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    good = not (runner.wrong or runner.missing or pinned or off) and runner.loads > 0 and counters["evictions"] > 0
    print("every loaded byte was right" if good else "NOT as it must be")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
