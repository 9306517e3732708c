"""swap_blocks and swap_blocks_batch: what engines call today, and what is refused instead of copied."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ecoffload import ConfigError, DescriptorError, registry, swap_blocks, swap_blocks_batch, swaps
from ecoffload.backend import PointerRange, SwapBackend
from ecoffload.testing.declarations import DECLARED
from ecoffload.testing.devices import SimInt64, sim_of, simulated
from ecoffload.testing.harness import DeviceUnderTest

DEVICES = ["sim-int64", "sim-uint64", "sim-top"]


@pytest.fixture(autouse=True)
def every_lease_comes_back() -> Any:
    before = swaps._pool.leased
    yield
    swaps._pool.lease().release()
    assert swaps._pool.leased == before


def blocks(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, 3, 5), dtype=np.uint8))


def on(backend: SwapBackend, tensor: torch.Tensor) -> torch.Tensor:
    return backend.ops.empty(tensor.numel()).view(tensor.shape).copy_(tensor)


# --- swap_blocks


@pytest.mark.parametrize("as_tensor", [True, False])
def test_pairs_of_blocks_are_copied_on_the_cpu(as_tensor: bool) -> None:
    src, dst = blocks(6), blocks(6, 1)
    want = dst.clone()
    pairs: Any = [(0, 5), (1, 4), (5, 0)]
    for s, d in pairs:
        want[d] = src[s]
    assert swap_blocks(src, dst, torch.tensor(pairs) if as_tensor else pairs).done()
    assert torch.equal(dst, want)


@pytest.mark.parametrize("name", DEVICES)
def test_the_direction_follows_from_the_devices(name: str) -> None:
    device = DeviceUnderTest(simulated(name))
    with device.host(6 * 15, 0) as host:
        plain = torch.from_numpy(host.array).view(6, 3, 5)
        there = on(device.backend, blocks(6))
        if device.capabilities.host_memory == "register":
            host.close()  # plain memory: tensors of a user's own
        device.finish(swap_blocks(there, plain, [(1, 0), (2, 3)], backend=device.backend))
        assert torch.equal(plain[[0, 3]], blocks(6)[[1, 2]])
        device.finish(swap_blocks(plain, there, [(0, 5)], backend=device.backend))
        device.ops.synchronize()
        assert torch.equal(there[5], blocks(6)[1])


def test_blocks_may_be_of_a_size_that_is_given() -> None:
    src, dst = blocks(4).reshape(-1), torch.zeros(60, dtype=torch.uint8)
    swap_blocks(src, dst, [(1, 0)], 20)
    assert torch.equal(dst[:20], src[20:40])
    assert (dst[20:] == 0).all()


@pytest.mark.parametrize("mapping", [[], np.empty((0, 2), np.int64), torch.empty(0, 2, dtype=torch.int64)])
def test_no_pairs_are_no_work(mapping: Any) -> None:
    dst = blocks(2, 1)
    assert swap_blocks(blocks(2), dst, mapping).done()
    assert torch.equal(dst, blocks(2, 1))


@pytest.mark.parametrize(
    ("pairs", "index", "words"),
    [
        ([(0, 0), (6, 1)], 1, r"pair 1 .*src has blocks 0 to 5"),
        ([(-1, 0)], 0, "src"),
        ([(0, 0), (1, 1), (0, 6)], 2, "dst"),
        ([(0, -1)], 0, "dst"),
    ],
)
def test_a_pair_outside_a_tensor_is_named_and_nothing_is_copied(
    pairs: list[tuple[int, int]], index: int, words: str
) -> None:
    dst = blocks(6, 1)
    with pytest.raises(DescriptorError, match=words) as caught:
        swap_blocks(blocks(6), dst, pairs)
    assert caught.value.index == index
    assert torch.equal(dst, blocks(6, 1))


@pytest.mark.parametrize(
    ("mapping", "words"),
    [([1, 2], "of shape"), ([(1, 2, 3)], "of shape"), ([(0.0, 1.0)], "float64"), ([(True, False)], "bool")],
)
def test_a_mapping_that_is_no_pairs_of_integers_is_refused(mapping: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        swap_blocks(blocks(2), blocks(2), mapping)


def test_tensors_whose_blocks_do_not_follow_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="src is not contiguous"):
        swap_blocks(blocks(4)[::2], blocks(2), [(0, 0)])
    with pytest.raises(ConfigError, match="dst is not contiguous"):
        swap_blocks(blocks(2), blocks(4)[::2], [(0, 0)])


@pytest.mark.parametrize("size", [0, -1, True, "15", 1.5, [15], 1 << 70])
def test_a_block_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="must be an integer above zero"):
        swap_blocks(blocks(2), blocks(2), [(0, 0)], size)
    with pytest.raises(ConfigError, match="no blocks"):
        swap_blocks(torch.tensor(1), blocks(2), [(0, 0)])


def test_two_tensors_of_one_side_are_refused() -> None:
    backend = simulated("sim-int64")
    there = on(backend, blocks(2))
    for pair in ((there, there), (blocks(2), blocks(2))):
        with pytest.raises(ConfigError, match="between the host and"):
            swap_blocks(*pair, [(0, 0)], backend=backend)


@pytest.mark.parametrize(
    "pairs",
    [
        [[0, 1], [2]],
        "ab",
        None,
        [[0.5, 1]],
        torch.zeros(1, 2, dtype=torch.int64, device="meta"),
        torch.ones(2, 2).to_sparse(),
    ],
    ids=["ragged", "text", "none", "floats", "without values", "sparse"],
)
def test_a_mapping_that_is_no_table_of_pairs_is_refused(pairs: Any) -> None:
    with pytest.raises(ConfigError, match="block_mapping must be"):
        swap_blocks(blocks(2), blocks(2), pairs)


@pytest.mark.parametrize("what", [None, 3, [1], np.zeros((2, 2)), torch.ones(2, 2).to_sparse()], ids=str)
def test_what_is_no_dense_tensor_is_refused_on_either_side(what: Any) -> None:
    with pytest.raises(ConfigError, match="src is of"):
        swap_blocks(what, blocks(2), [(0, 1)])
    with pytest.raises(ConfigError, match="dst is of"):
        swap_blocks(blocks(2), what, [(0, 1)])


def test_a_backend_may_be_named_and_what_is_none_is_refused() -> None:
    dst = blocks(2, 1)
    swap_blocks(blocks(2), dst, [(0, 1)], backend="cpu").wait()
    assert torch.equal(dst[1], blocks(2)[0])
    with pytest.raises(ConfigError, match="pass a backend's name"):
        swap_blocks(blocks(2), dst, [(0, 1)], backend=3.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pass a backend's name"):
        swap_blocks_batch([0], [0], [0], backend=3.5)  # type: ignore[arg-type]


# --- swap_blocks_batch


def tables(rows: list[tuple[int, int, int]], kind: str) -> list[Any]:
    columns = [[row[i] for row in rows] for i in range(3)]
    if kind == "list":
        return columns
    words = [np.array(column, dtype=np.uint64) for column in columns]
    if kind == "uint64 array":
        return list(words)
    if kind == "int64 tensor":
        return [torch.from_numpy(w.view(np.int64).copy()) for w in words]
    return [torch.from_numpy(w.copy()) for w in words]


@pytest.mark.parametrize("kind", ["list", "uint64 array", "int64 tensor", "uint64 tensor"])
@pytest.mark.parametrize("name", DEVICES)
def test_tables_are_read_by_bits_whatever_their_dtype(name: str, kind: str) -> None:
    device = DeviceUnderTest(simulated(name))
    with device.host(4096, 0) as host:
        data = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
        tensor = device.tensor(4096, data)
        base = device.address(tensor)
        rows = [(base + at, host.alias + at, n) for at, n in ((0, 1000), (1000, 0), (1001, 95), (2000, 2096))]
        device.finish(swap_blocks_batch(*tables(rows, kind), direction="d2h", backend=device.backend))
        want = np.zeros(4096, np.uint8)
        for src, _, n in rows:
            want[src - base : src - base + n] = data[src - base : src - base + n]
        assert np.array_equal(host.array, want)


def test_on_the_cpu_no_direction_is_needed() -> None:
    src, dst = blocks(2), torch.zeros(30, dtype=torch.uint8)
    assert swap_blocks_batch([src.data_ptr()], [dst.data_ptr()], [30], device="cpu").done()
    assert torch.equal(dst, src.reshape(-1))


def test_b12_an_empty_batch_is_a_completed_no_op() -> None:
    assert swap_blocks_batch([], [], [], device="cpu").done()
    assert swap_blocks_batch([1, 2], [3, 4], [0, 0], device="cpu").wait(0)
    backend = simulated("sim-uint64")
    assert swap_blocks_batch([1], [2], [0], direction="d2h", backend=backend).done()
    assert sim_of(backend).stats()["submits"] == 0


def test_b12_a_first_size_of_zero_is_left_out() -> None:
    src, dst = blocks(2), torch.zeros(30, dtype=torch.uint8)
    swap_blocks_batch([0, src.data_ptr()], [0, dst.data_ptr()], [0, 30], device="cpu")
    assert torch.equal(dst, src.reshape(-1))


def test_b12_the_direction_is_stated_and_never_guessed() -> None:
    backend = simulated("sim-uint64")
    with pytest.raises(ConfigError, match="give direction"):
        swap_blocks_batch([16], [16], [1], backend=backend)
    with pytest.raises(ConfigError, match="neither"):
        swap_blocks_batch([16], [16], [1], direction="up", backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (([1, 2], [1, 2], [1]), "of one length"),
        (([[1]], [[1]], [[1]]), "1-D"),
        ((5, 6, 7), "1-D|iterable|addresses"),
        (([1], [1], [-1]), "-1"),
        (([1], [1], torch.tensor([-1])), "never negative"),
        (([1.5], [1], [1]), "1.5"),
        (([2**64 - 1], [0], [2]), r"past 2\*\*64"),
        (([0], [2**64 - 8], [9]), r"past 2\*\*64"),
    ],
)
def test_tables_that_are_no_descriptors_are_refused_by_our_own_error(rows: tuple[Any, Any, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        swap_blocks_batch(*rows, device="cpu")
    assert type(caught.value).__module__ == "ecoffload.errors"


@pytest.mark.parametrize("name", DEVICES)
def test_tensors_live_until_their_swap_has_ended_also_if_its_completion_is_dropped(name: str) -> None:
    backend = simulated(name)
    sim_of(backend).device.latency = 0.1
    src, there = blocks(4), on(backend, blocks(4, 1))
    alive = weakref.ref(src)
    swap_blocks(src, there, [(0, 0)], backend=backend)
    del src
    gc.collect()
    assert alive() is not None
    backend.ops.synchronize()
    sim_of(backend).device.latency = 0
    swap_blocks(there, blocks(4), [(0, 0)], backend=backend).wait()  # the next swap on the queue: the first has ended
    swaps._pool.lease().release()  # looks after what was given up
    assert alive() is None


# --- what a driver knows of the addresses


class Asked(SimInt64):
    """A device whose driver knows allocations and registrations, as CUDA's does."""

    has_pointer_query = True

    def pointer_range(self, address: int) -> PointerRange | None:
        memory = self.device.memory
        if memory.contains(address):
            found = memory.find(address - memory.base)
            return PointerRange(memory.base + found[0], found[1], "device", self.device_index) if found else None
        for each in self.device.registered.values():
            if each.address <= address < each.address + each.nbytes:
                return PointerRange(each.address, each.nbytes, "host", 0)
        return None


