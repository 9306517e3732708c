"""A real vLLM generates on the CPU with an external connector: reloads are exact, and the output depends on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from generating import generate

pytestmark = pytest.mark.timeout(900)


def reference(directory: Path, **extra: Any) -> dict[str, Any]:
    return {
        "ec_connector": "ReferenceConnector",
        "ec_role": "ec_both",
        "ec_connector_module_path": "reference_connector",
        "ec_connector_extra_config": {"directory": str(directory), **extra},
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def first(model: Path, directory: Path) -> dict[str, Any]:
    """Two images, then both again: an encoder cache of one image makes the second pair come from the connector."""
    return generate(model, ec=reference(directory), rounds=[[0], [1], [0], [1]])


def test_the_output_depends_on_the_image(first: dict[str, Any]) -> None:
    assert first["rounds"][0][0]["tokens"] != first["rounds"][1][0]["tokens"]


def test_a_reload_gives_the_same_tokens_and_log_probabilities(first: dict[str, Any]) -> None:
    assert first["encodes"] == 2
    assert first["rounds"][2:] == first["rounds"][:2]


def test_the_hits_are_counted_in_prometheus(first: dict[str, Any]) -> None:
    assert first["metrics"]["vllm:ec_reference_hits"] == 2


def test_zeroed_bytes_change_the_output(model: Path, first: dict[str, Any], directory: Path) -> None:
    zeroed = generate(model, ec=reference(directory, tamper=True), rounds=[[0], [1]])
    assert zeroed["encodes"] == 0
    assert zeroed["rounds"][0] != first["rounds"][0]
    assert zeroed["rounds"][0][0]["tokens"] == zeroed["rounds"][1][0]["tokens"]


def test_an_engine_of_separate_processes_reloads_what_another_run_saved(
    model: Path, first: dict[str, Any], directory: Path
) -> None:
    second = generate(model, ec=reference(directory), rounds=[[0], [1]], in_process=False)
    assert second["metrics"]["vllm:ec_reference_hits"] == 2
    assert second["rounds"] == first["rounds"][:2]


def test_two_tensor_parallel_ranks_reload_what_one_saved(model: Path, first: dict[str, Any], directory: Path) -> None:
    two = generate(model, ec=reference(directory), rounds=[[0], [1]], in_process=False, tensor_parallel=2)
    assert two["metrics"]["vllm:ec_reference_hits"] == 2
    for got, want in zip(two["rounds"], first["rounds"], strict=False):
        assert got[0]["logprobs"][0] == pytest.approx(want[0]["logprobs"][0], abs=1e-3)
