"""An :class:`EncoderCache`'s counters for Prometheus; needs the extra ``ecoffload[metrics]``.

Nothing is counted here: a scrape reads ``cache.stats()``, so a cache that nobody scrapes pays nothing. The names are
those of the fields of :class:`CacheStats`, and for a tier those of ``TIER_METRICS``, which the vLLM connector shows as
well; docs/metrics.md lists them, and a test holds the two together.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ecoffload.errors import BackendUnavailable, CacheClosed
from ecoffload.tiers.link import FETCH_RESULTS, PUBLISH_RESULTS

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
    from prometheus_client.registry import REGISTRY, Collector
except ModuleNotFoundError as exc:
    raise BackendUnavailable(
        "ecoffload.metrics needs prometheus_client: pip install 'ecoffload[metrics]'",
        name="prometheus_client",
        reason="not installed",
    ) from exc

if TYPE_CHECKING:
    from ecoffload.cache import EncoderCache

__all__ = ["METRICS", "TIER_METRICS", "CacheCollector", "Described", "tier_numbers", "watch"]


@dataclass(frozen=True, slots=True)
class Described:
    """One metric: its name without "ecoffload_" (and, for a counter, "_total") is a field of :class:`CacheStats`, or
    a name that :func:`tier_numbers` gives, with one number for each value of ``label`` if there is one."""

    field: str
    kind: Literal["counter", "gauge", "summary"]
    help: str
    label: str = ""

    @property
    def name(self) -> str:
        """As Prometheus shows it."""
        return f"ecoffload_{self.field}{'_total' if self.kind == 'counter' else ''}"


METRICS = (
    Described("entries", "gauge", "Entries held."),
    Described("capacity_bytes", "gauge", "Bytes that entries can take."),
    Described("used_bytes", "gauge", "Bytes in extents that are not free."),
    Described("pinned_entries", "gauge", "Entries with loads in flight."),
    Described("quarantined_bytes", "gauge", "Bytes kept aside because a writer that was lost may still be at them."),
    Described("hits", "counter", "Lookups that found an entry."),
    Described("misses", "counter", "Lookups that did not."),
    Described("saves", "counter", "Entries saved."),
    Described("saves_failed", "counter", "Saves that failed; their entries were dropped."),
    Described("saves_refused_too_large", "counter", "Saves refused because the entry is larger than the region."),
    Described("saves_refused_no_room", "counter", "Saves refused because nothing more could be evicted."),
    Described("bytes_saved", "counter", "Bytes copied from device to host."),
    Described("loads", "counter", "Entries loaded."),
    Described("loads_failed", "counter", "Loads that failed; their entries were dropped."),
    Described("bytes_loaded", "counter", "Bytes copied from host to device."),
    Described("evictions", "counter", "Entries evicted to make room."),
    Described("evicted_bytes", "counter", "Their bytes."),
    Described("invalidated", "counter", "Entries forgotten on demand."),
    Described("workers_lost", "counter", "Workers that died without a word."),
    Described("encodes", "counter", "Encoders run by get_or_encode."),
    Described("recovered", "gauge", "Entries of an earlier process that were verified and can be loaded."),
)
TIER_METRICS = (
    Described("tier_on", "gauge", "1 while the tier is used, 0 after it was left out."),
    Described("tier_breaker_open", "gauge", "1 while the store is not asked, but for probes.", "direction"),
    Described("tier_breaker_opened", "counter", "Times that the store was given up for a while.", "direction"),
    Described("tier_fetches", "counter", "Entries asked of the store, by what became of it.", "result"),
    Described("tier_publications", "counter", "Entries saved here, by what became of their publication.", "result"),
    Described("tier_bytes_fetched", "counter", "Bytes of entries that came from the store."),
    Described("tier_bytes_published", "counter", "Bytes of entries sent to the store."),
    Described("tier_fetching", "gauge", "Entries on their way from the store."),
    Described("tier_publish_queue", "gauge", "Entries on their way to the store."),
    Described("tier_aside_bytes", "gauge", "Bytes kept aside because a fetch without an answer may still write there."),
    Described("tier_fetch_seconds", "summary", "From asking for an entry to its being ready, where it came."),
)


def tier_numbers(stats: Mapping[str, Any]) -> dict[str, Any]:
    """What :meth:`TierLink.stats` says, by the names of ``TIER_METRICS``: a number each, one for each label, or a
    summary's count and sum."""
    same = ("bytes_fetched", "bytes_published", "fetching", "publish_queue", "aside_bytes")
    return {
        "tier_on": int(not stats["off"]),
        "tier_breaker_open": {name: int(state != "closed") for name, state in stats["breakers"].items()},
        "tier_breaker_opened": dict(stats["breakers_opened"]),
        "tier_fetches": {name: stats[name] for name in FETCH_RESULTS},
        "tier_publications": {name: stats[name] for name in PUBLISH_RESULTS},
        **{f"tier_{name}": stats[name] for name in same},
        "tier_fetch_seconds": (stats["fetch_seconds"]["count"], stats["fetch_seconds"]["sum"]),
    }


class CacheCollector(Collector):
    """Reads one cache at every scrape; gives nothing once the cache is closed or gone.

    ``labels`` are put on every metric: caches that share a registry need different ones.
    """

    def __init__(self, cache: EncoderCache, labels: Mapping[str, str] | None = None) -> None:
        self._cache = weakref.ref(cache)
        self._labels = dict(labels or {})

    def collect(self) -> Iterator[Metric]:
        cache = self._cache()
        try:
            stats = None if cache is None or cache.closed else cache.stats()
        except CacheClosed:  # in a forked child
            stats = None
        if stats is None:
            return
        for each in METRICS:
            yield self._metric(each, getattr(stats, each.field))
        if stats.tier:
            numbers = tier_numbers(stats.tier)
            for each in TIER_METRICS:
                yield self._metric(each, numbers[each.field])

    def _metric(self, each: Described, number: Any) -> Metric:
        names, values = list(self._labels), list(self._labels.values())
        name = f"ecoffload_{each.field}"
        if each.kind == "summary":
            summary = SummaryMetricFamily(name, each.help, labels=names)
            summary.add_metric(values, *number)
            return summary
        family = CounterMetricFamily if each.kind == "counter" else GaugeMetricFamily
        if not each.label:
            metric = family(name, each.help, labels=names)
            metric.add_metric(values, number)
            return metric
        metric = family(name, each.help, labels=[*names, each.label])
        for label, value in number.items():
            metric.add_metric([*values, label], value)
        return metric

    def describe(self) -> list[Metric]:
        """None: registering must not read the cache, and two caches may give the same names with other labels."""
        return []


def watch(
    cache: EncoderCache, *, labels: Mapping[str, str] | None = None, registry: CollectorRegistry = REGISTRY
) -> CacheCollector:
    """Register a collector for ``cache``; ``registry.unregister`` takes it back."""
    collector = CacheCollector(cache, labels)
    registry.register(collector)
    return collector
