"""The connector's statistics as vLLM carries them: plain data, a summary for the log, and Prometheus metrics.

Runs in vLLM's front end too, so it touches neither a device nor a region. vLLM 0.30 has no such hooks: there the
scheduler half's numbers go to the log once a minute (`connector`).
"""

from __future__ import annotations

from typing import Any

from ecoffload.metrics import TIER_METRICS, tier_numbers

try:
    from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

    HAVE_HOOKS = True
except ImportError:
    ECConnectorPromMetrics = ECConnectorStats = object
    HAVE_HOOKS = False

__all__ = ["COUNTERS", "DURATIONS", "HAVE_HOOKS", "PrometheusMetrics", "Statistics", "summary", "tier_news"]

COUNTERS = {
    "misses": "Encoder outputs that had to be encoded.",
    "saves": "Encoder outputs saved to host memory.",
    "loads": "Loads that were confirmed by every rank.",
    "bytes_saved": "Bytes copied from device to host.",
    "bytes_loaded": "Bytes of entries loaded by every rank.",
    "evictions": "Entries evicted to make room.",
    "evicted_bytes": "Bytes of entries evicted to make room.",
    "invalidated": "Entries forgotten on request, such as after a weight update.",
    "encode_tokens_saved": "Encoder output tokens that were reloaded instead of encoded.",
    "encode_seconds_saved": "Encoding time saved, by the cost per token that was configured.",
    "deferrals": "Requests that waited for what was on its way from the tier.",
    "deferrals_expired": "Requests that waited for as long as they may, and then encoded.",
}
DURATIONS = {
    "save": "From a save's plan to its confirmation by every rank.",
    "load": "From a load's plan to its confirmation by every rank.",
    "tier_fetch": "From asking the tier for an entry to its being ready, where it came.",
    "deferral": "For how long requests waited for what was on its way from the tier.",
}
_OF_TIER = {each.field: each for each in TIER_METRICS if each.kind != "summary"}  # a histogram, of `DURATIONS`
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Statistics(ECConnectorStats):  # type: ignore[misc]
    """One interval. `data`: counters by name; `failures` by reason; `seconds`: durations by the names of `DURATIONS`;
    `tier`: what `tier_news` gives; `gauges` and `info`: the newest values."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = dict(data or {})

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: Any) -> Statistics:
        """Add what `other`, the later one, counted."""
        mine, theirs = self.data, other.data
        for name, value in theirs.items():
            if name in ("gauges", "info"):
                mine[name] = value
            elif name == "failures":
                mine[name] = _sum(mine.get(name, {}), value)
            elif name == "tier":
                known = mine.get(name, {})
                mine[name] = {**known, **value}
                for field in known.keys() & value.keys():
                    if _OF_TIER[field].kind == "counter":
                        mine[name][field] = _sum(known[field], value[field])
            elif name == "seconds":
                known = mine.get(name, {})
                mine[name] = {kind: [*known.get(kind, ()), *value.get(kind, ())] for kind in {**known, **value}}
            else:
                mine[name] = mine.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


def _sum(one: Any, other: Any) -> Any:
    """Of two counts, or of two counts for each label."""
    if not isinstance(other, dict):
        return one + other
    return {label: one.get(label, 0) + other.get(label, 0) for label in {**one, **other}}


def tier_news(stats: dict[str, Any], before: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a link's statistics say that the numbers told `before` did not, and what is told now.

    By the names of `TIER_METRICS`: what counters gained, and gauges as they are, each only if it changed.
    """
    numbers = tier_numbers(stats)
    news: dict[str, Any] = {}
    for name, each in _OF_TIER.items():
        value, told = numbers[name], before.get(name)
        if value == told:
            continue
        if each.kind == "gauge":
            news[name] = value
        elif isinstance(value, dict):
            told = told or {}
            news[name] = {label: count - told.get(label, 0) for label, count in value.items()}
        elif value:
            news[name] = value - (told or 0)
    return news, numbers


def summary(data: dict[str, Any]) -> dict[str, int | float]:
    """A few numbers for people."""
    hits, misses = data.get("hits", 0), data.get("misses", 0)
    result: dict[str, int | float] = {
        "hits": hits,
        "misses": misses,
        "hit_rate": round(hits / (hits + misses), 3) if hits + misses else 0.0,
        "saved_MiB": round(data.get("bytes_saved", 0) / 2**20, 1),
        "loaded_MiB": round(data.get("bytes_loaded", 0) / 2**20, 1),
        "evictions": data.get("evictions", 0),
        "failures": sum(data.get("failures", {}).values()),
    }
    if "hits_from_store" in data:
        result["hits_from_store"] = data["hits_from_store"]
    gauges = data.get("gauges", {})
    if gauges:
        result["used_MiB"] = round(gauges["used_bytes"] / 2**20, 1)
    return result


