"""Drives the real vLLM Scheduler and an encoder-cache connector step by step; only the model's arithmetic is left out.

Real: `Scheduler`, `EncoderCacheManager`, `ECConnectorFactory`, `ECOutputAggregator`, V2's `ActiveECConnector`, V1's
`ECConnectorModelRunnerMixin`, and a pickle round trip of each message as the multi-process executor makes it. Stood in
for: the model. `Worker` does what vLLM's model runners do around a connector (forget evicted entries, bind, load,
encode, save, gather, report), and *its gather is the referee*: a missing, misshapen or wrong encoder output fails the
test, where vLLM would stop the engine.

Called by the tests beside it, for any connector class (name, module path, extra config). Never imports ecoffload.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tinymodel import HIDDEN, IMAGE_TOKEN, TOKENS_PER_IMAGE
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.config.ec_transfer import ECTransferConfig
from vllm.distributed import parallel_state
from vllm.distributed.ec_transfer import ec_transfer_state
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput, make_empty_encoder_model_runner_output
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin

BLOCK = 16
DTYPE = torch.float32


class WrongEncoderOutput(AssertionError):
    """What the language model would have read is missing or not what the encoder makes of that input."""


def encoder_output(identifier: str, rows: int) -> torch.Tensor:
    """The one right encoder output of an input: float32 [rows, HIDDEN], the same for every process and rank."""
    seed = int.from_bytes(hashlib.sha256(identifier.encode()).digest()[:7], "little")
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def make_config(
    model: Path,
    *,
    connector: str | None,
    module: str | None = None,
    extra: dict[str, Any] | None = None,
    role: str = "ec_both",
    ranks: int = 1,
    encoder_cache_items: int = 8,
    max_batched_tokens: int = 128,
    asynchronous: bool = False,
    **model_options: Any,
) -> VllmConfig:
    """vLLM's configuration of a tiny LLaVA with the connector; `encoder_cache_items` images fit the encoder cache."""
    options: dict[str, Any] = {}
    if connector is not None:
        options["ec_transfer_config"] = ECTransferConfig(
            ec_connector=connector,
            ec_role=role,
            ec_connector_module_path=module,
            ec_connector_extra_config=dict(extra or {}),
        )
    config = VllmConfig(
        model_config=ModelConfig(
            **{"model": str(model), "dtype": "float32", "max_model_len": 512, "seed": 0, **model_options}
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=max_batched_tokens,
            max_model_len=512,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
        ),
        cache_config=CacheConfig(block_size=BLOCK, cache_dtype="auto", enable_prefix_caching=False),
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(
            tensor_parallel_size=ranks, distributed_executor_backend="mp" if ranks > 1 else "uni"
        ),
        **options,
    )
    config.scheduler_config.encoder_cache_size = encoder_cache_items * TOKENS_PER_IMAGE
    return config


@contextlib.contextmanager
def as_rank(rank: int, ranks: int, connector: Any = None) -> Iterator[None]:
    """Give this thread the process-wide state that a worker process of `rank` would have: groups and connector."""
    group = SimpleNamespace(
        rank_in_group=rank, rank=rank, local_rank=rank, world_size=ranks, is_first_rank=rank == 0, is_last_rank=True
    )
    alone = SimpleNamespace(rank_in_group=0, rank=0, local_rank=0, world_size=1, is_first_rank=True, is_last_rank=True)
    saved = {name: getattr(parallel_state, name, None) for name in ("_WORLD", "_TP", "_PP", "_DP", "_DCP", "_PCP")}
    agent = ec_transfer_state._EC_CONNECTOR_AGENT
    try:
        for name in saved:
            setattr(parallel_state, name, group if name in ("_WORLD", "_TP") else alone)
        ec_transfer_state._EC_CONNECTOR_AGENT = connector
        yield
    finally:
        for name, value in saved.items():
            setattr(parallel_state, name, value)
        ec_transfer_state._EC_CONNECTOR_AGENT = agent


