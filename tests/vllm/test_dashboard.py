"""The dashboard and the alert rules name metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from ecoffload.integrations.vllm.metrics import COUNTERS, DURATIONS
from ecoffload.metrics import TIER_METRICS

GRAFANA = Path(__file__).parents[2] / "docs" / "grafana"
_NAME = re.compile(r"vllm:ec_offload_(\w+)")
KNOWN = {
    *(f"{name}_total" for name in (*COUNTERS, "hits", "failures")),
    *(f"{kind}_seconds_bucket" for kind in DURATIONS),
    *(each.name.removeprefix("ecoffload_") for each in TIER_METRICS),
    *("region_bytes", "entries", "recovered_entries", "on", "info"),
}


@pytest.mark.parametrize("name", ["dashboard.json", "alerts.yaml"])
def test_every_metric_that_is_named_exists(name: str) -> None:
    named = set(_NAME.findall((GRAFANA / name).read_text()))
    assert named
    assert named <= KNOWN


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads((GRAFANA / "dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 8
    assert all(
        target["expr"].count("(") == target["expr"].count(")") for panel in panels for target in panel["targets"]
    )


def test_every_alert_has_an_expression_and_a_summary() -> None:
    rules = [
        rule for group in yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
    ]
    assert rules
    assert all(rule["expr"] and rule["annotations"]["summary"] for rule in rules)


def test_every_counter_is_in_the_documentation() -> None:
    page = (GRAFANA.parent / "vllm.md").read_text()
    names = [f"_{name}_total" for name in COUNTERS] + [f"_{kind}_seconds" for kind in DURATIONS]
    names += [each.name.removeprefix("ecoffload") for each in TIER_METRICS]
    assert [name for name in names if name not in page] == []
