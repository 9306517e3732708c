"""EncoderCache as its users see it: bytes, keys, dtypes, shapes, room, endings."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ecoffload import CacheClosed, ConfigError, EncoderCache, RegistrationRefused, SwapFailed
from ecoffload.region import HostRegion
from ecoffload.testing.devices import SimBackend, sim_of

Open = Callable[..., EncoderCache]


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def on(cache: EncoderCache, tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes in the memory of the cache's device."""
    there = cache._backend.ops.empty(tensor.numel() * tensor.element_size())
    if tensor.numel():
        there.copy_(torch.frombuffer(bytearray(raw(tensor)), dtype=torch.uint8))
    return there.view(tensor.dtype).reshape(tensor.shape)


def random(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


def fetched(cache: EncoderCache, tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    cache._backend.ops.synchronize()
    return tensor


def sim(cache: EncoderCache) -> SimBackend:
    return sim_of(cache._backend)


# --- bytes


def test_what_was_put_is_given_back_in_memory_of_its_own(cache: EncoderCache) -> None:
    tensor = on(cache, random(5000).view(50, 100))
    assert cache.put("a", tensor)
    first, second = (fetched(cache, cache.get("a")) for _ in range(2))
    assert torch.equal(first, random(5000).view(50, 100))
    first.zero_()
    assert torch.equal(second, random(5000).view(50, 100))
    assert raw(tensor) == raw(random(5000))


def test_a_get_right_behind_its_put_has_the_bytes(cache: EncoderCache) -> None:
    for seed in range(20):
        assert cache.put(f"{seed}", on(cache, random(3000, seed)))
        assert torch.equal(fetched(cache, cache.get(f"{seed}")), random(3000, seed))


@pytest.mark.parametrize("device", ["sim-int64", "sim-uint64", "sim-top"])
def test_a_get_behind_a_put_that_takes_long_returns_at_once_and_has_the_bytes(open_cache: Open, device: str) -> None:
    cache = open_cache(backend=device)
    sim(cache).device.latency = 0.15
    cache.put("a", on(cache, random(3000)))
    assert not cache.contains("a")
    begun = time.monotonic()
    got = cache.get("a")
    assert time.monotonic() - begun < 0.15
    assert torch.equal(fetched(cache, got), random(3000))


def test_a_tensor_may_be_dropped_as_soon_as_it_was_put(cache: EncoderCache) -> None:
    for seed in range(8):
        cache.put(f"{seed}", on(cache, random(4096, seed)))
        on(cache, torch.full((4096,), 0x55, dtype=torch.uint8))
    for seed, tensor in enumerate(cache.get_many([f"{seed}" for seed in range(8)]).values()):
        assert torch.equal(fetched(cache, tensor), random(4096, seed))


def test_with_copy_a_tensor_may_be_written_again_at_once(cache: EncoderCache) -> None:
    tensor = on(cache, random(4096))
    cache.put("a", tensor, copy=True)
    tensor.zero_()
    assert torch.equal(fetched(cache, cache.get("a")), random(4096))


def test_on_a_cpu_put_has_read_the_bytes_when_it_returns(open_cache: Open) -> None:
    cache, tensor = open_cache(), random(4096)
    cache.put("a", tensor)
    tensor.zero_()
    assert torch.equal(fetched(cache, cache.get("a")), random(4096))


def test_an_entry_keeps_its_first_bytes_until_it_is_invalidated(cache: EncoderCache) -> None:
    cache.put("a", on(cache, random(100, 1)))
    assert cache.put("a", on(cache, random(100, 2)))
    assert torch.equal(fetched(cache, cache.get("a")), random(100, 1))
    assert cache.invalidate("a") == 1
    assert cache.get("a") is None
    assert cache.invalidate("a") == 0
    cache.put("a", on(cache, random(100, 2)))
    assert torch.equal(fetched(cache, cache.get("a")), random(100, 2))


def test_a_gradient_is_not_kept(open_cache: Open) -> None:
    cache = open_cache()
    tensor = torch.rand(10, requires_grad=True)
    cache.put("a", tensor * 2)
    got = cache.get("a")
    assert got is not None
    assert not got.requires_grad
    assert torch.equal(got, tensor.detach() * 2)


# --- dtypes and shapes


def every_dtype() -> list[torch.dtype]:
    """What this torch can allocate and view as bytes."""
    found: list[torch.dtype] = []
    for name in sorted(vars(torch)):
        dtype = getattr(torch, name)
        if isinstance(dtype, torch.dtype) and dtype not in found:
            try:
                with warnings.catch_warnings(action="ignore"):  # torch says once that half complex is experimental
                    tensor = torch.empty(6, dtype=dtype)
                if not tensor.is_quantized and len(tensor.view(torch.uint8)):
                    found.append(dtype)
            except (RuntimeError, NotImplementedError, TypeError):
                continue
    return found


def test_there_are_dtypes_to_try() -> None:
    assert {torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint64} <= set(every_dtype())


@pytest.mark.parametrize("dtype", every_dtype(), ids=str)
@pytest.mark.parametrize("shape", [(6, 4), (), (0, 3)], ids=str)
def test_every_dtype_comes_back(open_cache: Open, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    cache = open_cache()
    count = int(np.prod(shape))
    words = random(count * dtype.itemsize) & (1 if dtype is torch.bool else 255)
    tensor = words.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    assert cache.put("a", tensor)
    got = cache.get("a")
    assert got is not None
    assert (got.dtype, got.shape, raw(got)) == (dtype, tensor.shape, raw(tensor))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2],
        lambda t: t[:, 3:7],
        lambda t: t[5],
        lambda t: t.expand(3, 20, 30),
        lambda t: t[3, 4],
        lambda t: t[:0],
        lambda t: t.unflatten(0, (4, 5)).permute(2, 0, 1),
    ],
    ids=["transposed", "strided", "columns", "row", "expanded", "0-d", "empty", "permuted"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.bool, torch.complex64])