class PrometheusMetrics(ECConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:ec_offload_*`, one child per engine. Input hashes are never labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._values = {engine: [str(value) for value in values] for engine, values in per_engine_labelvalues.items()}
        self._counters = {
            name: self._per_engine(
                self._counter_cls(name=f"vllm:ec_offload_{name}", documentation=text, labelnames=labelnames)
            )
            for name, text in COUNTERS.items()
        }
        hits = self._counter_cls(
            name="vllm:ec_offload_hits",
            documentation="Encoder outputs reloaded instead of encoded, by where they had come from.",
            labelnames=[*labelnames, "tier"],
        )
        self._hits = {
            tier: {engine: hits.labels(*values, tier) for engine, values in self._values.items()}
            for tier in ("region", "store")
        }
        self._failures = self._counter_cls(
            name="vllm:ec_offload_failures",
            documentation="Saves, loads and promises that did not come off, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        self._seconds = {
            kind: self._per_engine(
                self._histogram_cls(
                    name=f"vllm:ec_offload_{kind}_seconds",
                    documentation=text,
                    labelnames=labelnames,
                    buckets=_BUCKETS,
                )
            )
            for kind, text in DURATIONS.items()
        }
        self._tier = {
            each.field: self._counter_cls(
                name=f"vllm:ec_offload_{each.field}",
                documentation=each.help,
                labelnames=[*labelnames, *([each.label] if each.label else [])],
            )
            if each.kind == "counter"
            else self._gauge(each.field, each.help, *([each.label] if each.label else []))
            for each in _OF_TIER.values()
        }
        self._bytes = self._gauge("region_bytes", "Bytes of the host region: capacity, used, registered.", "kind")
        self._entries = self._gauge("entries", "Encoder outputs held.")
        self._recovered = self._gauge("recovered_entries", "Entries of an earlier process that can be loaded.")
        self._on = self._gauge("on", "1 while the cache works, 0 after a fault turned it off.")
        self._info = self._gauge(
            "info",
            "Constant 1: backend, version, path taken and how it started.",
            *("backend", "version", "path"),
            "start",
        )
        self._info_labels: dict[int, tuple[str, ...]] = {}

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        return self._gauge_cls(
            name=f"vllm:ec_offload_{name}",
            documentation=text,
            labelnames=[*self._labelnames, *labels],
            multiprocess_mode="mostrecent",
        )

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        return {engine: metric.labels(*values) for engine, values in self._values.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's data of one engine."""
        data, values = transfer_stats_data, self._values[engine_idx]
        for name, counter in self._counters.items():
            if data.get(name):
                counter[engine_idx].inc(data[name])
        from_store = data.get("hits_from_store", 0)
        self._hits["store"][engine_idx].inc(from_store)
        self._hits["region"][engine_idx].inc(data.get("hits", 0) - from_store)
        for name, value in data.get("tier", {}).items():
            self._observe_tier(name, value, values)
        for reason, count in data.get("failures", {}).items():
            self._failures.labels(*values, reason).inc(count)
        for kind, durations in data.get("seconds", {}).items():
            for seconds in durations:
                self._seconds[kind][engine_idx].observe(seconds)
        gauges = data.get("gauges")
        if gauges:
            for kind in ("capacity", "used", "registered"):
                self._bytes.labels(*values, kind).set(gauges[f"{kind}_bytes"])
            self._entries.labels(*values).set(gauges["entries"])
            self._recovered.labels(*values).set(gauges["recovered_entries"])
            self._on.labels(*values).set(gauges["on"])
        self._observe_info(data.get("info"), values, engine_idx)

    def _observe_tier(self, name: str, value: Any, values: list[str]) -> None:
        metric = self._tier[name]
        for label, number in value.items() if isinstance(value, dict) else [("", value)]:
            child = metric.labels(*values, *([label] if label else []))
            if _OF_TIER[name].kind == "counter":
                child.inc(number)
            else:
                child.set(number)

    def _observe_info(self, info: dict[str, str] | None, values: list[str], engine_idx: int) -> None:
        if info:
            labels = (info["backend"], info["version"], info["path"], info["start"])
            before = self._info_labels.get(engine_idx)
            if labels != before:
                if before is not None:
                    self._info.labels(*values, *before).set(0)  # the workers have told meanwhile what they use
                self._info.labels(*values, *labels).set(1)
                self._info_labels[engine_idx] = labels
