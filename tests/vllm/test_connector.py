"""EcoffloadConnector in vLLM's real scheduler, with the semantics of both model runners, every message pickled.

An entry of these tests has 4,096 bytes, one granule of the region: a capacity of three entries is 12,288 bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import WrongEncoderOutput, encoder_output
from late_backend import Devices
from reference_connector import CLOCK

from ecoffload.errors import DeviceLost, SwapFailed
from ecoffload.integrations.vllm import worker as worker_half

ENTRY = 4096
Make = Callable[..., Any]


def content(name: str) -> str:
    """An identifier as vLLM makes it of an input's content."""
    return hashlib.sha256(name.encode()).hexdigest()


@pytest.fixture
def ours(engine: Make) -> Make:
    """Make an engine with our connector; `entries` fit its region."""

    def make(entries: int = 16, *, extra: dict[str, Any] | None = None, **options: Any) -> Any:
        return engine(
            connector="EcoffloadConnector", extra={"ec_cpu_bytes": entries * ENTRY, **(extra or {})}, **options
        )

    return make


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    """Workers get late devices; `late` may be set before they are made."""
    found = Devices({})
    monkeypatch.setattr(worker_half, "get_backend", found)
    return found


def play(vllm: Any, names: str) -> None:
    """One request an image, each finished before the next."""
    for name in names:
        vllm.add(f"{name}{vllm.steps}", name)
        vllm.run(100_000)


def index(vllm: Any) -> Any:
    return vllm.connector._decider.engine.index


def settle(vllm: Any) -> None:
    """Everything in flight has ended: no pins, no extents without an owner."""
    vllm.run(100_000)  # an idle V1 calls no worker: a thread of ours reports, and steps without work are short
    assert not vllm.connector.has_pending_push_work()
    assert index(vllm).pinned == 0
    index(vllm).check()
    assert not vllm.connector.effective_configuration()["off"]


# -- what is saved and loaded ------------------------------------------------------------------------------------------


def test_the_second_request_for_an_image_reloads_it_after_eviction_from_the_encoder_cache(
    ours: Make, runner: str
) -> None:
    vllm = ours(runner=runner, encoder_cache_items=1)
    play(vllm, "aba")
    assert vllm.encodes() == ["a", "b"]
    settle(vllm)


def test_two_requests_of_one_step_that_share_an_image_encode_it_once(ours: Make, runner: str) -> None:
    vllm = ours(runner=runner)
    vllm.add("one", "a")
    vllm.add("two", "a")
    settle(vllm)
    assert vllm.encodes() == ["a"]
    assert vllm.tokens == {"one": 2, "two": 2}


def test_two_requests_of_one_step_that_share_an_image_load_it_once(ours: Make, runner: str) -> None:
    vllm = ours(runner=runner, encoder_cache_items=2)
    play(vllm, "abc")
    vllm.add("one", "a")
    vllm.add("two", "a")
    plan = vllm.step().ec_connector_metadata.plan
    assert [op.key for op in plan.loads] == [b"a"]
    settle(vllm)
    assert vllm.encodes() == ["a", "b", "c"]


def test_an_image_twice_in_one_request_is_encoded_once_and_loaded_once(ours: Make, runner: str) -> None:
    vllm = ours(runner=runner, encoder_cache_items=1)
    vllm.add("one", "a", "a")
    vllm.run()
    play(vllm, "b")
    vllm.add("two", "a", "a")
    settle(vllm)
    assert vllm.encodes() == ["a", "b"]


def test_a_preempted_request_resumes_with_its_image(ours: Make, runner: str) -> None:
    vllm = ours(runner=runner, encoder_cache_items=1)
    request = vllm.add("one", "a", max_tokens=6)
    vllm.step()
    vllm.preempt_all()
    vllm.add("two", "b")
    settle(vllm)
    assert request.num_preemptions == 1
    assert vllm.tokens == {"one": 6, "two": 2}


def test_a_full_kv_cache_preempts_and_every_request_still_gets_its_image(ours: Make, runner: str) -> None:
    vllm = ours(3, runner=runner, encoder_cache_items=2, blocks=8)
    requests = [vllm.add(f"r{turn}", name, text=10, max_tokens=24) for turn, name in enumerate("abca")]
    settle(vllm)
    assert sum(request.num_preemptions for request in requests) > 0
    assert set(vllm.tokens.values()) == {24}


