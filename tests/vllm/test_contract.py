"""The contract between vLLM and an encoder-cache connector, with the reference connector in the real scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., Any]


def test_the_second_request_for_an_image_reloads_it_after_eviction_from_the_encoder_cache(
    engine: Make, runner: str
) -> None:
    vllm = engine(runner=runner, encoder_cache_items=1)
    for name in ("a", "b", "a"):
        vllm.add(f"{name}{vllm.steps}", name)
        vllm.run()
    assert vllm.encodes() == ["a", "b"]


def test_statistics_of_the_scheduler_side_reach_the_front_end_as_plain_data(engine: Make, runner: str) -> None:
    pytest.importorskip("vllm.distributed.ec_transfer.ec_connector.metrics", reason="hooks exist from vLLM 0.31 on")
    vllm = engine(runner=runner, encoder_cache_items=1)
    for step, name in enumerate(("a", "b", "a")):
        vllm.add(f"{name}{step}", name)
        vllm.run()
    assert vllm.totals() == {"hits": 1, "misses": 2}


def test_two_requests_of_one_step_that_share_an_image_encode_it_once(engine: Make, runner: str) -> None:
    vllm = engine(runner=runner)
    vllm.add("one", "a")
    vllm.add("two", "a")
    vllm.run()
    assert vllm.encodes() == ["a"]
    assert vllm.tokens == {"one": 2, "two": 2}


def test_two_requests_of_one_step_that_share_an_image_load_it_once(engine: Make, runner: str) -> None:
    vllm = engine(runner=runner, encoder_cache_items=2)
    for name in ("a", "b", "c"):
        vllm.add(name, name)
        vllm.run()
    vllm.add("one", "a")
    vllm.add("two", "a")
    plan = vllm.step().ec_connector_metadata
    assert list(plan.loads) == ["a"]
    vllm.run()
    assert vllm.encodes() == ["a", "b", "c"]


def test_an_image_twice_in_one_request_is_encoded_once(engine: Make, runner: str) -> None:
    vllm = engine(runner=runner)
    vllm.add("one", "a", "a")
    vllm.run()
    assert vllm.encodes() == ["a"]


def test_a_preempted_request_resumes_with_its_image(engine: Make, runner: str) -> None:
    vllm = engine(runner=runner, encoder_cache_items=1)
    request = vllm.add("one", "a", max_tokens=6)
    vllm.step()
    vllm.preempt_all()
    vllm.add("two", "b")
    vllm.run()
    assert request.num_preemptions == 1
    assert vllm.tokens == {"one": 6, "two": 2}


def test_a_full_kv_cache_preempts_and_every_request_still_gets_its_image(engine: Make, runner: str) -> None:
    vllm = engine(runner=runner, encoder_cache_items=2, blocks=8)
    requests = [vllm.add(f"r{index}", name, text=10, max_tokens=24) for index, name in enumerate("abca")]
    vllm.run()
    assert sum(request.num_preemptions for request in requests) > 0
    assert set(vllm.tokens.values()) == {24}


def test_chunked_prefill_loads_an_image_that_spans_two_chunks(engine: Make, runner: str) -> None:
    vllm = engine(runner=runner, encoder_cache_items=1, max_batched_tokens=16)
    for step, name in enumerate(("a", "b", "a")):
        vllm.add(f"{name}{step}", name, text=11)
        vllm.run()
    assert vllm.encodes() == ["a", "b"]


def test_an_abort_with_transfers_in_flight_leaves_nothing_pending(engine: Make, runner: str) -> None:
    vllm = engine(runner=runner, encoder_cache_items=1, extra={"late": {"0": 5}})
    for name in ("a", "b"):
        vllm.add(name, name)
        vllm.run()
    vllm.add("again", "a")
    vllm.step()
    vllm.abort("again")
    vllm.run()
    assert not vllm.connector.has_pending_push_work()
    assert not any(entry.pins for entry in vllm.connector.half.entries.values())


def test_the_engine_keeps_stepping_until_a_late_save_is_confirmed(engine: Make, runner: str) -> None:
    vllm = engine(runner=runner, extra={"late": {"0": 9}})
    vllm.add("one", "a")
    assert vllm.run() >= 9
    assert vllm.connector.half.entries["a"].ready


def test_an_entry_still_being_saved_is_not_promised(engine: Make, runner: str) -> None:
    vllm = engine(runner=runner, encoder_cache_items=1, extra={"late": {"0": 50}})
    vllm.add("one", "a")
    vllm.add("two", "b")
    for _ in range(4):
        vllm.step()
    vllm.add("three", "a")
    vllm.step()
    assert vllm.encodes().count("a") == 2
    vllm.run()


def test_a_planned_save_that_vllm_never_makes_does_not_stay_on_its_way(engine: Make, runner: str) -> None:
    vllm = engine(runner=runner, encoder_cache_items=3, extra={"capacity": 2})
    for name in ("a", "x", "y"):
        vllm.add(name, name)
        vllm.run()
    # Room for "b" costs "a" its place in the encoder cache, and the same request brings "a" back: its tensor never left
    # the worker, so model runner V2 does not count it as new.
    vllm.add("both", "b", "a")
    vllm.run()
    assert vllm.encodes() == ["a", "x", "y", "b", "a"]
    assert all(entry.ready for entry in vllm.connector.half.entries.values())


def test_a_step_scheduled_ahead_of_the_last_one_reads_what_it_was_promised(engine: Make, runner: str) -> None:
    vllm = engine(runner=runner, asynchronous=True, encoder_cache_items=1, extra={"capacity": 2, "late": {"0": 2}})
    for turn, name in enumerate("abacabdbca"):
        vllm.add(f"r{turn}", name, max_tokens=3)
        vllm.step()
    vllm.run()
    assert set(vllm.tokens.values()) == {3}


def test_an_encoder_cache_reset_between_steps_is_survived(engine: Make, runner: str) -> None:
    vllm = engine(runner=runner, encoder_cache_items=4)
    vllm.add("one", "a")
    vllm.run()
    vllm.scheduler.reset_encoder_cache()
    vllm.workers[0].cache.clear()
    vllm.add("two", "a")
    vllm.run()
    assert vllm.encodes() == ["a"]


def test_three_entries_of_room_serve_many_images_without_a_wrong_byte(engine: Make, runner: str) -> None:
    vllm = engine(runner=runner, encoder_cache_items=2, extra={"capacity": 3, "late": {"0": 1}})
    for turn in range(30):
        vllm.add(f"r{turn}", f"i{turn % 4}", f"i{turn * 7 % 5}")
        vllm.step()
    vllm.run()
    assert len(vllm.connector.half.entries) <= 3
    assert all(vllm.tokens[f"r{turn}"] == 2 for turn in range(30))


@pytest.mark.parametrize("late", [{"1": 6}, {"0": 6}])
def test_an_entry_stays_pinned_until_the_slowest_of_two_ranks_has_read_it(
    engine: Make, runner: str, late: dict[str, int]
) -> None:
    vllm = engine(runner=runner, ranks=2, encoder_cache_items=1, extra={"capacity": 2, "late": late})
    for turn, name in enumerate("abacadabcabd"):
        vllm.add(f"r{turn}", name)
        vllm.step()
    vllm.run()
    assert vllm.encodes(0) == vllm.encodes(1)
    assert len(vllm.encodes()) < 12


def test_a_producer_alone_saves_and_never_loads(engine: Make, runner: str) -> None:
    vllm = engine(runner=runner, role="ec_producer", encoder_cache_items=1)
    for step, name in enumerate(("a", "b", "a")):
        vllm.add(f"{name}{step}", name, max_tokens=1)
        vllm.run()
    assert vllm.encodes() == ["a", "b", "a"]
    assert sorted(vllm.connector.half.entries) == ["a", "b"]
    assert not {name for who, name in vllm.calls if who == "worker0"} & {"start_load_caches"}


def test_a_consumer_alone_loads_what_a_producer_saved_and_never_saves(engine: Make, runner: str) -> None:
    producer = engine(runner=runner, role="ec_producer")
    producer.add("one", "a", max_tokens=1)
    producer.run()
    consumer = engine(runner=runner, role="ec_consumer")
    consumer.add("one", "a")
    consumer.add("two", "b")
    consumer.run()
    assert consumer.encodes() == ["b"]
    assert sorted(consumer.connector.half.entries) == ["a"]


def test_objects_shared_by_one_process_survive_a_step(engine: Make, runner: str) -> None:
    vllm = engine(runner=runner, pickled=False, encoder_cache_items=1)
    for step, name in enumerate(("a", "b", "a")):
        vllm.add(f"{name}{step}", name)
        vllm.run()
    assert vllm.encodes() == ["a", "b"]


def test_the_referee_sees_a_promise_that_was_not_kept(engine: Make, runner: str) -> None:
    from harness import WrongEncoderOutput

    vllm = engine(runner=runner, encoder_cache_items=1)
    for name in ("a", "b"):
        vllm.add(name, name)
        vllm.run()
    vllm.workers[0].connector.half.load = lambda cache, plan: None
    vllm.add("again", "a")
    with pytest.raises(WrongEncoderOutput, match="Encoder cache miss for a"):
        vllm.run()


def test_the_referee_sees_wrong_bytes(engine: Make, runner: str) -> None:
    from harness import WrongEncoderOutput

    vllm = engine(runner=runner, encoder_cache_items=1, extra={"tamper": True})
    for name in ("a", "b"):
        vllm.add(name, name)
        vllm.run()
    vllm.add("again", "a")
    with pytest.raises(WrongEncoderOutput, match="wrong bytes"):
        vllm.run()