def test_a_view_is_kept_as_it_looks(
    cache: EncoderCache, view: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    words = random(600 * dtype.itemsize) & (1 if dtype is torch.bool else 255)
    plain = words.view(dtype).reshape(20, 30)
    assert cache.put("a", view(on(cache, plain)))
    got = fetched(cache, cache.get("a"))
    assert (got.dtype, got.shape, raw(got)) == (dtype, view(plain).shape, raw(view(plain)))
    assert got.is_contiguous()


@pytest.mark.parametrize("make", [torch.conj, lambda t: t.conj().imag, torch._neg_view])
def test_lazily_conjugated_and_negated_views_are_kept_as_they_look(
    cache: EncoderCache, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    plain = torch.complex(torch.arange(12.0), torch.arange(12.0) + 100).reshape(3, 4)
    lazy = make(on(cache, plain))
    assert cache.put("a", lazy)
    got = fetched(cache, cache.get("a"))
    assert torch.equal(got, make(plain).resolve_conj().resolve_neg())
    assert not got.is_conj()
    assert not got.is_neg()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
        torch.empty(3, device="meta"),
        [1, 2],
        None,
        np.ones(3),
    ],
    ids=["sparse", "quantized", "meta", "list", "None", "numpy"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_what_is_no_dense_tensor_of_the_device_is_refused(open_cache: Open, tensor: Any) -> None:
    cache = open_cache()
    with pytest.raises(ConfigError) as caught:
        cache.put("a", tensor)
    assert caught.value.option == "tensor"
    assert len(cache) == 0


def test_b12_a_tensor_of_another_device_is_refused_with_both_named(open_cache: Open) -> None:
    cache = open_cache(backend="sim-int64")
    with pytest.raises(ConfigError, match="this cache serves"):
        cache.put("a", torch.zeros(3))
    assert len(cache) == 0


# --- keys


def test_text_and_its_bytes_are_the_same_key(open_cache: Open) -> None:
    cache = open_cache()
    cache.put("ä", random(10))
    assert cache.contains("ä".encode())
    assert "ä" in cache
    found = cache.get_many(["ä", "ä".encode(), "other"])
    assert list(found) == ["ä"], "under the key as it was given first, misses left out"


@pytest.mark.parametrize("key", ["k" * 256, b"\0" * 256, b"\0", "é" * 128, b"\xff\xfe"])
def test_keys_of_one_to_256_bytes_are_taken(open_cache: Open, key: str | bytes) -> None:
    cache = open_cache()
    assert cache.put(key, random(10))
    assert cache.get(key) is not None
    assert not cache.contains(b"\0\0")


@pytest.mark.parametrize("key", ["", b"", "k" * 257, "é" * 129, 5, None, bytearray(b"a"), ("a",), "\udc80"])
def test_other_keys_are_refused_by_every_call(open_cache: Open, key: Any) -> None:
    cache = open_cache()
    calls: list[Callable[[], Any]] = [
        lambda: cache.put(key, random(10)),
        lambda: cache.get(key),
        lambda: cache.get_many(["good", key]),
        lambda: cache.get_or_encode(key, lambda: random(10)),
        lambda: cache.contains(key),
        *([lambda: cache.invalidate(key)] if key is not None else []),
    ]
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.option == "key"
    assert len(cache) == 0


def test_one_key_is_no_list_of_keys(cache: EncoderCache) -> None:
    for key in ("abc", b"abc"):
        with pytest.raises(ConfigError, match="several keys"):
            cache.get_many(key)


def test_a_tensor_in_the_place_of_its_encoder_is_refused(cache: EncoderCache) -> None:
    with pytest.raises(ConfigError, match="lambda: tensor"):
        cache.get_or_encode("a", random(10))  # type: ignore[arg-type]


def test_nested_tensors_are_refused(open_cache: Open) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls its nested tensors a prototype
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(ConfigError, match="unbind"):
        open_cache().put("a", nested)


def test_a_known_key_keeps_its_tensor_until_it_is_invalidated(cache: EncoderCache) -> None:
    cache.put("a", on(cache, random(100, seed=1)))
    assert cache.put("a", on(cache, random(100, seed=2)))
    assert torch.equal(fetched(cache, cache.get("a")), random(100, seed=1))
    cache.invalidate("a")
    cache.put("a", on(cache, random(100, seed=2)))
    assert torch.equal(fetched(cache, cache.get("a")), random(100, seed=2))


# --- room


def test_e7_what_is_too_large_is_refused_every_time_and_evicts_nothing(cache: EncoderCache) -> None:
    cache.put("a", on(cache, random(1000)))
    for _ in range(3):
        assert cache.put("big", on(cache, random((64 << 10) + 1))) is False
    assert fetched(cache, cache.get("a")) is not None
    assert cache.stats().saves_refused_too_large == 3
    assert cache.stats().evictions == 0


def test_what_is_too_large_is_said_once_with_its_size_and_the_caches(
    cache: EncoderCache, caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("big", "big", "other"):
        cache.put(key, on(cache, random((64 << 10) + 1)))
    (record,) = [record for record in caplog.records if record.name == "ecoffload.scheduler"]
    assert record.getMessage() == "key b'big' is not kept: its 65537 bytes are more than the whole cache's 65536"


def test_the_whole_capacity_is_of_use(cache: EncoderCache) -> None:
    assert cache.put("all", on(cache, random(64 << 10)))
    assert torch.equal(fetched(cache, cache.get("all")), random(64 << 10))


def test_the_least_recently_used_makes_room(open_cache: Open) -> None:
    cache = open_cache("16KiB", policy="lru")
    for key in "abcd":
        cache.put(key, random(4096))
    assert cache.get("a") is not None
    cache.put("e", random(4096))
    assert [key for key in "abcde" if cache.contains(key)] == list("acde")
    assert (cache.stats().evictions, cache.stats().evicted_bytes) == (1, 4096)


@pytest.mark.parametrize("device", ["sim-int64", "sim-top"])
def test_e7_when_all_is_in_flight_the_answer_is_no_at_once(open_cache: Open, device: str) -> None:
    cache = open_cache("16KiB", backend=device)
    sim(cache).device.latency = 0.2
    tensor = on(cache, random(16 << 10))
    cache.put("a", tensor)
    begun = time.monotonic()
    assert cache.put("b", on(cache, random(10))) is False
    assert time.monotonic() - begun < 0.2
    cache.flush()
    assert cache.put("b", on(cache, random(10)))


@pytest.mark.parametrize("device", ["sim-int64", "sim-uint64", "sim-top"])
def test_e9_an_entry_is_not_evicted_while_it_is_loaded(open_cache: Open, device: str) -> None:
    cache = open_cache("16KiB", backend=device)
    cache.put("a", on(cache, random(16 << 10)))
    cache.flush()
    sim(cache).device.latency = 0.1
    got = cache.get("a")
    assert cache.put("b", on(cache, random(16 << 10, 1))) is False
    assert torch.equal(fetched(cache, got), random(16 << 10))
    sim(cache).device.latency = 0
    assert cache.put("b", on(cache, random(16 << 10, 1)))
    cache.flush()


def test_e5_invalidating_while_a_save_is_in_flight_gives_its_room_to_nobody_yet(open_cache: Open) -> None:
    cache = open_cache("16KiB", backend="sim-int64")
    sim(cache).device.latency = 0.1
    cache.put("a", on(cache, random(16 << 10)))
    assert cache.invalidate() == 1
    assert cache.put("b", on(cache, random(100, 1))) is False
    cache.flush()
    assert not cache.contains("a")
    assert cache.put("b", on(cache, random(16 << 10, 1)))
    assert torch.equal(fetched(cache, cache.get("b")), random(16 << 10, 1))


# --- faults


@pytest.mark.parametrize("device", ["sim-int64", "sim-uint64"])
def test_b11_a_put_that_cannot_be_submitted_is_false_and_the_next_works(open_cache: Open, device: str) -> None:
    cache = open_cache(backend=device)
    sim(cache).inject_fault("submit")
    assert cache.put("a", on(cache, random(100))) is False
    assert cache.put("a", on(cache, random(100))) is True
    assert torch.equal(fetched(cache, cache.get("a")), random(100))


@pytest.mark.parametrize("device", ["sim-int64", "sim-uint64", "sim-top"])
def test_b11_a_put_that_fails_late_is_a_miss(open_cache: Open, device: str) -> None:
    cache = open_cache(backend=device)
    sim(cache).inject_fault("late")
    cache.put("a", on(cache, random(100)))
    cache.flush()
    assert cache.get("a") is None
    assert cache.stats().saves_failed == 1
    assert cache.stats().used_bytes == 0


@pytest.mark.parametrize("device", ["sim-int64", "sim-uint64", "sim-top"])
def test_e12_a_get_that_fails_late_is_raised_with_its_key_by_the_next_call(open_cache: Open, device: str) -> None:
    cache = open_cache(backend=device)
    for key in ("a", "b"):
        cache.put(key, on(cache, random(100)))
    cache.flush()
    sim(cache).inject_fault("late")
    cache.get("a")
    assert cache._worker.synchronize(30)
    with pytest.raises(SwapFailed) as caught:
        cache.get("b")
    assert caught.value.keys == (b"a",)
    assert torch.equal(fetched(cache, cache.get("b")), random(100))
    assert cache.get("a") is None, "its entry is not trusted any more"
    assert cache.stats().loads_failed == 1
    cache.flush()
    assert cache.stats().pinned_entries == 0


def test_e12_a_get_whose_submit_fails_is_repeated_and_right(open_cache: Open) -> None:
    cache = open_cache(backend="sim-uint64")
    cache.put("a", on(cache, random(100)))
    cache.flush()
    sim(cache).inject_fault("submit")
    assert torch.equal(fetched(cache, cache.get("a")), random(100))
    assert cache.stats().worker["loads_repeated"] == 1


def test_c7_register_require_refuses_and_prefer_says_why(open_cache: Open, shm: Path) -> None:
    from ecoffload.testing.devices import simulated

    backend = simulated("sim-uint64")
    sim_of(backend).inject_fault("register")
    with pytest.raises(RegistrationRefused):
        open_cache(backend=backend, register="require")
    assert os.listdir(shm) == []
    sim_of(backend).inject_fault("register")
    cache = open_cache(backend=backend, register="prefer")
    assert cache.stats().worker["registered"] is False
    assert "801" in cache.stats().worker["registration"]
    cache.put("a", on(cache, random(100)))
    assert torch.equal(fetched(cache, cache.get("a")), random(100))


# --- checksums


@pytest.mark.parametrize("device", ["cpu", "sim-uint64"])
def test_a_byte_that_changed_in_the_region_is_a_miss(open_cache: Open, device: str) -> None:
    cache = open_cache(backend=device, checksum=True)
    for key in ("a", "b"):
        cache.put(key, on(cache, random(5000)))
    assert cache.flush(30)
    entry = cache._scheduler.index.lookup(b"a")
    assert entry is not None
    view = cache.region.view(entry.extents)[0]
    view[17] ^= 1
    view.release()
    hits = cache.stats().hits
    assert cache.get("a") is None
    assert torch.equal(fetched(cache, cache.get("b")), random(5000))
    stats = cache.stats()
    assert (stats.hits - hits, stats.misses, stats.entries) == (1, 1, 1)
    cache.put("a", on(cache, random(5000)))
    assert cache.flush(30)
    assert torch.equal(fetched(cache, cache.get("a")), random(5000))


def test_without_checksums_nothing_is_computed(open_cache: Open) -> None:
    cache = open_cache()
    cache.put("a", random(100))
    entry = cache._scheduler.index.lookup(b"a")
    assert entry is not None
    assert entry.checksum is None


# --- the end


def test_after_close_every_call_says_so(cache: EncoderCache, shm: Path) -> None:
    cache.put("a", on(cache, random(100)))
    tensor = on(cache, random(100))
    cache.close()
    cache.close()
    calls: list[Callable[[], Any]] = [
        lambda: cache.put("a", tensor),
        lambda: cache.get("a"),
        lambda: cache.get_many(["a"]),
        lambda: cache.get_or_encode("a", lambda: tensor),
        lambda: cache.contains("a"),
        cache.invalidate,
        cache.flush,
        lambda: len(cache),
    ]
    for call in calls:
        with pytest.raises(CacheClosed, match="closed"):
            call()
    assert "closed" in repr(cache)
    assert os.listdir(shm) == []


def test_after_close_the_last_figures_can_still_be_read(cache: EncoderCache) -> None:
    cache.put("a", on(cache, random(100)))
    assert not cache.closed
    cache.close()
    assert cache.closed
    stats = cache.stats()
    assert (stats.saves, stats.bytes_saved, stats.entries) == (1, 100, 1)


def test_leaving_a_with_block_closes(open_cache: Open) -> None:
    with open_cache() as cache:
        cache.put("a", random(10))
    with pytest.raises(CacheClosed):
        cache.get("a")


@pytest.mark.parametrize("device", ["sim-int64", "sim-uint64", "sim-top"])
def test_c9_close_waits_for_copies_in_flight(open_cache: Open, device: str) -> None:
    cache = open_cache(backend=device)
    backend = sim(cache)
    cache.put("a", on(cache, random(5000)))
    cache.flush()
    backend.device.latency = 0.05
    cache.put("b", on(cache, random(5000)))
    got = cache.get("a")
    cache.close()
    assert backend.device.registered == {}
    backend.device.latency = 0
    assert got is not None
    assert torch.equal(got, random(5000))


def test_a_tensor_that_was_given_out_outlives_the_cache(open_cache: Open) -> None:
    cache = open_cache()
    cache.put("a", random(100))
    got = cache.get("a")
    cache.close()
    assert got is not None
    assert torch.equal(got, random(100))


def _use(cache: EncoderCache, answers: Any) -> None:
    said = []
    for call in (lambda: cache.get("a"), lambda: cache.put("b", random(10)), cache.stats):
        try:
            call()
            said.append("nothing")
        except CacheClosed as error:
            said.append(str(error))
    cache.close()
    answers.put(said)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_f9_a_forked_child_is_refused_with_a_clear_word_and_harms_nothing(open_cache: Open) -> None:
    cache = open_cache()
    cache.put("a", random(100))
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_use, args=(cache, answers))
    child.start()
    said = answers.get()
    child.join(30)
    assert child.exitcode == 0
    assert len(said) == 3
    assert all("before the process was forked; open one in the child" in word for word in said)
    assert torch.equal(fetched(cache, cache.get("a")), random(100))


# --- many threads


def test_threads_may_do_anything_at_once(cache: EncoderCache) -> None:
    wrong: list[BaseException] = []
    end = time.monotonic() + 1.0

    def work(me: int) -> None:
        rng = np.random.default_rng(me)
        try:
            while time.monotonic() < end:
                key = int(rng.integers(0, 12))
                choice = int(rng.integers(0, 10))
                if choice < 4:
                    cache.put(str(key), on(cache, random(500 + 700 * key, key)))
                elif choice < 8:
                    got = cache.get(str(key))
                    if got is not None:
                        assert torch.equal(fetched(cache, got), random(500 + 700 * key, key))
                elif choice == 8:
                    got = cache.get_or_encode(str(key), lambda: on(cache, random(500 + 700 * key, key)))  # noqa: B023
                    assert torch.equal(fetched(cache, got), random(500 + 700 * key, key))
                else:
                    cache.invalidate(str(key))
                    cache.stats()
        except BaseException as exc:
            wrong.append(exc)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.flush(30)
    cache._backend.ops.synchronize()
    cache.flush(30)
    cache._scheduler.index.check()
    assert cache.stats().pinned_entries == 0


# --- options


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"capacity": 0}, "capacity"),
        ({"capacity": -5}, "capacity"),
        ({"capacity": "2g"}, "capacity"),
        ({"capacity": 1.5}, "capacity"),
        ({"capacity": True}, "capacity"),
        ({"granule": 100}, "granule"),
        ({"granule": 0}, "granule"),
        ({"granule": True}, "granule"),
        ({"register": "always"}, "register"),
        ({"policy": "newest"}, "policy"),
        ({"policy": b"lru"}, "policy"),
        ({"namespace": "\ud800"}, "namespace"),
        ({"checksum": "off"}, "checksum"),
        ({"checksum": None}, "checksum"),
        ({"warm": "no"}, "warm"),
        ({"trust_uuids": 1}, "trust_uuids"),
        ({"ghost_stats": "no"}, "ghost_stats"),
        ({"scrub_on_close": []}, "scrub_on_close"),
        ({"reclaim_after": "1h"}, "reclaim_after"),
        ({"reclaim_after": -1}, "reclaim_after"),
        ({"reclaim_after": math.nan}, "reclaim_after"),
        ({"reclaim_after": 1 << 2000}, "reclaim_after"),
        ({"backend": 3}, "backend"),
        ({"backend": b"cpu"}, "backend"),
    ],
)
def test_f1_options_that_make_no_sense_are_refused_by_name_and_leave_nothing(
    open_cache: Open, shm: Path, options: dict[str, Any], option: str
) -> None:
    with pytest.raises(ConfigError, match=option) as caught:
        open_cache(**options)
    assert caught.value.option == option
    assert os.listdir(shm) == []


