"""get_or_encode: one encode a key at a time, whatever goes wrong in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ecoffload import CacheClosed, ConfigError, EncoderCache

Open = Callable[..., EncoderCache]


def random(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


def on(cache: EncoderCache, tensor: torch.Tensor) -> torch.Tensor:
    return cache._backend.ops.empty(tensor.numel()).copy_(tensor)


class Crowd:
    """Threads that all ask for one key at once."""

    def __init__(self, cache: EncoderCache, count: int, encode: Callable[[], torch.Tensor], key: str = "a") -> None:
        self.results: list[Any] = [None] * count
        self._gate = threading.Barrier(count)

        def ask(i: int) -> None:
            self._gate.wait()
            try:
                tensor = cache.get_or_encode(key, encode)
                cache._backend.ops.synchronize()
                self.results[i] = tensor
            except Exception as exc:
                self.results[i] = exc

        self.threads = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
        for thread in self.threads:
            thread.start()

    def join(self) -> list[Any]:
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive(), "somebody waits for ever"
        return self.results


def all_wait(cache: EncoderCache, count: int) -> None:
    """Until so many wait for the one who encodes."""
    end = time.monotonic() + 30
    while (work := cache._encoding.get(b"a")) is None or len(work.done._cond._waiters) < count:  # type: ignore[attr-defined]
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("checksum", [False, True], ids=["plain", "checksums"])
def test_eight_threads_encode_once(cache: EncoderCache, open_cache: Open, checksum: bool) -> None:
    if checksum:
        cache = open_cache(checksum=True)
    calls: list[int] = []
    go = threading.Event()

    def encode() -> torch.Tensor:
        calls.append(1)
        go.wait(30)
        return on(cache, random(5000))

    crowd = Crowd(cache, 8, encode)
    all_wait(cache, 7)
    go.set()
    results = crowd.join()
    assert len(calls) == 1
    assert all(torch.equal(tensor, random(5000)) for tensor in results)
    assert cache.stats().encodes == 1
    assert cache._encoding == {}


def test_an_exception_goes_to_the_one_who_encoded_and_another_encodes(open_cache: Open) -> None:
    cache = open_cache()
    calls: list[int] = []

    def encode() -> torch.Tensor:
        calls.append(1)
        if len(calls) <= 2:
            raise ValueError(f"attempt {len(calls)}")
        return random(100)

    results = Crowd(cache, 6, encode).join()
    raised = [str(result) for result in results if isinstance(result, Exception)]
    assert sorted(raised) == ["attempt 1", "attempt 2"]
    assert sum(torch.is_tensor(result) and torch.equal(result, random(100)) for result in results) == 4
    assert len(calls) == 3
    assert cache.stats().encodes == 1


@pytest.mark.parametrize("device", ["cpu", "sim-int64"])
def test_what_is_too_large_is_shared_by_all_who_waited(open_cache: Open, device: str) -> None:
    cache = open_cache("8KiB", backend=device)
    calls: list[int] = []
    go = threading.Event()

    def encode() -> torch.Tensor:
        calls.append(1)
        go.wait(30)
        return on(cache, random(9000))

    crowd = Crowd(cache, 6, encode)
    all_wait(cache, 5)
    go.set()
    results = crowd.join()
    assert all(torch.equal(tensor, random(9000)) for tensor in results)
    assert len({tensor.data_ptr() for tensor in results}) == len(calls) == 1
    assert len(cache) == 0


def test_different_keys_are_encoded_side_by_side(open_cache: Open) -> None:
    cache = open_cache()
    both = threading.Barrier(2, timeout=30)

    def encode() -> torch.Tensor:
        both.wait()
        return random(100)

    first, second = Crowd(cache, 1, encode, "a"), Crowd(cache, 1, encode, "b")
    assert all(torch.is_tensor(result) for result in [*first.join(), *second.join()])


def test_others_may_use_the_cache_while_one_encodes(open_cache: Open) -> None:
    cache = open_cache()
    inside, go = threading.Event(), threading.Event()

    def encode() -> torch.Tensor:
        inside.set()
        go.wait(30)
        return random(100)

    crowd = Crowd(cache, 1, encode)
    assert inside.wait(30)
    assert cache.put("b", random(10))
    assert cache.get("b") is not None
    assert cache.stats().entries == 1
    go.set()
    crowd.join()


def test_an_encoder_that_asks_for_its_own_key_is_refused_and_not_hung(open_cache: Open) -> None:
    cache = open_cache()

    def encode() -> torch.Tensor:
        return cache.get_or_encode("a", lambda: random(10))

    with pytest.raises(ConfigError, match="asked for the same key again"):
        cache.get_or_encode("a", encode)
    assert torch.equal(cache.get_or_encode("a", lambda: random(10)), random(10))


def test_an_encoder_may_ask_for_other_keys(open_cache: Open) -> None:
    cache = open_cache()
    tensor = cache.get_or_encode("a", lambda: cache.get_or_encode("b", lambda: random(10)) + 1)
    assert torch.equal(tensor, random(10) + 1)
    assert cache.contains("b")


@pytest.mark.parametrize("result", [None, [1, 2], torch.eye(2).to_sparse(), torch.empty(2, device="meta")])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_no_tensor_of_the_device_is_refused_and_the_next_may_encode(open_cache: Open, result: Any) -> None:
    cache = open_cache()
    with pytest.raises(ConfigError, match=r"encode\(\) returned"):
        cache.get_or_encode("a", lambda: result)
    assert torch.equal(cache.get_or_encode("a", lambda: random(10)), random(10))


def test_what_is_there_is_not_encoded(cache: EncoderCache) -> None:
    cache.put("a", on(cache, random(100)))

    def never() -> torch.Tensor:
        raise AssertionError("it is there")

    tensor = cache.get_or_encode("a", never)
    cache._backend.ops.synchronize()
    assert torch.equal(tensor, random(100))


def test_after_an_invalidation_it_is_encoded_again(open_cache: Open) -> None:
    cache = open_cache()
    cache.get_or_encode("a", lambda: random(10, 1))
    cache.invalidate()
    assert torch.equal(cache.get_or_encode("a", lambda: random(10, 2)), random(10, 2))
    assert cache.stats().encodes == 2


def test_encoders_that_wait_for_each_other_are_let_go_when_the_cache_is_closed() -> None:
    both = threading.Barrier(2)
    cache = EncoderCache("1MiB")
    ends: list[BaseException] = []

    def encode(mine: str, other: str) -> None:
        def wait() -> torch.Tensor:
            both.wait(10)
            return cache.get_or_encode(other, lambda: torch.ones(3))

        try:
            cache.get_or_encode(mine, wait)
        except BaseException as exc:
            ends.append(exc)

    threads = [threading.Thread(target=encode, args=keys, daemon=True) for keys in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    while len(cache._encoding) < 2 or both.n_waiting:
        threading.Event().wait(0.01)
    cache.close()
    for thread in threads:
        thread.join(20)
    assert [type(each) for each in ends] == [CacheClosed, CacheClosed]


def test_what_was_encoded_while_the_cache_was_closed_is_still_the_callers() -> None:
    cache = EncoderCache("1MiB")

    def encode() -> torch.Tensor:
        cache.close()
        return torch.arange(3)

    assert cache.get_or_encode("key", encode).tolist() == [0, 1, 2]
    assert cache.stats().saves == 0
    with pytest.raises(CacheClosed):
        cache.get_or_encode("key", encode)
