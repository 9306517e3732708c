"""Device memory that loads may need comes out of the KV cache's share: vLLM's own accounting, on a device of numbers.

Real: `Worker.load_model` and `determine_available_memory`, `MemorySnapshot`, `memory_profiling`, `request_memory`.
Stood in for: torch's memory statistics, and the model, which takes and gives back numbers.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from harness import as_rank, make_config
from late_backend import LateBackend, LateOps
from tinymodel import HIDDEN, TOKENS_PER_IMAGE
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.utils import request_memory

from ecoffload.integrations.vllm import EcoffloadConnector
from ecoffload.integrations.vllm import worker as worker_half

TOTAL, CONTEXT, WEIGHTS, PEAK = 1 << 30, 40 << 20, 200 << 20, 50 << 20
ITEMS = 8
ENCODER_CACHE = ITEMS * TOKENS_PER_IMAGE * HIDDEN * 4


class Device:
    """A device's memory as torch's accelerator module tells it; nothing is cached, so empty_cache changes nothing."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0

    def take(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    def give(self, nbytes: int) -> None:
        self.allocated -= nbytes

    def install(self, patch: pytest.MonkeyPatch) -> None:
        here: dict[str, Callable[..., Any]] = {
            "memory_stats": lambda device=None: {
                "allocated_bytes.all.peak": self.peak,
                "allocated_bytes.all.current": self.allocated,
            },
            "memory_reserved": lambda device=None: self.allocated,
            "get_memory_info": lambda device=None: (TOTAL - CONTEXT - self.allocated, TOTAL),
            "empty_cache": lambda: None,
            "synchronize": lambda device=None: None,
            "reset_peak_memory_stats": lambda device=None: setattr(self, "peak", self.allocated),
        }
        for name, call in here.items():
            patch.setattr(torch.accelerator, name, call)


class CountedOps(LateOps):
    """Blocks that are held are counted."""

    def __init__(self, memory: Device) -> None:
        super().__init__()
        self.memory = memory

    def empty(self, nbytes: int, stream: Any = None) -> torch.Tensor:
        tensor = super().empty(nbytes, stream)
        self.memory.take(nbytes)
        weakref.finalize(tensor, self.memory.give, nbytes)
        return tensor


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Device:
    memory = Device()
    memory.install(monkeypatch)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # an engine of another test may have left it on; see `Engine`

    def get_backend(name: str | None = None, *, device: Any = None) -> LateBackend:
        return LateBackend(0, CountedOps(memory))

    monkeypatch.setattr(worker_half, "get_backend", get_backend)
    monkeypatch.setattr(gpu_worker, "maybe_apply_startup_plan", lambda worker: None, raising=False)
    return memory


def kv_cache_bytes(config: Any, memory: Device, connector: Any) -> int:
    """What vLLM would give its KV cache: its worker's start, from the connector's making on."""

    def load_model(**options: Any) -> None:
        memory.take(WEIGHTS)

    def profile_run(**options: Any) -> None:
        memory.take(PEAK)
        memory.give(PEAK)

    snapshot = MemorySnapshot(device="cpu")
    worker = mock.MagicMock(
        vllm_config=config,
        cache_config=config.cache_config,
        model_config=config.model_config,
        parallel_config=config.parallel_config,
        use_v2_model_runner=True,
        init_snapshot=snapshot,
        requested_memory=request_memory(snapshot, config.cache_config),
        model_runner=SimpleNamespace(
            load_model=load_model,
            profile_run=profile_run,
            model_memory_usage=WEIGHTS,
            profile_cudagraph_memory=lambda: 0,
        ),
        _maybe_get_memory_pool_context=lambda tag: contextlib.nullcontext(),
        _scoped_allocator_max_split=lambda **options: contextlib.nullcontext(),
    )
    try:
        with as_rank(0, 1, connector):
            gpu_worker.Worker.load_model(worker)
            return int(gpu_worker.Worker.determine_available_memory(worker))
    finally:
        memory.give(WEIGHTS)


def budget(model: Path, memory: Device, role: str | None) -> tuple[int, int]:
    """Bytes for the KV cache, and those that are held meanwhile by the connector of that role (None: there is none)."""
    config = make_config(
        model,
        connector=role and "EcoffloadConnector",
        module="ecoffload.integrations.vllm",
        role=role or "ec_both",
        extra={"ec_cpu_bytes": "64KiB"},
        encoder_cache_items=ITEMS,
    )
    with as_rank(0, 1):
        connector = role and EcoffloadConnector(config, ECConnectorRole.WORKER)
    try:
        return kv_cache_bytes(config, memory, connector), memory.allocated
    finally:
        if connector is not None:
            connector.shutdown()


@pytest.mark.parametrize("role", ["ec_both", "ec_consumer"])
def test_one_encoder_cache_for_loads_comes_out_of_the_kv_caches_share(model: Path, memory: Device, role: str) -> None:
    without, _ = budget(model, memory, None)
    with_loads, held = budget(model, memory, role)
    assert (without - with_loads, held) == (ENCODER_CACHE, ENCODER_CACHE)


def test_a_producer_that_loads_nothing_takes_nothing(model: Path, memory: Device) -> None:
    without, _ = budget(model, memory, None)
    assert budget(model, memory, "ec_producer") == (without, 0)


def test_what_is_held_before_vllms_first_look_is_not_in_the_kv_caches_share(model: Path, memory: Device) -> None:
    without, _ = budget(model, memory, None)
    memory.take(ENCODER_CACHE)  # why the connector waits with it until the weights are loaded
    assert budget(model, memory, None)[0] == without


def test_it_is_held_until_the_first_load(engine: Callable[..., Any], memory: Device) -> None:
    vllm = engine(connector="EcoffloadConnector", module=None, extra={"ec_cpu_bytes": "64KiB"}, encoder_cache_items=1)
    held = []
    for step, name in enumerate(("a", "b", "a")):
        held.append(memory.allocated)
        vllm.add(f"{name}{step}", name)
        vllm.run(100_000)
    assert [*held, memory.allocated] == [TOKENS_PER_IMAGE * HIDDEN * 4] * 3 + [0]
    assert vllm.encodes() == ["a", "b"]
