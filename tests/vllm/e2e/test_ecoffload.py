"""A real vLLM generates with EcoffloadConnector: reloads are exact, and they outlive a killed engine.

The connector is named without a module path: vLLM knows it by ecoffload's entry point.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from generating import generate

pytestmark = pytest.mark.timeout(900)
HITS = "vllm:ec_offload_hits"


def ours(**extra: Any) -> dict[str, Any]:
    return {
        "ec_connector": "EcoffloadConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"ec_cpu_bytes": "1MiB", **extra},
    }


@pytest.fixture(scope="module")
def name() -> Iterator[str]:
    """A name for this run's regions; they are removed at the end."""
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    yield name
    for left in Path("/dev/shm").glob(f"ecoffload.vllm-{name}-*"):
        left.unlink()


@pytest.fixture(scope="module")
def killed(model: Path, name: str) -> dict[str, Any]:
    """Two images, then both again, with an encoder cache of one image; then SIGKILL."""
    return generate(model, ec=ours(warm=True, name=name), rounds=[[0], [1], [0], [1]], kill=True)


def test_a_reload_gives_the_same_tokens_and_log_probabilities(killed: dict[str, Any]) -> None:
    assert killed["encodes"] == 2
    assert killed["rounds"][2:] == killed["rounds"][:2]
    assert killed["rounds"][0][0]["tokens"] != killed["rounds"][1][0]["tokens"]


def test_the_hits_are_counted_in_prometheus(killed: dict[str, Any]) -> None:
    assert killed["metrics"][HITS] == 2
    assert killed["metrics"]["vllm:ec_offload_misses"] == 2


def test_an_engine_of_separate_processes_hits_at_once_after_another_was_killed(
    model: Path, killed: dict[str, Any], name: str
) -> None:
    second = generate(model, ec=ours(warm=True, name=name), rounds=[[0], [1]], in_process=False)
    assert second["metrics"][HITS] == 2
    assert second["metrics"].get("vllm:ec_offload_misses", 0) == 0
    assert second["rounds"] == killed["rounds"][:2]


def test_zeroed_bytes_change_the_output(model: Path, killed: dict[str, Any]) -> None:
    zeroed = generate(model, ec=ours(), rounds=[[0], [1], [0], [1]], zero_before=2)
    assert zeroed["encodes"] == 2
    assert zeroed["rounds"][:2] == killed["rounds"][:2]
    assert zeroed["rounds"][2] != zeroed["rounds"][0]
    assert zeroed["rounds"][2][0]["tokens"] == zeroed["rounds"][3][0]["tokens"]


def test_two_tensor_parallel_ranks_reload_what_one_saved_before_all_were_killed(
    model: Path, killed: dict[str, Any], name: str
) -> None:
    options: dict[str, Any] = {"ec": ours(warm=True, name=name), "in_process": False, "tensor_parallel": 2}
    first = generate(model, rounds=[[0], [1]], kill=True, **options)
    second = generate(model, rounds=[[0], [1]], **options)
    assert first["metrics"].get(HITS, 0) == 0
    assert second["metrics"][HITS] == 2
    assert second["rounds"] == first["rounds"]
    for got, want in zip(second["rounds"], killed["rounds"], strict=False):
        assert got[0]["logprobs"][0] == pytest.approx(want[0]["logprobs"][0], abs=1e-3)


def test_the_example_shows_a_rising_hit_rate(model: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "vllm" / "rising_hit_rate.py"
    options = ["--images", "3", "--rounds", "2", "--side", "56", "--cpu-bytes", "1MiB", "--max-model-len", "256"]
    done = subprocess.run(
        [sys.executable, str(example), str(model), *options, "--prompt", "USER <image> w1 ASSISTANT"],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "round 1: 0 of 3 images reloaded, 0%" in done.stdout
    assert "round 2: 3 of 3 images reloaded, 100%" in done.stdout
