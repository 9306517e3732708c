"""Moving what the scheduler decided: the half of the engine that touches a device.

One worker a device and process. It carries out plans (``save``, ``flush``, ``load``) and reports through its slot in
the region, in order: the highest finished save and load, and what failed. It never evicts, never decides, and trusts
nothing in a plan: a plan comes from another process.

Ordering: saves wait on the device for the caller's stream (the tensor must have been produced), loads land in tensors
of their own allocated on the load stream (no wait for compute) and the caller's stream waits for them. Sources are
held until their copy has ended, so the allocator cannot reissue them; loaded tensors are recorded on the caller's
stream where the device asks for it.
"""

from __future__ import annotations

import logging
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from math import lcm
from typing import TYPE_CHECKING, Any, Literal

from ecoffload.backend import D2H, H2D, Completed, Completion, Direction, Registration, SwapBackend
from ecoffload.descriptors import Batch, DescriptorPool
from ecoffload.dtypes import dtype_name, dtype_of, nbytes_of
from ecoffload.errors import (
    CacheClosed,
    ConfigError,
    DescriptorError,
    DeviceLost,
    RegistrationRefused,
    SwapFailed,
)
from ecoffload.plan import PLAN_VERSION, LoadOp, Plan, SaveOp
from ecoffload.region import HostRegion
from ecoffload.slots import RING
from ecoffload.submission import submit_batch

if TYPE_CHECKING:
    import torch

__all__ = ["OffloadWorker", "RegisterPolicy"]

_log = logging.getLogger("ecoffload.worker")

RegisterPolicy = Literal["require", "prefer", "off"]

_CAPTURING = (
    "the current stream is being captured into a graph, and waiting for it would destroy the capture; "
    "put and get outside of it"
)


class _Flight:
    """One submitted batch: the numbers it settles, what it keeps alive, and what it depends on."""

    __slots__ = ("after", "completion", "failed", "kind", "last", "ops", "tensors")

    def __init__(
        self,
        kind: Literal["save", "load"],
        last: int,
        ops: list[SaveOp] | list[LoadOp],
        completion: Completion,
        tensors: list[torch.Tensor] | None,
    ) -> None:
        self.kind = kind
        self.last = last
        self.ops = ops
        self.completion = completion
        self.tensors = tensors
        self.after: list[_Flight] = []
        self.failed: SwapFailed | None = None


