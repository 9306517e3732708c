"""vLLM's own ECCPUConnector in the harness: its scheduler half and shared region unchanged, copies done by the host.

Its worker half needs a GPU's kernels; `HostCopies` stands in through the connector's construction seam and reports each
copy when it is done. The comparator for hits, evictions, encodes saved and scheduler time. Loaded by vLLM through
`ec_connector_module_path`; V2 only, as the original.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.cpu.common import (
    ECCPUConnectorMetadata,
    ECCPUWorkerMetadata,
    create_ec_shared_region,
)
from vllm.distributed.ec_transfer.ec_connector.cpu.connector import ECCPUConnector


class HostCopies:
    """Copies between the encoder cache and the shared region's blocks, on the host, finished when the call returns."""

    def __init__(self, config: Any) -> None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        self._region = create_ec_shared_region(config)
        self._dtype = config.model_config.dtype
        self._saves = get_tensor_model_parallel_rank() == 0
        self._done = ECCPUWorkerMetadata()

    def start_load_caches(self, cache: dict[str, torch.Tensor], connector_metadata: ECCPUConnectorMetadata) -> None:
        for identifier, (number, blocks, shape) in connector_metadata.loads.items():
            stored = self._region.blocks[blocks].reshape(-1).view(self._dtype)
            cache[identifier] = stored[: shape[0] * shape[1]].reshape(shape).clone()
            self._done.completed_loads.append(number)

    def save_caches(
        self, cache: dict[str, torch.Tensor], mm_hash: str, connector_metadata: ECCPUConnectorMetadata
    ) -> None:
        blocks = connector_metadata.saves.get(mm_hash)
        if blocks is None or not self._saves:
            return
        content = cache[mm_hash].contiguous().view(-1).view(torch.int8)
        self._region.blocks[blocks] = content.reshape(len(blocks), -1)
        self._done.completed_saves.append(mm_hash)

    def flush_saves(self) -> None:
        """Nothing waits: every copy is finished where it was started."""

    def build_connector_worker_meta(self) -> ECCPUWorkerMetadata | None:
        done, self._done = self._done, ECCPUWorkerMetadata()
        return done if done.completed_saves or done.completed_loads else None

    def shutdown(self) -> None:
        self._region.cleanup()


class ComparatorConnector(ECCPUConnector):
    """ECCPUConnector with host copies instead of its GPU worker."""

    def _make_worker(self, vllm_config: Any) -> HostCopies:
        return HostCopies(vllm_config)