def test_chunked_prefill_loads_an_image_that_spans_two_chunks(ours: Make, runner: str) -> None:
    vllm = ours(runner=runner, encoder_cache_items=1, max_batched_tokens=16)
    for step, name in enumerate("aba"):
        vllm.add(f"{name}{step}", name, text=11)
        vllm.run()
    assert vllm.encodes() == ["a", "b"]


def test_an_encoder_cache_reset_between_steps_is_survived(ours: Make, runner: str) -> None:
    vllm = ours(runner=runner, encoder_cache_items=4)
    play(vllm, "a")
    vllm.scheduler.reset_encoder_cache()
    vllm.workers[0].cache.clear()
    play(vllm, "a")
    assert vllm.encodes() == ["a"]


def test_objects_shared_by_one_process_survive_a_step(ours: Make, runner: str) -> None:
    vllm = ours(runner=runner, pickled=False, encoder_cache_items=1)
    play(vllm, "aba")
    assert vllm.encodes() == ["a", "b"]


def test_each_loaded_entry_is_a_tensor_of_its_own(ours: Make, runner: str) -> None:
    vllm = ours(runner=runner, encoder_cache_items=2)
    play(vllm, "abcd")
    vllm.add("two", "a", "b")
    vllm.step()
    tensors = [vllm.workers[0].cache[name] for name in "ab"]
    assert all(tensor.untyped_storage().nbytes() == ENTRY for tensor in tensors)
    assert tensors[0].data_ptr() != tensors[1].data_ptr()


# -- pressure, lateness, ranks -----------------------------------------------------------------------------------------


def test_three_entries_of_room_serve_many_images_without_a_wrong_byte(
    ours: Make, runner: str, devices: Devices
) -> None:
    devices.late = {0: 1}
    vllm = ours(3, runner=runner, encoder_cache_items=2)
    for turn in range(30):
        vllm.add(f"r{turn}", f"i{turn % 4}", f"i{turn * 7 % 5}")
        vllm.step()
    settle(vllm)
    assert len(index(vllm)) <= 3
    assert all(vllm.tokens[f"r{turn}"] == 2 for turn in range(30))


def test_a_promise_is_kept_though_the_same_step_wants_its_room(ours: Make, runner: str) -> None:
    vllm = ours(1, runner=runner, encoder_cache_items=2)
    play(vllm, "a")
    vllm.scheduler.reset_encoder_cache()
    vllm.workers[0].cache.clear()
    vllm.add("both", "b", "a")
    settle(vllm)
    assert vllm.encodes() == ["a", "b"]


def test_a_promise_that_vllm_does_not_follow_up_is_taken_back(ours: Make, runner: str) -> None:
    vllm = ours(3, runner=runner, encoder_cache_items=1)
    play(vllm, "ab")
    request = vllm.add("again", "a")
    vllm.connector.ensure_cache_available(request, 0)
    assert vllm.connector.has_cache_item("a")
    assert index(vllm).pinned == 1
    plan = vllm.connector.build_connector_meta(None)
    assert plan.plan is None
    assert index(vllm).pinned == 0
    vllm.run()


def test_an_abort_with_transfers_in_flight_leaves_nothing_pending(ours: Make, runner: str, devices: Devices) -> None:
    devices.late = {0: 5}
    vllm = ours(runner=runner, encoder_cache_items=1)
    play(vllm, "ab")
    vllm.add("again", "a")
    vllm.step()
    vllm.abort("again")
    settle(vllm)


def test_the_engine_keeps_stepping_until_a_late_save_is_confirmed(ours: Make, runner: str, devices: Devices) -> None:
    devices.late = {0: 9}
    vllm = ours(runner=runner)
    vllm.add("one", "a")
    assert vllm.run(100_000) >= 9
    assert index(vllm).lookup(b"a").state == "ready"


def test_an_entry_still_being_saved_is_not_promised(ours: Make, runner: str, devices: Devices) -> None:
    devices.late = {0: 50}
    vllm = ours(runner=runner, encoder_cache_items=1)
    vllm.add("one", "a")
    vllm.add("two", "b")
    for _ in range(4):
        vllm.step()
    vllm.add("three", "a")
    vllm.step()
    assert vllm.encodes().count("a") == 2
    vllm.run(100_000)