class OffloadWorker:
    """Saves and loads entries of ``region`` on the device of ``backend``. Not thread-safe: one caller at a time.

    ``rank`` of ``world`` workers: all load, rank 0 saves (encoder outputs are the same on every rank). ``register``:
    "require" DMA-able host memory (else :class:`RegistrationRefused`), "prefer" it (said once if refused) or "off".
    """

    def __init__(
        self,
        region: HostRegion,
        backend: SwapBackend,
        rank: int = 0,
        world: int = 1,
        *,
        register: RegisterPolicy = "prefer",
    ) -> None:
        if register not in ("require", "prefer", "off"):
            raise ConfigError(
                f"register={register!r} is none of 'require', 'prefer', 'off'", option="register", value=register
            )
        if not 0 <= rank < world:
            raise ConfigError(f"rank {rank} is not in 0..{world - 1}", option="rank", value=rank)
        if backend.spec.capabilities.host_memory == "allocate":
            raise ConfigError(
                f"backend {backend.spec.name!r} declares host_memory='allocate': its host memory comes from its own "
                "allocator, and a region is a file that several processes map; declare 'register' or 'none' if it can "
                "copy from mapped memory (swap_blocks serves it as it is)",
                option="host_memory",
                value="allocate",
            )
        self.region = region
        self.backend = backend
        self.rank = rank
        self.world = world
        self._saver = rank == 0
        self._ops = ops = backend.ops
        self._host_ordered = ops.host_ordered
        self._record = backend.spec.capabilities.needs_record_stream
        self._nbytes = region.nbytes
        limits = backend.limits(D2H), backend.limits(H2D)
        unit, least = lcm(*(each.alignment for each in limits)), max(each.min_bytes for each in limits)
        self._shape = unit > 1 or least > 1, unit, least  # what a descriptor has to be like: an odd one fails alone
        self._registrations: list[Registration] = []
        self.registered = False
        """Whether the region is DMA-able by this device: true only after every chunk was registered."""
        self.registration_reason = ""
        self._register(register)
        try:
            self._save_stream = ops.current_stream() if self._host_ordered else ops.stream()
            self._load_stream = self._save_stream if self._host_ordered else ops.stream()
            self._slot = region.claim_slot(rank)
            self._dropped = weakref.finalize(self, region.keep_slot, self._slot)
            self._dropped.atexit = False
        except BaseException:
            self._unregister()
            raise
        self._pool = DescriptorPool()
        self._instance = -1
        self._plan: Plan | None = None
        self._expected: dict[bytes, SaveOp] = {}  # saves of the current plan whose tensor has not come yet
        self._open: list[tuple[SaveOp, torch.Tensor]] = []  # given, not yet submitted
        self._last_save = self._last_load = 0  # of the plans that were seen
        self._saves: deque[_Flight] = deque()
        self._loads: deque[_Flight] = deque()
        self._writing: dict[bytes, _Flight] = {}  # saves in flight by key: a load of one is ordered behind it
        self._failure: SwapFailed | None = None  # of loads whose tensors were handed out; raised at the next call
        self._closed = False
        self.loads_repeated = 0
        self.plans_ignored = 0
        self.bytes_saved = self.bytes_loaded = 0
        self.submits = 0

    @property
    def load_stream(self) -> Any:
        """Where loads run, and what their tensors are allocated for."""
        return self._load_stream

    # -- registration ------------------------------------------------------------------------------------------------

    def _register(self, policy: RegisterPolicy) -> None:
        region = self.region
        starts = [0, *(edge for edge in region.chunk_edges if 0 < edge < region.nbytes)]
        lengths = [b - a for a, b in zip(starts, [*starts[1:], region.nbytes], strict=True)]
        self._chunk_starts = starts
        self._bases = [region.address] * len(starts)  # device address of offset 0, as each chunk sees it
        needed = self.backend.spec.capabilities.host_memory == "register"
        if policy == "off" and needed:
            self.registration_reason = "switched off"
        else:
            try:
                for start, length in zip(starts, lengths, strict=True):
                    self._registrations.append(self.backend.register(region.address + start, length))
            except RegistrationRefused as exc:
                # All or nothing: half a region would make the speed of a load depend on where its entry lies.
                self._unregister()
                if policy == "require":
                    raise
                self.registration_reason = str(exc)
                _log.warning(
                    "the region %s is not registered with %s: %s. Transfers stay right, but are slower",
                    region.id,
                    self.backend.spec.name,
                    exc,
                )
            except BaseException:
                self._unregister()
                raise
            else:
                self.registered = needed
                self.registration_reason = "registered" if needed else "not needed on this device"
                self._bases = [r.alias - start for r, start in zip(self._registrations, starts, strict=True)]
        self._base = self._bases[0] if len(set(self._bases)) == 1 else None

    def _unregister(self) -> None:
        while self._registrations:
            registration = self._registrations.pop()
            try:
                self.backend.unregister(registration)
            except Exception as exc:  # the others still have to go
                _log.warning("a chunk of the region could not be unregistered: %s", exc)
        self.registered = False

    # -- plans -------------------------------------------------------------------------------------------------------

    def _begin(self, plan: Plan) -> bool:
        """Take note of a plan; False if it is none of ours."""
        if self._closed:
            raise CacheClosed("this worker is closed; open another one on the region")
        if self._failure is not None:
            self._raise_failure()
        if plan is self._plan:
            return True
        region = self.region
        if plan.version != PLAN_VERSION or plan.region_id != region.id or plan.instance != region.instance:
            self.plans_ignored += 1
            _log.warning(
                "a plan (version %r) of region %r, instance %r was ignored: this worker serves region %r, instance %r",
                plan.version,
                plan.region_id,
                plan.instance,
                region.id,
                region.instance,
            )
            return False
        if plan.instance == self._instance and (plan.saved < self._last_save or plan.loaded < self._last_load):
            # Its extents may belong to others by now.
            self.plans_ignored += 1
            _log.warning(
                "a plan from before save %d and load %d was ignored: it came late or twice",
                self._last_save,
                self._last_load,
            )
            return False
        if plan.era < region.era:
            self.plans_ignored += 1
            _log.warning(
                "a plan of era %r was ignored: its saves count as lost since era %d began", plan.era, region.era
            )
            return False
        if self._expected or self._open:
            self.flush()  # the step before was never flushed: what it did not give will not come
        if plan.instance != self._instance or plan.era != region.era:
            # An earlier scheduler's numbers would be taken for this one's, and the new era is for idle writers.
            self.synchronize()
            region.enter_era(plan.era)
        if plan.instance != self._instance:
            self._slot.adopt(plan.instance)
            self._instance = plan.instance
            self._last_save = self._last_load = 0
        if plan.saved > self._last_save or plan.loaded > self._last_load:
            self._pass_over(plan)
        self._plan = plan
        if plan.saves:
            self._last_save = plan.saves[-1].number
            if self._saver:
                self._expected = {op.key: op for op in plan.saves}
            else:
                self._slot.finish_save(self._last_save)
        return True

    def _pass_over(self, plan: Plan) -> None:
        """Plans before this one never came here (this worker is new, or a message was lost): nobody makes their saves
        any more, so none of them may count as finished well."""
        slot = self._slot
        missed = range(self._last_save + 1, plan.saved + 1)
        if self._saver and len(missed) > RING // 4:
            slot.lose_saves(plan.saved)  # one word: an overflow would put the loads in doubt as well
        elif self._saver:
            for number in missed:
                slot.fail_save(number)
        self._last_save, self._last_load = plan.saved, plan.loaded
        self._saves.append(_Flight("save", plan.saved, [], Completed(), None))
        self._loads.append(_Flight("load", plan.loaded, [], Completed(), None))
        self._settle()

    def _descriptors(self, batch: Batch, op: SaveOp | LoadOp, address: int, *, to_host: bool) -> None:
        """Append an entry's extents; ``address`` is its tensor's. Raises :class:`DescriptorError` for a bad plan."""
        left = op.nbytes
        limit = self._nbytes
        base = self._base
        shaped, unit, least = self._shape
        for offset, length in op.extents:
            take = length if length < left else left
            if offset < 0 or take <= 0 or offset + length > limit:
                self._refuse(op, offset, length)
            host = self._chunk_address(op, offset, length) if base is None else base + offset
            if shaped and (address % unit or host % unit or take % unit or take < least):
                raise DescriptorError(
                    f"key {op.key!r}: {take} bytes at {address:#x}; this device copies at least {least} bytes, and "
                    f"multiples of {unit} at such addresses",
                    index=None,
                    size=take,
                )
            if to_host:
                batch.append(address, host, take)
            else:
                batch.append(host, address, take)
            address += take
            left -= take
        if left:
            self._refuse(op, -1, left)

    def _chunk_address(self, op: SaveOp | LoadOp, offset: int, length: int) -> int:
        i = bisect_right(self._chunk_starts, offset) - 1
        if i + 1 < len(self._chunk_starts) and offset + length > self._chunk_starts[i + 1]:
            self._refuse(op, offset, length)
        return self._bases[i] + offset

    def _refuse(self, op: SaveOp | LoadOp, offset: int, length: int) -> None:
        raise DescriptorError(
            f"plan for key {op.key!r}: extents {op.extents} do not hold its {op.nbytes} bytes inside a region of "
            f"{self._nbytes} bytes, or cross a registration",
            index=None,
            offset=offset,
            size=length,
        )

    # -- saves -------------------------------------------------------------------------------------------------------

    def save(self, key: bytes, tensor: torch.Tensor, plan: Plan) -> None:
        """Note that ``key``'s tensor has been produced on the caller's stream; ``flush`` submits all that came.

        The tensor may be dropped at once and written again only after its save. A key that the plan does not ask for is
        left alone; a tensor of another dtype, shape or device than planned fails that save.
        """
        if not self._begin(plan):
            return
        op = self._expected.pop(key, None)
        if op is None:
            return
        self._open.append((op, tensor))

    def flush(self) -> None:
        """Submit the saves that were given since the last flush; those planned and not given have failed."""
        if self._closed:
            raise CacheClosed("this worker is closed; open another one on the region")
        given, self._open = self._open, []
        slot = self._slot
        for op in self._expected.values():
            slot.fail_save(op.number)
        self._expected = {}
        if not given:
            if not self._saves and self._saver:
                slot.finish_save(self._last_save)
            elif self._saves:
                self._saves[-1].last = self._last_save
            return
        sent: list[SaveOp] = []
        tensors: list[torch.Tensor] = []
        completion: Completion = Completed()
        ops = self._ops
        batch = self._pool.lease(2 * len(given))
        try:
            for op, tensor in given:
                filled = batch.count
                try:
                    source = self._source(op, tensor)
                    self._descriptors(batch, op, ops.address_of(source), to_host=True)
                except DeviceLost:
                    raise
                except Exception as exc:  # no memory for a clone, say: that is no reason to drop the other saves
                    batch.count = filled
                    _log.warning("the save of key %r was dropped: %s", op.key, exc)
                    slot.fail_save(op.number)
                else:
                    sent.append(op)
                    tensors.append(source)
            if not self._host_ordered and not ops.order(ops.current_stream(), self._save_stream):
                raise SwapFailed(_CAPTURING)
            completion = self._submit(batch, D2H, self._save_stream)
        except BaseException as exc:
            # Whatever it was: every number must be settled, or the scheduler waits for these saves for ever.
            batch.release()
            for op, _ in given:
                slot.fail_save(op.number)
            sent, tensors = [], []
            if isinstance(exc, DeviceLost) or not isinstance(exc, SwapFailed):
                raise
            _log.warning("%d saves were dropped: %s", len(given), exc)
        finally:
            flight = _Flight("save", self._last_save, sent, completion, tensors)
            self._saves.append(flight)
            for op in sent:
                self._writing[op.key] = flight
            if self._host_ordered or not sent:
                self._settle()

    def _source(self, op: SaveOp, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy, whose bytes are the entry. Raises :class:`ConfigError` for one not as planned."""
        if dtype_name(tensor.dtype) != op.dtype or tensor.shape != op.shape:
            raise ConfigError(
                f"planned as {op.dtype} {op.shape}, got {dtype_name(tensor.dtype)} {tuple(tensor.shape)}", value=op.key
            )
        ops = self._ops
        if not ops.owns(tensor):
            raise ConfigError(f"the tensor lies on {tensor.device}, the worker serves {ops.device}", value=op.key)
        source = tensor.detach() if tensor.requires_grad else tensor  # holding it must not hold its graph
        if source.is_contiguous() and not source.is_conj() and not source.is_neg():  # the last two are not in its bytes
            return source
        if not self._host_ordered and ops.is_capturing(ops.current_stream()):
            raise SwapFailed(_CAPTURING)  # before the clone: that would become part of the graph
        return ops.clone(source)

    def _submit(self, batch: Batch, direction: Direction, stream: Any) -> Completion:
        self.submits += 1
        # Both sides of every descriptor were checked or computed here: extents in _descriptors, tensors by torch.
        return submit_batch(self.backend, batch, direction, stream, checked=True)

    # -- loads -------------------------------------------------------------------------------------------------------

    def load(self, plan: Plan) -> dict[bytes, torch.Tensor]:
        """Start the plan's loads and return a tensor of its own for each; the caller's stream waits for the bytes.

        A key that could not be loaded is left out (and reported as failed). Raises :class:`DeviceLost`, and
        :class:`SwapFailed` for tensors handed out earlier whose copy has failed since (``keys`` names them), or if the
        caller's stream is being captured into a graph (then nothing was done; outside the capture the same plan works).
        """
        if not self._begin(plan) or not plan.loads:
            return {}
        last = plan.loads[-1].number
        if last <= self._last_load:
            self.plans_ignored += 1  # carried out before: its pins may be gone
            return {}
        current = self._ops.current_stream()
        if not self._host_ordered and self._ops.is_capturing(current):
            raise SwapFailed(f"{len(plan.loads)} loads were refused: {_CAPTURING}", keys=[op.key for op in plan.loads])
        self._last_load = last
        try:
            result, flight = self._start_loads(plan, current)
        except BaseException as exc:
            # Whatever it was: every number must be settled, or the scheduler keeps these entries pinned for ever.
            if isinstance(exc, SwapFailed):
                for op in plan.loads:
                    self._slot.fail_load(op.number)
            # Published at the next poll: until then the caller may still read what it had promised by another way.
            self._loads.append(_Flight("load", last, [], Completed(), None))
            raise
        self._loads.append(flight)
        if self._host_ordered:
            self._settle()
            if self._failure is not None:
                self._raise_failure()
        return result

    def _start_loads(self, plan: Plan, current: Any) -> tuple[dict[bytes, torch.Tensor], _Flight]:
        ops, slot = self._ops, self._slot
        good: list[LoadOp] = []
        specs: list[tuple[tuple[int, ...], torch.dtype, int]] = []
        for op in {op.key: op for op in plan.loads}.values():  # a key that is asked for twice is loaded once
            # Not landed and not in flight here: it never will, and its extents hold what was there before.
            spec = None if op.in_flight and op.key not in self._writing else self._spec(op)
            if spec is None:
                slot.fail_load(op.number)
            else:
                good.append(op)
                specs.append(spec)
        tensors = ops.empty_tensors(specs, self._load_stream)
        batch = self._pool.lease(4 * len(good))
        result: dict[bytes, torch.Tensor] = {}
        sent: list[LoadOp] = []
        after: list[_Flight] = []
        try:
            for op, tensor in zip(good, tensors, strict=True):
                filled = batch.count
                try:
                    self._descriptors(batch, op, ops.address_of(tensor), to_host=False)
                    if self._writing:
                        writer = self._writing.get(op.key)
                        if writer is not None and writer not in after:
                            writer.completion.block(self._load_stream)  # on the host, perhaps: then it tells a failure
                            after.append(writer)
                except (DescriptorError, SwapFailed) as exc:
                    if isinstance(exc, DeviceLost):
                        raise
                    batch.count = filled
                    slot.fail_load(op.number)
                    _log.warning("the load of key %r is a miss: %s", op.key, exc)
                    continue
                sent.append(op)
                result[op.key] = tensor
        except BaseException:
            batch.release()
            raise
        completion: Completion
        try:
            completion = self._submit(batch, H2D, self._load_stream)
            completion.block(current)
        except SwapFailed as exc:
            if isinstance(exc, DeviceLost):
                raise
            completion = Completed()
            sent = self._repeat(sent, result, exc)
        if self._record:
            for op in sent:
                ops.record_stream(result[op.key], current)
        flight = _Flight("load", plan.loads[-1].number, sent, completion, None)
        flight.after = after
        return result, flight

    def _spec(self, op: LoadOp) -> tuple[tuple[int, ...], torch.dtype, int] | None:
        try:
            dtype = dtype_of(op.dtype)
        except ConfigError as exc:
            _log.warning("the load of key %r is a miss: %s", op.key, exc)
            return None
        if nbytes_of(op.shape, dtype) != op.nbytes:
            _log.warning(
                "the load of key %r is a miss: %s %s has not the %d bytes of the entry",
                op.key,
                op.dtype,
                op.shape,
                op.nbytes,
            )
            return None
        return op.shape, dtype, op.nbytes

    def _repeat(self, sent: list[LoadOp], result: dict[bytes, torch.Tensor], cause: SwapFailed) -> list[LoadOp]:
        """A load was promised and its submit failed: once more, synchronously, entry by entry, still pinned."""
        done: list[LoadOp] = []
        for op in sent:
            batch = self._pool.lease(len(op.extents))
            self._descriptors(batch, op, self._ops.address_of(result[op.key]), to_host=False)
            try:
                self._submit(batch, H2D, self._load_stream).wait()
            except SwapFailed as exc:
                if isinstance(exc, DeviceLost):
                    raise
                _log.warning("the load of key %r is a miss: %s (at first: %s)", op.key, exc, cause)
                self._slot.fail_load(op.number)
                del result[op.key]
            else:
                self.loads_repeated += 1
                done.append(op)
        return done

    # -- completion --------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Report what has ended. Raises :class:`SwapFailed` with ``keys`` if a load failed after its tensor was
        handed out. Never blocks."""
        if self._saves or self._loads:
            self._settle()
        if self._failure is not None:
            self._raise_failure()

    def _settle(self) -> None:
        slot = self._slot
        saves = self._saves
        while saves and self._ended(saves[0]):
            flight = saves.popleft()
            for op in flight.ops:
                if flight.failed is not None:
                    slot.fail_save(op.number)
                else:
                    self.bytes_saved += op.nbytes
                if self._writing.get(op.key) is flight:
                    del self._writing[op.key]
            flight.tensors = None
            slot.finish_save(flight.last)
        loads = self._loads
        while loads and self._ended(loads[0]):
            flight = loads.popleft()
            for writer in flight.after:  # it ended before this load did, perhaps since the loop above looked
                if writer.failed is None:
                    self._ended(writer)
            failed = flight.failed or next((f.failed for f in flight.after if f.failed is not None), None)
            if failed is not None:
                for op in flight.ops:
                    slot.fail_load(op.number)
                self._note_failure(failed, [op.key for op in flight.ops])
            else:
                self.bytes_loaded += sum(op.nbytes for op in flight.ops)
            slot.finish_load(flight.last)

    def _ended(self, flight: _Flight) -> bool:
        try:
            return flight.completion.done()
        except SwapFailed as exc:
            flight.failed = exc
        except Exception as exc:  # a completion query that raises says no more than that the copy is not to be trusted
            flight.failed = SwapFailed(f"asking for completion failed: {exc!r}", keys=())
            flight.failed.__cause__ = exc
        if flight.kind == "save":
            _log.warning("%d saves were dropped: %s", len(flight.ops), flight.failed)
        return True

    def _note_failure(self, failed: SwapFailed, keys: list[bytes]) -> None:
        before: Iterable[bytes] = () if self._failure is None else self._failure.details["keys"]
        kind = DeviceLost if isinstance(failed, DeviceLost) else SwapFailed
        all_keys = (*before, *keys)
        error = kind(
            f"{len(all_keys)} loads failed after their tensors were handed out; those tensors hold no valid data: "
            f"{failed}",
            keys=all_keys,
        )
        error.__cause__ = failed
        self._failure = error

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def oldest_save(self) -> Completion | None:
        """What tells the end of the first of the saves in flight; None if there are none."""
        return self._saves[0].completion if self._saves else None

    def pending(self) -> bool:
        """Whether anything is given or in flight."""
        return bool(self._saves or self._loads or self._open)

    def synchronize(self, timeout: float | None = None, *, saves_only: bool = False) -> bool:
        """Wait until what is in flight has ended, at most ``timeout`` seconds; False if the time ran out."""
        end = None if timeout is None else time.monotonic() + timeout
        for flight in [*self._saves, *(() if saves_only else self._loads)]:
            try:
                left = None if end is None else max(0.0, end - time.monotonic())
                if not flight.completion.wait(left):
                    return False
            except Exception as exc:  # kept by the completion: _settle sees it again
                _log.debug("a flight ended badly: %r", exc)
        self._settle()
        return True

    def stats(self) -> dict[str, Any]:
        """Plain data: what this worker moved and how."""
        return {
            "backend": self.backend.spec.name,
            "device": str(self._ops.device),
            "encoding": self.backend.spec.encoding.dtype,
            "rank": self.rank,
            "registered": self.registered,
            "registration": self.registration_reason,
            "bytes_saved": self.bytes_saved,
            "bytes_loaded": self.bytes_loaded,
            "submits": self.submits,
            "loads_repeated": self.loads_repeated,
            "plans_ignored": self.plans_ignored,
            **self.backend.stats(),
        }

    def close(self) -> None:
        """Wait for what is in flight, report it, unregister and leave the slot. Idempotent; each step runs even if an
        earlier one failed. The backend stays open: it serves the whole process.

        Raises :class:`SwapFailed`, with all that done, for tensors handed out whose copy turned out to have failed.
        """
        if self._closed:
            return
        steps: list[Callable[[], object]] = [self.flush, self.synchronize]
        # The streams as well: a copy whose end could not be asked may still be at the memory that is unmapped next.
        steps += [partial(self._ops.synchronize, each) for each in (self._save_stream, self._load_stream)]
        for step in steps:
            try:
                step()
            except Exception as exc:  # the next step has to run all the same
                _log.warning("closing: %s", exc)
        self._closed = True
        self._unregister()
        self._dropped.detach()
        self._slot.release()
        self._raise_failure()
