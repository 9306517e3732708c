"""The connector's statistics as vLLM carries them: plain data, a summary for the log, and Prometheus metrics.

Runs in vLLM's front end too, so it touches neither a device nor a region. vLLM 0.30 has no such hooks: there the
scheduler half's numbers go to the log once a minute (`connector`).
"""

from __future__ import annotations

from typing import Any

try:
    from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

    HAVE_HOOKS = True
except ImportError:
    ECConnectorPromMetrics = ECConnectorStats = object
    HAVE_HOOKS = False

__all__ = ["COUNTERS", "HAVE_HOOKS", "PrometheusMetrics", "Statistics", "summary"]

COUNTERS = {
    "hits": "Encoder outputs reloaded instead of encoded.",
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
}
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Statistics(ECConnectorStats):  # type: ignore[misc]
    """One interval. `data`: counters by name; `failures` by reason; `seconds`: durations of "save" and "load";
    `gauges` and `info`: the newest values."""

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
                failures = dict(mine.get(name, {}))
                for reason, count in value.items():
                    failures[reason] = failures.get(reason, 0) + count
                mine[name] = failures
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
        self._failures = self._counter_cls(
            name="vllm:ec_offload_failures",
            documentation="Saves, loads and promises that did not come off, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        self._seconds = {
            kind: self._per_engine(
                self._histogram_cls(
                    name=f"vllm:ec_offload_{kind}_seconds",
                    documentation=f"From a {kind}'s plan to its confirmation by every rank.",
                    labelnames=labelnames,
                    buckets=_BUCKETS,
                )
            )
            for kind in ("save", "load")
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
        info = data.get("info")
        if info:
            labels = (info["backend"], info["version"], info["path"], info["start"])
            before = self._info_labels.get(engine_idx)
            if labels != before:
                if before is not None:
                    self._info.labels(*values, *before).set(0)  # the workers have told meanwhile what they use
                self._info.labels(*values, *labels).set(1)
                self._info_labels[engine_idx] = labels
