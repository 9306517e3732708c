"""Faults at every step of a save and a load: what failed is a miss, it is said, and the next operation works.

Destinations are poisoned before a load: no poisoned byte may reach a caller that was not told.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_kit import GRANULE, POISON, Engine, QueryFails, raw

from ecoffload.errors import ConfigError, DeviceLost, RegionError, RegistrationRefused, SwapFailed
from ecoffload.testing.devices import sim_of, simulated
from ecoffload.worker import OffloadWorker

Start = Callable[..., Engine]
ASYNC = ["sim-int64", "sim-uint64"]  # sim-top reports every failure late
ALL = [*ASYNC, "sim-top"]


# --- saves (B11: a copy failure takes the engine down; E10: evicts although the backup failed)


@pytest.mark.parametrize("device", ASYNC)
def test_b11_a_save_that_fails_at_its_submit_is_dropped(engine: Start, device: str) -> None:
    e = engine(devices=(device,))
    e.plan_save(b"a"), e.plan_save(b"b")
    e.workers[0].sim.inject_fault("submit", 1)
    e.step()
    e.settle()
    assert not e.scheduler.known(b"a")
    assert not e.scheduler.known(b"b")
    assert e.scheduler.stats().saves_failed == 2
    assert e.index.used_bytes == 0
    e.assert_works()


@pytest.mark.parametrize("device", ALL)
def test_b11_a_save_that_fails_late_is_dropped_and_said_once(
    engine: Start, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    e = engine(devices=(device,))
    e.plan_save(b"a"), e.plan_save(b"b")
    e.workers[0].sim.inject_fault("late", 1)
    with caplog.at_level(logging.WARNING, "ecoffload"):
        e.step()
        e.settle()
    assert not e.scheduler.known(b"a")
    assert e.scheduler.stats().saves_failed == 2
    assert len(caplog.records) == 1
    assert e.workers[0].failures == [], "nobody was promised anything"
    e.assert_works()


@pytest.mark.parametrize("device", ALL)
def test_a_save_whose_completion_cannot_be_asked_is_dropped(engine: Start, device: str) -> None:
    e = engine(devices=(device,))
    e.plan_save(b"a")
    e.workers[0].queries_fail()
    e.step()
    e.settle(asking=True)
    assert not e.scheduler.known(b"a")
    assert e.index.used_bytes == 0
    for _ in range(3):
        e.assert_works(b"next")
        e.scheduler.invalidate()


def test_a_failed_save_fails_none_of_the_saves_before_and_behind_it(engine: Start) -> None:
    e = engine()
    for key in (b"a", b"b", b"c"):
        if key == b"b":
            e.workers[0].sim.inject_fault("submit")
        e.plan_save(key)
        e.step()
    e.settle()
    assert [entry.key for entry in e.index] == [b"a", b"c"]
    e.verify(e.load(b"a", b"c")[0])


@pytest.mark.parametrize("error", [DeviceLost("gone"), KeyboardInterrupt()], ids=repr)
def test_whatever_interrupts_a_flush_its_saves_are_dropped(engine: Start, error: BaseException) -> None:
    e = engine()
    each = e.workers[0]
    plain = each.backend.ops.address_of

    def address_of(tensor: torch.Tensor) -> int:
        each.backend.ops.address_of = plain  # type: ignore[method-assign]
        raise error

    e.plan_save(b"a"), e.plan_save(b"b")
    message = e.take()
    each.backend.ops.address_of = address_of  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        e.give(0, message)
    e.settle()
    assert e.index.used_bytes == 0
    assert e.scheduler.stats().saves_failed == 2
    e.assert_works()
    e.assert_idle()


@pytest.mark.parametrize("error", [RuntimeError("no such thing"), ConfigError("odd"), SwapFailed("no")])
@pytest.mark.parametrize("kind", ["save", "load"])
def test_a_backend_that_raises_anything_at_submit_leaves_a_working_engine(
    engine: Start, kind: str, error: Exception
) -> None:
    e = engine()
    e.save(b"a")
    each = e.workers[0]
    plain = each.backend.submit

    def submit(batch: Any, direction: Any, stream: Any) -> Any:
        each.backend.submit = plain  # type: ignore[method-assign]
        raise error

    each.backend.submit = submit  # type: ignore[method-assign]
    loaded: list[dict[bytes, torch.Tensor]] = [{}]
    if kind == "save":
        e.plan_save(b"b")
    else:
        e.plan_load(b"a")
    with contextlib.suppress(ConfigError):
        loaded = e.step()
    e.settle()
    e.verify(loaded[0])
    assert not e.scheduler.known(b"b")
    e.assert_works()
    e.assert_idle()


# --- loads (E12: a failed transfer is reported as loaded)


@pytest.mark.parametrize("device", ASYNC)
def test_a_load_whose_submit_fails_is_repeated_once_and_counted(engine: Start, device: str) -> None:
    e = engine(devices=(device,))
    e.save(b"a", b"b")
    e.workers[0].sim.inject_fault("submit", 1)
    (loaded,) = e.load(b"a", b"b")
    assert set(loaded) == {b"a", b"b"}
    e.verify(loaded)
    assert e.workers[0].worker.stats()["loads_repeated"] == 2
    assert e.scheduler.stats().loads_failed == 0
    e.assert_works()


@pytest.mark.parametrize("device", ASYNC)
def test_a_load_that_fails_again_is_a_miss_and_others_of_its_plan_are_not(engine: Start, device: str) -> None:
    e = engine(devices=(device,))
    e.save(b"a", b"b")
    for _ in range(2):
        e.workers[0].sim.inject_fault("submit")
    (loaded,) = e.load(b"a", b"b")
    assert set(loaded) == {b"b"}
    e.verify(loaded)
    assert not e.scheduler.known(b"a"), "who asked again would fail again"
    assert e.scheduler.lookup(b"b")
    assert e.scheduler.stats().loads_failed == 1
    e.assert_works()
    e.assert_idle()


def test_e7_a_load_that_always_fails_is_marked_missing(engine: Start) -> None:
    e = engine()
    e.save(b"a")
    for _ in range(2):
        e.workers[0].sim.inject_fault("submit")
    assert e.load(b"a") == [{}]
    assert e.plan_load(b"a") is None
    e.save(b"a")
    e.verify(e.load(b"a")[0])


@pytest.mark.parametrize("device", ALL)
def test_e12_a_load_that_fails_late_is_raised_at_the_next_call_with_its_keys(engine: Start, device: str) -> None:
    e = engine(devices=(device,))
    e.save(b"a", b"b", b"c")
    e.plan_load(b"a"), e.plan_load(b"b")
    each = e.workers[0]
    each.sim.inject_fault("late", 0)
    (loaded,) = e.step()
    assert each.worker.synchronize(30)
    assert raw(loaded[b"a"]) == bytes([POISON]) * GRANULE, "the poison arrived at a caller that has yet to be told"
    e.plan_load(b"c")
    message = e.take()
    with pytest.raises(SwapFailed, match="no valid data") as caught:
        e.give(0, message)
    assert sorted(caught.value.keys) == [b"a", b"b"]
    assert caught.value.__cause__ is not None
    e.verify(e.give(0, message))  # the same plan again: said once is enough
    e.settle()
    assert not e.scheduler.known(b"a")
    assert not e.scheduler.known(b"b")
    assert e.scheduler.lookup(b"c")
    e.assert_works()
    e.assert_idle()


@pytest.mark.parametrize("call", ["poll", "save", "load"])
def test_e12_whatever_the_next_call_is_it_says_so(engine: Start, call: str) -> None:
    e = engine()
    e.save(b"a")
    e.plan_load(b"a")
    each = e.workers[0]
    each.sim.inject_fault("late")
    e.step()
    assert each.worker.synchronize(30)
    e.plan_save(b"b")
    plan = e.scheduler.take_plan()
    with pytest.raises(SwapFailed) as caught:
        {
            "poll": each.worker.poll,
            "save": lambda: each.worker.save(b"b", each.backend.ops.empty(GRANULE), plan),
            "load": lambda: each.worker.load(plan),
        }[call]()
    assert caught.value.keys == (b"a",)
    each.worker.poll()
    e.plan_save(b"c")  # the plan above was lost to whoever was told instead
    e.step()
    e.settle()
    assert [entry.key for entry in e.index] == [b"c"], "b was never written"


@pytest.mark.parametrize("device", ALL)
def test_a_load_whose_completion_cannot_be_asked_is_raised(engine: Start, device: str) -> None:
    e = engine(devices=(device,))
    e.save(b"a")
    e.plan_load(b"a")
    e.workers[0].queries_fail()
    e.step()
    e.settle(asking=True)
    (failure,) = e.workers[0].failures
    assert failure.keys == (b"a",)
    assert not e.scheduler.known(b"a")
    for _ in range(3):
        e.assert_works(b"next")
        e.scheduler.invalidate()


def test_a_load_that_could_not_allocate_releases_its_pins_and_keeps_the_entries(engine: Start) -> None:
    e = engine()
    e.save(b"a")
    e.plan_load(b"a")
    each = e.workers[0]
    plain = each.backend.ops.empty_tensors

    def no_room(specs: Any, stream: Any) -> Any:
        each.backend.ops.empty_tensors = plain  # type: ignore[method-assign]
        raise torch.OutOfMemoryError("no room")

    each.backend.ops.empty_tensors = no_room  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        e.step()
    e.settle()
    e.assert_idle()
    e.verify(e.load(b"a")[0])


def test_a_completion_that_fails_when_the_caller_is_made_to_wait_is_repeated(engine: Start) -> None:
    e = engine()
    e.save(b"a")
    each = e.workers[0]
    plain = each.backend.submit

    class FailsToBlock(QueryFails):
        def block(self, stream: Any) -> None:
            self.inner.wait()
            raise SwapFailed("it failed before anybody saw the tensor")

    def submit(batch: Any, direction: Any, stream: Any) -> Any:
        each.backend.submit = plain  # type: ignore[method-assign]
        return FailsToBlock(plain(batch, direction, stream))

    each.backend.submit = submit  # type: ignore[method-assign]
    (loaded,) = e.load(b"a")
    e.verify(loaded)
    assert each.worker.loads_repeated == 1
    assert each.failures == []
    e.assert_works()


def test_a_failed_load_on_one_rank_makes_the_key_a_miss_for_all(engine: Start) -> None:
    e = engine(world=2)
    e.save(b"a")
    for _ in range(2):
        e.workers[1].sim.inject_fault("submit")
    first, second = e.load(b"a")
    assert (set(first), set(second)) == ({b"a"}, set())
    e.verify(first)
    assert not e.scheduler.known(b"a")
    e.assert_works()
    e.assert_idle()


# --- a load right behind the save of its entry, ordered on the device


def behind(e: Engine) -> list[dict[bytes, torch.Tensor]]:
    e.plan_save(b"a")
    e.step()
    assert e.scheduler.plan_load(b"a", in_flight=True)
    loaded = e.step()
    e.settle()
    return loaded


@pytest.mark.parametrize("device", ALL)
def test_a_load_behind_its_save_waits_for_it_on_the_device(engine: Start, device: str) -> None:
    e = engine(devices=(device,))
    e.workers[0].sim.device.latency = 0.02
    e.verify(behind(e)[0])


@pytest.mark.parametrize("device", ALL)
def test_a_load_behind_a_save_that_fails_late_fails_as_well(engine: Start, device: str) -> None:
    for latency in (0.0, 0.003):
        e = engine(devices=(device,))
        e.workers[0].sim.device.latency = latency
        e.workers[0].sim.inject_fault("late")
        behind(e)
        (failure,) = e.workers[0].failures
        assert failure.keys == (b"a",)
        assert not e.scheduler.known(b"a")
        e.assert_works()
        e.assert_idle()


# --- the device is gone


@pytest.mark.parametrize("device", ALL)
@pytest.mark.parametrize("kind", ["save", "load"])
def test_a_lost_device_is_raised_and_holds_nothing(engine: Start, device: str, kind: str) -> None:
    e = engine(devices=(device,))
    e.save(b"a")
    e.workers[0].sim.inject_fault("lost")
    e.plan_save(b"b") if kind == "save" else e.plan_load(b"a")
    try:
        e.step()
        e.settle()
    except DeviceLost:
        e.settle()
    else:
        (failure,) = e.workers[0].failures or [None]
        assert kind == "save" or isinstance(failure, DeviceLost)
    assert not e.scheduler.known(b"b")
    assert e.scheduler.known(b"a") == (kind == "save")
    e.assert_idle()
    e.workers[0].sim.device.reset()
    e.assert_works()


def test_a_rank_whose_device_is_lost_holds_up_nobody(engine: Start) -> None:
    e = engine(world=2)
    e.save(b"a")
    e.plan_load(b"a")
    message = e.take()
    e.workers[1].sim.inject_fault("lost")
    loaded = e.give(0, message)
    with pytest.raises(DeviceLost):
        e.give(1, message)
    e.settle()
    e.verify(loaded)
    e.assert_idle()


# --- registration


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_c3_a_refused_chunk_rolls_back_those_before_it(engine: Start, failing: int) -> None:
    e = engine(devices=("sim-uint64",), capacity=12 * GRANULE, chunk_bytes=4 * GRANULE, register=("off",))
    backend = e.workers[0].backend
    register = backend.register
    calls: list[tuple[str, int]] = []

    def counted(address: int, nbytes: int) -> Any:
        calls.append(("register", address))
        if len(calls) == failing + 1:
            sim_of(backend).inject_fault("register")
        return register(address, nbytes)

    def counted_back(registration: Any) -> None:
        calls.append(("unregister", registration.address))
        plain_back(registration)

    plain_back = backend.unregister
    backend.register, backend.unregister = counted, counted_back  # type: ignore[method-assign]
    with pytest.raises(RegistrationRefused):
        OffloadWorker(e.region, backend, 0, 1, register="require")
    done = [address for kind, address in calls if kind == "register"][:failing]
    assert [address for kind, address in calls if kind == "unregister"] == done[::-1]
    assert sim_of(backend).device.registered == {}


def test_c3_c7_a_rank_that_may_not_register_follows_its_policy_and_transfers_stay_right(
    engine: Start, caplog: pytest.LogCaptureFixture
) -> None:
    e = engine(world=2, devices=("sim-int64", "sim-uint64"), register=("require", "off"))
    assert [each.worker.registered for each in e.workers] == [True, False]
    e.assert_works()
    assert e.workers[1].worker.stats()["registration"] == "switched off"


def test_a_device_whose_host_memory_is_its_own_allocators_is_refused_with_the_way_out(engine: Start) -> None:
    e = engine(devices=("sim-int64",))
    each = e.workers[0]
    capabilities = each.backend.spec.capabilities.model_copy(update={"host_memory": "allocate"})
    backend = simulated("sim-int64")
    backend.spec = backend.spec.model_copy(update={"capabilities": capabilities})
    with pytest.raises(ConfigError, match=r"host_memory='allocate'.*declare 'register' or 'none'"):
        OffloadWorker(each.region, backend, 0, 1)
    e.assert_works()


def test_c7_prefer_says_once_why_it_is_not_registered(engine: Start, caplog: pytest.LogCaptureFixture) -> None:
    e = engine(devices=("sim-int64",), register=("off",))
    each = e.workers[0]
    each.worker.close()
    each.sim.inject_fault("register")
    with caplog.at_level(logging.WARNING, "ecoffload"):
        each.worker = OffloadWorker(each.region, each.backend, 0, 1, register="prefer")
    assert not each.worker.registered
    assert len(caplog.records) == 1
    assert "801" in each.worker.registration_reason
    e.assert_works()


@pytest.mark.parametrize("device", ALL)
def test_c1_entries_lie_inside_one_registration_and_are_reached_through_its_alias(engine: Start, device: str) -> None:
    e = engine(devices=(device,), capacity=12 * GRANULE, chunk_bytes=3 * GRANULE)
    assert len(e.region.chunk_edges) >= 3
    e.save(*(b"%d" % i for i in range(4)), nbytes=3 * GRANULE - 100)
    if device == "sim-uint64":
        aliases = [r.alias - r.address for r in e.workers[0].sim.device.registered.values()]
        assert aliases == [1 << 61] * 4
    loaded = e.load(*(b"%d" % i for i in range(4)))
    e.verify(loaded[0])
    assert e.plan_save(b"large", 4 * GRANULE) is not None, "over two chunks, in two extents"
    e.step()
    e.settle()
    e.verify(e.load(b"large")[0])


def test_a_plan_whose_extent_crosses_a_registration_is_a_miss(engine: Start) -> None:
    e = engine(devices=("sim-uint64",), capacity=8 * GRANULE, chunk_bytes=4 * GRANULE)
    each = e.workers[0]
    each.worker._base = None  # as where chunks have different aliases
    e.save(b"a", nbytes=2 * GRANULE)
    e.plan_load(b"a")
    plan = e.scheduler.take_plan()
    bad = plan._replace(loads=(plan.loads[0]._replace(extents=((3 * GRANULE, 2 * GRANULE),)),))
    assert each.worker.load(bad) == {}
    e.settle()
    assert not e.scheduler.known(b"a")
    e.assert_works()


def test_c9_close_waits_for_what_is_in_flight_before_it_unregisters(engine: Start) -> None:
    e = engine()
    op = e.plan_save(b"a")
    each = e.workers[0]
    each.backend.ops.delay(each.worker._save_stream, 50)
    e.step()
    seen: list[bytes] = []
    unregister = each.backend.unregister

    def watched(registration: Any) -> None:
        assert op is not None
        seen.extend(bytes(view) for view in e.region.view(op.extents))
        unregister(registration)

    each.backend.unregister = watched  # type: ignore[method-assign]
    each.worker.close()
    each.worker.close()
    assert seen == [e.truth[b"a"]]
    assert each.sim.device.registered == {}


@pytest.mark.parametrize("where", ["flush", "synchronize", "unregister"])
def test_c9_a_step_of_closing_that_raises_keeps_none_of_the_others_from_running(engine: Start, where: str) -> None:
    e = engine()
    e.save(b"a")
    each = e.workers[0]

    def fails(*_: Any, **__: Any) -> None:
        raise SwapFailed("asked to fail")

    if where == "unregister":
        each.backend.unregister = fails  # type: ignore[method-assign]
    else:
        setattr(each.worker, where, fails)
    each.worker.close()
    if where != "unregister":
        assert each.sim.device.registered == {}
    with pytest.raises(RegionError, match="was released"):
        each.worker._slot.finish_save(1)


# --- workers that leave, die and come back


def test_without_the_rank_that_saves_no_save_counts_whatever_the_others_report(engine: Start) -> None:
    for leaving in ("close", "die"):
        e = engine(world=2)
        e.save(b"a")
        getattr(e.workers.pop(0), leaving)()
        e.plan_save(b"b")
        e.step()
        for _ in range(3):
            e.poll()
            e.workers[0].worker.poll()
        assert not e.scheduler.lookup(b"b"), "nobody wrote it"
        assert e.scheduler.lookup(b"a")
        e.verify(e.load_now(b"a")[0])


@pytest.mark.parametrize("device", ASYNC)
def test_c9_close_waits_for_a_copy_whose_end_could_not_be_asked(engine: Start, device: str) -> None:
    e = engine(devices=(device,))
    op = e.plan_save(b"a")
    each = e.workers[0]
    each.backend.ops.delay(each.worker._save_stream, 60)
    each.queries_fail()
    e.step()
    with contextlib.suppress(SwapFailed):
        each.worker.poll()
    assert not each.worker.pending()
    each.worker.close()
    assert op is not None
    assert b"".join(bytes(view) for view in e.region.view(op.extents)) == e.truth[b"a"]


def test_a_load_behind_a_save_that_is_not_in_flight_here_is_a_miss(engine: Start) -> None:
    """The plan of the save was lost: what lies in its extents is somebody else's."""
    e = engine()
    e.plan_save(b"a")
    e.take()
    assert e.scheduler.plan_load(b"a", in_flight=True)
    loaded = e.step()
    e.settle()
    assert loaded == [{}]
    assert not e.scheduler.known(b"a")
    e.assert_works()


def test_a_save_that_finds_no_memory_to_be_made_contiguous_fails_alone(
    engine: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    e = engine()
    each = e.workers[0]
    for key in (b"a", b"strided", b"z"):
        e.scheduler.plan_save(key, GRANULE, "uint8", (64, 64))
    plan = e.scheduler.take_plan()
    tensor = each.backend.ops.empty(GRANULE).fill_(1).view(64, 64)

    def full(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("the device is full")

    monkeypatch.setattr(each.backend.ops, "clone", full)
    with caplog.at_level(logging.WARNING, "ecoffload"):
        each.worker.save(b"a", tensor, plan)
        each.worker.save(b"strided", tensor.t(), plan)
        each.worker.save(b"z", tensor, plan)
        each.worker.flush()
        e.settle()
    assert [key for key in (b"a", b"strided", b"z") if e.scheduler.lookup(key)] == [b"a", b"z"]
    assert "the device is full" in caplog.text
