"""Prometheus sees what `cache.stats()` says, under the documented names."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry, generate_latest

from ecoffload import CacheStats, EncoderCache
from ecoffload.metrics import METRICS, TIER_METRICS, watch
from ecoffload.testing.tiers.fake import FakeStore, FakeTier

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_a_scrape_gives_what_the_cache_counted() -> None:
    registry = CollectorRegistry()
    with EncoderCache("1MiB") as cache:
        watch(cache, registry=registry, labels={"model": "m"})
        cache.put("a", torch.arange(1000))
        cache.get("a")
        cache.get("b")

        def value(name: str) -> float | None:
            return registry.get_sample_value(name, {"model": "m"})

        assert value("ecoffload_hits_total") == 1
        assert value("ecoffload_misses_total") == 1
        assert value("ecoffload_bytes_saved_total") == 8000
        assert value("ecoffload_entries") == 1
        assert value("ecoffload_capacity_bytes") == 1 << 20


def test_two_caches_share_a_registry_under_different_labels() -> None:
    registry = CollectorRegistry()
    with EncoderCache("1MiB") as one, EncoderCache("2MiB") as two:
        watch(one, registry=registry, labels={"cache": "one"})
        watch(two, registry=registry, labels={"cache": "two"})
        assert registry.get_sample_value("ecoffload_capacity_bytes", {"cache": "one"}) == 1 << 20
        assert registry.get_sample_value("ecoffload_capacity_bytes", {"cache": "two"}) == 2 << 20


def test_a_closed_cache_and_one_that_is_gone_give_nothing() -> None:
    registry = CollectorRegistry()
    cache = EncoderCache("1MiB")
    watch(cache, registry=registry)
    assert b"ecoffload_entries" in generate_latest(registry)
    cache.close()
    assert generate_latest(registry) == b""
    del cache
    gc.collect()
    assert generate_latest(registry) == b""


def test_a_tier_is_told_apart_from_the_region() -> None:
    store, registry = FakeStore(), CollectorRegistry()
    with EncoderCache("1MiB", namespace="m", tier=FakeTier(store=store)) as one:
        one.put("a", torch.arange(1000))
        while not one.stats().tier["published"]:
            pass
        with EncoderCache("1MiB", namespace="m", tier=FakeTier(store=store)) as two:
            watch(two, registry=registry, labels={"model": "m"})
            two.get("a")
            two.get("b")

            def value(name: str, **labels: str) -> float | None:
                return registry.get_sample_value(f"ecoffload_{name}", {"model": "m", **labels})

            assert value("hits_total") == 1
            assert value("tier_fetches_total", result="hits") == 1
            assert value("tier_fetches_total", result="misses") == 1
            assert value("tier_bytes_fetched_total") == 8000
            assert value("tier_publications_total", result="published") == 0
            assert value("tier_on") == 1
            assert value("tier_breaker_open", direction="fetch") == 0
            assert value("tier_fetch_seconds_count") == 1


def test_every_number_of_the_stats_is_a_metric() -> None:
    numbers = {field.name for field in fields(CacheStats) if field.type == "int"}
    assert {each.field for each in METRICS} == numbers


def test_the_documentation_lists_the_metrics_as_they_are() -> None:
    rows = [line for line in (DOCS / "metrics.md").read_text().splitlines() if line.startswith("| `ecoffload_")]
    named = [(each, f"{each.name}{{{each.label}}}" if each.label else each.name) for each in (*METRICS, *TIER_METRICS)]
    assert rows == [f"| `{name}` | {each.kind} | {each.help} |" for each, name in named]


def test_without_the_extra_the_error_says_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from ecoffload.errors import BackendUnavailable\n"
        "try:\n    import ecoffload.metrics\nexcept BackendUnavailable as exc:\n    print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'ecoffload[metrics]'" in done.stdout
