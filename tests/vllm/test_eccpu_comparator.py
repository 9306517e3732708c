"""vLLM's own ECCPUConnector (scheduler half and region) on the same harness: what a user has today."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tinymodel import HIDDEN, TOKENS_PER_IMAGE

ENTRY_BYTES = TOKENS_PER_IMAGE * HIDDEN * 4


@pytest.fixture
def eccpu(engine: Callable[..., Any]) -> Callable[..., Any]:
    pytest.importorskip(
        "vllm.distributed.ec_transfer.ec_connector.encoder_output_width",
        reason="compared from vLLM 0.32 on: before, its loads have no numbers",
    )

    def make(entries: int, **options: Any) -> Any:
        return engine(
            connector="ComparatorConnector",
            module="eccpu_comparator",
            extra={"ec_cpu_bytes": entries * ENTRY_BYTES},
            runner="v2",
            **options,
        )

    return make


def test_eccpu_reloads_an_image_evicted_from_the_encoder_cache(eccpu: Callable[..., Any]) -> None:
    vllm = eccpu(8, encoder_cache_items=1)
    for step, name in enumerate(("a", "b", "a")):
        vllm.add(f"{name}{step}", name)
        vllm.run()
    assert vllm.encodes() == ["a", "b"]


def test_eccpu_serves_two_ranks_under_pressure(eccpu: Callable[..., Any]) -> None:
    vllm = eccpu(3, ranks=2, encoder_cache_items=1)
    for turn in range(24):
        vllm.add(f"r{turn}", f"i{turn * 7 % 5}")
        vllm.step()
    vllm.run()
    assert set(vllm.tokens.values()) == {2}
    assert vllm.encodes(0) == vllm.encodes(1)
