"""The smallest connector that keeps vLLM's contract: it proves the harness, and shows what a connector has to do.

Entries are files of one directory; capacity is a number of entries, eviction is LRU. A worker's transfers finish `late`
clock ticks after they were started (per rank; 0: at once), as a device's do, and completion is read from the directory,
not from vLLM's messages. Loaded by vLLM through `ec_connector_module_path`; used by the scheduler tests (where the test
advances the clock) and by the generating tests (where nothing is late).

Options: `directory`, `capacity` (entries), `late` ({rank: ticks}), `tamper` (loads give zeros: the control that shows
that outputs depend on what the cache returned).
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)

try:
    from vllm.distributed.ec_transfer.ec_connector.metrics import (
        ECConnectorPromMetrics,
        ECConnectorStats,
    )
except ImportError:  # vLLM 0.30 has no statistics hooks
    ECConnectorStats = ECConnectorPromMetrics = object  # type: ignore[assignment,misc]


class Clock:
    """The simulated devices of all workers of this process: what was started finishes when enough ticks have passed."""

    def __init__(self) -> None:
        self._now = 0
        self._due: list[tuple[int, Callable[[], None]]] = []

    def start(self, ticks: int, finish: Callable[[], None]) -> None:
        if ticks <= 0:
            finish()
        else:
            self._due.append((self._now + ticks, finish))

    def tick(self) -> None:
        self._now += 1
        ready = [finish for due, finish in self._due if due <= self._now]
        self._due = [(due, finish) for due, finish in self._due if due > self._now]
        for finish in ready:
            finish()

    def reset(self) -> None:
        self._due.clear()


CLOCK = Clock()


@dataclass
class StepPlan(ECConnectorMetadata):
    """Scheduler to workers: transfers of one step, each with a number of its own."""

    saves: dict[str, int] = field(default_factory=dict)
    loads: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)


@dataclass
class Report(ECConnectorWorkerMetadata):
    """Worker to scheduler: how many reports were merged. Nothing is decided by it; it must only cross."""

    ranks: list[int] = field(default_factory=list)

    def aggregate(self, other: ECConnectorWorkerMetadata) -> Report:
        if not isinstance(other, Report):
            raise TypeError(f"cannot merge a report with {type(other).__name__}")
        return Report(self.ranks + other.ranks)


class Stats(ECConnectorStats):  # type: ignore[misc]
    """Counters of one interval; `data` is plain because vLLM sends only that."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = dict(data or {})

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: Any) -> Stats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class Prometheus(ECConnectorPromMetrics):  # type: ignore[misc]
    """One counter family, made as vLLM makes its own: a metric per engine, labelled by vLLM's label names."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        hits = self._counter_cls(
            name="vllm:ec_reference_hits", documentation="Encoder outputs reloaded.", labelnames=labelnames
        )
        self._hits = {engine: hits.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._hits[engine_idx].inc(transfer_stats_data.get("hits", 0))


@dataclass
class Entry:
    shape: tuple[int, ...]
    save: int
    ready: bool = False
    pins: int = 0


class _Scheduler:
    def __init__(self, directory: Path, config: Any) -> None:
        options = config.ec_transfer_config.ec_connector_extra_config
        self.producer, self.consumer = (
            config.ec_transfer_config.is_ec_producer,
            config.ec_transfer_config.is_ec_consumer,
        )
        self.directory, self.capacity = directory, int(options.get("capacity", 1000))
        self.width = config.model_config.get_inputs_embeds_size()
        parallel = config.parallel_config
        self.ranks = parallel.tensor_parallel_size
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self.promised: set[str] = set()
        self.plan = StepPlan()
        self.loading: dict[int, str] = {}
        self.saving: dict[int, str] = {}
        self.next = 1
        self.counts: Counter[str] = Counter()
        for path in sorted(directory.glob("*.npy")):
            with path.open("rb") as file:
                shape = np.load(file, allow_pickle=False).shape
            self.entries[path.stem] = Entry(shape, save=0, ready=True)

    def has(self, identifier: str) -> bool:
        self.poll()
        entry = self.entries.get(identifier) if self.consumer else None
        if entry is None or not entry.ready:
            self.counts["misses"] += 1
            return False
        # A promise: whatever is reserved in the rest of this step must not push the entry out.
        if identifier not in self.promised:
            self.promised.add(identifier)
            entry.pins += 1
        return True

    def allocated(self, identifier: str, rows: int) -> None:
        if identifier in self.promised:
            if identifier not in self.plan.loads:
                entry = self.entries[identifier]
                entry.pins += 1
                self.entries.move_to_end(identifier)
                self.plan.loads[identifier] = (self.next, entry.shape)
                self.loading[self.next] = identifier
                self.next += 1
                self.counts["hits"] += 1
        elif self.producer and identifier not in self.entries and self._room():
            self.entries[identifier] = Entry((rows, self.width), save=self.next)
            self.plan.saves[identifier] = self.next
            self.saving[self.next] = identifier
            self.next += 1

    def _room(self) -> bool:
        if len(self.entries) < self.capacity:
            return True
        for identifier, entry in self.entries.items():
            if entry.ready and not entry.pins:
                del self.entries[identifier]
                (self.directory / f"{identifier}.npy").unlink(missing_ok=True)
                self.counts["evictions"] += 1
                return True
        return False

    def take(self) -> StepPlan:
        for identifier in self.promised:
            self.entries[identifier].pins -= 1
        self.promised.clear()
        plan, self.plan = self.plan, StepPlan()
        return plan

    def poll(self) -> None:
        done = {path.name for path in (self.directory / "done").iterdir()} if self.saving or self.loading else set()
        for number, identifier in list(self.saving.items()):
            if f"{number}.0" in done:
                del self.saving[number]
                self.entries[identifier].ready = True
            elif f"{number}.0.dropped" in done:
                del self.saving[number], self.entries[identifier]
        for number, identifier in list(self.loading.items()):
            if all(f"{number}.{rank}" in done for rank in range(self.ranks)):
                del self.loading[number]
                self.entries[identifier].pins -= 1

    def pending(self) -> bool:
        self.poll()
        return bool(self.saving or self.loading)


class _Worker:
    def __init__(self, directory: Path, config: Any) -> None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        options = config.ec_transfer_config.ec_connector_extra_config
        self.directory, self.dtype = directory, config.model_config.dtype
        self.rank = get_tensor_model_parallel_rank()
        self.late = int(options.get("late", {}).get(str(self.rank), 0))
        self.tamper = bool(options.get("tamper", False))
        self.unsaved: dict[str, int] = {}

    def begin(self, plan: StepPlan) -> None:
        self.unsaved = dict(plan.saves) if self.rank == 0 else {}

    def load(self, cache: dict[str, torch.Tensor], plan: StepPlan) -> None:
        for identifier, (number, shape) in plan.loads.items():
            path = self.directory / f"{identifier}.npy"
            array = np.load(path, allow_pickle=False)
            if array.shape != tuple(shape):
                raise ValueError(f"{identifier}: stored {array.shape}, promised {shape}")
            tensor = torch.from_numpy(array).to(self.dtype)
            cache[identifier] = torch.zeros_like(tensor) if self.tamper else tensor

            def finish(path: Path = path, number: int = number) -> None:
                if not path.exists():
                    raise RuntimeError(f"{path.stem} was evicted while rank {self.rank} was still reading it")
                self._done(f"{number}.{self.rank}")

            CLOCK.start(self.late, finish)

    def save(self, cache: dict[str, torch.Tensor], identifier: str) -> None:
        number = self.unsaved.pop(identifier, None)
        if number is None:
            return
        tensor = cache[identifier]

        def finish() -> None:
            path = self.directory / f"{identifier}.npy"
            part = path.with_suffix(f".{os.getpid()}.part")
            with part.open("wb") as file:
                np.save(file, tensor.float().cpu().numpy())
            part.rename(path)
            self._done(f"{number}.0")

        CLOCK.start(self.late, finish)

    def end(self) -> None:
        # vLLM may schedule an encode and then not call save: the entry would stay "on its way" for ever.
        for number in self.unsaved.values():
            self._done(f"{number}.0.dropped")
        self.unsaved = {}

    def _done(self, name: str) -> None:
        (self.directory / "done" / name).touch()


class ReferenceConnector(ECConnectorBase):
    """See the module's docstring."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        directory = Path(vllm_config.ec_transfer_config.ec_connector_extra_config["directory"])
        (directory / "done").mkdir(parents=True, exist_ok=True)
        if role is ECConnectorRole.SCHEDULER:
            self.half: Any = _Scheduler(directory, vllm_config)
        else:
            self.half = _Worker(directory, vllm_config)

    # Scheduler.
    def has_cache_item(self, identifier: str) -> bool:
        return bool(self.half.has(identifier))

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        feature = request.mm_features[index]
        self.half.allocated(feature.identifier, feature.mm_position.get_num_embeds())

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        return self.half.take()  # type: ignore[no-any-return]

    def has_pending_push_work(self) -> bool:
        return bool(self.half.pending())

    def get_ec_connector_stats(self) -> Any:
        if self.role is ECConnectorRole.WORKER or not self.half.counts:
            return None
        counts, self.half.counts = self.half.counts, Counter()
        return Stats(dict(counts))

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return Stats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Any:
        return Prometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Worker.
    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.half.begin(connector_metadata)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        self.half.load(encoder_cache, self._get_connector_metadata())

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        self.half.save(encoder_cache, mm_hash)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.half.end()
        return None, None

    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        return Report([self.half.rank])
