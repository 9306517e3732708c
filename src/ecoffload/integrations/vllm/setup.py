"""From vLLM's configuration to what both halves need: options, sizes, ranks, namespace, and the region itself.

Scheduler and workers each call it in their own process and must come to the same answers, so it uses only what vLLM's
configuration says in all of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ecoffload.dtypes import dtype_name
from ecoffload.errors import ConfigError, RegionError
from ecoffload.integrations.vllm.config import GRANULE, Options, check_capacity, check_version, log, read_options
from ecoffload.integrations.vllm.namespace import identify
from ecoffload.region import HostRegion

__all__ = ["Setup", "open_region", "say", "set_up"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What is in force. `world`: ranks that encode and load, tensor by prefill-context parallel; `rows`: the most
    tokens that vLLM's own encoder cache holds; `width`: of the language model's embeddings, elements; `tier`: URL of
    the store, "" without one."""

    options: Options
    producer: bool
    consumer: bool
    world: int
    region_id: str
    namespace: str
    warm: bool
    cold_reason: str
    content_hashes: bool
    dtype: str
    itemsize: int
    width: int
    rows: int
    tier: str
    why_no_tier: str
    device: str
    data_parallel: tuple[int, int]
    notes: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """Plain data for logs and for whoever asks."""
        rank, size = self.data_parallel
        return {
            "enabled": self.options.enabled,
            "role": "both" if self.producer and self.consumer else "producer" if self.producer else "consumer",
            "bytes": self.options.ec_cpu_bytes,
            "data_parallel_rank": rank,
            "bytes_of_all_data_parallel_ranks": self.options.ec_cpu_bytes * size,
            "ranks": self.world,
            "policy": self.options.policy,
            "directory": self.options.directory,
            "region": self.region_id,
            "namespace": self.namespace,
            "warm": self.warm,
            "why_not_warm": self.cold_reason,
            "checksum": self.options.checksum or self.warm,
            "content_hashes": self.content_hashes,
            "tier": self.tier,
            "why_no_tier": self.why_no_tier,
            "notes": list(self.notes),
        }


def set_up(config: Any) -> Setup:
    """Read a `VllmConfig`. Raises ConfigError for options or a parallel layout that cannot work."""
    from vllm import __version__

    notes = [check_version(__version__)]
    transfer, model, parallel = config.ec_transfer_config, config.model_config, config.parallel_config
    options = read_options(dict(transfer.ec_connector_extra_config or {}))
    nodes = getattr(parallel, "nnodes_within_dp", getattr(parallel, "nnodes", 1))
    if nodes > 1 and options.enabled:
        raise ConfigError(
            f"this engine's ranks lie on {nodes} hosts; EcoffloadConnector shares host memory between them and needs "
            "them on one. Keep tensor parallelism within a host, or leave ec_connector out",
            option="nnodes",
            value=nodes,
        )
    dtype, width = model.dtype, model.get_inputs_embeds_size()
    itemsize = dtype.itemsize
    rows = int(getattr(config.scheduler_config, "encoder_cache_size", 0) or 0)
    notes.append(check_capacity(options, width * itemsize, rows * width * itemsize))
    multimodal = model.multimodal_config
    hashed = not (
        multimodal is not None
        and getattr(multimodal, "mm_processor_cache_gb", 1) == 0
        and not config.cache_config.enable_prefix_caching
    )
    if not hashed:
        notes.append(
            "vLLM hashes no contents, because its processor cache and prefix caching are both off: nothing will ever "
            "be found again. Set --mm-processor-cache-gb above 0, or --enable-prefix-caching"
        )
    namespace, missing = identify(config, epoch=options.weight_epoch)
    cold = "not asked for" if not options.warm else missing
    if options.warm and missing:
        notes.append(f"nothing is kept for a restart: {missing}")
    no_tier = "not asked for" if options.tier is None else missing
    if options.tier is not None and missing:
        notes.append(f"the tier is left out, because entries depend on what no other node can tell: {missing}")
    index = int(getattr(parallel, "data_parallel_index", 0) or 0)
    warm = options.warm and not missing
    stem = f"{options.name}-" if options.name else ""
    life = namespace.rsplit(" ", 1)[1][:24] if warm else re.sub(r"[^A-Za-z0-9_-]", "-", str(config.instance_id))[:24]
    return Setup(
        options=options,
        producer=transfer.is_ec_producer,
        consumer=transfer.is_ec_consumer,
        world=parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1),
        region_id=f"vllm-{stem}{life}-dp{index}",
        namespace=namespace,
        warm=warm,
        cold_reason=cold,
        content_hashes=hashed,
        dtype=dtype_name(dtype),
        itemsize=itemsize,
        width=width,
        rows=rows,
        tier="" if no_tier else str(options.tier),
        why_no_tier=no_tier,
        device=str(config.device_config.device_type),
        data_parallel=(index, int(parallel.data_parallel_size)),
        notes=tuple(note for note in notes if note),
    )


def open_region(setup: Setup, *, worker: bool) -> HostRegion:
    """Create or join the engine's region: whoever comes first creates it.

    A worker refuses one that has a scheduler already: vLLM builds an engine's workers first, so it is another engine's.
    """
    options = setup.options
    region = HostRegion.open(
        setup.region_id,
        capacity=options.ec_cpu_bytes,
        granule=GRANULE,
        namespace=setup.namespace,
        directory=options.directory,
        warm=setup.warm,
        timeout=options.timeout,
        reclaim_after=options.reclaim_after,
        scrub_on_close=options.scrub_on_close,
    )
    if worker and region.scheduled():
        path = str(region.path)
        region.close()
        apart = "" if setup.producer and setup.consumer else ". A producer and a consumer at once need a tier"
        raise RegionError(
            f"another engine with this model and configuration is using the region {path}, which serves one at a time; "
            'give each a name of its own in ec_connector_extra_config, e.g. "name": "second", or set "warm" to '
            f"false{apart}",
            path=path,
        )
    return region


_said: set[str] = set()


def say(setup: Setup) -> None:
    """Warn of what a user should know, once a process."""
    for note in setup.notes:
        if note not in _said:
            _said.add(note)
            log.warning("ecoffload: %s", note)
