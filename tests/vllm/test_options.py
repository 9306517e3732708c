"""What a user may write, which vLLM it works with, how it is registered, and what it tells about itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ecoffload.errors import ConfigError
from ecoffload.integrations.vllm.config import Options, check_version, effective_configuration, read_options
from ecoffload.integrations.vllm.namespace import identify, is_content_hash, key_of
from ecoffload.integrations.vllm.setup import set_up

Make = Callable[..., Any]


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, 'ec_cpu_bytes is missing; .* "ec_cpu_bytes": "8GiB"'),
        ({"num_ec_blocks": 10}, "unknown option 'num_ec_blocks'; known are ec_cpu_bytes, enabled"),
        ({"ec_cpu_byte": "1GiB"}, "unknown option 'ec_cpu_byte'; did you mean 'ec_cpu_bytes'"),
        ({"ec_cpu_bytes": "1GiB", "pollicy": "lru"}, "did you mean 'policy'"),
        ({"ec_cpu_bytes": "1GiB", "register_": "off"}, "did you mean 'register'"),
        ({"ec_cpu_bytes": "2g"}, "'2g' is no size"),
        ({"ec_cpu_bytes": 0}, "must be above zero"),
        ({"ec_cpu_bytes": -1}, "must be above zero"),
        ({"ec_cpu_bytes": 1.5}, "no size"),
        ({"ec_cpu_bytes": True}, "no size"),
        ({"ec_cpu_bytes": "1GiB", "policy": "mru"}, "policy is 'mru': .*'lru'"),
        ({"ec_cpu_bytes": "1GiB", "warm": "yes"}, "warm is 'yes': .*boolean"),
        ({"ec_cpu_bytes": "1GiB", "register": "always"}, "register is 'always': .*'require'"),
        ({"ec_cpu_bytes": "1GiB", "name": "a/b"}, "name is 'a/b'"),
        ({"ec_cpu_bytes": "1GiB", "timeout": 0}, "timeout is 0"),
        ({"ec_cpu_bytes": "1GiB", "warm": True, "scrub_on_close": True}, "contradict each other"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_an_error_that_names_the_remedy(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_options(extra)


@pytest.mark.parametrize(
    ("size", "nbytes"), [(4096, 4096), ("8GiB", 8 << 30), ("1.5GB", 1_500_000_000), ("512MiB", 1 << 29)]
)
def test_sizes_are_ints_or_well_defined_suffixes(size: int | str, nbytes: int) -> None:
    assert read_options({"ec_cpu_bytes": size}).ec_cpu_bytes == nbytes


def test_every_option_is_described() -> None:
    text = Options.__doc__ or ""
    assert [name for name, field in Options.model_fields.items() if f"`{field.alias or name}`" not in text] == []


def test_a_region_too_small_for_one_token_is_refused_with_the_minimum(engine: Make) -> None:
    with pytest.raises(ConfigError, match="ec_cpu_bytes is 100; the minimum is 4096 bytes"):
        engine(connector="EcoffloadConnector", extra={"ec_cpu_bytes": 100}, runner="v2")


def test_a_region_smaller_than_the_largest_input_is_said(config: Make) -> None:
    assert any("larger ones than the region are never kept" in note for note in set_up(config(ec_cpu_bytes=8192)).notes)


@pytest.fixture
def config(model: Any) -> Make:
    """A real VllmConfig with our connector."""
    from harness import make_config

    def make(role: str = "ec_both", model_options: dict[str, Any] | None = None, **extra: Any) -> Any:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        return make_config(
            model,
            connector="EcoffloadConnector",
            module="ecoffload.integrations.vllm",
            extra={"ec_cpu_bytes": "1MiB", **extra},
            role=role,
            **(model_options or {}),
        )

    return make


def test_ranks_on_more_than_one_host_are_refused(config: Make) -> None:
    made = config()
    parallel = SimpleNamespace(nnodes_within_dp=2, tensor_parallel_size=16)
    with pytest.raises(ConfigError, match="ranks lie on 2 hosts"):
        set_up(SimpleNamespace(**{**vars(made), "parallel_config": parallel}))


def test_an_engine_that_hashes_no_contents_is_told_why_nothing_will_ever_hit(config: Make) -> None:
    setup = set_up(config(model_options={"mm_processor_cache_gb": 0}))
    assert not setup.content_hashes
    assert any("--mm-processor-cache-gb above 0" in note for note in setup.notes)


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.28.1", "0.29.0", "0.9.2"])
def test_a_vllm_that_lacks_hooks_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=f"vLLM {version} is too old .* 0.30 to 0.33"):
        check_version(version)


def test_an_old_vllm_is_refused_before_anything_is_imported_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from ecoffload.integrations import vllm as package

    monkeypatch.setattr(vllm, "__version__", "0.28.0")
    with pytest.raises(ConfigError, match=r"vLLM 0\.28\.0 is too old"):
        _ = package.EcoffloadConnector


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0+cpu", "0.33.0"])
def test_a_vllm_that_was_tried_is_taken_without_a_word(version: str) -> None:
    assert check_version(version) == ""


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "dev", "0.0.0.dev1"])
def test_a_vllm_that_is_newer_or_unknown_is_taken_with_a_warning_that_names_what_was_tried(version: str) -> None:
    assert "0.30 to 0.33" in check_version(version)


# -- namespace and keys ------------------------------------------------------------------------------------------------


def test_two_readings_of_one_configuration_agree_also_after_pickling(config: Make) -> None:
    import pickle

    made = config()
    assert identify(made) == identify(pickle.loads(pickle.dumps(made)))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"revision": "another"},
        {"mm_processor_kwargs": {"size": 1}},
        {"hf_overrides": {"vision_feature_layer": -1}},
    ],
    ids=str,
)
def test_what_changes_the_bytes_changes_the_namespace(config: Make, options: dict[str, Any]) -> None:
    assert identify(config())[0] != identify(config(model_options=options))[0]


def test_an_incomplete_namespace_turns_warm_off_and_says_so(config: Make) -> None:
    setup = set_up(config(warm=True, model_options={"hf_overrides": lambda hf: hf}))
    assert not setup.warm
    assert setup.cold_reason == "hf_overrides is a function"
    assert any("nothing is kept for a restart: hf_overrides is a function" in note for note in setup.notes)


@pytest.mark.parametrize(
    ("identifier", "is_hash"),
    [
        ("0" * 64, True),
        ("a9" * 64, True),
        ("A9" * 32, False),
        ("0" * 63, False),
        ("lora:" + "0" * 64, False),
        ("cat.png", False),
        ("", False),
    ],
)
def test_only_what_has_the_form_of_a_content_hash_is_taken_for_one(identifier: str, is_hash: bool) -> None:
    assert is_content_hash(identifier) is is_hash


def test_keys_are_never_empty_nor_too_long_and_differ_for_different_identifiers() -> None:
    names = ["", "a", "x" * 256, "x" * 257, "x" * 258, "\ud800", "ü" * 200]
    keys = [key_of(name) for name in names]
    assert all(0 < len(key) <= 256 for key in keys)
    assert len(set(keys)) == len(names)


# -- registration and configuration ------------------------------------------------------------------------------------


def test_the_plugin_registers_the_name_once_and_may_be_called_again() -> None:
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    from ecoffload.integrations.vllm_plugin import register

    register()
    register()
    assert "EcoffloadConnector" in ECConnectorFactory._registry


def test_the_plugin_raises_nothing_where_vllm_has_no_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    from ecoffload.integrations.vllm_plugin import register

    monkeypatch.setitem(sys.modules, "vllm.distributed.ec_transfer.ec_connector.factory", None)
    register()
    assert sys.modules["vllm.distributed.ec_transfer.ec_connector.factory"] is None


def test_the_plugin_module_imports_neither_torch_nor_the_connector() -> None:
    code = (
        "import sys, ecoffload.integrations.vllm_plugin as p;"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'vllm') or 'integrations.vllm.' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_module_path_works_as_well(engine: Make) -> None:
    vllm = engine(
        connector="EcoffloadConnector",
        module="ecoffload.integrations.vllm",
        extra={"ec_cpu_bytes": 65536},
        runner="v2",
    )
    assert type(vllm.connector).__name__ == "EcoffloadConnector"


def test_the_effective_configuration_can_be_asked_for_in_each_process_and_is_plain_data(engine: Make) -> None:
    vllm = engine(connector="EcoffloadConnector", extra={"ec_cpu_bytes": 65536}, runner="v2")
    found = effective_configuration()
    assert json.loads(json.dumps(found)) == found
    worker = found["worker 0"]
    assert (worker["bytes"], worker["backend"], worker["encoding"], worker["registered"]) == (
        65536,
        "cpu",
        "int64",
        False,
    )
    assert found["scheduler"] == vllm.connector.effective_configuration()
    assert found["scheduler"]["path"].startswith("/dev/shm/ecoffload.vllm-")


def test_prometheus_metrics_are_made_and_fed_from_plain_data(config: Make) -> None:
    metrics = pytest.importorskip("vllm.distributed.ec_transfer.ec_connector.metrics", reason="from vLLM 0.31 on")
    from prometheus_client import REGISTRY

    prometheus = metrics.ECConnectorProm(config(), ["model_name", "engine"], {0: ["tiny", "0"]})
    prometheus.observe(
        {
            "hits": 3,
            "hits_from_store": 1,
            "failures": {"too_large": 2},
            "seconds": {"load": [0.002, 0.2], "deferral": [0.1]},
            "tier": {
                "tier_on": 1,
                "tier_breaker_open": {"fetch": 1, "publish": 0},
                "tier_fetches": {"hits": 1, "late": 2},
                "tier_bytes_fetched": 4096,
            },
            "gauges": {
                "entries": 1,
                "capacity_bytes": 10,
                "used_bytes": 5,
                "registered_bytes": 10,
                "recovered_entries": 0,
                "on": 1,
            },
            "info": {"backend": "cpu", "version": "0.1.0", "path": "plain", "start": "created", "reason": ""},
        }
    )
    labels = {"model_name": "tiny", "engine": "0"}
    value = REGISTRY.get_sample_value
    assert value("vllm:ec_offload_hits_total", {**labels, "tier": "region"}) == 2
    assert value("vllm:ec_offload_hits_total", {**labels, "tier": "store"}) == 1
    assert value("vllm:ec_offload_deferral_seconds_count", labels) == 1
    assert value("vllm:ec_offload_tier_on", labels) == 1
    assert value("vllm:ec_offload_tier_breaker_open", {**labels, "direction": "fetch"}) == 1
    assert value("vllm:ec_offload_tier_fetches_total", {**labels, "result": "late"}) == 2
    assert value("vllm:ec_offload_tier_bytes_fetched_total", labels) == 4096
    assert value("vllm:ec_offload_failures_total", {**labels, "reason": "too_large"}) == 2
    assert value("vllm:ec_offload_load_seconds_count", labels) == 2
    assert value("vllm:ec_offload_region_bytes", {**labels, "kind": "used"}) == 5
    info = {"backend": "cpu", "version": "0.1.0", "path": "plain", "start": "created"}
    assert value("vllm:ec_offload_info", {**labels, **info}) == 1


def test_statistics_of_two_intervals_add_up() -> None:
    from ecoffload.integrations.vllm.metrics import Statistics

    first = Statistics({"hits": 1, "failures": {"save": 1}, "seconds": {"load": [1.0]}, "gauges": {"used_bytes": 1}})
    first.data["tier"] = {"tier_bytes_fetched": 2, "tier_fetches": {"hits": 1}, "tier_publish_queue": 5}
    second = Statistics({"hits": 2, "misses": 1, "failures": {"save": 1, "off": 1}, "seconds": {"load": [2.0]}})
    second.data["tier"] = {"tier_bytes_fetched": 3, "tier_fetches": {"hits": 1, "late": 1}, "tier_publish_queue": 4}
    total = first.aggregate(second)
    assert total.data == {
        "hits": 3,
        "misses": 1,
        "failures": {"save": 2, "off": 1},
        "seconds": {"load": [1.0, 2.0]},
        "tier": {"tier_bytes_fetched": 5, "tier_fetches": {"hits": 2, "late": 1}, "tier_publish_queue": 4},
        "gauges": {"used_bytes": 1},
    }
    assert total.reduce()["hit_rate"] == 0.75
