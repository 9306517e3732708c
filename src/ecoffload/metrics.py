"""An :class:`EncoderCache`'s counters for Prometheus; needs the extra ``ecoffload[metrics]``.

Nothing is counted here: a scrape reads ``cache.stats()``, so a cache that nobody scrapes pays nothing. The names are
those of the fields of :class:`CacheStats`; docs/metrics.md lists them, and a test holds the two together.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ecoffload.errors import BackendUnavailable, CacheClosed

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import REGISTRY, Collector
except ModuleNotFoundError as exc:
    raise BackendUnavailable(
        "ecoffload.metrics needs prometheus_client: pip install 'ecoffload[metrics]'",
        name="prometheus_client",
        reason="not installed",
    ) from exc

if TYPE_CHECKING:
    from ecoffload.cache import EncoderCache

__all__ = ["METRICS", "CacheCollector", "Described", "watch"]


@dataclass(frozen=True, slots=True)
class Described:
    """One metric: its name without "ecoffload_" (and, for a counter, "_total") is a field of :class:`CacheStats`."""

    field: str
    kind: Literal["counter", "gauge"]
    help: str

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
        names, values = list(self._labels), list(self._labels.values())
        for each in METRICS:
            family = CounterMetricFamily if each.kind == "counter" else GaugeMetricFamily
            metric = family(f"ecoffload_{each.field}", each.help, labels=names)
            metric.add_metric(values, getattr(stats, each.field))
            yield metric

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
