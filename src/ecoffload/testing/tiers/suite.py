"""What a tier must do, asked of the one that ``ECOFFLOAD_TIER`` names, else of the fake. See `ecoffload.testing.tiers`.

The store must be reachable, and hold a few MiB. Each run uses names of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import threading
import time
from collections.abc import Iterator

import pytest

from ecoffload.errors import CacheClosed, ConfigError
from ecoffload.testing.tiers.fake import FakeStore, FakeTier
from ecoffload.tiers import Answer, RemoteTier, TierObject, open_tier

URL = os.environ.get("ECOFFLOAD_TIER", "")
SIZE = 4 << 20


class Client:
    """A tier, connected, over memory of its own."""

    def __init__(self, tier: RemoteTier) -> None:
        self.tier = tier
        self.memory = mmap.mmap(-1, SIZE)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        tier.connect([(self.base, SIZE)])

    def object(self, name: str, *parts: tuple[int, int]) -> TierObject:
        """Parts by offset in this client's memory."""
        return TierObject(name, tuple((self.base + offset, length) for offset, length in parts))

    def holds(self, offset: int, data: bytes) -> bool:
        return self.memory[offset : offset + len(data)] == data

    def put(self, offset: int, data: bytes) -> None:
        self.memory[offset : offset + len(data)] = data


_store = FakeStore()


def fresh() -> Client:
    return Client(open_tier(URL, namespace="suite").tier if URL else FakeTier(store=_store))


@pytest.fixture
def writer() -> Iterator[Client]:
    client = fresh()
    yield client
    client.tier.close()


@pytest.fixture
def reader() -> Iterator[Client]:
    client = fresh()
    yield client
    client.tier.close()


@pytest.fixture
def name() -> str:
    return f"suite-{secrets.token_hex(8)}"


def published(client: Client, name: str, data: bytes) -> None:
    client.put(0, data)
    assert client.tier.publish([client.object(name, (0, len(data)))]) == [Answer.DONE]


def test_what_one_client_publishes_another_fetches(writer: Client, reader: Client, name: str) -> None:
    data = secrets.token_bytes(100_000)
    published(writer, name, data)
    assert reader.tier.fetch_many([reader.object(name, (4096, len(data)))]) == [Answer.DONE]
    assert reader.holds(4096, data)


def test_parts_are_gathered_and_scattered_in_their_order(writer: Client, reader: Client, name: str) -> None:
    data = secrets.token_bytes(10_000)
    writer.put(8192, data[:3000])
    writer.put(0, data[3000:])
    assert writer.tier.publish([writer.object(name, (8192, 3000), (0, 7000))]) == [Answer.DONE]
    assert reader.tier.fetch_many([reader.object(name, (50_000, 512), (100, 9000), (20_000, 488))]) == [Answer.DONE]
    assert reader.holds(50_000, data[:512])
    assert reader.holds(100, data[512:9512])
    assert reader.holds(20_000, data[9512:])


def test_bytes_around_the_parts_are_left_alone(writer: Client, reader: Client, name: str) -> None:
    published(writer, name, bytes(5000))
    reader.put(0, b"\xaa" * 10_000)
    assert reader.tier.fetch_many([reader.object(name, (1001, 5000))]) == [Answer.DONE]
    assert reader.holds(0, b"\xaa" * 1001 + bytes(5000) + b"\xaa" * 3999)


def test_the_size_of_an_object_is_told_and_a_missing_one_has_none(writer: Client, reader: Client, name: str) -> None:
    published(writer, name, bytes(1234))
    assert reader.tier.exists([name, name + "-not"]) == [1234, None]
    assert reader.tier.exists([]) == []


def test_a_missing_object_touches_nothing_and_hides_no_other(writer: Client, reader: Client, name: str) -> None:
    data = secrets.token_bytes(2000)
    published(writer, name, data)
    reader.put(10_000, b"\xaa" * 2000)
    asked = [reader.object(name + "-not", (10_000, 2000)), reader.object(name, (0, 2000))]
    assert reader.tier.fetch_many(asked) == [Answer.ABSENT, Answer.DONE]
    assert reader.holds(10_000, b"\xaa" * 2000)
    assert reader.holds(0, data)


@pytest.mark.parametrize("asked", [1999, 2001, 1])
def test_an_object_of_another_size_is_not_done(writer: Client, reader: Client, name: str, asked: int) -> None:
    published(writer, name, bytes(2000))
    assert reader.tier.fetch_many([reader.object(name, (0, asked))]) != [Answer.DONE]


def test_the_first_to_publish_a_name_wins(writer: Client, reader: Client, name: str) -> None:
    first, second = secrets.token_bytes(3000), secrets.token_bytes(4000)
    published(writer, name, first)
    reader.put(0, second)
    reader.tier.publish([reader.object(name, (0, len(second)))])
    assert reader.tier.exists([name]) == [3000]
    assert reader.tier.fetch_many([reader.object(name, (0, 3000))]) == [Answer.DONE]
    assert reader.holds(0, first)


def test_many_objects_move_in_one_call(writer: Client, reader: Client, name: str) -> None:
    data = secrets.token_bytes(16 * 1000)
    writer.put(0, data)
    objects = [writer.object(f"{name}-{i}", (1000 * i, 1000)) for i in range(16)]
    assert writer.tier.publish(objects) == [Answer.DONE] * 16
    asked = [reader.object(f"{name}-{i}", (1000 * i, 1000)) for i in reversed(range(16))]
    assert reader.tier.fetch_many(asked) == [Answer.DONE] * 16
    assert reader.holds(0, data)


def test_threads_share_a_client(writer: Client, reader: Client, name: str) -> None:
    data = secrets.token_bytes(50_000)
    published(writer, name, data)
    answers: list[list[Answer]] = []

    def fetch(i: int) -> None:
        answers.append(reader.tier.fetch_many([reader.object(name, (100_000 * i, len(data)))]))

    threads = [threading.Thread(target=fetch, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[Answer.DONE]] * 4
    assert all(reader.holds(100_000 * i, data) for i in range(4))


def test_after_closing_every_call_says_so_and_closing_twice_is_closing_once(name: str) -> None:
    client = fresh()
    tier = client.tier
    tier.close()
    tier.close()
    for call in (
        lambda: tier.exists([name]),
        lambda: tier.publish([client.object(name, (0, 10))]),
        lambda: tier.fetch_many([client.object(name, (0, 10))]),
        lambda: tier.connect([(client.base, SIZE)]),
    ):
        with pytest.raises(CacheClosed):
            call()


def test_a_client_is_opened_and_closed_many_times(name: str) -> None:
    for _ in range(3):
        client = fresh()
        assert client.tier.exists([name]) == [None]
        client.tier.close()


def test_an_unknown_option_is_refused() -> None:
    kind = type(open_tier(URL, namespace="suite").tier) if URL else FakeTier
    with pytest.raises(ConfigError, match="no-such-option"):
        kind("host:1", {"no-such-option": "1"})


def test_asking_for_what_is_not_there_takes_no_time_worth_speaking_of(reader: Client, name: str) -> None:
    begun = time.monotonic()
    for i in range(20):
        assert reader.tier.exists([f"{name}-{i}"]) == [None]
    assert time.monotonic() - begun < 5.0
