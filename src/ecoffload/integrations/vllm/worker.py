"""The half that lives in each of vLLM's workers: carries out the scheduler half's plans on this rank's device.

Over one `OffloadWorker`. What was promised is delivered, whatever happens: a load that could not be enqueued is made
again by the host from the entry that is still pinned. A device that is lost is raised where vLLM loads; everything
else that goes wrong turns this half off.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from ecoffload.dtypes import dtype_name, dtype_of
from ecoffload.errors import ConfigError, SwapFailed
from ecoffload.integrations.vllm.config import announce, log
from ecoffload.integrations.vllm.messages import Report, StepPlan
from ecoffload.integrations.vllm.setup import Setup, open_region
from ecoffload.plan import LoadOp, Plan
from ecoffload.registry import get_backend
from ecoffload.worker import OffloadWorker

if TYPE_CHECKING:
    import torch

__all__ = ["WorkerHalf", "rank_of"]

_WATCH_SECONDS = 0.005


class WorkerHalf:
    """One rank of `setup.world`. vLLM calls it from one thread; a thread of its own reports what ends between steps."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self.setup = setup
        self.rank = rank
        self.off = ""
        options = setup.options
        backend = get_backend(options.backend, device=_device(setup.device, options.backend))
        self.region = open_region(setup, worker=True)
        try:
            self.engine = OffloadWorker(self.region, backend, rank, setup.world, register=options.register_)
        except BaseException:
            self.region.close()
            raise
        self._reserve: torch.Tensor | None = None
        self._lock = threading.Lock()  # guards the engine against the thread that watches
        self._moving = threading.Event()
        self._closed = False
        self._watcher: threading.Thread | None = None
        self._error: SwapFailed | None = None
        self._step = StepPlan()
        self._begun: Plan | None = None
        self._seen: dict[str, tuple[str, int]] = {}
        self._tell = True
        self._announce()

    def _announce(self) -> None:
        announce(f"worker {self.rank}", self.describe())

    def describe(self) -> dict[str, Any]:
        """The effective configuration and state, plain data."""
        stats = self.engine.stats()
        return {
            **self.setup.describe(),
            "rank": self.rank,
            "path": str(self.region.path),
            "start": self.region.start,
            "off": self.off,
            "device_bytes_for_loads": self.load_bytes,
            **{name: stats[name] for name in ("backend", "device", "encoding", "registered", "registration")},
        }

    @property
    def load_bytes(self) -> int:
        """Device memory that loads may need beyond what vLLM's profile run counts, in bytes.

        That run fills the encoder cache from the encoder's stream; loads fill it from theirs, and torch's allocator
        does not lend memory from one stream to another: as much again, one whole cache.
        """
        if self.engine.backend.ops.host_ordered or not self.setup.consumer:
            return 0
        return self.setup.rows * self.setup.width * self.setup.itemsize

    def reserve_memory(self) -> None:
        """Hold `load_bytes` until the first load; from then on the allocator keeps them for the load stream.

        To be called between vLLM's first look at the device's free memory (after the connector was made) and the one
        that sizes the KV cache: only what is taken in between is subtracted from the KV cache's share.
        """
        if self.load_bytes and self._reserve is None:
            self._reserve = self.engine.backend.ops.empty(self.load_bytes, self.engine.load_stream)

    # -- a step ------------------------------------------------------------------------------------------------------

    def bind(self, step: StepPlan) -> None:
        """Take the step's plan. Raises what a device has reported since the last step."""
        self._step = step
        error, self._error = self._error, None
        if error is not None:
            self.turn_off(error)
            raise error

    def load(self, cache: dict[str, torch.Tensor]) -> None:
        """Put what was promised into vLLM's encoder cache, ordered on the current stream."""
        step = self._step
        for op in step.owed:
            cache[step.names[op.key]] = self._read(op)
        plan = step.plan
        if plan is None or not plan.loads:
            return
        self._reserve = None
        loaded: dict[bytes, torch.Tensor] = {}
        with self._lock:
            if not self.off:
                self._begun = plan
                try:
                    loaded = self.engine.load(plan)
                except SwapFailed as error:
                    self._turn_off(error)
                    raise  # the device, or tensors that vLLM has used already: no answer of ours could be right
                except Exception as error:
                    self._turn_off(error)
            # Under the lock: nobody tells the scheduler of these loads, and so nobody frees the entries, before.
            for op in plan.loads:
                tensor = loaded.get(op.key)
                cache[step.names[op.key]] = self._read(op) if tensor is None else tensor
        self._watch()

    def _read(self, op: LoadOp) -> torch.Tensor:
        """An entry by way of the host, where the device's own way failed: slow, and right."""
        import torch

        content = bytearray()
        for view in self.region.view(op.extents):
            content += view[: op.nbytes - len(content)]
            view.release()
        log.warning("ecoffload: an encoder output of %d bytes was loaded by the host", op.nbytes)
        return torch.frombuffer(content, dtype=dtype_of(op.dtype)).reshape(op.shape).to(self.engine.backend.ops.device)

    def save(self, cache: dict[str, torch.Tensor], identifier: str, key: bytes) -> None:
        """Note that an encoder's output is there; it is saved if the plan says so."""
        step = self._step
        if step.plan is None or self.off or step.names.get(key) != identifier:
            return
        tensor = cache[identifier]
        with self._lock:
            self._compare(tensor, key, step)
            self._begun = step.plan
            self.engine.save(key, tensor, step.plan)

    def _compare(self, tensor: torch.Tensor, key: bytes, step: StepPlan) -> None:
        """Tell the scheduler what this encoder's outputs look like if they are not as planned."""
        if step.plan is None or key not in step.modalities:
            return
        for op in step.plan.saves:
            if op.key == key:
                dtype = dtype_name(tensor.dtype)
                if (
                    tensor.ndim == 2
                    and tensor.shape[0] == op.shape[0]
                    and (dtype, tensor.shape[1])
                    != (
                        op.dtype,
                        op.shape[1],
                    )
                ):
                    self._seen[step.modalities[key]] = dtype, int(tensor.shape[1])
                return

    def finish(self) -> None:
        """The step's saves are all given: submit them, and report what has ended. Raises nothing of the device's:
        vLLM calls it while an error of its own may be on its way."""
        plan = self._step.plan
        if self.off:
            return
        with self._lock:
            try:
                if plan is not None:
                    if self._begun is not plan:
                        self.engine.load(plan)  # no loads in it, or vLLM would have asked: only its saves are noted
                    self.engine.flush()
                if self.engine.pending():
                    self.engine.poll()
            except SwapFailed as error:
                self._error = error
        self._watch()

    def defer(self, error: SwapFailed) -> None:
        """Raise it at the beginning of the next step."""
        self._error = error

    def report(self) -> Report | None:
        """Hints for the scheduler half, or None, as in nearly every step."""
        if not self._tell and not self._seen:
            return None
        seen, self._seen = self._seen, {}
        self._tell = False
        stats = self.engine.stats()
        info = {
            "backend": stats["backend"],
            "registered": stats["registered"],
            "path": "registered" if stats["registered"] else "plain",
            "start": self.region.start,
            "start_reason": self.region.start_reason,
        }
        return Report(seen=seen, info=info, off=self.off)

    # -- between steps -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """An idle engine calls no hook (V1), and its scheduler waits for the last transfers: a thread reports them."""
        if self.off or self._moving.is_set():
            return
        try:
            if not self.engine.pending():
                return
        except Exception as error:
            self.turn_off(error)
            return
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._report_between_steps, name="ecoffload-watch", daemon=True)
            self._watcher.start()
        self._moving.set()

    def _report_between_steps(self) -> None:
        while not self._closed:
            self._moving.wait()
            time.sleep(_WATCH_SECONDS)
            with self._lock:
                if self._closed:
                    return
                try:
                    self.engine.poll()
                    left = self.engine.pending()
                except SwapFailed as error:
                    self._error, left = error, True  # the others in flight are still to be reported
                except Exception as error:
                    self._turn_off(error)
                    left = False
                if not left:
                    self._moving.clear()

    # -- the end -----------------------------------------------------------------------------------------------------

    def turn_off(self, error: BaseException) -> None:
        """Save nothing from now on, and load what is still promised by way of the host."""
        with self._lock:
            self._turn_off(error)

    def _turn_off(self, error: BaseException) -> None:
        if self.off:
            return
        self.off = f"{type(error).__name__}: {error}"
        self._reserve = None
        self._tell = True
        log.error(
            "ecoffload: the encoder cache of rank %d is off, the engine goes on without it: %s", self.rank, self.off
        )
        log.debug("ecoffload: what turned it off", exc_info=error)
        self._announce()

    def close(self) -> None:
        """Wait for what is in flight and leave the region. Idempotent."""
        self._closed = True
        self._moving.set()
        if self._watcher is not None:
            self._watcher.join(timeout=10)
        try:
            self.engine.close()
        finally:
            self.region.close()


def _device(kind: str, backend: str | None) -> str | int | None:
    """The device of this process, as vLLM has set it. With a backend named by the user, its index only."""
    if kind == "cpu":
        return None if backend else "cpu"
    import torch

    index = torch.accelerator.current_device_index()
    return index if backend else f"{kind}:{index}"


def rank_of(setup: Setup, config: Any) -> int | None:
    """This process's rank among those that encode and load; None for a pipeline stage that does neither."""
    from vllm.distributed import parallel_state

    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1 and not parallel_state.get_pp_group().is_first_rank:
        return None
    tensor = parallel.tensor_parallel_size
    rank = parallel_state.get_tensor_model_parallel_rank() if tensor > 1 else 0
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        rank += parallel_state.get_pcp_group().rank_in_group * tensor
    if not 0 <= rank < setup.world:
        raise ConfigError(f"rank {rank} is not among this engine's {setup.world}", option="rank", value=rank)
    return int(rank)