def test_a_planned_save_that_vllm_never_makes_does_not_stay_on_its_way(ours: Make, runner: str) -> None:
    vllm = ours(2, runner=runner, encoder_cache_items=3)
    play(vllm, "axy")
    # "b" takes the place of "a" in the encoder cache, and the same request brings "a" back: V2 never saves it.
    vllm.add("both", "b", "a")
    settle(vllm)
    assert all(entry.state == "ready" for entry in index(vllm))


def test_a_step_whose_only_planned_save_is_never_made_leaves_nothing_pending(ours: Make) -> None:
    vllm = ours(runner="v2")
    vllm.workers[0].cache["a"] = encoder_output("a", 16)  # V2 saves only what was not there before
    play(vllm, "a")
    settle(vllm)
    assert len(index(vllm)) == 0


def test_a_step_scheduled_ahead_of_the_last_one_reads_what_it_was_promised(
    ours: Make, runner: str, devices: Devices
) -> None:
    devices.late = {0: 2}
    vllm = ours(2, runner=runner, asynchronous=True, encoder_cache_items=1)
    for turn, name in enumerate("abacabdbca"):
        vllm.add(f"r{turn}", name, max_tokens=3)
        vllm.step()
    vllm.run(100_000)
    settle(vllm)
    assert set(vllm.tokens.values()) == {3}


@pytest.mark.parametrize("late", [{1: 6}, {0: 6}], ids=["rank 1 late", "rank 0 late"])
def test_an_entry_stays_pinned_until_the_slowest_of_two_ranks_has_read_it(
    ours: Make, runner: str, devices: Devices, late: dict[int, int]
) -> None:
    devices.late = late
    vllm = ours(2, runner=runner, ranks=2, encoder_cache_items=1)
    for turn, name in enumerate("abacadabcabd"):
        vllm.add(f"r{turn}", name)
        vllm.step()
    vllm.run(100_000)
    settle(vllm)
    assert vllm.encodes(0) == vllm.encodes(1)


def test_a_pin_outlasts_the_fast_rank(ours: Make, runner: str, devices: Devices) -> None:
    vllm = ours(2, runner=runner, ranks=2, encoder_cache_items=1)
    play(vllm, "ab")
    devices.made[1].late = 1000
    vllm.add("again", "a")
    for _ in range(4):
        vllm.step()
    assert index(vllm).pinned == 1
    for _ in range(1000):
        CLOCK.tick()
    settle(vllm)


