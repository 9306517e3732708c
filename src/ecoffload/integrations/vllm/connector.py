"""vLLM's side of the connector: each hook of `ECConnectorBase`, passed on to the half that this process has.

Owns the rule that no fault of ours ends the engine: an exception turns the half off, once and with a log line, and the
hook answers as a connector without entries would, while what was promised is still delivered. Start-up is different:
wrong options, no room and an unusable device are errors there. So is a lost device at any time: that is the engine's.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from ecoffload.errors import SwapFailed
from ecoffload.integrations.vllm.config import announce, log
from ecoffload.integrations.vllm.messages import Report, StepPlan
from ecoffload.integrations.vllm.metrics import HAVE_HOOKS, PrometheusMetrics, Statistics, summary
from ecoffload.integrations.vllm.namespace import key_of
from ecoffload.integrations.vllm.scheduler import SchedulerHalf
from ecoffload.integrations.vllm.setup import say, set_up
from ecoffload.integrations.vllm.worker import WorkerHalf, rank_of

if TYPE_CHECKING:
    import torch

__all__ = ["EcoffloadConnector"]

_Hook = TypeVar("_Hook", bound=Callable[..., Any])
_LOG_EVERY = 60.0  # seconds


def _decides(hook: _Hook) -> _Hook:
    """A hook of the scheduler's half: an exception turns the half off, then the hook answers as one that is off."""

    @functools.wraps(hook)
    def guarded(self: EcoffloadConnector, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:
            if self._decider is None or self._decider.off:
                raise
            log.debug("ecoffload: what turned it off", exc_info=error)
            self._decider.turn_off(f"{type(error).__name__}: {error}")
            return hook(self, *args, **kwargs)

    return cast("_Hook", guarded)


class EcoffloadConnector(ECConnectorBase):  # type: ignore[misc]
    """Keeps encoder outputs in host memory; see `ecoffload.integrations.vllm` and docs/vllm.md."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        self.setup = set_up(vllm_config)
        self._decider: SchedulerHalf | None = None
        self._mover: WorkerHalf | None = None
        self._log_at = time.monotonic() + _LOG_EVERY
        say(self.setup)
        if not self.setup.options.enabled:
            announce("connector", self.setup.describe())
        elif role is ECConnectorRole.SCHEDULER:
            self._decider = SchedulerHalf(self.setup, vllm_config)
        else:
            rank = rank_of(self.setup, vllm_config)
            if rank is not None:  # else a later pipeline stage, which neither encodes nor loads
                self._mover = WorkerHalf(self.setup, rank)

    def effective_configuration(self) -> dict[str, Any]:
        """What is in force in this half now, plain data: options, region, warm or why not, `off` and why."""
        half = self._decider or self._mover
        return self.setup.describe() if half is None else half.describe()

    # -- scheduler's half --------------------------------------------------------------------------------------------

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the request, whose inputs are asked for next, may be scheduled now. Only with a tier it may have to
        wait, for what is on its way from there; see `admission`."""
        decider = self._decider  # asked for each request in each step: what costs something comes last
        return (
            decider is None
            or decider.look_at(request, num_computed_tokens)
            or self._admit(request, num_computed_tokens)
        )

    @_decides
    def _admit(self, request: Any, num_computed_tokens: int) -> bool:
        return self._decider is None or self._decider.admit(request, num_computed_tokens)

    @_decides
    def has_cache_item(self, identifier: str) -> bool:
        """Whether the input can be loaded: then it is pinned, until the load has ended or was not asked for."""
        return self._decider is not None and self._decider.has(identifier)

    @_decides
    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Input `index` of `request` is to be loaded, if it was promised, or encoded."""
        if self._decider is not None:
            self._decider.allocated(request, index)

    @_decides
    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """The step's plan."""
        if self._decider is None:
            return StepPlan()
        plan = self._decider.plan(getattr(scheduler_output, "free_encoder_mm_hashes", ()))
        if not HAVE_HOOKS:
            self._log_statistics()
        return plan

    @_decides
    def update_connector_output(self, connector_output: Any) -> None:
        """Take a worker's hints; completion is read from the region."""
        report = connector_output.ec_connector_worker_meta
        if self._decider is not None and isinstance(report, Report):
            self._decider.hear(report)

    @_decides
    def has_pending_push_work(self) -> bool:
        """Whether the engine has to go on stepping: transfers are in flight."""
        return self._decider is not None and self._decider.pending()

    @_decides
    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Never delays anything: entries are pinned for loads, not for requests."""
        if self._decider is not None:
            self._decider.finished(request.request_id)
        return False, None

    @_decides
    def invalidate(self, identifier: str | None = None) -> int:
        """Forget one input, or everything: call it (in the engine core) after weights were updated in place, together
        with vLLM's `reset_encoder_cache`. From other processes: `weight_epoch_file`. Returns how many entries."""
        return 0 if self._decider is None else self._decider.invalidate(identifier)

    def get_ec_connector_stats(self) -> Any:
        """What the scheduler's half counted since the last call; a worker's counts nothing (V1 never asks it)."""
        data = self._statistics()
        return None if data is None else Statistics(data)

    @_decides
    def _statistics(self) -> dict[str, Any] | None:
        return None if self._decider is None else self._decider.statistics()

    def _log_statistics(self) -> None:
        """For vLLM 0.30, which asks for no statistics."""
        now = time.monotonic()
        if now < self._log_at:
            return
        self._log_at = now + _LOG_EVERY
        data = self._statistics()
        if data is not None:
            log.info("ecoffload: %s", ", ".join(f"{name}={value}" for name, value in summary(data).items()))

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """In the front end: statistics from the plain data that crossed."""
        return Statistics(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> Any:
        """In the front end: the metrics `vllm:ec_offload_*`."""
        return PrometheusMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- worker's half -----------------------------------------------------------------------------------------------

    def start_worker_services(self) -> None:
        """The weights are loaded and nothing has run yet: what loads may need is taken before vLLM sizes its KV cache.
        Raises the device's error if there is no room for it."""
        if self._mover is not None:
            self._mover.reserve_memory()

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        """The step begins. Raises what a device reported since the last one."""
        super().bind_connector_metadata(connector_metadata)
        if self._mover is not None and isinstance(connector_metadata, StepPlan):
            self._mover.bind(connector_metadata)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Put what was promised into `encoder_cache`. Raises only what leaves no right answer: a lost device."""
        if self._mover is not None:
            self._mover.load(encoder_cache)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """An encoder's output is there."""
        if self._mover is not None:
            self._moved(lambda mover: mover.save(encoder_cache, mm_hash, key_of(mm_hash)))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The step's saves are submitted; nothing is ever sent or received for a request."""
        if self._mover is not None:
            self._moved(lambda mover: mover.finish())
        return None, None

    def build_connector_worker_meta(self) -> Report | None:
        """Hints for the scheduler's half."""
        return None if self._mover is None else self._moved(lambda mover: mover.report())

    def _moved(self, call: Callable[[WorkerHalf], Any]) -> Any:
        mover = self._mover
        if mover is None:
            return None
        try:
            return call(mover)
        except SwapFailed as error:
            mover.defer(error)
        except Exception as error:
            mover.turn_off(error)
        return None

    # -- the end -----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the region; a warm one stays for the next engine. Idempotent."""
        for half in (self._decider, self._mover):
            if half is not None:
                try:
                    half.close()
                except Exception as error:  # the engine is ending: it must not hang on this
                    log.warning("ecoffload: closing: %r", error)
        self._decider = self._mover = None
