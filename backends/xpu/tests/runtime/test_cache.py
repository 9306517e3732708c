"""The whole of ecoffload over this backend: entries put and got through the real SYCL runtime."""

from __future__ import annotations

import torch

from ecoffload import EncoderCache, get_backend

NBYTES = 100_003
KEYS = range(12)


def round_trip(name: str, **options) -> tuple[list[int], dict]:
    """Keys whose bytes came back as they were, and the worker's stats."""
    ops = get_backend(name).ops
    with EncoderCache("4MiB", backend=name, device=None, **options) as cache:
        for key in KEYS:
            entry = ops.empty(NBYTES)
            entry.copy_((torch.arange(NBYTES) * (key + 1) % 251).to(torch.uint8))
            cache.put(f"image-{key}", entry)
        cache.flush()
        back = {key: cache.get(f"image-{key}") for key in KEYS}
        ops.synchronize()
        right = [
            key
            for key, entry in back.items()
            if entry is not None and torch.equal(entry, (torch.arange(NBYTES) * (key + 1) % 251).to(torch.uint8))
        ]
        return right, cache.stats().worker


def test_entries_come_back_through_registered_memory():
    right, worker = round_trip("sycl-cpu")
    assert (right, worker["registered"], worker["batches"]["staged"]) == (list(KEYS), True, 0)


def test_entries_come_back_where_nothing_can_be_registered():
    right, worker = round_trip("sycl-cpu-plain")
    assert (right, worker["registered"], worker["batches"]["asynchronous"]) == (list(KEYS), False, 0)


def test_c7_with_prefer_a_registration_that_the_runtime_refuses_leaves_a_working_cache():
    assert get_backend("sycl-cpu").inject_fault("register")
    before = get_backend("sycl-cpu").stats()["batches"]["asynchronous"]
    right, worker = round_trip("sycl-cpu", register="prefer")
    assert (right, worker["registered"]) == (list(KEYS), False)
    assert worker["batches"]["asynchronous"] == before