@pytest.fixture
def asked() -> Iterator[tuple[Asked, int, int]]:
    """The backend, and where 8 KiB on its device and 8 KiB of registered host memory begin."""
    backend = Asked(DECLARED["sim-int64"])
    tensor, memory = backend.ops.empty(8192), np.zeros(8192, dtype=np.uint8)
    registration = backend.register(memory.ctypes.data, 8192)
    yield backend, backend.ops.address_of(tensor), registration.address
    backend.ops.synchronize()
    backend.unregister(registration)


def test_the_direction_and_the_ranges_are_asked_of_the_driver(asked: tuple[Asked, int, int]) -> None:
    backend, there, host = asked
    swap_blocks_batch([host], [there], [8192], backend=backend).wait()
    swap_blocks_batch([there], [host], [8192], backend=backend).wait()


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_memory_of_the_wrong_kind_is_refused(asked: tuple[Asked, int, int], direction: Any) -> None:
    backend, there, host = asked
    rows = [(host, host, 0), (there, host, 8), (host, there, 8)]
    with pytest.raises(DescriptorError, match="is needed") as caught:
        swap_blocks_batch(*tables(rows, "list"), direction=direction, backend=backend)
    assert caught.value.index == (2 if direction == "d2h" else 1), "by the caller's own count"