@pytest.mark.parametrize("directory", [None, 3, b"/dev/shm", ["/dev/shm"], "", "/dev/shm\0", "\ud800"])
def test_a_directory_that_is_no_path_is_refused_by_name(directory: Any) -> None:
    with pytest.raises(ConfigError, match="directory is"):
        EncoderCache("64KiB", directory=directory)


def test_f2_what_is_in_force_can_be_asked(open_cache: Open) -> None:
    stats = open_cache(backend="sim-uint64").stats()
    assert stats.worker["backend"] == "sim-uint64"
    assert stats.worker["encoding"] == "uint64"
    assert stats.worker["registered"] is True
    assert stats.start["how"] == "created"
    plain = stats.asdict()
    assert plain["capacity_bytes"] == 64 << 10
    assert plain["hit_rate"] == 0.0


def test_the_region_is_private_while_it_lives(open_cache: Open, shm: Path) -> None:
    open_cache(id="mine")
    (name,) = os.listdir(shm)
    assert (shm / name).stat().st_mode & 0o777 == 0o600
    assert isinstance(open_cache(id="other").region, HostRegion)


def test_a_get_right_behind_its_put_finds_the_entry_although_its_checksum_is_still_computed() -> None:
    with EncoderCache("1MiB", checksum=True) as cache:
        for number in range(20):
            tensor = torch.full((1000,), number)
            assert cache.put(f"key-{number}", tensor)
            found = cache.get(f"key-{number}")
            assert found is not None
            assert torch.equal(found, tensor)


@pytest.mark.parametrize("timeout", ["1", True, float("nan"), 10**400])
def test_a_flush_for_no_number_of_seconds_is_refused(timeout: Any) -> None:
    with EncoderCache("64KiB") as cache, pytest.raises(ConfigError, match="write seconds as a number from 0 up"):
        cache.flush(timeout)


@pytest.mark.parametrize("timeout", [0, -1, float("-inf")])
def test_a_flush_for_no_time_says_whether_all_has_landed(open_cache: Open, timeout: float) -> None:
    cache = open_cache(backend="sim-uint64")
    stream = cache._backend.ops.current_stream()
    cache._backend.ops.delay(stream, 100)
    cache.put("a", on(cache, random(1000)))
    assert not cache.flush(timeout)
    assert cache.flush(30)
    assert cache.flush(timeout)


@pytest.mark.parametrize("timeout", [float("inf"), 1e300])
def test_a_flush_for_ever_ends_with_the_save(cache: EncoderCache, timeout: float) -> None:
    cache.put("a", on(cache, random(1000)))
    assert cache.flush(timeout)
    assert cache.contains("a")