class Recorded:
    """A connector whose public calls are appended to `calls`, as (who, method); everything else passes through."""

    def __init__(self, connector: Any, who: str, calls: list[tuple[str, str]]) -> None:
        for name in dir(type(connector)):
            if name.startswith("_") or not callable(getattr(type(connector), name)):
                continue
            setattr(connector, name, self._recording(getattr(connector, name), name, who, calls))

    @staticmethod
    def _recording(call: Callable[..., Any], name: str, who: str, calls: list[tuple[str, str]]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            calls.append((who, name))
            return call(*args, **kwargs)

        return recorded


class Worker:
    """One rank: what a model runner (`runner` "v1" or "v2") does around its connector, over a plain dict."""

    def __init__(self, config: VllmConfig, *, rank: int, ranks: int, runner: str, calls: list[tuple[str, str]]) -> None:
        self.rank, self.ranks, self.runner = rank, ranks, runner
        config.parallel_config.rank = rank
        self.config = config
        self.cache: dict[str, torch.Tensor] = {}
        self.encoded: list[str] = []
        self._features: dict[str, list[MultiModalFeatureSpec]] = {}
        self._length: dict[str, int] = {}
        with as_rank(rank, ranks):
            self.connector = ECConnectorFactory.create_connector(config, ECConnectorRole.WORKER)
        Recorded(self.connector, f"worker{rank}", calls)
        with as_rank(rank, ranks, self.connector):
            self.connector.start_worker_services()
            if runner == "v2":
                from vllm.v1.worker.gpu.ec_connector import ActiveECConnector

                self._v2 = ActiveECConnector(config, self.cache)

    def execute(self, step: Any) -> ModelRunnerOutput:
        """Run one step as the model runner would and return its output, ready to be pickled."""
        with as_rank(self.rank, self.ranks, self.connector):
            self._update(step)
            return self._execute_v2(step) if self.runner == "v2" else self._execute_v1(step)

    def shutdown(self) -> None:
        with as_rank(self.rank, self.ranks, self.connector):
            self.connector.shutdown()

    def _update(self, step: Any) -> None:
        for request_id in step.finished_req_ids:
            self._features.pop(request_id, None)
            self._length.pop(request_id, None)
        for identifier in step.free_encoder_mm_hashes:
            self.cache.pop(identifier, None)
        for request in step.scheduled_new_reqs:
            self._features[request.req_id] = request.mm_features
            self._length[request.req_id] = len(request.prefill_token_ids or request.prompt_token_ids)

    def _execute_v2(self, step: Any) -> ModelRunnerOutput:
        if not step.total_num_scheduled_tokens:
            return self._v2.no_forward(step)
        with self._v2.maybe_get_output(step) as reported:
            self._encode(step)
            if self.connector.is_consumer:
                self._gather(step)
        if not self.connector.is_consumer:
            return ModelRunnerOutput.with_ec_conn_output(make_empty_encoder_model_runner_output(step), reported)
        return ModelRunnerOutput.with_ec_conn_output(self._sample(step), reported)

    def _execute_v1(self, step: Any) -> ModelRunnerOutput:
        mixin = ECConnectorModelRunnerMixin
        if not self.connector.is_consumer:
            with mixin.maybe_get_ec_connector_output(step, encoder_cache=self.cache):
                self._encode(step)
                return make_empty_encoder_model_runner_output(step)
        if not step.total_num_scheduled_tokens:
            return ModelRunnerOutput(req_ids=[], req_id_to_index={})
        with mixin.maybe_get_ec_connector_output(step, encoder_cache=self.cache) as reported:
            self._encode(step)
            self._gather(step)
        output = self._sample(step)
        output.ec_connector_output = reported
        return output

    def _encode(self, step: Any) -> None:
        for request_id, inputs in step.scheduled_encoder_inputs.items():
            for index in inputs:
                feature = self._features[request_id][index]
                self.cache[feature.identifier] = encoder_output(
                    feature.identifier, feature.mm_position.get_num_embeds()
                )
                self.encoded.append(feature.identifier)
                if self.runner == "v1":
                    ECConnectorModelRunnerMixin.maybe_save_ec_to_connector(self.cache, feature.identifier)

    def _gather(self, step: Any) -> None:
        for request_id, start, count in self._scheduled(step):
            for feature in self._features[request_id]:
                position = feature.mm_position
                if position.offset >= start + count or position.offset + position.length <= start:
                    continue
                got = self.cache.get(feature.identifier)
                want = encoder_output(feature.identifier, position.get_num_embeds())
                where = f"{feature.identifier} of {request_id} on rank {self.rank}"
                if got is None:
                    raise WrongEncoderOutput(f"Encoder cache miss for {where}")
                if got.shape != want.shape or got.dtype != want.dtype:
                    raise WrongEncoderOutput(f"{where}: {got.dtype} {tuple(got.shape)}, not {tuple(want.shape)}")
                if not torch.equal(got, want):
                    raise WrongEncoderOutput(f"{where}: wrong bytes")

    def _sample(self, step: Any) -> ModelRunnerOutput:
        request_ids, tokens = [], []
        for request_id, start, count in self._scheduled(step):
            request_ids.append(request_id)
            done = start + count >= self._length[request_id]
            tokens.append([7] if done else [])
            self._length[request_id] += done
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=tokens,
        )

    @staticmethod
    def _scheduled(step: Any) -> Iterator[tuple[str, int, int]]:
        """(request, first computed token, tokens) of everything scheduled in this step."""
        cached = step.scheduled_cached_reqs
        starts = {request.req_id: request.num_computed_tokens for request in step.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, count in step.num_scheduled_tokens.items():
            yield request_id, starts[request_id], count


class Engine:
    """The loop of vLLM's engine core: schedule, run every rank, aggregate, update; one `step` at a time.

    With `asynchronous=True` a step is scheduled before the last one's output was seen, as async scheduling does.
    `runner` is "v1" or "v2"; `pickled` False hands objects over as the single-process executor does. `tick` is called
    after each step: tests advance a simulated device there. `blocks` KV blocks of 16 tokens: few of them preempt.
    """

    def __init__(
        self,
        model: Path,
        *,
        runner: str = "v2",
        ranks: int = 1,
        pickled: bool = True,
        blocks: int = 256,
        tick: Callable[[], None] | None = None,
        **config_options: Any,
    ) -> None:
        # Before 0.33 a configuration for V2 is refused where Triton is missing, though nothing here compiles a kernel:
        # it is made for V1, and the scheduler, which asks again, is told V2.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        load_general_plugins()  # as every process of vLLM does first
        self.config = make_config(model, ranks=ranks, **config_options)
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
        self.calls: list[tuple[str, str]] = []
        self.stats: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.tokens: Counter[str] = Counter()
        self.steps = 0
        self._pickled, self._tick, self._ranks = pickled, tick, ranks
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._ahead = 1 if self.config.scheduler_config.async_scheduling else 0
        transfer = self.config.ec_transfer_config
        encode_only = transfer is not None and transfer.is_ec_producer and not transfer.is_ec_consumer
        # vLLM's order: workers are built before the scheduler, and the width is measured in between.
        self.workers = [
            Worker(self._wire(self.config), rank=rank, ranks=ranks, runner=runner, calls=self.calls)
            for rank in range(ranks)
        ]
        if transfer is not None and transfer.is_ec_producer and hasattr(transfer, "mm_encoder_output_widths"):
            transfer.mm_encoder_output_widths = {"image": HIDDEN}
        self.config.cache_config.num_gpu_blocks = blocks
        with contextlib.suppress(ImportError):
            from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

            register_all_kvcache_specs(self.config)
        group = KVCacheGroupSpec(
            ["layer"], FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=DTYPE)
        )
        kind = AsyncScheduler if self.config.scheduler_config.async_scheduling else Scheduler
        self.scheduler = kind(
            self.config,
            KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[] if encode_only else [group]),
            StructuredOutputManager(self.config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.connector = self.scheduler.ec_connector
        if self.connector is not None:
            Recorded(self.connector, "scheduler", self.calls)

    def add(
        self, request_id: str, *images: str, rows: int = TOKENS_PER_IMAGE, text: int = 4, max_tokens: int = 2
    ) -> Request:
        """Queue a request of `text` tokens, then each image (`rows` placeholder tokens and one more token of text)."""
        prompt, features = [5] * text, []
        for image in images:
            features.append(
                MultiModalFeatureSpec(
                    data=MultiModalKwargsItem.dummy(),
                    modality="image",
                    identifier=image,
                    mm_position=PlaceholderRange(offset=len(prompt), length=rows),
                    mm_hash=image,
                )
            )
            prompt += [IMAGE_TOKEN] * rows + [6]
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, eos_token_id=2)
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            mm_features=features,
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def preempt_all(self) -> None:
        """Preempt everything that runs; it is resumed from its first token."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def step(self) -> Any:
        """One step of the engine; returns the scheduler's output of it."""
        step = self.scheduler.schedule()
        self._in_flight.append((step, self._execute(step)))
        while len(self._in_flight) > (self._ahead if step.total_num_scheduled_tokens else 0):
            self._update(*self._in_flight.popleft())
        self.steps += 1
        if self._tick is not None:
            self._tick()
        return step

    def _execute(self, step: Any) -> ModelRunnerOutput:
        outputs = [self._wire(worker.execute(self._wire(step))) for worker in self.workers]
        if self._ranks > 1:
            from vllm.distributed.ec_transfer.ec_connector.utils import ECOutputAggregator

            return ECOutputAggregator().aggregate(outputs, output_rank=0)
        return outputs[0]

    def _update(self, step: Any, output: ModelRunnerOutput) -> None:
        for client in self.scheduler.update_from_output(step, output).values():
            for result in client.outputs:
                self.tokens[result.request_id] += len(result.new_token_ids)
                if str(result.finish_reason) == "error":
                    self.errors.append(result.request_id)
            stats = client.scheduler_stats
            if stats is not None and getattr(stats, "ec_connector_stats", None):
                self.stats.append(pickle.loads(pickle.dumps(stats.ec_connector_stats)))

    def run(self, limit: int = 300) -> int:
        """Step while vLLM's engine would; returns the steps taken. More than `limit` is a livelock."""
        before = self.steps
        while self.scheduler.has_requests():
            if self.steps - before >= limit:
                raise AssertionError(f"still busy after {limit} steps: the engine would spin for ever")
            self.step()
        return self.steps - before

    def totals(self) -> Counter[str]:
        """The connector's counters as they reached vLLM's front end, summed (empty where vLLM has no such hook)."""
        counts: Counter[str] = Counter()
        for stats in self.stats:
            counts.update({name: value for name, value in stats.items() if isinstance(value, int)})
        return counts

    def encodes(self, rank: int = 0) -> list[str]:
        """Identifiers that the encoder ran for, in order."""
        return self.workers[rank].encoded

    def shutdown(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()

    def _wire(self, message: Any) -> Any:
        return pickle.loads(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)) if self._pickled else message