def test_memory_of_another_device_is_refused_or_served_by_that_device(
    asked: tuple[Asked, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, there, host = asked
    other = simulated("sim-int64", 1)
    other.has_pointer_query = True  # type: ignore[misc]
    monkeypatch.setattr(other, "pointer_range", backend.pointer_range)
    backend.device_index = 5
    with pytest.raises(DescriptorError, match="memory of device 5"):
        swap_blocks_batch([host], [there], [8], backend=other)
    names = []

    def get_backend(name: Any = None, *, device: Any = None) -> SwapBackend:
        names.append(device)
        return other if device is None else backend

    monkeypatch.setattr(registry, "get_backend", get_backend)
    assert swap_blocks_batch([host], [there], [8]).wait()
    assert names == [None, "sim-int64:5"]


def test_an_error_names_the_callers_own_index_whatever_was_left_out_or_joined(asked: tuple[Asked, int, int]) -> None:
    backend, there, host = asked
    joined = [(host + 64 * i, there + 64 * i, 64) for i in range(3)]
    for rows, bad in (
        ([(host, there, 0), (host, there + 8192, 8)], 1),
        ([*joined, (host, there, 0), (host + 1024, there + 8190, 64)], 4),
        ([(host, there, 0)] * 30 + [(host + i, there + i, 1) for i in range(30)] + [(host + 8191, there, 2)], 60),
    ):
        with pytest.raises(DescriptorError, match=f"descriptor {bad} ") as caught:
            swap_blocks_batch(*tables(rows, "list"), direction="h2d", backend=backend)
        assert caught.value.index == bad


def in_two_registrations(backend: SwapBackend) -> tuple[torch.Tensor, torch.Tensor]:
    """Four blocks of 4 KiB in host memory that was registered as two pieces, and as many on the device."""
    host = torch.full((5, 4096), 3, dtype=torch.uint8)
    host = host.view(-1)[-host.data_ptr() % 4096 :][: 4 * 4096].view(4, 4096)
    backend.register(host.data_ptr(), 8192)
    backend.register(host.data_ptr() + 8192, 8192)
    return host, backend.ops.empty(4 * 4096).view(4, 4096)


@pytest.mark.parametrize("make", [lambda: Asked(DECLARED["sim-int64"]), lambda: simulated("sim-int64")])
def test_blocks_that_follow_each_other_are_not_joined_over_the_edge_of_a_registration(make: Any) -> None:
    backend = make()
    host, there = in_two_registrations(backend)
    swap_blocks(host, there, [(i, i) for i in range(4)], backend=backend).wait()
    assert int(there.sum()) == 3 * 4 * 4096
    assert backend.stats()["descriptors"] == (2 if backend.has_pointer_query else 4)
    there.zero_()
    rows = [(host[i].data_ptr(), backend.ops.address_of(there[i]), 4096) for i in range(4)]
    swap_blocks_batch(*tables(rows, "list"), direction="h2d", backend=backend).wait()
    assert int(there.sum()) == 3 * 4 * 4096


@pytest.mark.parametrize("name", DEVICES)
def test_later_work_on_the_stream_waits_for_the_copy(name: str) -> None:
    backend = simulated(name)
    sim_of(backend).device.latency = 0.05
    there = on(backend, blocks(4) * 0)
    stream, seen = backend.ops.stream(), []
    swap_blocks(blocks(4) * 0 + 7, there, [(0, 0)], stream=stream, backend=backend)
    stream.put(lambda: seen.append(int(there[0, 0, 0])))
    backend.ops.synchronize(stream)
    assert seen == [7]


@pytest.mark.parametrize("view", [torch.ones(1, 4, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(1, 4))])
def test_a_view_whose_memory_holds_other_values_is_refused(view: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="conjugated or negated"):
        swap_blocks(view, torch.zeros(1, 4, dtype=view.dtype), [[0, 0]])