def test_nothing_is_promised_until_every_rank_maps_the_region(
    ours: Make, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = ours(runner=runner, ranks=2, encoder_cache_items=1)
    half = vllm.connector._decider
    monkeypatch.setattr(half.region, "ranks", lambda: frozenset({0}))
    play(vllm, "aba")
    assert vllm.encodes() == ["a", "b", "a"]
    monkeypatch.undo()
    play(vllm, "b")
    assert vllm.encodes() == ["a", "b", "a"]


# -- roles -------------------------------------------------------------------------------------------------------------


def test_a_producer_alone_saves_and_never_loads(ours: Make, runner: str) -> None:
    vllm = ours(runner=runner, role="ec_producer", encoder_cache_items=1)
    for step, name in enumerate("aba"):
        vllm.add(f"{name}{step}", name, max_tokens=1)
        vllm.run()
    assert vllm.encodes() == ["a", "b", "a"]
    assert sorted(entry.key for entry in index(vllm)) == [b"a", b"b"]
    settle(vllm)


def test_a_consumer_alone_loads_what_a_producer_left_in_a_warm_region_and_never_saves(ours: Make, runner: str) -> None:
    producer = ours(runner=runner, role="ec_producer", extra={"warm": True})
    producer.add("one", content("a"), max_tokens=1)
    producer.run()
    producer.shutdown()
    consumer = ours(runner=runner, role="ec_consumer", extra={"warm": True})
    wait_until_verified(consumer, 1)
    consumer.add("one", content("a"))
    consumer.add("two", content("b"))
    consumer.run()
    try:
        assert consumer.encodes() == [content("b")]
        assert [entry.key for entry in index(consumer)] == [content("a").encode()]
    finally:
        remove(consumer)


# -- keys and what outlives the process --------------------------------------------------------------------------------


def remove(vllm: Any) -> None:
    """End an engine and its warm region."""
    path = Path(vllm.connector.effective_configuration()["path"])
    vllm.shutdown()
    path.unlink(missing_ok=True)


def wait_until_verified(vllm: Any, entries: int) -> None:
    half = vllm.connector._decider
    for _ in range(100_000):
        half._poll()
        if half.engine.recovered >= entries or not half.engine._verifying:
            break
    assert half.engine.recovered == entries


def restart(ours: Make, first: dict[str, Any], second: dict[str, Any], *names: str) -> Any:
    """An engine that saved these inputs and ended; the next one on the same region."""
    vllm = ours(runner="v2", **{**first, "extra": {"warm": True, **first.get("extra", {})}})
    for name in names:
        vllm.add(f"r{vllm.steps}", name)
        vllm.run()
    vllm.shutdown()
    return ours(runner="v2", **{**second, "extra": {"warm": True, **second.get("extra", {})}})


def test_a_warm_restart_hits_at_once(ours: Make) -> None:
    vllm = restart(ours, {}, {}, content("a"), content("b"))
    try:
        play_hash(vllm, "a", "b")
        assert vllm.encodes() == []
        assert vllm.connector.effective_configuration()["start"] == "joined"
        assert vllm.workers[0].connector.effective_configuration()["start"] == "warm"
        assert vllm.connector._decider._info()["start"] == "warm"
    finally:
        remove(vllm)


def play_hash(vllm: Any, *names: str) -> None:
    for name in names:
        vllm.add(f"h{vllm.steps}", content(name))
        vllm.run()


@pytest.mark.parametrize(
    "second", [{"dtype": "bfloat16"}, {"revision": "other"}, {"extra": {"weight_epoch": 2}}], ids=str
)
def test_another_dtype_revision_or_epoch_starts_cold(ours: Make, second: dict[str, Any]) -> None:
    name = f"cold-{os.getpid()}"  # other runs on this machine have regions as well
    later = {**second, "extra": {"name": name, **second.get("extra", {})}}
    vllm = restart(ours, {"extra": {"name": name}}, later, content("a"))
    try:
        assert len(index(vllm)) == 0
    finally:
        remove(vllm)
        for left in Path("/dev/shm").glob(f"ecoffload.vllm-{name}-*"):
            left.unlink()


def test_touched_weight_files_start_cold(ours: Make, model: Path) -> None:
    (model / "adapter.bin").write_bytes(b"1")
    try:
        first = ours(runner="v2", extra={"warm": True})
        namespace = first.connector.effective_configuration()["namespace"]
        remove(first)
        (model / "adapter.bin").write_bytes(b"22")
        second = ours(runner="v2", extra={"warm": True})
        assert second.connector.effective_configuration()["namespace"] != namespace
        remove(second)
    finally:
        (model / "adapter.bin").unlink()


@pytest.mark.parametrize("key", ["my-cat", "adapter:" + "0" * 64, "renderer0-mm-1-image-0"])
def test_a_key_that_a_client_or_an_adapter_chose_does_not_outlive_the_process(ours: Make, key: str) -> None:
    vllm = restart(ours, {}, {}, key)
    try:
        assert len(index(vllm)) == 0
    finally:
        remove(vllm)


def test_such_a_key_is_kept_if_uuids_are_trusted(ours: Make) -> None:
    vllm = restart(ours, {"extra": {"trust_uuids": True}}, {}, "my-cat")
    try:
        wait_until_verified(vllm, 1)
    finally:
        remove(vllm)


def test_nothing_outlives_the_process_once_weights_were_updated_in_place(ours: Make, tmp_path: Path) -> None:
    epoch = tmp_path / "epoch"
    first = ours(runner="v2", encoder_cache_items=1, extra={"warm": True, "weight_epoch_file": str(epoch)})
    play_hash(first, "a", "b")
    epoch.touch()
    play_hash(first, "a")
    assert [first.encodes().count(content(name)) for name in "ab"] == [2, 1]
    play_hash(first, "c")
    first.shutdown()
    second = ours(runner="v2", extra={"warm": True, "weight_epoch_file": str(epoch)})
    try:
        assert len(index(second)) == 0
    finally:
        remove(second)


def test_explicit_invalidation_forgets_one_input_or_all(ours: Make, runner: str) -> None:
    vllm = ours(runner=runner, encoder_cache_items=1)
    play(vllm, "abc")
    assert vllm.connector.invalidate("a") == 1
    assert vllm.connector.invalidate() == 2
    play(vllm, "ab")
    assert vllm.encodes() == ["a", "b", "c", "a", "b"]


def test_a_second_engine_of_the_same_model_is_refused_a_warm_region_in_use(ours: Make) -> None:
    first = ours(runner="v2", extra={"warm": True})
    try:
        with pytest.raises(Exception, match='"name": "second"'):
            ours(runner="v2", extra={"warm": True})
        with pytest.raises(Exception, match="A producer and a consumer at once need a tier"):
            ours(runner="v2", role="ec_consumer", extra={"warm": True})
        play(first, "aba")
        settle(first)
        second = ours(runner="v2", extra={"warm": True, "name": "second"})
        remove(second)
    finally:
        remove(first)


def test_a_uuid_that_was_used_for_an_input_of_another_size_is_a_miss(ours: Make, runner: str) -> None:
    vllm = ours(runner=runner, encoder_cache_items=2)
    play(vllm, "abc")
    vllm.add("other size", "a", rows=8)
    vllm.run()
    assert vllm.errors == []
    assert vllm.encodes() == ["a", "b", "c", "a"]


def test_a_promise_to_one_request_is_none_to_another_of_another_size(ours: Make, runner: str) -> None:
    vllm = ours(runner=runner, encoder_cache_items=1)
    play(vllm, "ab")
    connector = vllm.connector
    connector.ensure_cache_available(vllm.add("right size", "a"), 0)
    assert connector.has_cache_item("a")
    connector.ensure_cache_available(vllm.add("other size", "a", rows=8), 0)
    assert not connector.has_cache_item("a")
    connector.build_connector_meta(None)
    vllm.abort("other size")
    settle(vllm)


def test_a_very_long_identifier_is_found_again(ours: Make, runner: str) -> None:
    long = "x" * 1000
    vllm = ours(runner=runner, encoder_cache_items=1)
    for name in (long, "b", long):
        vllm.add(f"r{vllm.steps}", name)
        vllm.run()
    assert vllm.encodes() == [long, "b"]


# -- outputs that are not as planned -----------------------------------------------------------------------------------


def test_an_encoder_whose_outputs_are_of_another_dtype_is_learned_from_its_first(
    ours: Make, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import harness

    right = harness.encoder_output
    monkeypatch.setattr(harness, "encoder_output", lambda name, rows: right(name, rows).bfloat16())
    vllm = ours(runner=runner, encoder_cache_items=1)
    play(vllm, "abab")
    assert vllm.encodes() == ["a", "b", "a"]


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_load_that_cannot_be_submitted_is_repeated_and_right(ours: Make, runner: str, devices: Devices) -> None:
    vllm = ours(runner=runner, encoder_cache_items=1)
    play(vllm, "ab")
    devices.fail("h2d", SwapFailed("once"))
    play(vllm, "a")
    assert vllm.encodes() == ["a", "b"]
    settle(vllm)


def test_a_load_that_fails_twice_is_delivered_by_the_host(ours: Make, runner: str, devices: Devices) -> None:
    vllm = ours(runner=runner, encoder_cache_items=1)
    play(vllm, "ab")
    devices.fail("h2d", SwapFailed("once"), SwapFailed("twice"))
    play(vllm, "a")
    assert vllm.encodes() == ["a", "b"]
    settle(vllm)
    assert index(vllm).lookup(b"a") is None


def test_a_failed_save_drops_its_entry_and_nothing_else(ours: Make, runner: str, devices: Devices) -> None:
    vllm = ours(runner=runner, encoder_cache_items=1)
    play(vllm, "a")
    devices.fail("d2h", SwapFailed("no"))
    play(vllm, "b")
    assert [entry.key for entry in index(vllm)] == [b"a"]
    settle(vllm)


def test_a_lost_device_is_raised_to_the_engine(ours: Make, runner: str, devices: Devices) -> None:
    vllm = ours(runner=runner, encoder_cache_items=1)
    play(vllm, "ab")
    devices.fail("h2d", DeviceLost("fell off the bus"))
    vllm.add("again", "a")
    with pytest.raises(DeviceLost, match="fell off the bus"):
        vllm.run()


def test_a_device_lost_while_saving_is_raised_at_the_next_step(ours: Make, runner: str, devices: Devices) -> None:
    vllm = ours(runner=runner, encoder_cache_items=1)
    devices.fail("d2h", DeviceLost("gone"))
    vllm.add("one", "a")
    vllm.step()
    with pytest.raises(DeviceLost, match="gone"):
        vllm.run()


@pytest.mark.parametrize("where", ["lookup", "plan_load", "plan_save", "take_plan", "poll", "cancel_load", "unsettled"])
def test_an_exception_of_the_schedulers_half_turns_the_cache_off_and_not_the_engine(
    ours: Make, runner: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = ours(runner=runner, encoder_cache_items=1)
    play(vllm, "ab")
    half = vllm.connector._decider

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(half.engine.index if where == "lookup" else half.engine, where, broken)
    play(vllm, "acaba")
    assert set(vllm.tokens.values()) == {2}
    if where != "cancel_load":  # nothing was taken back
        assert "a bug of ours" in vllm.connector.effective_configuration()["off"]
    assert not vllm.connector.has_pending_push_work()


@pytest.mark.parametrize("where", ["load", "save", "flush", "poll", "pending"])
def test_an_exception_of_a_workers_half_turns_the_cache_off_and_not_the_engine(
    ours: Make, runner: str, where: str, monkeypatch: pytest.MonkeyPatch, devices: Devices
) -> None:
    devices.late = {0: 1}
    vllm = ours(runner=runner, encoder_cache_items=1)
    play(vllm, "ab")
    half = vllm.workers[0].connector._mover

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(half.engine, where, broken)
    play(vllm, "acaba")
    assert set(vllm.tokens.values()) == {2}
    assert "a bug of ours" in vllm.connector.effective_configuration()["off"]


def test_transfers_that_never_end_do_not_keep_the_engine_busy_for_ever(
    ours: Make, runner: str, devices: Devices
) -> None:
    devices.late = {0: 10**9}
    vllm = ours(runner=runner, extra={"stall_after": 0.05})
    vllm.add("one", "a")
    vllm.run(1_000_000)
    assert "no progress" in vllm.connector.effective_configuration()["off"]


def test_switched_off_by_its_option_it_does_nothing(ours: Make, runner: str) -> None:
    vllm = ours(runner=runner, encoder_cache_items=1, extra={"enabled": False})
    play(vllm, "aba")
    assert vllm.encodes() == ["a", "b", "a"]
    assert vllm.connector.effective_configuration()["enabled"] is False


def test_the_control_zeroed_bytes_in_the_region_are_noticed_by_the_referee(ours: Make, runner: str) -> None:
    vllm = ours(runner=runner, encoder_cache_items=1)
    play(vllm, "ab")
    half = vllm.connector._decider
    for view in half.region.view(index(vllm).lookup(b"a").extents):
        view[:] = bytes(len(view))
        view.release()
    vllm.add("again", "a")
    with pytest.raises(WrongEncoderOutput, match="wrong bytes"):
        vllm.run()


# -- statistics --------------------------------------------------------------------------------------------------------


def test_statistics_of_the_schedulers_side_reach_the_front_end_as_plain_data(ours: Make, runner: str) -> None:
    pytest.importorskip("vllm.distributed.ec_transfer.ec_connector.metrics", reason="hooks exist from vLLM 0.31 on")
    vllm = ours(runner=runner, encoder_cache_items=1, extra={"encode_us_per_token": 10.0})
    play(vllm, "aba")
    totals = vllm.totals()
    assert (totals["hits"], totals["misses"]) == (1, 2)
    assert totals["encode_tokens_saved"] == 16
    assert totals["bytes_saved"] == 2 * ENTRY
    gauges = [stats["gauges"] for stats in vllm.stats if "gauges" in stats]
    assert gauges[-1]["capacity_bytes"] == 16 * ENTRY
    assert sum(stats.get("encode_seconds_saved", 0) for stats in vllm.stats) == pytest.approx(160e-6)


def test_evictions_and_refusals_are_counted_by_reason(ours: Make, runner: str) -> None:
    pytest.importorskip("vllm.distributed.ec_transfer.ec_connector.metrics", reason="hooks exist from vLLM 0.31 on")
    vllm = ours(2, runner=runner, encoder_cache_items=4)
    play(vllm, "abcd")
    vllm.add("large", "e", rows=48)
    vllm.run()
    assert vllm.totals()["evictions"] >= 2
    assert [stats["failures"] for stats in vllm.stats if "failures" in stats] == [{"too_large": 1}]
