"""The cache against a model: any sequence of calls gives right bytes, sound ownership, and no pins at the end."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ecoffload import CacheClosed, EncoderCache, get_backend

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int64,
]
SHAPES = st.one_of(
    st.just(()),
    st.just((0, 7)),
    st.tuples(st.integers(1, 60), st.integers(1, 300)),
    st.tuples(st.integers(1, 5), st.integers(1, 50), st.integers(1, 50)),
    st.tuples(st.integers(30_000, 90_000)),
)
KEYS = st.integers(0, 12).map(lambda i: f"key-{i}")


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


class CacheMachine(RuleBasedStateMachine):
    backend = "cpu"

    @initialize(policy=st.sampled_from(["lru", "fifo", "s3-fifo", "gdsf", "auto"]))
    def open(self, policy: str) -> None:
        self.cache = EncoderCache("256KiB", backend=self.backend, policy=policy)
        self.ops = get_backend(self.backend).ops
        self.truth: dict[str, tuple[torch.dtype, tuple[int, ...], bytes]] = {}
        self.closed = False

    def make(self, dtype: torch.dtype, shape: tuple[int, ...], seed: int, strided: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        count = 1
        for side in shape:
            count *= side
        words = torch.randint(0, 2 if dtype is torch.bool else 256, (count * dtype.itemsize,), generator=generator)
        there = self.ops.empty(count * dtype.itemsize).copy_(words.to(torch.uint8))
        tensor = there.view(dtype).reshape(shape)
        return tensor.transpose(0, -1) if strided and len(shape) > 1 else tensor

    @rule(key=KEYS, dtype=st.sampled_from(DTYPES), shape=SHAPES, seed=st.integers(0, 999), strided=st.booleans())
    def put(self, key: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int, strided: bool) -> None:
        tensor = self.make(dtype, shape, seed, strided)
        known = self.cache._scheduler.known(key.encode())  # on its way counts as well: it keeps what it has
        before = len(self.cache)
        kept = self.cache.put(key, tensor)
        if tensor.numel() * tensor.element_size() > 256 << 10:
            assert kept == known, "larger than the region: refused unless the key was known"
            assert len(self.cache) == before, "and nothing else was evicted"
        elif not known:
            if not kept:  # room that a copy in flight still uses is given to nobody
                assert self.backend != "cpu"
                self.ops.synchronize()
                assert self.cache.flush(timeout=30)
                kept = self.cache.put(key, tensor)
            assert kept
            self.truth[key] = (tensor.dtype, tuple(tensor.shape), raw(tensor))

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        self.compare(key, self.cache.get(key))

    @rule(keys=st.lists(KEYS, max_size=6))
    def get_many(self, keys: list[str]) -> None:
        for key, tensor in self.cache.get_many(keys).items():
            self.compare(key, tensor)

    @rule(key=KEYS, seed=st.integers(0, 999))
    def get_or_encode(self, key: str, seed: int) -> None:
        encoded: list[torch.Tensor] = []

        def encode() -> torch.Tensor:
            encoded.append(self.make(torch.float32, (17, 31), seed, False))
            return encoded[0]

        tensor = self.cache.get_or_encode(key, encode)
        if encoded:
            self.truth[key] = (encoded[0].dtype, (17, 31), raw(encoded[0]))
        self.compare(key, tensor)

    def compare(self, key: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            self.ops.synchronize()
            assert (tensor.dtype, tuple(tensor.shape), raw(tensor)) == self.truth[key]

    @rule(key=KEYS)
    def invalidate_one(self, key: str) -> None:
        assert self.cache.invalidate(key) in (0, 1)
        assert self.cache.get(key) is None

    @rule()
    def invalidate_all(self) -> None:
        count = len(self.cache)
        assert self.cache.invalidate() == count
        assert len(self.cache) == 0

    @rule()
    def flush(self) -> None:
        assert self.cache.flush(timeout=5)

    @rule()
    def close_and_open(self) -> None:
        self.cache.close()
        with pytest.raises(CacheClosed):
            self.cache.get("key-0")
        self.cache = EncoderCache("256KiB", backend=self.backend)
        self.truth.clear()

    @invariant()
    def every_granule_has_one_owner(self) -> None:
        self.cache._scheduler.index.check()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.flush(timeout=5)
            self.ops.synchronize()
            stats = self.cache.stats()
            assert stats.pinned_entries == 0
            self.cache.close()


class OnHighAddresses(CacheMachine):
    backend = "sim-uint64"


class AtTheTopOfTheAddressSpace(CacheMachine):
    backend = "sim-top"


TestCpu = CacheMachine.TestCase
TestCpu.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestSimUint64 = OnHighAddresses.TestCase
TestSimUint64.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)
TestSimTop = AtTheTopOfTheAddressSpace.TestCase
TestSimTop.settings = settings(max_examples=5, stateful_step_count=20, deadline=None)
