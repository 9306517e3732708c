"""What the connector's halves send each other through vLLM: importable classes of plain data, pickled by vLLM.

Nothing here decides completion: that is read from the region. No `__len__` and no `__bool__`: vLLM drops what is false.
With the single-process executor both halves hold the same object, so neither changes one that it was given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from ecoffload.plan import LoadOp, Plan

__all__ = ["Report", "StepPlan"]


@dataclass
class StepPlan(ECConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, one step. `names`: identifiers by key, for the plan's loads and saves; `modalities` of the
    saves by key. `owed`: loads that were promised by a scheduler half that is turned off since; their entries stay
    where they are."""

    plan: Plan | None = None
    names: dict[bytes, str] = field(default_factory=dict)
    modalities: dict[bytes, str] = field(default_factory=dict)
    owed: tuple[LoadOp, ...] = ()


@dataclass
class Report(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """Worker to scheduler, only when there is something to say, and only hints: it may be lost. `seen`: (dtype, width)
    by modality where an encoder's output was not as planned; `info`: backend and paths; `off`: why a worker's half is
    turned off."""

    seen: dict[str, tuple[str, int]] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    off: str = ""

    def aggregate(self, other: ECConnectorWorkerMetadata) -> Report:
        if not isinstance(other, Report):
            return self
        info = self.info or other.info
        if info.get("start") == "joined" and other.info:
            info = other.info  # whoever came first knows how the region started
        return Report({**other.seen, **self.seen}, info, self.off or other.off)
