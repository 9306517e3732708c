"""The half that lives in vLLM's scheduler: what is promised, saved and loaded in each step.

Over one `OffloadScheduler`. Within a step vLLM asks `has`, tells `allocated`, and takes the `plan`; each promise is a
pinned, planned load from the moment it is made, and one that vLLM did not follow up is taken back when the plan is
taken. Completion comes from the region alone. Once turned off it promises nothing, and delivers what it had promised.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from ecoffload.dtypes import dtype_of
from ecoffload.errors import ConfigError
from ecoffload.index import Entry
from ecoffload.integrations.vllm.admission import Admission, all_computed
from ecoffload.integrations.vllm.config import announce, log
from ecoffload.integrations.vllm.messages import Report, StepPlan
from ecoffload.integrations.vllm.metrics import tier_news
from ecoffload.integrations.vllm.namespace import is_content_hash, key_of
from ecoffload.integrations.vllm.setup import Setup, open_region
from ecoffload.plan import LoadOp
from ecoffload.scheduler import OffloadScheduler
from ecoffload.tiers.opening import open_tier

__all__ = ["SchedulerHalf"]

_FAILURES = {
    "saves_failed": "save",
    "loads_failed": "load",
    "saves_refused_too_large": "too_large",
    "saves_refused_no_room": "no_room",
    "workers_lost": "worker_lost",
}
_GAUGES_EVERY = 1.0  # seconds
_VERIFY_SECONDS = 5.0  # of a start: some tens of GiB


class SchedulerHalf:
    """One engine's decisions. Not thread-safe: vLLM's scheduler is one thread."""

    def __init__(self, setup: Setup, config: Any) -> None:
        self.setup = setup
        self.off = ""
        """Why nothing is promised or saved any more; "" while all is well."""
        self._widths = config.ec_transfer_config
        options = setup.options
        self._link = link = open_tier(setup.tier, namespace=setup.namespace) if setup.tier else None
        self.region = open_region(setup, worker=False)
        try:
            self.engine = OffloadScheduler(
                self.region, world=setup.world, policy=options.policy, checksum=options.checksum, tier=link
            )
        except BaseException:
            self.region.close()
            raise
        try:
            self.engine.await_recovered(_VERIFY_SECONDS)  # a restarted engine is asked for much at once
        except BaseException:
            self._leave()
            raise
        self._admission: Admission | None = None
        if link is not None:
            if setup.consumer and link.options.fetch:
                self._admission = Admission(self.engine, link, self._lasting)
            log.warning(
                "ecoffload: whoever reaches the store behind %s can read and write encoder outputs; keep it on a "
                "network of its own, on which everybody is trusted",
                setup.tier,
            )
        self._request: Any = None  # the one that vLLM looks at now
        self._fresh = False  # whether this step's first question was asked
        self._promised: dict[str, LoadOp] = {}
        self._confirmed: dict[str, LoadOp] = {}
        self._names: dict[bytes, str] = {}
        self._modalities: dict[bytes, str] = {}
        self._learned: dict[str, tuple[str, int]] = {}
        self._all_here = False
        self._saves_sent: deque[tuple[int, float]] = deque()
        self._loads_sent: deque[tuple[int, float]] = deque()
        self._progress: tuple[Any, float] = (None, 0.0)
        self._epoch_file = setup.options.weight_epoch_file
        self._epoch = self._read_epoch()
        self._durable = True
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._seconds: dict[str, list[float]] = {"save": [], "load": [], "tier_fetch": [], "deferral": []}
        self._told: dict[str, int] = {}
        self._tier_told: dict[str, Any] = {}
        self._tier_due = 0.0
        self._changed = True  # whether anything may have been counted since the last statistics
        self._gauges_at = 0.0
        self._worker_info: dict[str, Any] = {}
        self._announce()

    def _announce(self) -> None:
        announce("scheduler", self.describe())

    def describe(self) -> dict[str, Any]:
        """The effective configuration and state, plain data."""
        return {
            **self.setup.describe(),
            "path": str(self.region.path),
            "start": self.region.start,
            "why": self.region.start_reason,
            "off": self.off,
            "tier_off": "" if self._link is None else self._link.off,
            **{f"worker_{name}": value for name, value in self._worker_info.items()},
        }

    # -- within a step -----------------------------------------------------------------------------------------------

    def look_at(self, request: Any, computed: int) -> bool:
        """vLLM is about to ask for this request's inputs; whether nothing could keep it waiting."""
        self._request = request
        return self._admission is None or all_computed(request, computed)

    def admit(self, request: Any, computed: int) -> bool:
        """Whether it may be scheduled, or has to wait for what the tier is sending."""
        admission, link = self._admission, self._link
        if admission is None or link is None or self.off:
            return True
        if not self._fresh:
            self._open_step()
        try:
            admitted = admission.admit(request, computed)
        except Exception as error:
            link.turn_off(f"{type(error).__name__}: {error}")
            self._admission = None
            return True
        self._changed |= not admitted
        return admitted

    def finished(self, request_id: str) -> None:
        """A request has ended: done, aborted or failed."""
        if self._admission is not None:
            self._admission.finished(request_id)

    def _lasting(self, identifier: str) -> bool:
        """Whether an entry may outlive this process, here or in the tier: not under a key that a client chose."""
        return self._durable and (self.setup.options.trust_uuids or is_content_hash(identifier))

    def has(self, identifier: str) -> bool:
        """Promise a load in this step; True only with the entry pinned, verified and of the request's size."""
        if self.off or not self.setup.consumer:
            return identifier in self._promised
        if not self._fresh:
            self._open_step()
        feature = self._feature(identifier)
        rows = None if feature is None else int(feature.mm_position.get_num_embeds())
        promised = self._promised.get(identifier)
        if promised is not None:
            return rows is None or promised.shape[0] == rows
        key = key_of(identifier)
        entry = self.engine.index.lookup(key)
        if (
            entry is None
            or entry.write != "ended"
            or not self._fits(entry, rows, feature)
            or not self._everybody_is_here()
        ):
            return False
        op = self.engine.plan_load(key)
        if op is None:
            return False
        self._promised[identifier] = op
        return True

    def _open_step(self) -> None:
        """Before the first promise of a step: what has landed, and whether it is still wanted."""
        self._fresh = True
        self._poll()
        if self._epoch_file is not None:
            self._check_epoch()

    def _feature(self, identifier: str) -> Any:
        """The input of the request at hand; None if it is not among its inputs."""
        for feature in getattr(self._request, "mm_features", None) or ():
            if feature.identifier == identifier:
                return feature
        return None

    def _fits(self, entry: Entry, rows: int | None, feature: Any) -> bool:
        shape = entry.shape
        if len(shape) == 2 and (rows is None or shape[0] == rows):
            if not entry.fetched or feature is None:
                return True
            dtype, width = self._known_output(feature.modality)
            if dtype in ("", entry.dtype) and width in (0, shape[1]):
                return True
        # A client's own uuid for another input, most likely. vLLM would fail on the shape.
        self._changed = True
        self._failures["mismatch"] += 1
        if entry.fetched:
            self.engine.invalidate(entry.key)  # nor fetched again: what is encoded here takes its place
        return False

    def _everybody_is_here(self) -> bool:
        """Whether every rank maps this region: one on another host would not find what it is told to load."""
        if not self._all_here:
            self._all_here = self.region.ranks() >= frozenset(range(self.setup.world))
        return self._all_here

    def allocated(self, request: Any, index: int) -> None:
        """An input of `request` gets its place in vLLM's encoder cache: to be loaded if promised, else encoded."""
        self._changed = True
        feature = request.mm_features[index]
        identifier = feature.identifier
        if self._admission is not None:
            self._admission.allocated(identifier)
        op = self._promised.get(identifier)
        if op is not None:
            if identifier not in self._confirmed:
                self._confirmed[identifier] = op
                self._names[op.key] = identifier
                self._counts["hits"] += 1
                entry = self.engine.index.lookup(op.key)
                if entry is not None and entry.fetched:
                    self._counts["hits_from_store"] += 1
                self._counts["encode_tokens_saved"] += op.shape[0]
            return
        self._counts["misses"] += 1
        if self.off or not self.setup.producer:
            return
        if not self._fresh:
            self._open_step()
        rows = int(feature.mm_position.get_num_embeds())
        dtype, width = self._output_of(feature.modality)
        nbytes = rows * width * dtype_of(dtype).itemsize
        if not nbytes:
            return
        key = key_of(identifier)
        if self.engine.plan_save(key, nbytes, dtype, (rows, width), durable=self._lasting(identifier)) is not None:
            self._names[key] = identifier
            self._modalities[key] = feature.modality

    def _output_of(self, modality: str) -> tuple[str, int]:
        """dtype and width of an encoder's output: as far as they are known, or the language model's."""
        dtype, width = self._known_output(modality)
        return dtype or self.setup.dtype, width or self.setup.width

    def _known_output(self, modality: str) -> tuple[str, int]:
        """dtype and width as seen, or the width as measured by vLLM (0.32 and newer); "" and 0 where unknown."""
        learned = self._learned.get(modality)
        if learned is not None:
            return learned
        widths = getattr(self._widths, "mm_encoder_output_widths", None) or {}
        return "", int(widths.get(modality) or 0)

    def plan(self, freed: Iterable[str] = ()) -> StepPlan:
        """What the workers do in this step. Promises that vLLM did not follow up are taken back. `freed`: inputs that
        vLLM's encoder cache gave up in this step."""
        if self._admission is not None:
            self._admission.freed(freed)
        confirmed = self._confirmed
        if self.off:
            step = StepPlan(names=self._names, owed=tuple(confirmed.values()))
            self._begin_step()
            return step
        engine = self.engine
        if len(self._promised) > len(confirmed):
            for identifier in [each for each in self._promised if each not in confirmed]:
                engine.cancel_load(self._promised[identifier])
                del self._promised[identifier]
        if not self._names:
            self._begin_step()
            return StepPlan()
        plan = engine.take_plan()
        now = time.monotonic()
        if plan.saves:
            self._saves_sent.append((plan.saves[-1].number, now))
        if plan.loads:
            self._loads_sent.append((plan.loads[-1].number, now))
        step = StepPlan(plan, self._names, self._modalities)
        self._begin_step()
        return step

    def _begin_step(self) -> None:
        # New containers: with the single-process executor the workers hold the old ones.
        self._promised, self._confirmed, self._names, self._modalities = {}, {}, {}, {}
        self._request, self._fresh = None, False

    # -- completion --------------------------------------------------------------------------------------------------

    def pending(self) -> bool:
        """Whether transfers are in flight that vLLM should keep stepping for."""
        if self.off:
            return False
        self._poll()
        engine = self.engine
        left = engine.unsettled()
        if not left:
            self._progress = (None, 0.0)
            return False
        now = time.monotonic()
        mark = (left, engine.settled())
        if mark != self._progress[0]:
            self._progress = (mark, now)
        elif now - self._progress[1] > self.setup.options.stall_after:
            raise TimeoutError(
                f"{left} transfers made no progress for {self.setup.options.stall_after:g} s; ranks that report here: "
                f"{sorted(self.region.ranks())} of {self.setup.world} (all must run on this host)"
            )
        return True

    def _poll(self) -> None:
        engine = self.engine
        if not engine.poll():
            return
        self._changed = True
        saved, loaded = engine.settled()
        now = time.monotonic()
        for sent, number, seconds in (
            (self._saves_sent, saved, self._seconds["save"]),
            (self._loads_sent, loaded, self._seconds["load"]),
        ):
            while sent and sent[0][0] <= number:
                seconds.append(now - sent.popleft()[1])

    def hear(self, report: Report) -> None:
        """A worker's hints. Nothing is accounted for by them: they may be lost, late, or of one rank only."""
        if self.off:
            return
        for modality, (dtype, width) in report.seen.items():
            try:
                dtype_of(dtype)
            except ConfigError:
                continue
            self._learned[modality] = dtype, width
        if report.info and report.info != self._worker_info:
            self._worker_info = dict(report.info)
            self._gauges_at, self._changed = 0.0, True
            self._announce()
        if report.off:
            raise RuntimeError(f"a worker's half is turned off: {report.off}")

    # -- forgetting --------------------------------------------------------------------------------------------------

    def invalidate(self, identifier: str | None = None) -> int:
        """Forget one input or, after weights were updated in place, everything; returns how many entries.

        After the latter nothing outlives the process: a restart would load the old weights.
        """
        if self.off:
            return 0
        self._changed = True
        if identifier is None:
            self._durable = False  # the tier turns itself off: it may hold what was forgotten
            if self._admission is not None:
                self._admission.forget()
        return self.engine.invalidate(None if identifier is None else key_of(identifier))

    def _read_epoch(self) -> tuple[int, int] | None:
        if self._epoch_file is None:
            return None
        try:
            status = os.stat(self._epoch_file)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino

    def _check_epoch(self) -> None:
        epoch = self._read_epoch()
        if epoch != self._epoch:
            self._epoch = epoch
            count = self.invalidate()
            log.info("ecoffload: %s was touched: %d entries of the old weights are forgotten", self._epoch_file, count)

    # -- statistics --------------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any] | None:
        """What happened since the last call, plain data; None if nothing did. Gauges come with it once a second."""
        if not self.off:
            self._poll()
        tier = self._tier_statistics()
        if not self._changed and not tier:
            return None
        self._changed = False
        data: dict[str, Any] = dict(self._counts)
        if tier:
            data["tier"] = tier
        self._counts.clear()
        failures = dict(self._failures)
        self._failures.clear()
        if not self.off:
            now = self.engine.counters()
            told, self._told = self._told, now
            for name, count in now.items():
                more = count - told.get(name, 0)
                if more:
                    reason = _FAILURES.get(name)
                    if reason is None:
                        data[name] = more
                    else:
                        failures[reason] = failures.get(reason, 0) + more
        per_token = self.setup.options.encode_us_per_token
        if per_token is not None and "encode_tokens_saved" in data:
            data["encode_seconds_saved"] = data["encode_tokens_saved"] * per_token * 1e-6
        if failures:
            data["failures"] = failures
        for kind, seconds in self._seconds.items():
            if seconds:
                data.setdefault("seconds", {})[kind] = seconds
                self._seconds[kind] = []
        clock = time.monotonic()
        if clock - self._gauges_at >= _GAUGES_EVERY and (data or not self._gauges_at):
            self._gauges_at = clock
            data["gauges"] = self._gauges()
            data["info"] = self._info()
        return data or None

    def _tier_statistics(self) -> dict[str, Any]:
        """What is new of the tier: at once where something else has happened as well, else once a second."""
        link, admission, now = self._link, self._admission, time.monotonic()
        if link is None or not (self._changed or now >= self._tier_due):
            return {}
        self._tier_due = now + _GAUGES_EVERY
        self._seconds["tier_fetch"] += link.take_durations()
        if admission is not None:
            self._counts.update(admission.counts)
            self._seconds["deferral"] += admission.waits
            admission.counts.clear()
            admission.waits.clear()
        before = self._tier_told
        news, self._tier_told = tier_news(link.stats(), before)
        return news

    def _gauges(self) -> dict[str, int]:
        index = self.engine.index
        return {
            "entries": 0 if self.off else len(index),
            "capacity_bytes": index.capacity,
            "used_bytes": 0 if self.off else index.used_bytes,
            "registered_bytes": index.capacity if self._worker_info.get("registered") else 0,
            "recovered_entries": self.engine.recovered,
            "on": int(not self.off),
        }

    def _info(self) -> dict[str, str]:
        from ecoffload import __version__

        return {
            "version": __version__,
            "backend": str(self._worker_info.get("backend", "")),
            "path": str(self._worker_info.get("path", "")),
            "start": str(self._worker_info.get("start", self.region.start)),
            "reason": str(self._worker_info.get("start_reason", "")) if self.setup.warm else self.setup.cold_reason,
        }

    # -- the end -----------------------------------------------------------------------------------------------------

    def turn_off(self, reason: str) -> None:
        """Promise and save nothing from now on; what was promised in this step is still delivered."""
        if self.off:
            return
        self.off = reason
        self._failures["off"] += 1
        self._gauges_at, self._changed = 0.0, True
        self._announce()
        log.error("ecoffload: the encoder cache is off, the engine goes on without it: %s", reason)

    def close(self) -> None:
        """Settle what has ended and leave the region. Idempotent."""
        try:
            self.engine.poll()
        finally:
            self._leave()

    def _leave(self) -> None:
        try:
            self.engine.close()  # first: threads of the tier's use the region's memory
        finally:
            self.region.close()
