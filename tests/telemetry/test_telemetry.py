"""What a running scheduler tells the outside: read from the file alone, whole or not at all, and off unless asked."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

from ecoffload import EncoderCache
from ecoffload.cli.app import app
from ecoffload.layout import HEADER_BYTES, W_ACTIVITY
from ecoffload.region import HostRegion
from ecoffload.telemetry import Activity, activity, read


@pytest.fixture
def name() -> str:
    return f"tell-{os.getpid()}-{time.monotonic_ns()}"


@pytest.fixture
def cache(name: str) -> Iterator[EncoderCache]:
    with EncoderCache("2MiB", id=name, ghost_stats=True, policy="lru") as opened:
        yield opened


def used(cache: EncoderCache) -> EncoderCache:
    """Four entries of 100 KiB, each looked up before and after its save; told at once, whatever the clock says."""
    for number in range(4):
        for _ in range(2):
            cache.get_or_encode(f"{number}", lambda: torch.zeros(100 << 10, dtype=torch.uint8))
    cache._scheduler._reporter.tell()
    return cache


def test_what_the_cache_counted_can_be_read_from_the_file(cache: EncoderCache, name: str) -> None:
    stats = used(cache).stats()
    told = activity("/dev/shm", name)
    assert told is not None
    for field in (
        "entries",
        "used_bytes",
        "pinned_entries",
        "hits",
        "misses",
        "bytes_saved",
        "bytes_loaded",
        "evictions",
    ):
        assert getattr(told, field) == getattr(stats, field), field
    assert told.hit_rate == stats.hit_rate
    assert abs(time.time() - told.at) < 60
    assert 0 <= told.oldest < 60


def test_polling_tells_at_most_once_a_second(cache: EncoderCache, name: str) -> None:
    clock = time.monotonic()
    with patch("ecoffload.telemetry.time.monotonic", side_effect=lambda: clock):
        cache._scheduler._reporter._due = 0.0
        cache.put("a", torch.zeros(10))  # polls, and tells
        cache.put("b", torch.zeros(10))
        first = activity("/dev/shm", name)
        clock += 1.5
        cache.put("c", torch.zeros(10))
        second = activity("/dev/shm", name)
    assert first is not None
    assert second is not None
    assert first.entries < second.entries


def test_a_fresh_scheduler_tells_that_nothing_happened_yet(name: str) -> None:
    with EncoderCache("1MiB", id=name):
        told = activity("/dev/shm", name)
    assert told is not None
    assert (told.entries, told.hits, told.misses, told.curve) == (0, 0, 0, None)


def test_ghost_statistics_give_the_curve_of_what_was_asked_for(cache: EncoderCache, name: str) -> None:
    used(cache)
    told = activity("/dev/shm", name)
    assert told is not None
    assert told.curve is not None
    assert told.curve.lookups == 8
    assert told.curve.footprint == 4 * (100 << 10)
    assert told.curve.best == pytest.approx(0.5)
    assert told.curve.byte_hit(110 << 10) == pytest.approx(0.5)  # each was asked for again at once


def test_an_entry_that_never_fits_is_counted_as_asked_for_all_the_same(cache: EncoderCache) -> None:
    for _ in range(3):
        cache.get_or_encode("large", lambda: torch.zeros(3 << 20, dtype=torch.uint8))
    reuse = cache._scheduler.index.reuse
    assert reuse is not None
    assert reuse.curve().best == pytest.approx(2 / 3)


def test_a_reader_in_the_middle_of_a_write_gets_nothing(name: str) -> None:
    with HostRegion.open(name, capacity=1 << 20, granule=4096) as region:
        with region.path.open("rb") as file:
            assert read(file.read(HEADER_BYTES)) is None  # no scheduler yet
        region.publish(W_ACTIVITY, [3, 1000])
        assert activity("/dev/shm", name) is None
        region.publish(W_ACTIVITY, [4])
        told = activity("/dev/shm", name)
        assert told is not None
        assert told.at == 1.0


def test_files_that_are_no_regions_tell_nothing(tmp_path: Path) -> None:
    (tmp_path / "ecoffload.short").write_bytes(b"x")
    (tmp_path / "ecoffload.other").write_bytes(struct.pack("<512Q", *range(512)))
    (tmp_path / "ecoffload.link").symlink_to(tmp_path / "ecoffload.other")
    assert [activity(tmp_path, id) for id in ("short", "other", "link", "absent")] == [None] * 4


def test_a_count_of_points_beyond_the_page_is_not_believed(name: str) -> None:
    with HostRegion.open(name, capacity=1 << 20, granule=4096) as region:
        region.publish(W_ACTIVITY, [2, *range(11), 1, 5, 5, 1 << 60])
        told = activity("/dev/shm", name)
    assert told is not None
    assert told.curve is not None
    assert len(told.curve.capacities) == 48


def test_the_command_line_sizes_a_running_engine(cache: EncoderCache, name: str) -> None:
    used(cache)
    result = CliRunner().invoke(app, ["size", "--live", name, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["lookups"] == 8
    assert document["recommendation"]["capacity_bytes"] <= 110 << 10


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--live", "absent"], 2), (["--live", "no/id"], 2), ([], 2), (["a.csv", "--live", "x"], 2)]
)
def test_a_region_that_is_not_there_and_a_bad_call_are_bad_input(arguments: list[str], code: int) -> None:
    result = CliRunner().invoke(app, ["size", *arguments], catch_exceptions=False)
    assert result.exit_code == code
    assert result.stderr != ""


def test_watching_shows_rates_between_two_looks(
    cache: EncoderCache, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used(cache)
    monkeypatch.setattr("ecoffload.cli.regions.stdout.width", 120)  # a narrower terminal shows fewer columns
    result = CliRunner().invoke(app, ["regions", name, "--watch", "--count", "2", "--interval", "0.05", "--json"])
    looks = [json.loads(line) for line in result.stdout.splitlines()]
    assert [look[0]["activity"]["hits"] for look in looks] == [4, 4]
    from ecoffload.cli.regions import _activity_table
    from ecoffload.regions import list_regions

    (info,) = [each for each in list_regions() if each.id == name]

    def told(at: float, moved: int) -> Activity:
        return Activity(at, 3, 1 << 20, 1, 3, 1, moved, 2 * moved, 5, 0, 90.0, None)

    shown = _activity_table([(info, told(12.0, 4_000_000))], {name: told(10.0, 0)})
    assert [next(iter(column.cells)) for column in shown.columns][3:] == [
        "1 MiB", "3", "75.0", "2.0", "4.0", "1", "5", "1.5 min",
    ]  # fmt: skip
